"""A small run, recorded with the real recorder, and a judge that is simple enough to foresee."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kvwitness.collectors.journal import Journal
from kvwitness.patches.recorder import Recorder
from kvwitness.patches.schema.events import Queued, Text
from kvwitness.tracer.bundle import BundleInputs
from kvwitness.tracer.judgement import Judgement
from kvwitness.tracer.model import (
    CrossCheck,
    EventRef,
    Grade,
    Link,
    LinkEvidence,
    RangeVerdict,
    Reason,
    RequestVerdict,
    ServerReport,
    Tier,
    TokensPerTier,
)
from kvwitness.tracer.protocol.record import RequestRecord

CREATED = "2026-01-02T03:04:05+00:00"


def simple_judge(
    journals: Sequence[Journal], reports: Mapping[str, ServerReport] | None = None, counters: object = None
) -> Judgement:
    """Every queued request was recomputed, except what the server reports. Rests on journals and reports only."""
    return Judgement(instances=(), verdicts=tuple(_verdicts(journals, reports or {})))


def _verdicts(journals: Sequence[Journal], reports: Mapping[str, ServerReport]) -> list[RequestVerdict]:
    verdicts = []
    for journal in journals:
        names = {event.id: event.text for event in journal.events if isinstance(event, Text)}
        for event in journal.events:
            if isinstance(event, Queued):
                rid = names[event.req]
                report = reports.get(rid)
                host = (report.host or 0) if report else 0
                ref = EventRef(journal.instance, event.seq, "Queued")
                verdicts.append(verdict_of(rid, journal.instance, event.prompt_tokens, host, ref, report))
    return verdicts


def verdict_of(
    rid: str, instance: str, prompt: int, host: int, ref: EventRef, report: ServerReport | None
) -> RequestVerdict:
    links = (
        LinkEvidence(Link.BORN, True, "queued", (ref,)),
        LinkEvidence(Link.READ, False, "no load was seen", (), "attach the hooks before the run"),
    )
    tier, reason = (Tier.L2, Reason.L2_READ) if host else (Tier.RECOMPUTED, Reason.RECOMPUTED)
    return RequestVerdict(
        rid=rid,
        instance=instance,
        epoch=0,
        attempt=1,
        prompt_tokens=prompt,
        output_tokens=None,
        finished=False,
        tokens=TokensPerTier(l2=host, recomputed=prompt - host),
        ranges=(RangeVerdict(0, prompt, tier, Grade.REPORTED, reason, "by the server", links),),
        tier=tier,
        grade=Grade.REPORTED,
        reason=reason,
        sentence=f"{tier.value} reported",
        reports=(report,) if report else (),
        checks=(CrossCheck("cached_tokens_details", True, f"{host}", f"{host}"),),
    )


def record(rid: str, series: str, order: int, host: int | None = None) -> RequestRecord:
    return RequestRecord(
        rid=rid,
        series=series,
        order=order,
        prompt_tokens=100,
        prompt_sha256="0" * 64,
        sent_ns=1_000 + order,
        ttft_s=0.1,
        total_s=0.2,
        status=200,
        error=None,
        traceparent=None,
        output_ids=(1, 2),
        text="ok",
        finish_reason="length",
        cached_tokens=host or 0,
        cached_tokens_details=None if host is None else {"device": 0, "host": host},
    )


RECORDS = (record("abc-a-1", "A", 1), record("abc-b-1", "B", 2), record("abc-c-1", "C", 3, host=64))


def record_journal(directory: Path, rids: Sequence[str], role: str = "scheduler") -> Path:
    recorder = Recorder(directory, role=role, quota_bytes=200_000, chunk_bytes=1 << 13)
    for rid in rids:
        recorder.emit(Queued, recorder.text(rid), 100, 0)
    recorder.close()
    return recorder.path


def small_run(directory: Path) -> BundleInputs:
    journals = (
        record_journal(directory, [one.rid for one in RECORDS]),
        record_journal(directory, ["other"], role="http"),
    )
    return BundleInputs(
        journals=journals,
        requests=RECORDS,
        environment={"sglang": "0.5.23", "unknown": ["gpu"], "server": {"page_size": 16}},
        metrics={"before": "sglang:cached_tokens_total 0\n", "after": "sglang:cached_tokens_total 64\n"},
        created=CREATED,
    )
