"""SGLang 0.4 to 0.5.1: whether the forward pass waited, layer by layer, for the load that was launched for it.

There the controller's thread counts layers (``LayerDoneCounter.increment``) and the pools' getters wait for
that count (``wait_until``). They do not always wait: the count of an earlier load stands until the thread
wakes up and resets it, and a batch that is told another of the three counts waits for nothing. What such a
pass reads are slots that nothing has been copied to yet. A load-back is therefore a read here only when,
for every layer, the copy had ended before the pass went on to read that layer.

``increment`` runs in the loading thread after the layer's copy was synchronised, ``wait_until`` where the
forward pass runs (the scheduler's thread, or one of its own with the overlap schedule). Neither records:
what they saw is recorded on the scheduler thread when it processes the batch's result. Each table has one
thread that writes it. 0.5.2 and newer order the copies by device events instead and have no ``increment``.
"""

from __future__ import annotations

from typing import Any

from kvwitness.patches.contract import HIRADIX, Args, Hook, Kwargs, argument
from kvwitness.patches.schema.events import LoadWaited
from kvwitness.patches.witness import ThreadLoad, Witness

MODULE = "sglang.srt.managers.cache_controller"
OWNER = "LayerDoneCounter"


def launched(w: Witness, transfer: int, tokens: int, slot: int | None) -> None:
    """A load was launched for the batch that will be told count ``slot`` (None: the release has one count)."""
    w.thread_tokens += tokens
    w.thread_reads = (*w.thread_reads, ThreadLoad(transfer, w.thread_tokens, slot))


def batch_begins(w: Witness, number: int) -> None:
    """The scheduler runs prefill batch ``number``: loads that were launched since the last one are its own."""
    for load in w.thread_reads:
        load.batch = load.batch or number


def batch_ended(w: Witness, number: int) -> None:
    """The result of batch ``number`` is processed: its forward pass is over."""
    over = [load for load in w.thread_reads if load.batch == number]
    if over:
        w.thread_reads = tuple(load for load in w.thread_reads if load.batch != number)
        for load in over:
            w.emit(LoadWaited, load.transfer, len(load.layers), int(load.early))


def forget(w: Witness) -> None:
    """The cache was reset, and the loading thread with it."""
    w.thread_reads = ()
    w.thread_tokens = 0
    w.layers_loaded.clear()


def _is_watched(w: Witness, counter: Any) -> bool:
    return w.controller is not None and counter is getattr(w.controller, "layer_done_counter", None)


def _enter_increment(w: Witness, args: Args, kwargs: Kwargs) -> None:
    # Before the original: nobody can have been let through by it yet.
    counter = args[0]
    if _is_watched(w, counter):
        layer = counter.counters[counter.producer_index] if hasattr(counter, "counters") else counter.counter
        w.layers_loaded[layer] = w.layers_loaded.get(layer, 0) + w.layer_tokens
        w.layer_tokens = 0


def _after_set_consumer(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if w.thread_reads and _is_watched(w, args[0]):
        slot = argument(args, kwargs, 1, "index")
        for load in w.thread_reads:
            load.begun = load.begun or load.slot == slot


def _after_wait(w: Witness, _: Any, result: Any, args: Args, kwargs: Kwargs) -> None:
    if not w.thread_reads or not _is_watched(w, args[0]):
        return
    layer = argument(args, kwargs, 1, "threshold")
    slot = getattr(args[0], "consumer_index", None)
    loaded = w.layers_loaded.get(layer, 0)
    for load in w.thread_reads:
        if load.slot is not None and not (load.begun and load.slot == slot):
            continue
        if loaded >= load.upto:
            load.layers.add(layer)
        else:
            load.early = True


def _hook(attribute: str, parameters: tuple[str, ...], links: tuple[str, ...], **observers: Any) -> Hook:
    return Hook(
        name=f"layers.{attribute}",
        module=MODULE,
        owner=OWNER,
        attribute=attribute,
        parameters=("self", *parameters),
        links=links,
        family=HIRADIX,
        beside="increment",
        **observers,
    )


# No link rests on them by declaration: other releases do not have them, and what was not seen here is missed.
HOOKS: tuple[Hook, ...] = (
    _hook("increment", (), (), enter=_enter_increment),
    _hook("set_consumer", ("index",), (), seen=_after_set_consumer),
    _hook("wait_until", ("threshold",), (), seen=_after_wait),
)
