"""SGLang's own scheduler in this process, on a CPU: real trees, controllers and pools, and no model.

Where the model would compute, each token's row in the device pool is written with a pattern that says which prefix it
belongs to. Whatever is in a slot later, in either pool, can so be read back: that is the truth which the ledger and
the verdicts are held against. Runs in the stand's environment (SGLang 0.5.23, layer-first pools, page size free).

One float of each row, the lane, says where the row comes from: every host row gets 1 after each step, every device row
0. A row with 1 in L1 was copied from L2 since the last step.
"""

from __future__ import annotations

import array
import hashlib
import importlib
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvwitness.patches.witness import Witness

Prefix = tuple[int, int, int]
"""48 bits over the tokens up to and with one position, as three numbers that a float32 holds exactly."""
_LANE = 6
_COPIED = 1.0
_MAX_NEW = 24


@dataclass(frozen=True)
class Settings:
    """How the scheduler is started. Pools in tokens."""

    tree_core: str = "rust"
    write_policy: str = "write_through"
    page_size: int = 16
    device_tokens: int = 384
    host_ratio: float = 2.0
    chunk: int = 128
    io_backend: str = "direct"

    @property
    def name(self) -> str:
        return f"{self.tree_core}, {self.write_policy}, page {self.page_size}, host x{self.host_ratio:g}"

    def arguments(self, model: Path) -> list[str]:
        """SGLang's own command line."""
        pairs = {
            "--model-path": str(model),
            "--device": "cpu",
            # The patterns need it.
            "--dtype": "float32",
            "--attention-backend": "torch_native",
            "--hicache-ratio": f"{self.host_ratio:g}",
            "--hicache-write-policy": self.write_policy,
            "--hicache-io-backend": self.io_backend,
            "--hicache-mem-layout": "layer_first",
            "--page-size": str(self.page_size),
            "--max-total-tokens": str(self.device_tokens),
            "--chunked-prefill-size": str(self.chunk),
            "--mem-fraction-static": "0.5",
            "--max-running-requests": "8",
            "--log-level": "error",
        }
        flags = [
            "--enable-hierarchical-cache",
            "--disable-overlap-schedule",
            "--enable-cache-report",
            "--enable-metrics",
        ]
        return [part for pair in pairs.items() for part in pair] + flags


@dataclass
class Served:
    """What was in L1 when the forward pass of a request's admission began, token by token of its reused prefix."""

    rid: str
    tokens: tuple[int, ...]
    right: list[bool] = field(default_factory=list)
    """Every layer of the row holds this very prefix."""
    copied: list[bool] = field(default_factory=list)
    """It was copied from L2 in this step."""


class Prefixes:
    """The pattern of every prefix that was ever computed."""

    def __init__(self) -> None:
        self._known: dict[tuple[Prefix, int], Prefix] = {}

    def of(self, tokens: Sequence[int]) -> list[Prefix]:
        """The patterns of ``tokens``, one for each position."""
        before: Prefix = (0, 0, 0)
        found = []
        for token in tokens:
            after = self._known.get((before, token))
            if after is None:
                raw = hashlib.blake2b(repr((before, token)).encode(), digest_size=6).digest()
                after = (
                    int.from_bytes(raw[:2], "big"),
                    int.from_bytes(raw[2:4], "big"),
                    1 + int.from_bytes(raw[4:], "big"),
                )
                self._known[before, token] = after
            found.append(after)
            before = after
        return found


class Engine:
    """One scheduler, driven step by step. There can be one in a process: SGLang's groups are global."""

    def __init__(self, settings: Settings, model: Path) -> None:
        self.settings = settings
        self.prefixes = Prefixes()
        self.served: dict[str, Served] = {}
        self.requests: dict[str, Any] = {}
        """SGLang's own request objects, of every request that was ever computed."""
        self.witness = _witness()
        self._schedule = importlib.import_module("sglang.srt.managers.scheduler")
        self._io = importlib.import_module("sglang.srt.managers.io_struct")
        self.scheduler = self._start(model)
        self.tree = self.scheduler.tree_cache
        self.controller = self.tree.cache_controller
        self.allocator = self.scheduler.token_to_kv_pool_allocator
        pool = self.allocator.get_kvcache()
        self.device = [*pool.k_buffer, *pool.v_buffer]
        self.host_pool = self.tree.host_pool_group.anchor_entry.host_pool
        self.host = [buffer for kv in self.host_pool.kv_buffer for buffer in kv]
        self._closed: list[Path] = []

    def _start(self, model: Path) -> Any:
        from sglang.srt import runtime_context
        from sglang.srt.managers.scheduler_components.output_sender import SenderWrapper
        from sglang.srt.server_args import PortArgs, prepare_server_args

        # Nobody is at the other end, and a full socket would block.
        SenderWrapper.send_output = lambda *_, **__: None
        arguments = prepare_server_args(self.settings.arguments(model))
        ports = PortArgs.init_new(arguments)
        ranks = runtime_context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        runtime_context.publish(arguments, role="scheduler", ranks=ranks)
        scheduler = self._schedule.Scheduler(arguments, ports)
        scheduler.tp_worker.forward_batch_generation = self._forward
        scheduler.ipc_channels.send_metrics_from_scheduler.close()
        return scheduler

    # --- the place of the model ----------------------------------------------------------------------

    def _forward(self, batch: Any, **_: Any) -> Any:
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.utils import GenerationBatchResult

        self.scheduler.tp_worker.set_hicache_consumer(batch.hicache_consumer_index)
        rows = self.scheduler.req_to_token_pool.req_to_token
        following = []
        for i, req in enumerate(batch.reqs):
            self.requests[req.rid] = req
            length = int(batch.seq_lens[i])
            extends = batch.forward_mode.is_extend()
            start = int(batch.prefix_lens[i]) if extends else length - 1
            tokens = (*req.origin_input_ids, *req.output_ids)[:length]
            slots = rows[int(batch.req_pool_indices[i]), :length].to(torch.int64)
            patterns = self.prefixes.of(tokens)
            # Once for each admission: chunks after the first reuse what the request computed itself.
            if extends and getattr(req, "_looked_at", None) != req.retraction_count:
                self._look(req, tokens[:start], patterns[:start], slots[:start])
            self._write(slots[start:], patterns[start:])
            following.append(1 + (sum(patterns[-1]) % 5))
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None), next_token_ids=torch.tensor(following)
        )

    def _look(self, req: Any, tokens: tuple[int, ...], patterns: list[Prefix], slots: torch.Tensor) -> None:
        req._looked_at = req.retraction_count
        served = Served(req.rid, tokens)
        if patterns:
            expected = torch.tensor(patterns, dtype=torch.float32)
            right = torch.ones(len(patterns), dtype=torch.bool)
            for number, buffer in enumerate(self.device):
                found = buffer[slots].flatten(1)
                right &= (found[:, :3] == expected).all(1) & (found[:, 3] == number)
            served.right = right.tolist()
            served.copied = (self.device[0][slots].flatten(1)[:, _LANE] == _COPIED).tolist()
        self.served[req.rid] = served

    def _write(self, slots: torch.Tensor, patterns: list[Prefix]) -> None:
        content = torch.tensor(patterns, dtype=torch.float32)
        for number, buffer in enumerate(self.device):
            rows = torch.zeros(len(patterns), buffer[0].numel())
            rows[:, :3], rows[:, 3] = content, number
            buffer[slots] = rows.view(-1, *buffer.shape[1:])

    # --- what the workload does ----------------------------------------------------------------------

    def send(self, rid: str, tokens: Sequence[int], new_tokens: int) -> None:
        """A request arrives."""
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=min(new_tokens, _MAX_NEW), temperature=0, ignore_eos=True)
        sampling.normalize(None)
        request = self._io.TokenizedGenerateReqInput(
            rid=rid,
            input_text=None,
            input_ids=array.array("q", tokens),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        self.scheduler.process_input_requests([request])

    def abort(self, rid: str) -> None:
        """The client goes away."""
        self.scheduler.process_input_requests([self._io.AbortReq(rid=rid)])

    def flush(self) -> bool:
        """Empty the caches; refused while requests run."""
        return bool(self.scheduler.flush_cache(empty_cache=False))

    def step(self, retract: bool = False) -> None:
        """One turn of SGLang's own loop (``Scheduler.event_loop_normal``)."""
        scheduler = self.scheduler
        self._schedule.TEST_RETRACT, self._schedule.TEST_RETRACT_INTERVAL = retract, 1
        with torch.no_grad():
            plan = scheduler.get_next_batch_to_run(
                running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
            )
            scheduler.running_batch = plan.running_batch
            batch = plan.batch_to_run
            scheduler.cur_batch_for_debug = batch
            if batch:
                scheduler.process_batch_result(batch, scheduler.run_batch(batch))
            else:
                scheduler._sched_idled = True
                # Its own check for leaks, too.
                scheduler.on_idle()
            scheduler.last_batch = batch
        for buffer in self.host:
            buffer.flatten(1)[:, _LANE] = _COPIED
        for buffer in self.device:
            buffer.flatten(1)[:, _LANE] = 0

    def patterns(self, rid: str) -> list[Prefix]:
        """The prefixes of a request's sequence, outputs included."""
        req = self.requests[rid]
        return self.prefixes.of((*req.origin_input_ids, *req.output_ids))

    def open_requests(self) -> Iterable[Any]:
        """SGLang's own request objects of all that wait or run."""
        found = list(self.scheduler.waiting_queue)
        for batch in (self.scheduler.running_batch, self.scheduler.last_batch):
            found += batch.reqs if batch else []
        if self.scheduler.chunked_req is not None:
            found.append(self.scheduler.chunked_req)
        return {id(req): req for req in found}.values()

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing waits, and no copy is under way."""
        return bool(self.scheduler.is_fully_idle()) and not self.copying

    @property
    def copying(self) -> bool:
        """Whether the controller has copies that it has not acknowledged."""
        c = self.controller
        queues = (c.write_queue, c.load_queue, c.ack_write_queue, c.ack_load_queue)
        return any(len(queue) for queue in queues)

    # --- what is there -------------------------------------------------------------------------------

    def in_device(self) -> dict[int, Prefix]:
        """Every device slot that is in use, and the prefix whose row it holds."""
        page = self.settings.page_size
        free = {int(p) for p in self.allocator.get_all_free_pages().tolist()}
        first, last = 1, self.allocator.size // page
        used = [p for p in range(first, last + 1) if p not in free]
        slots = [p * page + i for p in used for i in range(page)] if page > 1 else used
        return dict(zip(slots, self._read(self.device[0], slots), strict=True))

    def rows(self) -> set[int]:
        """Device slots in the rows of requests that run: not all of them belong to the cache."""
        table, page = self.scheduler.req_to_token_pool.req_to_token, self.settings.page_size
        pages: set[int] = set()
        for req in self.open_requests():
            if req.kv.req_pool_idx is not None:
                row = table[int(req.kv.req_pool_idx), : req.kv.kv_allocated_len]
                pages.update((row // page).tolist())
        return {number * page + i for number in pages for i in range(page)}

    def in_host(self) -> dict[int, Prefix]:
        """Every host slot that is in use, and the prefix whose row it holds."""
        slots = self.host_pool.slot_used.nonzero().flatten().tolist()
        return dict(zip(slots, self._read(self.host[0], slots), strict=True))

    @staticmethod
    def _read(buffer: torch.Tensor, slots: Sequence[int]) -> list[Prefix]:
        if not slots:
            return []
        rows = buffer[torch.tensor(slots)].flatten(1)[:, :3].to(torch.int64).tolist()
        return [(a, b, c) for a, b, c in rows]

    # --- the journal ---------------------------------------------------------------------------------

    def counter(self, name: str) -> int:
        """One of SGLang's own counters, summed over its labels."""
        from prometheus_client import REGISTRY

        samples = (s for metric in REGISTRY.collect() for s in metric.samples)
        return int(sum(s.value for s in samples if s.name == name))

    def begin(self) -> None:
        """Empty caches and a journal of its own for one workload."""
        self.witness.stop()
        self.witness.close_stopped()
        for path in self._closed:
            path.unlink(missing_ok=True)
        self.served.clear()
        self.requests.clear()
        self.witness.open("scheduler")
        assert self.flush(), "the workload before this one did not end"

    def journal(self) -> Path:
        """The journal of this workload, as far as it is."""
        recorder = self.witness.recorder
        assert recorder is not None
        self._closed = [recorder.path]
        return recorder.path


def _witness() -> Witness:
    from kvwitness.patches.install import installed

    installer = installed()
    assert installer is not None, "kvwitness is off in this process"
    return installer.witness


def enter_stand() -> None:
    """Make this process a scheduler of the stand with kvwitness's hooks, as SGLang's plugins would."""
    os.environ.setdefault("KVWITNESS_DIR", tempfile.mkdtemp(prefix="kvwitness-model-"))
    os.environ["KVWITNESS_STAND"] = "1"
    os.environ.update(KVWITNESS_QUOTA_MB="8", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    from sglang.srt.plugins import load_plugins

    load_plugins()
