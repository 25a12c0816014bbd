"""SGLang 0.4: the controller copies in two threads of its own and acknowledges node ids through queues.

The launch of a copy cannot be seen on the scheduler thread, and what another thread records could come
before the event that queued it. So launch and completion are both recorded when the scheduler thread takes
the acknowledgement: the order is right, the time of the launch is an upper bound. What was copied is
counted where the threads call the copy functions (:mod:`kvwitness.patches.hooks.copies`).
"""

from __future__ import annotations

from kvwitness.patches.hooks import copies
from kvwitness.patches.schema.events import Tail, TransferStarted
from kvwitness.patches.witness import Witness


def in_use(w: Witness) -> bool:
    """Whether acknowledgements come through queues of node ids (a list of ``HiCacheAck`` since 0.5.2)."""
    return w.controller is not None and not isinstance(w.controller.ack_write_queue, list)


def queued(w: Witness, direction: int, node: int, tokens: int) -> None:
    """A copy was handed to the threads."""
    if in_use(w):
        w.handed_over[direction, node] = tokens


def completed(w: Witness, direction: int, nodes: list[int]) -> tuple[int, int, int]:
    """Copies were acknowledged: record that they were launched. Returns transfer, tokens and bytes."""
    tokens = sum(w.handed_over.pop((direction, node), 0) for node in nodes)
    size = copies.bytes_called(w, direction, tokens)
    transfer = w.next_transfer()
    w.emit(TransferStarted, transfer, direction, tokens, size, 0, tail=Tail.ints(nodes))
    return transfer, tokens, size
