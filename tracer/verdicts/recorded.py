"""Who recorded, and who did not: the way in to each scheduler, and the ranks of a server of which there is no journal.

Pure functions over what the schedulers said of themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.model import RequestVerdict
from kvwitness.tracer.verdicts.groups import Server, servers
from kvwitness.tracer.verdicts.places import named

_LIVE: Final = "recorded since kvwitness went into "
LEFT_OUT: Final = "not recorded: "


def noted(verdicts: Sequence[RequestVerdict], instances: Sequence[InstanceFacts]) -> tuple[RequestVerdict, ...]:
    """The verdicts, with what their server's schedulers owe to a way in, and which of them did not record."""
    ways = {instance.instance: _way_in(instance) for instance in instances}
    left_out = {rank.instance: _left_out(server) for server in servers(instances) for rank in server.ranks}
    return tuple(
        _noted(verdict, ways.get(verdict.instance, ""), left_out.get(verdict.instance, "")) for verdict in verdicts
    )


def _left_out(server: Server) -> str:
    """The names of the ranks that no journal is of; "" where all recorded, or it cannot be told."""
    return named(server.expected - server.seen, server.expected)


def _noted(verdict: RequestVerdict, way_in: str, left_out: str) -> RequestVerdict:
    added = tuple(filter(None, (way_in, f"{LEFT_OUT}{left_out}, nor what it served" if left_out else "")))
    return msgspec.structs.replace(verdict, notes=(*verdict.notes, *added)) if added else verdict


def _way_in(instance: InstanceFacts) -> str:
    attached = instance.facts.attach
    if attached is None or attached.way != "live":
        return ""
    stopped = attached.stopped_us or 0
    stood = f"it stood still for {stopped / 1e6:.2f} s" if stopped else "it was not stopped"
    return f"{_LIVE}{instance.instance} while it served ({attached.tool or 'unknown tool'}): {stood}"


def about_the_recording(verdicts: Iterable[RequestVerdict]) -> tuple[str, ...]:
    """The notes of :func:`noted`, each once."""
    notes = dict.fromkeys(note for verdict in verdicts for note in verdict.notes)
    return tuple(note for note in notes if note.startswith((_LIVE, LEFT_OUT)))
