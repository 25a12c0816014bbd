"""A request's way through the scheduler of SGLang 0.5.22 and 0.5.23, and whose allocation is going on.

All on the scheduler thread. Decode steps leave no event: only prefill decides which tokens were reused.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from kvwitness.patches.contract import UNIFIED, Args, Hook, Kwargs, argument
from kvwitness.patches.instance import describe_process
from kvwitness.patches.schema.events import (
    AbortedInQueue,
    Admission,
    Cause,
    FactKind,
    MatchPurpose,
    Prefill,
    PrefillDone,
    Queued,
    Released,
    ReleaseState,
)
from kvwitness.patches.witness import Allocation, Witness

SCHEDULER = "sglang.srt.managers.scheduler"
POLICY = "sglang.srt.managers.schedule_policy"
BATCH = "sglang.srt.managers.schedule_batch"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor"
TREE = "sglang.srt.mem_cache.unified_radix_cache"


def _enter_scheduler_init(w: Witness, args: Args, kwargs: Kwargs) -> None:
    # The process has only begun: file work is harmless here and never again.
    w.open("scheduler")


def _after_scheduler_init(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    server_args = argument(args, kwargs, 1, "server_args")
    facts = describe_process("scheduler", server_args)
    w.on_open.append(lambda: w.facts(FactKind.PROCESS, facts))
    w.facts(FactKind.PROCESS, facts)


# --- queue -------------------------------------------------------------------------------------------


def _enter_queue(w: Witness, args: Args, kwargs: Kwargs) -> None:
    req = argument(args, kwargs, 1, "req")
    if w.starts_with(req):
        w.start()
    if not w.recording:
        return
    retracted = bool(argument(args, kwargs, 2, "is_retracted", False))
    tokens = req.origin_input_ids
    w.emit(Queued, w.req_id(req), len(tokens), int(retracted))
    w.digest(req, tokens, points=(len(tokens),))


def _after_queue_abort(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    req = argument(args, kwargs, 1, "req")
    w.emit(AbortedInQueue, w.req_id(req))
    w.forget(req)


# --- match for admission -----------------------------------------------------------------------------


def _enter_next_round(w: Witness, args: Args, kwargs: Kwargs) -> int:
    before, w.match_purpose = w.match_purpose, MatchPurpose.ADMISSION
    return before


def _leave_next_round(w: Witness, token: Any) -> None:
    w.match_purpose = token


def _enter_add(w: Witness, args: Args, kwargs: Kwargs) -> None:
    w.allocations.append(Allocation(Cause.PREFILL, (argument(args, kwargs, 1, "req"),)))


def _leave_allocation(w: Witness, token: Any) -> None:
    w.allocations.pop()


def _after_add(w: Witness, token: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    req = argument(args, kwargs, 1, "req")
    admitted = bool(args[0].can_run_list) and args[0].can_run_list[-1] is req
    w.emit(
        Admission,
        w.req_id(req),
        int(admitted),
        int(req.prefix_len),
        int(req.extend_end) if admitted else -1,
        int(getattr(req, "host_loaded_length", 0) or 0),
    )


# --- allocation for a batch --------------------------------------------------------------------------


def _enter_extend(w: Witness, args: Args, kwargs: Kwargs) -> None:
    w.allocations.append(Allocation(Cause.PREFILL, args[0].reqs))


def _enter_decode(w: Witness, args: Args, kwargs: Kwargs) -> None:
    w.allocations.append(Allocation(Cause.DECODE, args[0].reqs))


# --- forward -----------------------------------------------------------------------------------------


def _enter_run_batch(w: Witness, args: Args, kwargs: Kwargs) -> None:
    batch = argument(args, kwargs, 1, "batch")
    if not batch.forward_mode.is_extend():
        return
    number = w.next_batch()
    decoding = batch.decoding_reqs or ()
    for req in batch.reqs:
        if req in decoding:
            continue
        end = int(req.extend_end)
        last = end >= len(req.full_untruncated_fill_ids)
        w.batches.setdefault(req.rid, deque()).append(number)
        w.emit(Prefill, w.req_id(req), number, int(req.prefix_len), end, int(last))


def _after_prefill_result(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    batch = argument(args, kwargs, 1, "batch")
    for req in batch.reqs:
        waiting = w.batches.get(req.rid)
        if waiting:
            w.emit(PrefillDone, w.req_id(req), waiting.popleft(), len(req.output_ids))


# --- end ---------------------------------------------------------------------------------------------


def _after_release(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    req = argument(args, kwargs, 1, "req")
    if not req.finished():
        state = ReleaseState.RETRACTED
    elif type(req.finished_reason).__name__ == "FINISH_ABORT":
        state = ReleaseState.ABORTED
    else:
        state = ReleaseState.FINISHED
    w.emit(
        Released,
        w.req_id(req),
        state,
        len(req.output_ids),
        int(req.cached_tokens),
        int(req.cached_tokens_device),
        int(req.cached_tokens_host),
        int(req.cached_tokens_storage),
    )
    if state != ReleaseState.RETRACTED:
        # PrefillDone of a request that ends with its first token comes after this.
        waiting = w.batches.get(req.rid)
        w.forget(req)
        if waiting:
            w.batches[req.rid] = waiting


def _hook(name: str, module: str, owner: str, attribute: str, parameters: str, links: str, **rest: Any) -> Hook:
    return Hook(
        name=name,
        module=module,
        owner=owner,
        attribute=attribute,
        parameters=("self", *parameters.split()),
        links=tuple(links.split()),
        **rest,
    )


HOOKS: tuple[Hook, ...] = (
    _hook(
        "scheduler.init",
        SCHEDULER,
        "Scheduler",
        "__init__",
        "server_args port_args",
        "instance",
        enter=_enter_scheduler_init,
        seen=_after_scheduler_init,
        always=True,
    ),
    _hook(
        "scheduler.queue",
        SCHEDULER,
        "Scheduler",
        "_add_request_to_queue",
        "req is_retracted",
        "born",
        enter=_enter_queue,
        always=True,
    ),
    _hook(
        "scheduler.abort_in_queue",
        SCHEDULER,
        "Scheduler",
        "_release_aborted_request",
        "req",
        "",
        seen=_after_queue_abort,
    ),
    _hook(
        "request.next_round",
        BATCH,
        "Req",
        "init_next_round_input",
        "tree_cache",
        "resident_l1 resident_l2 left_l1",
        enter=_enter_next_round,
        leave=_leave_next_round,
    ),
    _hook(
        "policy.add_one_req",
        POLICY,
        "PrefillAdder",
        "add_one_req",
        "req has_chunked_req truncation_align_size",
        "used",
        enter=_enter_add,
        leave=_leave_allocation,
        seen=_after_add,
    ),
    _hook(
        "batch.prepare_for_extend",
        BATCH,
        "ScheduleBatch",
        "prepare_for_extend",
        "",
        "",
        enter=_enter_extend,
        leave=_leave_allocation,
    ),
    _hook(
        "batch.prepare_for_decode",
        BATCH,
        "ScheduleBatch",
        "prepare_for_decode",
        "",
        "",
        enter=_enter_decode,
        leave=_leave_allocation,
    ),
    _hook("scheduler.run_batch", SCHEDULER, "Scheduler", "run_batch", "batch", "used", enter=_enter_run_batch),
    _hook(
        "results.prefill",
        RESULTS,
        "SchedulerBatchResultProcessor",
        "process_batch_result_prefill",
        "batch result",
        "used",
        seen=_after_prefill_result,
    ),
    _hook(
        "tree.on_release",
        TREE,
        "UnifiedRadixCache",
        "on_release",
        "req checkpointed",
        "used",
        seen=_after_release,
        family=UNIFIED,
    ),
)
