"""One row per request: what every table of requests shows, in a terminal and in ``summary.md``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvwitness.tracer.bundle.reports import report_of
from kvwitness.tracer.model import Grade, RequestVerdict
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.verdicts.recorded import LEFT_OUT, about_the_recording

_UNSEEN: Final = "not in the journals"
_TO_CONFIRM: Final = "kvwitness attach, or kvwitness serve, records what would confirm it"


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
    unseen = "; ".join(note for note in about_the_recording(verdicts) if note.startswith(LEFT_OUT)) or _UNSEEN
    ordered = sorted(records, key=lambda record: record.order)
    rows = [_sent(record, latest.get(record.rid), unseen) for record in ordered]
    shown = {id(latest[record.rid]) for record in ordered if record.rid in latest}
    rows.extend(_judged(verdict, "") for verdict in verdicts if id(verdict) not in shown)
    return tuple(rows)


def _sent(record: RequestRecord, verdict: RequestVerdict | None, unseen: str) -> Row:
    if verdict is not None:
        return _judged(verdict, record.series)
    reported = None if record.error else _reported(record, unseen)
    if reported is not None:
        return reported
    why = f"no verdict: the request failed ({record.error})" if record.error else f"no verdict: {unseen}"
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


def _reported(record: RequestRecord, unseen: str) -> Row | None:
    """The server's own word, where nothing was recorded inside it; None where it names no tier."""
    report = report_of(record)
    if report is None:
        return None
    l1, l2, l3 = report.device or 0, report.host or 0, report.storage or 0
    tier = "L3" if l3 else "L2" if l2 else "L1" if l1 else None
    if tier is None:
        return None
    return Row(
        request=record.rid,
        series=record.series,
        prompt=record.prompt_tokens,
        l1=l1,
        l2=l2,
        l3=l3,
        recomputed=0,
        # Nobody saw the rest being computed.
        unknown=max(0, record.prompt_tokens - l1 - l2 - l3),
        grade=Grade.REPORTED,
        sentence=f"{tier} read reported by the server, not confirmed: {unseen} ({_TO_CONFIRM})",
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
