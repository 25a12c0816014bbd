"""Events in one line, also where there are hundreds of them."""

from __future__ import annotations

from kvwitness.tracer.event_names import event_names
from kvwitness.tracer.model import EventRef


def refs(count: int, instance: str = "a") -> list[EventRef]:
    return [EventRef(instance, seq, "LoadDigested") for seq in range(1, count + 1)]


def test_a_few_are_all_named() -> None:
    assert event_names(refs(2), "a") == "LoadDigested 1, LoadDigested 2"
    assert event_names(refs(1), "b") == "LoadDigested 1 of a"
    assert event_names(refs(1), "b", " ({})") == "LoadDigested 1 (a)"


def test_of_many_the_first_and_the_last_are_named_and_the_rest_counted() -> None:
    named = event_names(refs(188), "a")
    assert named == "LoadDigested 1, LoadDigested 2, LoadDigested 3, LoadDigested 4, +183, LoadDigested 188"
