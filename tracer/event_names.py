"""Events by their kind and number, as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvwitness.tracer.model import EventRef

SHOWN: Final = 8
"""More than these are counted: a link that compares pages rests on two events for each of them."""


def event_names(events: Sequence[EventRef], instance: str, elsewhere: str = " of {}") -> str:
    """The events of a link, in one line. ``elsewhere`` names the instance of those that are not ``instance``'s."""
    names = [
        f"{event.kind} {event.seq}" + (elsewhere.format(event.instance) if event.instance != instance else "")
        for event in events
    ]
    if len(names) > SHOWN:
        names[SHOWN // 2 : -1] = [f"+{len(names) - SHOWN // 2 - 1}"]
    return ", ".join(names)
