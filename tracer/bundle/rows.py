"""One row per request: what every table of requests shows, in a terminal and in ``summary.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from kvwitness.tracer.model import Grade, RequestVerdict
from kvwitness.tracer.protocol.record import RequestRecord


class Row(msgspec.Struct, frozen=True):
    """A request in a table. Token counts are None where there is no verdict."""

    request: str
    series: str
    prompt: int
    l1: int | None
    l2: int | None
    l3: int | None
    recomputed: int | None
    unknown: int | None
    grade: Grade
    sentence: str


def rows_of(verdicts: Sequence[RequestVerdict], records: Iterable[RequestRecord] = ()) -> tuple[Row, ...]:
    """The client's requests in the order sent, then everything else that the journals know of.

    A request that the journals do not know gets a row that says so.
    """
    latest = {verdict.rid: verdict for verdict in verdicts}
    ordered = sorted(records, key=lambda record: record.order)
    rows = [_sent(record, latest.get(record.rid)) for record in ordered]
    shown = {id(latest[record.rid]) for record in ordered if record.rid in latest}
    rows.extend(_judged(verdict, "") for verdict in verdicts if id(verdict) not in shown)
    return tuple(rows)


def _sent(record: RequestRecord, verdict: RequestVerdict | None) -> Row:
    if verdict is not None:
        return _judged(verdict, record.series)
    why = f"no verdict: the request failed ({record.error})" if record.error else "no verdict: not in the journals"
    return Row(
        request=record.rid,
        series=record.series,
        prompt=record.prompt_tokens,
        l1=None,
        l2=None,
        l3=None,
        recomputed=None,
        unknown=None,
        grade=Grade.UNKNOWN,
        sentence=" ".join(why.split()),
    )


def _judged(verdict: RequestVerdict, series: str) -> Row:
    tokens = verdict.tokens
    return Row(
        request=verdict.rid,
        series=series,
        prompt=verdict.prompt_tokens,
        l1=tokens.l1,
        l2=tokens.l2,
        l3=tokens.l3,
        recomputed=tokens.recomputed,
        unknown=tokens.unknown,
        grade=verdict.grade,
        sentence=verdict.sentence,
    )


def one_of_series(records: Iterable[RequestRecord], series: str) -> RequestRecord | None:
    """The request that a series stands for: A's first (a repeat already reuses it), the last of any other."""
    sent = sorted((record for record in records if record.series == series), key=lambda record: record.order)
    if not sent:
        return None
    return sent[0] if series == "A" else sent[-1]
