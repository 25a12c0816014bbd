"""SGLang 0.4: the controller copies in two threads of its own and acknowledges node ids through queues.

A backup is launched by handing it over in ``write``; loads are launched together when the tree says that a
batch is ready (``ready_to_load_host_cache``). Both happen on the scheduler thread and are recorded there:
what the threads themselves recorded could come before the event that queued it.

The size of a launch is that of its tokens. What was copied is counted where the threads call the copy
functions (:mod:`kvwitness.patches.hooks.copies`); a load that ends with another count is not believed.
Whether the forward pass waited for it is another question: :mod:`kvwitness.patches.hooks.layers`.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import HIRADIX, Args, Hook, Kwargs
from kvwitness.patches.hooks import copies, layers
from kvwitness.patches.instance import anchor_pool, copies_in_threads
from kvwitness.patches.schema.events import Direction, LoadDone, Tail, TransferStarted
from kvwitness.patches.witness import Witness


def in_use(w: Witness) -> bool:
    """Whether this server's controller copies in threads of its own."""
    return copies_in_threads(w.controller)


def _launched(w: Witness, direction: int, nodes: tuple[int, ...], tokens: int) -> tuple[int, int]:
    transfer = w.next_transfer()
    size = tokens * int(getattr(anchor_pool(w.tree), "size_per_token", 0) or 0)
    w.emit(TransferStarted, transfer, direction, tokens, size, 0, tail=Tail.ints(nodes))
    return transfer, size


def write_handed_over(w: Witness, node: int, tokens: int) -> None:
    """``write`` gave a backup to the writing thread."""
    if in_use(w):
        w.transfer_of_write[node] = (_launched(w, Direction.D2H, (node,), tokens)[0], None)


def load_queued(w: Witness, node: int, tokens: int) -> None:
    """``load`` put a load into the queue of the loading thread, which waits for a batch to be ready."""
    if in_use(w):
        w.handed_over[node] = tokens


def _after_ready(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if args[0] is not w.tree or not w.handed_over or not in_use(w):
        return
    nodes, tokens = tuple(w.handed_over), sum(w.handed_over.values())
    w.handed_over.clear()
    transfer, _ = _launched(w, Direction.H2D, nodes, tokens)
    w.thread_loads.append((transfer, nodes, tokens))
    # The result is the number of the layer count that the batch will wait for.
    layers.launched(w, transfer, tokens, None if result is None else int(result))


def loads_acknowledged(w: Witness, nodes: list[int]) -> None:
    """The tree took acknowledgements; a launch is complete with the last of its nodes."""
    w.thread_acks.update(nodes)
    for load in list(w.thread_loads):
        transfer, of_load, tokens = load
        if w.thread_acks.issuperset(of_load):
            w.thread_acks.difference_update(of_load)
            w.thread_loads.remove(load)
            size = copies.bytes_called(w, Direction.H2D, tokens)
            if not size:
                # Acknowledged, and no copy was seen: when it was complete is not known.
                continue
            w.emit(LoadDone, transfer, tokens, size, -1, tail=Tail.ints(of_load))


def forget(w: Witness) -> None:
    """The cache was reset: node ids begin anew."""
    w.handed_over.clear()
    w.thread_loads.clear()
    w.thread_acks.clear()
    layers.forget(w)
    for direction in (Direction.D2H, Direction.H2D):
        copies.forget(w, direction)


HOOKS: tuple[Hook, ...] = (
    Hook(
        name="hiradix.ready_to_load_host_cache",
        module="sglang.srt.mem_cache.hiradix_cache",
        owner="HiRadixCache",
        attribute="ready_to_load_host_cache",
        parameters=("self",),
        links=("read",),
        family=HIRADIX,
        seen=_after_ready,
    ),
)
