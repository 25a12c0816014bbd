"""What an earlier part of a run has done, from its bundle's records and conditions, and what is left of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvwitness.tracer.protocol.abc import plan_of
from kvwitness.tracer.protocol.options import AbcOptions
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.protocol.runner import Before, Eviction, Wave


class NothingToResume(Exception):
    """The bundle is no run that could go on; the message says why, in one line."""


class Earlier(msgspec.Struct, frozen=True):
    """The earlier part of a run."""

    options: AbcOptions
    """With the seed that was drawn."""
    before: Before
    server: Mapping[str, Any]
    """What the server said of itself then."""


def earlier_part(
    records: Sequence[RequestRecord], environment: Mapping[str, Any], *, with_control: bool = False
) -> Earlier:
    """Read the earlier part of a run out of its bundle. Raises :class:`NothingToResume`.

    A run whose rounds are complete can go on when there is a control to be made (``with_control``).
    """
    run = environment.get("run")
    if not isinstance(run, Mapping) or not isinstance(run.get("options"), Mapping):
        raise NothingToResume("it is no run of the protocol")
    try:
        options = msgspec.convert({**run["options"], "seed": run["seed"]}, AbcOptions)
        evictions = msgspec.convert(run.get("evictions") or [], tuple[Eviction, ...])
        run_id = msgspec.convert(run["id"], str)
    except (msgspec.ValidationError, KeyError) as error:
        raise NothingToResume("its conditions are not as this version writes them") from error
    remaining = remaining_of(options, records)
    if not remaining and not with_control:
        raise NothingToResume("all of its rounds are complete")
    raw = environment.get("raw")
    server = raw.get("server_info") if isinstance(raw, Mapping) else None
    return Earlier(
        options,
        Before(run_id, tuple(records), evictions, remaining),
        server if isinstance(server, Mapping) else {},
    )


def remaining_of(options: AbcOptions, records: Sequence[RequestRecord]) -> tuple[Wave, ...]:
    """The waves that have to be sent yet.

    A round that was cut short is begun again under a new number: its prefix is in the cache by now, so that its A would
    not be cold.
    """
    sent = {record.round for record in records if record.series == "A" and record.round is not None}
    done = {record.round for record in records if record.series == "C" and record.error is None}
    total = options.rounds
    # Of the same length as the round that it stands for, where the rounds go through several.
    finished = {number % total for number in done if number is not None}
    waves = []
    for wave in plan_of(options):
        numbers = tuple(_fresh(number, total, sent) for number in wave.rounds if number not in finished)
        if numbers:
            waves.append(Wave(numbers))
    return tuple(waves)


def _fresh(number: int, total: int, sent: set[int]) -> int:
    while number in sent:
        number += total
    return number
