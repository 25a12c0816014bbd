"""The protocol: A computes a prefix, B reuses it from L1, unrelated prompts push it out of L1, C asks again.

The run is a closed loop: an observer says when a request's copies are done and when the prefix has left L1.
Without one the run goes by sizes and counters, and says so in its notes.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Final

import msgspec

from kvwitness.collectors.memory import memory_of
from kvwitness.collectors.metrics import HOST_TOTAL_TOKENS, MetricsSnapshot, MetricsUnavailable
from kvwitness.collectors.server_info import ServerInfo, is_loopback
from kvwitness.tracer.protocol.client import FlushResult, ServerClient
from kvwitness.tracer.protocol.fit import Finding, Room, Severity, check_fit
from kvwitness.tracer.protocol.observer import Observer
from kvwitness.tracer.protocol.options import AbcOptions, Api
from kvwitness.tracer.protocol.progress import Progress
from kvwitness.tracer.protocol.prompts import DrawnIds, Prompts, Texts, calibration
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.protocol.runner import Before, Eviction, Runner, Stopped, Wave
from kvwitness.tracer.protocol.settings import SettingsLog, logged
from kvwitness.tracer.protocol.waiting import Clock, SystemClock
from kvwitness.tracer.protocol.workload import choose_vocabulary

_BYTES_A_TOKEN: Final = 4
"""Where the server does not count: about the mean of English text."""
_TOKENS_A_WORD: Final = 2.0


class UnfitServer(Exception):
    """The run would prove nothing on this server. ``findings`` has every line, the stops first."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        self.findings = findings
        stops = [finding.message for finding in findings if finding.severity is Severity.STOP]
        super().__init__("; ".join(stops))


class AbcRun(msgspec.Struct, frozen=True):
    """Everything that one run did and saw. ``stopped`` says why it did not get to its end (None: it did)."""

    run_id: str
    seed: int
    options: AbcOptions
    server: ServerInfo
    vocabulary: str
    """Range of the token ids used, and where it comes from; or what else the prompts are made of."""
    records: tuple[RequestRecord, ...]
    findings: tuple[Finding, ...]
    """What the fit checks found, and what the run had to note about itself."""
    eviction: Eviction | None
    """The last one."""
    flush: FlushResult | None
    snapshots: dict[str, MetricsSnapshot]
    """Metrics by moment: ``start``, and after the last of each series (``A``, ``B``, ``evict``, ``C``)."""
    stopped: str | None
    interrupted: bool = False
    """Whether the user stopped it."""
    evictions: tuple[Eviction, ...] = ()
    settings: SettingsLog = SettingsLog()
    missing: tuple[int, ...] = ()
    """Rounds that were asked for and did not get to their C."""

    def series(self, name: str) -> tuple[RequestRecord, ...]:
        """The requests of one series, in the order sent."""
        return tuple(record for record in self.records if record.series == name)

    def one(self, name: str) -> RequestRecord | None:
        """The last request of series ``name``."""
        found = self.series(name)
        return found[-1] if found else None

    @property
    def load(self) -> tuple[Wave, ...]:
        """What was sent up to each C, for a control run to send again."""
        done = {record.round for record in self.records if record.series == "C" and record.error is None}
        return tuple(
            Wave(rounds, one.fills, one.first_fill, one.fill_tokens)
            for one in self.evictions
            if (rounds := tuple(number for number in one.rounds if number in done))
        )


def plan_of(options: AbcOptions) -> tuple[Wave, ...]:
    """The rounds of a run, in the groups that share an eviction."""
    numbers = range(options.rounds)
    return tuple(Wave(tuple(numbers[i : i + options.wave])) for i in range(0, len(numbers), options.wave))


def run_abc(
    options: AbcOptions,
    server: ServerClient,
    observer: Observer | None,
    progress: Progress,
    clock: Clock | None = None,
    *,
    document: str | None = None,
    load: tuple[Wave, ...] | None = None,
    before: Before | None = None,
) -> AbcRun:
    """Send A, B, the unrelated prompts and C, round after round, and record what came back.

    ``document`` is the text of the prefix, where it is not drawn. ``load`` is another run's, to be sent as it was;
    ``before`` what an earlier part of the same run has done. Raises :class:`UnfitServer` before the first request when
    the run would prove nothing, :class:`~kvwitness.tracer.protocol.client.ServerUnavailable` or
    :class:`~kvwitness.collectors.server_info.ServerInfoUnavailable` when the server does not answer, and
    ``ValueError`` for lengths below one token. After that nothing is raised, and Ctrl-C ends the run: see
    :attr:`AbcRun.stopped`.
    """
    progress.phase("Checking the server")
    server.check()
    info = server.server_info()
    if document is not None:
        options = _measured(options, document, server)
    findings = check_fit(options, info, _room(server))
    if any(finding.severity is Severity.STOP for finding in findings):
        raise UnfitServer(findings)
    seed = options.seed if options.seed is not None else secrets.randbits(48)
    prompts = _prompts(options, seed, info, server, document)
    waves = load if load is not None else before.remaining if before is not None else plan_of(options)
    runner = Runner(options, server, info, observer, progress, clock or SystemClock(), prompts, waves, before)
    stopped: str | None = None
    interrupted = False
    try:
        runner.run()
    except Stopped as stop:
        stopped = str(stop)
    except KeyboardInterrupt:
        interrupted = True
        stopped = f"interrupted by the user after {len(runner.records)} requests"
    missing = runner.missing
    if stopped is None and missing:
        stopped = "requests failed, and with them their rounds"
    if stopped is not None and options.rounds > 1:
        stopped += f"; missing: {len(missing)} of {options.rounds} rounds"
    return AbcRun(
        run_id=runner.run_id,
        seed=seed,
        options=options,
        server=info,
        vocabulary=prompts.describes,
        records=tuple(runner.records),
        findings=(*findings, *runner.findings),
        eviction=runner.evictions[-1] if runner.evictions else None,
        flush=runner.flush,
        snapshots=runner.snapshots,
        stopped=stopped,
        interrupted=interrupted,
        evictions=tuple(runner.evictions),
        settings=logged(runner.reads),
        missing=missing,
    )


def _room(server: ServerClient) -> Room:
    """What can be measured of the room for the run."""
    host: int | None = None
    with suppress(MetricsUnavailable):
        # The gauge is exported as 0 before the scheduler has reported for the first time.
        host = int(server.metrics().value(HOST_TOTAL_TOKENS) or 0) or None
    memory = memory_of(server.url) if is_loopback(server.url) else None
    if memory is None:
        return Room(host)
    return Room(host, memory.available, memory.total)


def _measured(options: AbcOptions, document: str, server: ServerClient) -> AbcOptions:
    """The same options with the document's length in tokens, by the server, or by a rule of thumb."""
    count = server.count_tokens(document)
    guess = max(1, len(document.encode()) // _BYTES_A_TOKEN)
    return msgspec.structs.replace(options, prefix_tokens=count if count is not None else guess)


def _prompts(options: AbcOptions, seed: int, info: ServerInfo, server: ServerClient, document: str | None) -> Prompts:
    if document is None and options.questions is None and options.api is not Api.CHAT:
        lengths = options.lengths or (options.prefix_tokens,)
        return DrawnIds(seed, lengths, options.question_tokens, choose_vocabulary(info.vocab_size))
    sample = calibration(seed).text
    count = server.count_tokens(sample)
    tokens_a_word = count / len(sample.split()) if count else _TOKENS_A_WORD
    words = max(1, round(options.prefix_tokens / tokens_a_word))
    return Texts(seed, document, options.questions, words, tokens_a_word)


__all__ = ["AbcRun", "Eviction", "Progress", "UnfitServer", "plan_of", "run_abc"]
