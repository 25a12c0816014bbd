"""A request's way through the scheduler of SGLang 0.4.6 to 0.5.23, and whose allocation is going on.

All on the scheduler thread. Decode steps leave no event: only prefill decides which tokens were reused.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import HIMAMBA, HIRADIX, UNIFIED, UNIFIED_OBJ, Args, Hook, Kwargs, argument
from kvwitness.patches.hooks import common, layers
from kvwitness.patches.instance import describe_process, scheduler_ranks
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
RESULTS_MIXIN = "sglang.srt.managers.scheduler_output_processor_mixin"
TREE = "sglang.srt.mem_cache.unified_radix_cache"
BASE_TREE = "sglang.srt.mem_cache.radix_cache"
MAMBA_TREE = "sglang.srt.mem_cache.mamba_radix_cache"

# Scheduler.__init__: 0.5.21 and newer take the ranks from a context, before they were arguments.
_RANKS_04 = "gpu_id tp_rank pp_rank dp_rank"
_RANKS_0410 = "gpu_id tp_rank moe_ep_rank pp_rank dp_rank"
_RANKS_0510 = "gpu_id tp_rank moe_ep_rank pp_rank attn_cp_rank moe_dp_rank dp_rank"


def _enter_scheduler_init(w: Witness, args: Args, kwargs: Kwargs) -> None:
    # The process has only begun: file work is harmless here and never again.
    w.open("scheduler")


def _with_ranks(ranks: str) -> Hook:
    """The constructor of one release, with the ranks that it is given."""
    names = tuple(ranks.split())

    def enter(w: Witness, args: Args, kwargs: Kwargs) -> None:
        _enter_scheduler_init(w, args, kwargs)
        values = tuple(argument(args, kwargs, index, name) for index, name in enumerate(names, start=3))
        w.ranks = scheduler_ranks(names, values, argument(args, kwargs, 1, "server_args"))

    return _hook(
        "scheduler.init",
        SCHEDULER,
        "Scheduler",
        "__init__",
        f"server_args port_args {ranks}",
        "instance",
        enter=enter,
        seen=_after_scheduler_init,
        always=True,
    )


def _after_scheduler_init(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    server_args = argument(args, kwargs, 1, "server_args")
    facts = describe_process(w, "scheduler", server_args)
    w.on_open.append(lambda: w.facts(FactKind.PROCESS, facts))
    w.facts(FactKind.PROCESS, facts)


# --- queue -------------------------------------------------------------------------------------------


def _enter_queue(w: Witness, args: Args, kwargs: Kwargs) -> None:
    req = argument(args, kwargs, 1, "req")
    if w.starts_with(req):
        w.start()
    if not w.recording:
        return
    _queued(w, req, bool(argument(args, kwargs, 2, "is_retracted", False)))


def _queued(w: Witness, req: Any, retracted: bool) -> None:
    tokens = req.origin_input_ids
    w.emit(Queued, w.req_id(req), len(tokens), int(retracted))
    w.digest(req, tokens, points=(len(tokens),))


def _enter_requeue(w: Witness, args: Args, kwargs: Kwargs) -> None:
    if argument(args, kwargs, 2, "is_retracted", False):
        for req in argument(args, kwargs, 1, "reqs"):
            _queued(w, req, True)


def _after_queue_abort(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    req = argument(args, kwargs, 1, "req")
    w.emit(AbortedInQueue, w.req_id(req))
    w.forget(req)


# --- match for admission -----------------------------------------------------------------------------


def _enter_next_round(w: Witness, args: Args, kwargs: Kwargs) -> tuple[int, Any]:
    before = w.match_purpose, w.matching
    w.match_purpose, w.matching = MatchPurpose.ADMISSION, args[0]
    return before


def _leave_next_round(w: Witness, token: Any) -> None:
    w.match_purpose, w.matching = token


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
        _prefix(req),
        _end(req) if admitted else -1,
        int(getattr(req, "host_loaded_length", 0) or 0),
    )


def _prefix(req: Any) -> int:
    """Tokens of the request that are in L1 or on their way to it."""
    known = getattr(req, "prefix_len", None)
    return len(req.prefix_indices) if known is None else int(known)


def _end(req: Any) -> int:
    """Where the next prefill pass of the request ends."""
    known = getattr(req, "extend_end", None)
    if known is not None:
        return int(known)
    extent = getattr(req, "extend_range", None)
    return int(extent.end) if extent is not None else len(req.prefix_indices) + int(req.extend_input_len)


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
    layers.batch_begins(w, number)
    decoding = getattr(batch, "decoding_reqs", None) or ()
    for i, req in enumerate(batch.reqs):
        if req in decoding:
            continue
        if hasattr(req, "extend_end"):
            start, end, whole = int(req.prefix_len), int(req.extend_end), len(req.full_untruncated_fill_ids)
        else:
            # The request's own fields may be those of its next chunk already: the batch has its own.
            start = int(batch.prefix_lens[i])
            end, whole = start + int(batch.extend_lens[i]), len(req.origin_input_ids) + len(req.output_ids)
        w.batches.setdefault(req.rid, []).append(number)
        w.emit(Prefill, w.req_id(req), number, start, end, int(end >= whole))


def _after_prefill_result(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    batch = argument(args, kwargs, 1, "batch")
    for req in batch.reqs:
        waiting = w.batches.get(req.rid)
        if waiting:
            number = waiting.pop(0)
            if not waiting:
                # Also for a request that has ended meanwhile: nobody would look for it again.
                del w.batches[req.rid]
            layers.batch_ended(w, number)
            w.emit(PrefillDone, w.req_id(req), number, len(req.output_ids))


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
        # Since 0.5.9. -1: the server does not say.
        int(getattr(req, "cached_tokens_device", -1)),
        int(getattr(req, "cached_tokens_host", -1)),
        int(getattr(req, "cached_tokens_storage", -1)),
    )
    if state != ReleaseState.RETRACTED:
        w.forget(req)


def _enter_finished(w: Witness, args: Args, kwargs: Kwargs) -> Any:
    """``cache_finished_req`` inserts and gives the row back."""
    return common.enter_inserting(w, args, kwargs) if args[0] is w.tree else w.inserting


def _after_finished(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if args[0] is w.tree:
        _after_release(w, _, result, args, kwargs)


def _finished(name: str, module: str, owner: str, parameters: str, family: str) -> Hook:
    """Up to 0.5.20: ``is_insert`` came with 0.5.4, ``kv_len_to_handle`` with 0.5.16."""
    return _hook(
        name,
        module,
        owner,
        "cache_finished_req",
        parameters,
        "born used",
        enter=_enter_finished,
        leave=common.leave_inserting,
        seen=_after_finished,
        family=family,
    )


def _add_one(parameters: str) -> Hook:
    return _hook(
        "policy.add_one_req",
        POLICY,
        "PrefillAdder",
        "add_one_req",
        parameters,
        "used",
        enter=_enter_add,
        leave=_leave_allocation,
        seen=_after_add,
    )


def _results(module: str, owner: str) -> Hook:
    return _hook(
        "results.prefill",
        module,
        owner,
        "process_batch_result_prefill",
        "batch result",
        "used",
        seen=_after_prefill_result,
    )


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
    _with_ranks(_RANKS_0510),
    _with_ranks(_RANKS_0410),
    _with_ranks(_RANKS_04),
    _hook(
        "scheduler.queue",
        SCHEDULER,
        "Scheduler",
        "_add_request_to_queue",
        "req",
        "born",
        enter=_enter_queue,
        always=True,
    ),
    # Up to 0.5.3 retracted requests go back into the queue here.
    _hook(
        "scheduler.requeue",
        SCHEDULER,
        "Scheduler",
        "_extend_requests_to_queue",
        "reqs",
        "",
        enter=_enter_requeue,
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
    _add_one("req has_chunked_req truncation_align_size"),
    _add_one("req has_chunked_req"),
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
    _results(RESULTS, "SchedulerBatchResultProcessor"),
    _results(RESULTS_MIXIN, "SchedulerOutputProcessorMixin"),
    # 0.5.22 and newer, and 0.5.21; before, cache_finished_req.
    *(
        _hook(
            "tree.on_release",
            TREE,
            "UnifiedRadixCache",
            "on_release",
            parameters,
            "used",
            seen=_after_release,
            family=UNIFIED,
        )
        for parameters in ("req checkpointed", "req inserted")
    ),
    _finished("tree.on_release", TREE, "UnifiedRadixCache", "req is_insert kv_len_to_handle", UNIFIED),
    _finished("tree.on_release", TREE, "UnifiedRadixCache", "req is_insert kv_len_to_handle", UNIFIED_OBJ),
    _finished("tree.on_release", TREE, "UnifiedRadixCache", "req is_insert", UNIFIED_OBJ),
    _finished("hiradix.finished", BASE_TREE, "RadixCache", "req is_insert kv_len_to_handle", HIRADIX),
    _finished("hiradix.finished", BASE_TREE, "RadixCache", "req", HIRADIX),
    _finished("himamba.finished", MAMBA_TREE, "MambaRadixCache", "req is_insert kv_len_to_handle", HIMAMBA),
    _finished("himamba.finished", MAMBA_TREE, "MambaRadixCache", "req is_insert", HIMAMBA),
)
