"""A host hit that never was: SGLang matches a few tokens in L2, declines to load them, and reports them.

From 0.5.9 to 0.5.19 the server's answer credits the promised tokens to the host and takes them from the
device. Four steps provoke it: a short node Y behind a long prefix X, both backed up and evicted from L1; X
comes back by a load-back; then a request matches X in L1 and Y in L2, and Y is shorter than the load-back
threshold (10 tokens).
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import msgspec

from kvwitness.collectors.metrics import stamped
from kvwitness.tracer.bundle.places import recorded_journals
from kvwitness.tracer.bundle.write import BundleInfo, BundleInputs, write_bundle
from kvwitness.tracer.model import Grade, Reason, RequestVerdict, Tier
from kvwitness.tracer.protocol.client import GenerateCall, ServerClient
from kvwitness.tracer.protocol.observer import JournalObserver
from kvwitness.tracer.protocol.prompts import Prompt
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.protocol.waiting import SystemClock, wait_until
from kvwitness.tracer.spans.otlp_json import span_lines
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.progress import Progress
from kvwitness.tracer.stand.server import ServerOptions, StandServer

LONG, SHORT, FILL, NEW = 2000, 6, 1900, 20
"""Tokens of X, of Y, of an unrelated prompt, and of what follows Y in the request that is judged."""
PROBE = "probe"
_SETTLE_S = 20.0


class DeclinedResult(msgspec.Struct, frozen=True):
    """The bundle, and the records of what was sent."""

    bundle: BundleInfo
    records: tuple[RequestRecord, ...]

    @property
    def probe(self) -> RequestVerdict | None:
        """The verdict about the request whose load-back was declined."""
        rid = next((record.rid for record in self.records if record.series == PROBE), None)
        return next((verdict for verdict in self.bundle.verdicts if verdict.rid == rid), None)


def run_declined(release: str, out: Path, progress: Progress, *, replace: bool = True) -> DeclinedResult:
    """Run the four steps on a real server of ``release`` and write the bundle. Raises as ``run_demo`` does."""
    environment = ensure_environment(progress, release=release)
    model = ensure_model(environment, progress)
    workdir = Path(tempfile.mkdtemp(prefix="kvwitness-declined-"))
    journals = workdir / "journals"
    options = ServerOptions(page_size=1, extra_env={"KVWITNESS_DIR": str(journals)})
    progress.phase(f"Starting SGLang {release} with page size 1")
    with StandServer(environment, model, options, workdir=workdir) as server, ServerClient(server.url) as client:
        before = stamped(client.metrics())
        records = _steps(client, JournalObserver(journals), progress)
        after = stamped(client.metrics())
        progress.phase("Stopping the server")
    inputs = BundleInputs(
        journals=tuple(recorded_journals(journals)),
        requests=records,
        environment={"unknown": [], "run": {"story": "declined load-back", "sglang": release}},
        metrics={"before": before, "after": after},
    )
    progress.phase("Writing the evidence bundle")
    bundle = write_bundle(out, inputs, spans=span_lines, replace=replace)
    shutil.rmtree(workdir, ignore_errors=True)
    return DeclinedResult(bundle, records)


def _steps(client: ServerClient, observer: JournalObserver, progress: Progress) -> tuple[RequestRecord, ...]:
    chance = random.Random(16)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(chance.randrange(1, 1000) for _ in range(count))

    x, y = tokens(LONG), tokens(SHORT)
    prompts = [("X", x), ("X+Y", (*x, *y, 5))]
    prompts += [("evict", tokens(FILL)) for _ in range(3)]
    prompts += [("reload", (*x, 9)), (PROBE, (*x, *y, *tokens(NEW)))]
    records: list[RequestRecord] = []
    for order, (series, ids) in enumerate(prompts):
        progress.phase(f"Request {order + 1} of {len(prompts)}: {series}")
        rid = f"kvw-declined-{order:03d}-{series}"
        record = client.generate(GenerateCall(rid=rid, series=series, order=order, prompt=Prompt(ids), output_tokens=2))
        records.append(record)
        wait_until(lambda rid=rid: observer.settled((rid,)), _SETTLE_S, 0.05, SystemClock())  # type: ignore[misc]
    return tuple(records)


def wrong_about_probe(verdict: RequestVerdict | None, capped: bool) -> str | None:
    """Why the verdict is not the right one; None when it is. ``capped``: the release caps its own figures."""
    if verdict is None:
        return "there is no verdict about the request"
    said = f"{verdict.grade.value}: {verdict.sentence}"
    read = sum(r.tokens for r in verdict.ranges if r.tier is Tier.L1 and r.grade is Grade.CONFIRMED)
    declined = [r for r in verdict.ranges if r.reason is Reason.PROMISED_NOT_LOADED]
    if read != LONG or [r.tokens for r in declined] != [SHORT]:
        return f"expected an L1 read of {LONG} tokens and {SHORT} promised and not loaded; {said}"
    if capped:
        return None if verdict.grade is Grade.CONFIRMED else said
    return None if verdict.grade is Grade.REFUTED else f"the server's figures are not refuted; {said}"
