"""What ``kvwitness run abc --expect`` asks of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from kvwitness.tracer.model import Grade, RequestVerdict, Tier
from kvwitness.tracer.protocol.record import RequestRecord

EXPECTED: Final[Mapping[str, Tier]] = {"A": Tier.RECOMPUTED, "B": Tier.L1, "C": Tier.L2}


def unmet_expectations(verdicts: Sequence[RequestVerdict], records: Sequence[RequestRecord]) -> tuple[str, ...]:
    """A line for each request of A, B and C that is not confirmed to be what the protocol is about."""
    latest = {verdict.rid: verdict for verdict in verdicts}
    lines = []
    for series, tier in EXPECTED.items():
        sent = _first_of_each(records, series)
        if not sent:
            lines.append(f"{series} was not sent")
        for record in sent:
            line = _unmet(latest.get(record.rid), tier)
            if line is not None:
                lines.append(f"{series} ({record.rid}): {line}")
    return tuple(lines)


def _first_of_each(records: Sequence[RequestRecord], series: str) -> list[RequestRecord]:
    """The requests of a series; of A only the first with each prompt, since a second one reuses it already."""
    sent = sorted((record for record in records if record.series == series), key=lambda record: record.order)
    if series != "A":
        return sent
    first: dict[tuple[int | None, str], RequestRecord] = {}
    for record in sent:
        first.setdefault((record.round, record.prompt_sha256), record)
    return list(first.values())


def met_expectations() -> str:
    """The line for a run in which nothing is unmet."""
    return "as expected: " + ", ".join(
        f"{series} {tier.value}{'' if tier is Tier.RECOMPUTED else ' confirmed'}" for series, tier in EXPECTED.items()
    )


def _unmet(verdict: RequestVerdict | None, tier: Tier) -> str | None:
    if verdict is None:
        return f"expected {tier.value}, and nothing was recorded of it"
    wanted = (Grade.RECOMPUTED,) if tier is Tier.RECOMPUTED else (Grade.CONFIRMED, Grade.VERIFIED)
    if verdict.tier is tier and verdict.grade in wanted:
        return None
    return f"expected {tier.value} confirmed, found {verdict.tier.value} {verdict.grade.value} ({verdict.sentence})"
