"""Write a tiny random model and its tokenizer: `python -m kvwitness.patches.stand.make_model KIND FOLDER`.

KIND is `qwen2` (dense, grouped-query attention), `dsv2` (DeepSeek-V2-like: MLA, all layers dense), `mellum` (every
other layer attends to a window of 256 tokens) or `lfm2` (every other layer is a convolution with a state). All have
4 layers, 128 hidden units and 1,024 token ids. The first two are about 3 MB, with a fixed seed; the others have no
weights: `--load-format dummy`. The weights are made so that a prompt's tokens tell whether its cached prefix is right:

- float32, because in bfloat16 the two best logits are often within one rounding step, and a prefix read
  from the cache could give other tokens than a computed one with nothing wrong;
- weights of a larger deviation than usual, because with the usual 0.02 the last tokens alone nearly
  decide what follows, and prompts with different prefixes come out the same.

Needs torch, safetensors and tokenizers, and no transformers: the folder loads in releases 4 and 5 of it
(plain tokenizer class, rope_theta at the top level), which one written by either does not.
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1024
CONTEXT_TOKENS = 8192
LAYERS = 4
HIDDEN = 128
INTERMEDIATE = 256
HEADS = 4
SEED = 0
WEIGHT_DEVIATION = 0.08
END_OF_TEXT = "<|endoftext|>"

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

Shapes = dict[str, tuple[int, ...]]

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": WEIGHT_DEVIATION,
    "max_position_embeddings": CONTEXT_TOKENS,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "attention_dropout": 0.0,
}


def _outer_shapes() -> Shapes:
    return {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }


def _block_shapes(prefix: str) -> Shapes:
    """What a layer has besides its attention."""
    return {
        f"{prefix}input_layernorm.weight": (HIDDEN,),
        f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
        f"{prefix}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        f"{prefix}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }


def qwen2() -> tuple[dict[str, Any], Shapes]:
    """The configuration and weight shapes of the dense model."""
    kv_heads, head_dim = 2, 32
    shapes = _outer_shapes()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        shapes |= _block_shapes(prefix)
        for name, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
            shapes[f"{attention}{name}_proj.weight"] = (heads * head_dim, HIDDEN)
            shapes[f"{attention}{name}_proj.bias"] = (heads * head_dim,)
        shapes[f"{attention}o_proj.weight"] = (HIDDEN, HEADS * head_dim)
    config = COMMON | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": kv_heads,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 28,
    }
    return config, shapes


def dsv2() -> tuple[dict[str, Any], Shapes]:
    """The configuration and weight shapes of the MLA model."""
    latent, rope, nope, value = 64, 16, 32, 32
    shapes = _outer_shapes()
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        attention = f"{prefix}self_attn."
        shapes |= _block_shapes(prefix)
        shapes |= {
            f"{attention}q_proj.weight": (HEADS * (nope + rope), HIDDEN),
            f"{attention}kv_a_proj_with_mqa.weight": (latent + rope, HIDDEN),
            f"{attention}kv_a_layernorm.weight": (latent,),
            f"{attention}kv_b_proj.weight": (HEADS * (nope + value), latent),
            f"{attention}o_proj.weight": (HIDDEN, HEADS * value),
        }
    config = COMMON | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 64,
        "num_key_value_heads": HEADS,
        "kv_lora_rank": latent,
        "q_lora_rank": None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": LAYERS,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "attention_bias": False,
        # SGLang 0.5.23 asserts that a DeepSeek model on a CPU has rope scaling.
        "rope_scaling": {
            "type": "yarn",
            "factor": 2,
            "original_max_position_embeddings": CONTEXT_TOKENS // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    }
    return config, shapes


def mellum() -> tuple[dict[str, Any], Shapes]:
    """The configuration of the hybrid model with sliding-window layers; without weights."""
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = COMMON | {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 256,
        "moe_intermediate_size": 64,
        "num_experts_per_tok": 2,
        "num_experts": 4,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "mlp_layer_types": ["dense"] * LAYERS,
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "torch_dtype": "bfloat16",
        "attention_bias": False,
    }
    return config, {}


def lfm2() -> tuple[dict[str, Any], Shapes]:
    """The configuration of the hybrid model with convolution states; without weights."""
    config = COMMON | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_key_value_heads": 2,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "pad_token_id": 0,
    }
    return config, {}


KINDS = {"qwen2": qwen2, "dsv2": dsv2, "mellum": mellum, "lfm2": lfm2}


def _weights(shapes: Shapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if "norm" in name:
            values = torch.ones(shape)
        elif name.endswith(".bias"):
            values = torch.zeros(shape)
        else:
            values = torch.randn(shape, generator=generator) * WEIGHT_DEVIATION
        weights[name] = values
    return weights


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


def _write_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer trained on made-up words."""
    chance = random.Random(SEED)
    words = ["".join(chance.choices(string.ascii_lowercase, k=chance.randint(2, 8))) for _ in range(600)]
    corpus = [" ".join(chance.choices(words, k=200)) for _ in range(50)]
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "model_max_length": CONTEXT_TOKENS,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def write_model(kind: str, folder: Path) -> None:
    """Write the model `kind` into `folder`, which exists. Raises KeyError on another kind."""
    config, shapes = KINDS[kind]()
    if shapes:
        save_file(_weights(shapes), str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 0})
    _write_tokenizer(folder)


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))
