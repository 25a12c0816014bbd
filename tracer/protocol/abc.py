"""The protocol: A computes a prefix, B reuses it from L1, unrelated prompts push it out of L1, C asks again.

The run is a closed loop: an observer says when a request's copies are done and when the prefix has left L1.
Without one the run goes by sizes and counters, and says so in its notes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from kvwitness.collectors.metrics import HOST_TOTAL_TOKENS, MetricsSnapshot, MetricsUnavailable
from kvwitness.collectors.server_info import ServerInfo
from kvwitness.tracer.protocol.client import FlushResult, GenerateCall, RequestInterrupted, ServerClient
from kvwitness.tracer.protocol.fit import Finding, Severity, auto_fills, check_fit, fill_length
from kvwitness.tracer.protocol.observer import Observer
from kvwitness.tracer.protocol.options import AbcOptions
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.protocol.waiting import Clock, SystemClock, wait_until, wait_until_quiet
from kvwitness.tracer.protocol.workload import Workload, build_workload, choose_vocabulary

FILLS_WITHOUT_SIZES: Final = 64
"""Upper bound of the fills when the server does not say how large its pools are."""
IMPATIENCE_S: Final = 1.0
"""How long to wait for later requests' events once the wait for one has timed out."""
NUDGE_TOKENS: Final = 8


class Progress(Protocol):
    """Where the run reports what it is doing."""

    def phase(self, title: str) -> None: ...

    def detail(self, text: str) -> None: ...


class UnfitServer(Exception):
    """The run would prove nothing on this server. ``findings`` has every line, the stops first."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        self.findings = findings
        stops = [finding.message for finding in findings if finding.severity is Severity.STOP]
        super().__init__("; ".join(stops))


class Eviction(msgspec.Struct, frozen=True):
    """How the prefix was pushed out, and what is known of it before C."""

    fills: int
    limit: int
    """More fills than this would not have been sent."""
    decided_by: str
    """What ended the filling: ``observer``, ``size``, ``asked`` (a number was given), ``limit`` or ``error``."""
    left_l1: bool | None
    """None: nobody could tell."""
    left_l2: bool | None


class AbcRun(msgspec.Struct, frozen=True):
    """Everything that one run did and saw. ``stopped`` says why it did not get to its end (None: it did)."""

    run_id: str
    seed: int
    options: AbcOptions
    server: ServerInfo
    vocabulary: str
    """Range of the token ids used, and where it comes from."""
    records: tuple[RequestRecord, ...]
    findings: tuple[Finding, ...]
    """What the fit checks found, and what the run had to note about itself."""
    eviction: Eviction | None
    flush: FlushResult | None
    snapshots: dict[str, MetricsSnapshot]
    """Metrics by moment: ``start``, and after each series (``A``, ``B``, ``evict``, ``C``)."""
    stopped: str | None
    interrupted: bool = False
    """Whether the user stopped it."""

    def series(self, name: str) -> tuple[RequestRecord, ...]:
        """The requests of one series, in the order sent."""
        return tuple(record for record in self.records if record.series == name)

    def one(self, name: str) -> RequestRecord | None:
        """The last request of series ``name``."""
        found = self.series(name)
        return found[-1] if found else None


class _Stopped(Exception):
    """The run cannot go on; the message says why."""


def run_abc(
    options: AbcOptions,
    server: ServerClient,
    observer: Observer | None,
    progress: Progress,
    clock: Clock | None = None,
) -> AbcRun:
    """Send A, B, the unrelated prompts and C, one after the other, and record what came back.

    Raises :class:`UnfitServer` before the first request when the run would prove nothing,
    :class:`~kvwitness.tracer.protocol.client.ServerUnavailable` or
    :class:`~kvwitness.collectors.server_info.ServerInfoUnavailable` when the server does not answer, and
    ``ValueError`` for lengths below one token. After that nothing is raised, and Ctrl-C ends the run: see
    :attr:`AbcRun.stopped`.
    """
    progress.phase("Checking the server")
    server.check()
    info = server.server_info()
    findings = check_fit(options, info)
    if any(finding.severity is Severity.STOP for finding in findings):
        raise UnfitServer(findings)
    seed = options.seed if options.seed is not None else secrets.randbits(48)
    vocabulary = choose_vocabulary(info.vocab_size)
    workload = build_workload(seed, options.prefix_tokens, options.question_tokens, vocabulary)
    runner = _Runner(options, server, info, observer, progress, clock or SystemClock(), workload)
    stopped: str | None = None
    interrupted = False
    try:
        runner.run()
    except _Stopped as stop:
        stopped = str(stop)
    except KeyboardInterrupt:
        interrupted = True
        stopped = f"interrupted by the user after {len(runner.records)} requests"
    return AbcRun(
        run_id=runner.run_id,
        seed=seed,
        options=options,
        server=info,
        vocabulary=f"{vocabulary.first}..{vocabulary.last} ({vocabulary.source})",
        records=tuple(runner.records),
        findings=(*findings, *runner.notes),
        eviction=runner.eviction,
        flush=runner.flush,
        snapshots=runner.snapshots,
        stopped=stopped,
        interrupted=interrupted,
    )


class _Runner:
    """The state of one run while it goes on."""

    def __init__(
        self,
        options: AbcOptions,
        server: ServerClient,
        info: ServerInfo,
        observer: Observer | None,
        progress: Progress,
        clock: Clock,
        workload: Workload,
    ) -> None:
        self.options = options
        self.server = server
        self.info = info
        self.observer = observer
        self.progress = progress
        self.clock = clock
        self.workload = workload
        # Not from the seed: the same prompts may be sent to the same server twice, under different ids.
        self.run_id = secrets.token_hex(4)
        self.records: list[RequestRecord] = []
        self.notes: list[Finding] = []
        self.snapshots: dict[str, MetricsSnapshot] = {}
        self.eviction: Eviction | None = None
        self.flush: FlushResult | None = None
        self.patience_s = options.settle_timeout_s

    def run(self) -> None:
        options, workload = self.options, self.workload
        if self.observer is None:
            self._note("no_observer", "no journals to watch: waits go by the server's counters, fills by pool sizes")
        self._snapshot("start")
        for number in range(options.warmups):
            self.progress.phase("Warming up")
            self._send("warmup", workload.unrelated(number))
        self.progress.phase("A: computing the prefix")
        first = self._send("A", workload.prompt_a)
        if first.cached_tokens:
            self._note(
                "prefix_known",
                f"A found {first.cached_tokens} of its tokens in the cache: this seed was used on this server before",
            )
        self._settle(first)
        if options.second_hit:
            self._settle(self._send("A", workload.prompt_a))
        self._snapshot("A")
        self.progress.phase("B: the next turn" if options.turns else "B: the same prefix, another question")
        prompt_b = workload.prompt_b
        if options.turns:
            prompt_b = (*workload.prompt_a, *(first.output_ids or ()), *workload.question_b)
        second = self._send("B", prompt_b)
        self._settle(second)
        self._snapshot("B")
        again = second if options.turns else first
        self._evict(again)
        self._snapshot("evict")
        if options.flush_between_bc:
            self._flush()
        self.progress.phase(f"C: the same prompt as {'B' if options.turns else 'A'}")
        settled = self._settle(self._send("C", prompt_b if options.turns else workload.prompt_a))
        self._snapshot("C")
        if settled is False:
            # SGLang 0.4 takes note of a completed load only when another request comes (get_new_batch_prefill).
            self._settle(self._send("nudge", workload.prompt_a[-NUDGE_TOKENS:]))

    # --- the eviction --------------------------------------------------------------------------------

    def _evict(self, first: RequestRecord) -> None:
        options = self.options
        tokens = fill_length(options, self.info)
        by_size, limit = self._fill_counts(tokens)
        self.progress.phase(f"Pushing the prefix out of {'L1 and L2' if options.evict_host else 'L1'}")
        if not options.control and not options.flush_between_bc and self._ask_backed_up(first.rid) is False:
            self._note("not_backed_up", self._why_not_backed_up())
        sent, decided_by = 0, "error"
        try:
            while (enough := self._enough(sent, by_size, limit, first.rid)) is None:
                self.progress.detail(f"unrelated prompt {sent + 1}, at most {options.fills or limit}")
                fill = self._send("evict", self.workload.unrelated(options.warmups + sent, tokens))
                sent += 1
                self._settle(fill)
            decided_by = enough
        finally:
            # Also when a fill failed: what had been reached until then is part of the record.
            left_l1 = self._ask(lambda observer: observer.left_l1(first.rid))
            in_l2 = self._ask(lambda observer: observer.in_l2(first.rid))
            left_l2 = None if in_l2 is None else not in_l2
            self.eviction = Eviction(sent, limit, decided_by, left_l1, left_l2)
        self._note_eviction(self.eviction)

    def _enough(self, sent: int, by_size: int | None, limit: int, rid: str) -> str | None:
        """What says that no more fills are needed after ``sent`` (None: go on)."""
        if self.options.fills is not None:
            return "asked" if sent >= self.options.fills else None
        gone = self._gone(rid)
        if gone is True:
            return "observer"
        if gone is None and by_size is not None and sent >= by_size:
            return "size"
        return "limit" if sent >= limit else None

    def _fill_counts(self, tokens: int) -> tuple[int | None, int]:
        """Fills that must be enough by the sizes (None: sizes not known), and the upper bound when observed."""
        device = self.info.max_total_num_tokens
        host = self._host_tokens() if self.options.evict_host else 0
        if device is None or host is None:
            return None, FILLS_WITHOUT_SIZES
        room = device + host
        return auto_fills(room, tokens), auto_fills(2 * room, tokens)

    def _host_tokens(self) -> int | None:
        for snapshot in reversed(self.snapshots.values()):
            # The gauge is exported as 0 before the scheduler has reported for the first time.
            if measured := snapshot.value(HOST_TOTAL_TOKENS):
                return int(measured)
        return self.info.host_tokens

    def _gone(self, rid: str) -> bool | None:
        left_l1 = self._ask(lambda observer: observer.left_l1(rid))
        if not self.options.evict_host or left_l1 is not True:
            return left_l1
        in_l2 = self._ask(lambda observer: observer.in_l2(rid))
        return None if in_l2 is None else not in_l2

    def _note_eviction(self, eviction: Eviction) -> None:
        if eviction.decided_by == "size":
            self._note("fills_by_size", f"nobody could tell when the prefix left: sent {eviction.fills} fills by size")
        elif eviction.decided_by == "limit":
            self._note("fills_exhausted", f"the prefix was not seen to leave after {eviction.fills} fills")
        elif eviction.decided_by == "asked" and eviction.left_l1 is False:
            self._note("still_in_l1", f"after the {eviction.fills} fills asked for, the prefix is still in L1")
        if not self.options.evict_host and not self.options.control and eviction.left_l2 and eviction.left_l1:
            self._note("left_l2_too", "the prefix is not in L2 either: C can only recompute it (or read it from L3)")

    def _ask_backed_up(self, rid: str) -> bool | None:
        if self.info.hicache.write_policy == "write_back":
            return None  # It is copied when it is evicted, so not yet.
        return self._ask(lambda observer: observer.backed_up(rid))

    def _why_not_backed_up(self) -> str:
        if self.info.hicache.write_policy == "write_through_selective" and not self.options.second_hit:
            return "write_through_selective has not backed up all of A yet: only what was hit twice is (second_hit)"
        return "not all of A's prefix is backed up before the eviction: C may have to recompute some of it"

    # --- steps ---------------------------------------------------------------------------------------

    def _send(self, series: str, ids: tuple[int, ...]) -> RequestRecord:
        order = len(self.records)
        keep = self.options.keep_prompts and series in ("A", "B", "C")
        call = GenerateCall(
            rid=f"kvw-{self.run_id}-{order:03d}-{series}",
            series=series,
            order=order,
            input_ids=ids,
            output_tokens=self.options.output_tokens,
            dp_rank=self.options.dp_rank,
            keep_prompt=keep,
        )
        try:
            record = self.server.generate(call)
        except RequestInterrupted as interrupt:
            self.records.append(interrupt.record)
            raise
        self.records.append(record)
        if record.error is not None:
            raise _Stopped(f"request {order} ({series}) failed: {record.error}")
        return record

    def _settle(self, record: RequestRecord) -> bool | None:
        """Wait until the request's copies are done, so that the next step starts from a known state.

        None: nobody can tell.
        """
        pause_s = self.options.poll_interval_s
        seen = wait_until(
            lambda: self._ask(lambda observer: observer.settled((record.rid,))), self.patience_s, pause_s, self.clock
        )
        if seen is False:
            self._note(
                "not_settled", f"{record.rid}: its release or its copies were not seen within {self.patience_s:g} s"
            )
            # The journals may be another server's: dozens of fills must not each wait as long.
            self.patience_s = min(self.patience_s, IMPATIENCE_S)
        elif seen is None:
            wait_until_quiet(self.server.metrics, pause_s, self.clock)
        return seen

    def _flush(self) -> None:
        self.progress.phase("Fault: emptying the cache before C")
        self.flush = self.server.flush_cache()
        if not self.flush.ok:
            raise _Stopped(f"the cache could not be emptied ({self.flush.status}): {self.flush.message}")

    def _ask(self, question: Callable[[Observer], bool | None]) -> bool | None:
        if self.observer is None:
            return None
        try:
            return question(self.observer)
        except Exception as error:
            # Whatever is wrong with the observer, the requests already sent are worth more than it.
            self.observer = None
            self._note("observer_failed", f"the observer failed ({type(error).__name__}: {error}), going by sizes")
            return None

    def _snapshot(self, moment: str) -> None:
        try:
            self.snapshots[moment] = self.server.metrics()
        except MetricsUnavailable as problem:
            if not any(note.code == "no_metrics" for note in self.notes):
                self._note("no_metrics", str(problem))

    def _note(self, code: str, message: str) -> None:
        self.notes.append(Finding(Severity.WARN, code, message))
