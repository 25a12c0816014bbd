"""Which model a server serves, from its files: revision, hashes of weights, tokenizer and chat template."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

WEIGHTS_READ_AT_MOST: Final = 8 << 30
"""Bytes of weights that are read for their hash; more would keep a run waiting for minutes."""
_BLOCK: Final = 1 << 20
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"\+g([0-9a-f]{7,40})")


class ModelFiles(msgspec.Struct, frozen=True):
    """What the model's folder says. None together with a line in ``unknown``: could not be read."""

    path: str | None
    revision: str | None
    weights_sha256: str | None
    """Over the names and sha256 of all files of weights; ``random`` where the server made them up."""
    tokenizer_sha256: str | None
    chat_template_sha256: str | None
    sglang_commit: str | None
    unknown: tuple[str, ...] = ()


def model_files(server: Mapping[str, Any], model: Mapping[str, Any], *, local: bool) -> ModelFiles:
    """Read the files of the model that ``/server_info`` and ``/model_info`` name; ``local``: they are here."""
    unknown: list[str] = []
    commit = _COMMIT.search(str(server.get("version") or ""))
    if commit is None:
        unknown.append(f"sglang_commit: version {server.get('version') or 'unknown'} does not carry it")
    named = model.get("model_path") or server.get("model_path")
    folder = Path(named) if isinstance(named, str) and local else None
    if folder is None or not folder.is_dir():
        where = "the server is on another machine" if not local else "the model's path is no folder here"
        unknown += [f"{name}: {where}" for name in ("revision", "weights", "tokenizer", "chat_template")]
        return ModelFiles(
            named if isinstance(named, str) else None, None, None, None, None, _group(commit), tuple(unknown)
        )
    revision = _revision(folder, server)
    if revision is None:
        unknown.append("revision: the model's folder does not name it")
    weights = _or_unknown("weights", unknown, lambda: _weights(folder, server))
    tokenizer = _or_unknown("tokenizer", unknown, lambda: _first_hash(folder, _TOKENIZERS))
    template = _or_unknown("chat_template", unknown, lambda: _chat_template(folder, server))
    return ModelFiles(str(folder), revision, weights, tokenizer, template, _group(commit), tuple(unknown))


def _or_unknown(name: str, unknown: list[str], read: Any) -> str | None:
    try:
        return str(read())
    except (OSError, ValueError) as error:
        unknown.append(f"{name}: {error}")
        return None


def _group(found: re.Match[str] | None) -> str | None:
    return None if found is None else found[1]


def _revision(folder: Path, server: Mapping[str, Any]) -> str | None:
    """As asked of the server, or by the name that Hugging Face's cache gives a snapshot."""
    asked = server.get("revision")
    if isinstance(asked, str) and asked:
        return asked
    return folder.name if folder.parent.name == "snapshots" else None


def _weights(folder: Path, server: Mapping[str, Any]) -> str:
    if server.get("load_format") == "dummy":
        return "random"
    files = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not files:
        raise ValueError("the model's folder holds no weights")
    to_read = sum(path.stat().st_size for path in files if _named_hash(path) is None)
    if to_read > WEIGHTS_READ_AT_MOST:
        raise ValueError(f"{to_read} bytes are more than are read for a hash ({WEIGHTS_READ_AT_MOST})")
    lines = "".join(f"{_named_hash(path) or _file_hash(path)}  {path.name}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _named_hash(path: Path) -> str | None:
    """In Hugging Face's cache a file of weights is a link to one that is named by its sha256."""
    target = path.resolve().name
    return target if path.is_symlink() and _SHA256.fullmatch(target) else None


def _first_hash(folder: Path, names: tuple[str, ...]) -> str:
    for name in names:
        if (folder / name).is_file():
            return _file_hash(folder / name)
    raise ValueError(f"the model's folder holds none of {', '.join(names)}")


def _chat_template(folder: Path, server: Mapping[str, Any]) -> str:
    asked = server.get("chat_template")
    if isinstance(asked, str) and asked:
        return _file_hash(Path(asked)) if Path(asked).is_file() else f"built in: {asked}"
    if (folder / "chat_template.jinja").is_file():
        return _file_hash(folder / "chat_template.jinja")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    template = config.get("chat_template") if isinstance(config, dict) else None
    if template is None:
        return "none"
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: Any) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block
