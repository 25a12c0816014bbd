"""One run while it goes on: its waves, its waits, and what it notes about itself."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from kvwitness.collectors.metrics import HOST_TOTAL_TOKENS, MetricsSnapshot, MetricsUnavailable
from kvwitness.collectors.server_info import ServerInfo, ServerInfoUnavailable
from kvwitness.tracer.protocol.client import FlushResult, GenerateCall, ServerClient
from kvwitness.tracer.protocol.fit import Finding, Severity, auto_fills, fill_length
from kvwitness.tracer.protocol.observer import Observer
from kvwitness.tracer.protocol.options import AbcOptions
from kvwitness.tracer.protocol.parallel import ManyInterrupted, generate_all
from kvwitness.tracer.protocol.progress import Progress
from kvwitness.tracer.protocol.prompts import Prompt, Prompts, Round
from kvwitness.tracer.protocol.record import RequestRecord
from kvwitness.tracer.protocol.settings import SettingsRead, flat_settings, logged
from kvwitness.tracer.protocol.waiting import Clock, wait_until, wait_until_quiet

FILLS_WITHOUT_SIZES: Final = 64
"""Upper bound of the fills when the server does not say how large its pools are."""
IMPATIENCE_S: Final = 1.0
"""How long to wait for later requests' events once the wait for one has timed out."""
NUDGE_TOKENS: Final = 8
FAILURES_BORNE: Final = 3
"""Failed requests in a row after which a run of several rounds gives up."""


class Eviction(msgspec.Struct, frozen=True):
    """How the prefixes of a wave were pushed out, and what is known of them before C."""

    fills: int
    limit: int
    """More fills than this would not have been sent."""
    decided_by: str
    """What ended the filling: ``observer``, ``size``, ``asked`` (a number was given), ``limit`` or ``error``."""
    left_l1: bool | None
    """None: nobody could tell."""
    left_l2: bool | None
    rounds: tuple[int, ...] = (0,)
    first_fill: int = 0
    """Number of the first of these fills among all unrelated prompts."""
    fill_tokens: int = 0


class Wave(msgspec.Struct, frozen=True):
    """Rounds that share an eviction, and how it is to be done (None: as it is needed)."""

    rounds: tuple[int, ...]
    fills: int | None = None
    first_fill: int | None = None
    fill_tokens: int | None = None


class Before(msgspec.Struct, frozen=True):
    """What the earlier part of a run that was cut short has done, and what is left of it."""

    run_id: str
    records: tuple[RequestRecord, ...]
    evictions: tuple[Eviction, ...]
    remaining: tuple[Wave, ...]


class Stopped(Exception):
    """The run cannot go on; the message says why."""


class Runner:
    """The state of one run while it goes on."""

    def __init__(
        self,
        options: AbcOptions,
        server: ServerClient,
        info: ServerInfo,
        observer: Observer | None,
        progress: Progress,
        clock: Clock,
        prompts: Prompts,
        waves: Sequence[Wave],
        before: Before | None = None,
    ) -> None:
        self.options = options
        self.server = server
        self.info = info
        self.observer = observer
        self.progress = progress
        self.clock = clock
        self.prompts = prompts
        self.waves = tuple(waves)
        # Not from the seed: the same prompts may be sent to the same server twice, under different ids.
        self.run_id = secrets.token_hex(4) if before is None else before.run_id
        self.records: list[RequestRecord] = [] if before is None else list(before.records)
        self.evictions: list[Eviction] = [] if before is None else list(before.evictions)
        self.snapshots: dict[str, MetricsSnapshot] = {}
        self.reads: list[SettingsRead] = []
        self.flush: FlushResult | None = None
        self.patience_s = options.settle_timeout_s
        self._notes: dict[str, Finding] = {}
        self._noted: Counter[str] = Counter()
        self._failures = 0
        self._used = max((one.first_fill + one.fills for one in self.evictions), default=0)
        """Unrelated prompts that were sent already: a second one of the same number would be in the cache."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the run noted about itself, each kind once."""
        return tuple(
            note
            if self._noted[code] == 1
            else msgspec.structs.replace(note, message=f"{note.message} (and {self._noted[code] - 1} times more)")
            for code, note in self._notes.items()
        )

    @property
    def missing(self) -> tuple[int, ...]:
        """Rounds of the plan that have no C."""
        done = {record.round for record in self.records if record.series == "C" and record.error is None}
        return tuple(number for wave in self.waves for number in wave.rounds if number not in done)

    def run(self) -> None:
        if self.observer is None:
            self._note("no_observer", "no journals to watch: waits go by the server's counters, fills by pool sizes")
        self._snapshot("start")
        self._read_settings("the start")
        if self.waves:
            self._warm_up()
        for wave in self.waves:
            self._wave(wave)

    def _warm_up(self) -> None:
        options = self.options
        for _ in range(options.warmups):
            self.progress.phase("Warming up")
            prompt = self.prompts.unrelated(self._used, options.longest_prefix + options.question_tokens)
            self._used += 1
            self._send("warmup", [(prompt, None)])

    def _wave(self, wave: Wave) -> None:
        options = self.options
        rounds = [self.prompts.round(number) for number in wave.rounds]
        self._phase("A: computing the prefix", wave)
        first = self._series("A", rounds, wave)
        if not first:
            return  # There is no prefix to evict, and nothing to ask for again.
        known = {round_: record for round_, record in first.items() if record.cached_tokens}
        if known:
            found = max(record.cached_tokens or 0 for record in known.values())
            self._note(
                "prefix_known",
                f"A found {found} of its tokens in the cache: this seed was used on this server before",
            )
        if options.second_hit:
            self._series("A", [one for one in rounds if one.number in first], wave)
        turns = options.turns
        rounds = [self._next_turn(one, first[one.number]) if turns else one for one in rounds if one.number in first]
        self._phase("B: the next turn" if turns else "B: the same prefix, another question", wave)
        second = self._series("B", rounds, wave)
        again = [one for one in rounds if one.number in second] if turns else rounds
        self._evict(second if turns else first, wave)
        if options.flush_between_bc:
            self._flush()
        self._phase(f"C: the same prompt as {'B' if turns else 'A'}", wave)
        settled = self._series_unsettled("C", again, wave)
        if settled is False and again:
            # Up to 0.5.8 an idle scheduler takes no note of a completed load (_get_new_batch_prefill_raw).
            self._settle(self._send("nudge", [(_tail(again[-1].prompt_a), None)]))

    def _next_turn(self, one: Round, answered: RequestRecord) -> Round:
        """The round whose B goes on where A's answer ended, and whose C is B again."""
        question = one.prompt_b.ids[one.prefix_tokens :]
        turn = Prompt((*one.prompt_a.ids, *(answered.output_ids or ()), *question))
        return msgspec.structs.replace(one, prompt_a=turn, prompt_b=turn)

    def _series(self, series: str, rounds: Sequence[Round], wave: Wave) -> dict[int, RequestRecord]:
        """Send one series of a wave, wait for its copies, and look whether the server is still the same one."""
        answered = self._send_rounds(series, rounds)
        self._settle(list(answered.values()))
        self._ended(series, wave)
        return answered

    def _series_unsettled(self, series: str, rounds: Sequence[Round], wave: Wave) -> bool | None:
        settled = self._settle(list(self._send_rounds(series, rounds).values()))
        self._ended(series, wave)
        return settled

    def _send_rounds(self, series: str, rounds: Sequence[Round]) -> dict[int, RequestRecord]:
        prompts = [(one.prompt_b if series == "B" else one.prompt_a, one) for one in rounds]
        records = self._send(series, prompts)
        return {record.round: record for record in records if record.error is None and record.round is not None}

    def _ended(self, series: str, wave: Wave) -> None:
        self._snapshot(series)
        self._read_settings(f"after {series}{self._of_wave(wave)}")

    def _phase(self, title: str, wave: Wave) -> None:
        self.progress.phase(f"{title}{self._of_wave(wave)}")

    def _of_wave(self, wave: Wave) -> str:
        total = self.options.rounds
        if total == 1:
            return ""
        # A round that is begun again has another number, and stands for the same one.
        first, last = wave.rounds[0] % total + 1, wave.rounds[-1] % total + 1
        again = " again" if wave.rounds[0] >= total else ""
        return f" (round {first} of {total}{again})" if first == last else f" (rounds {first} to {last}{again})"

    # --- the eviction --------------------------------------------------------------------------------

    def _evict(self, first: dict[int, RequestRecord], wave: Wave) -> None:
        options = self.options
        tokens = wave.fill_tokens or fill_length(options, self.info)
        room, limit = self._room(tokens)
        start = self._used if wave.first_fill is None else wave.first_fill
        records = list(first.values())
        self._phase(f"Pushing the prefix out of {'L1 and L2' if options.evict_host else 'L1'}", wave)
        if not options.control and not options.flush_between_bc and self._ask_backed_up(records) is False:
            self._note("not_backed_up", self._why_not_backed_up())
        asked = wave.fills if wave.fills is not None else options.fills
        sent, filled, decided_by = 0, 0, "error"
        try:
            while (enough := self._enough(sent, filled, asked, room, limit, records)) is None:
                self.progress.detail(f"unrelated prompt {sent + 1}, at most {limit if asked is None else asked}")
                prompt = self.prompts.unrelated(start + sent, tokens)
                fill = self._send("evict", [(prompt, None)], wave.rounds[0])
                sent += 1
                filled += sum(one.prompt_tokens for one in fill)
                self._used = max(self._used, start + sent)
                self._settle(fill)
            decided_by = enough
        finally:
            # Also when a fill failed: what had been reached until then is part of the record.
            left_l1 = self._left_l1(records)
            in_l2 = self._every(records, lambda observer, one: observer.in_l2(one.rid))
            self.evictions.append(
                Eviction(
                    fills=sent,
                    limit=limit,
                    decided_by=decided_by,
                    left_l1=left_l1,
                    left_l2=None if in_l2 is None else not in_l2,
                    rounds=wave.rounds,
                    first_fill=start,
                    fill_tokens=tokens,
                )
            )
        self._note_eviction(self.evictions[-1])
        self._ended("evict", wave)

    def _enough(
        self, sent: int, filled: int, asked: int | None, room: int | None, limit: int, records: Sequence[RequestRecord]
    ) -> str | None:
        """What says that no more fills are needed after ``sent`` with ``filled`` tokens (None: go on)."""
        if asked is not None:
            return "asked" if sent >= asked else None
        gone = self._gone(records)
        if gone is True:
            return "observer"
        if gone is None and room is not None and filled > room and sent > 1:
            return "size"
        return "limit" if sent >= limit else None

    def _room(self, tokens: int) -> tuple[int | None, int]:
        """Tokens that the fills must exceed by the sizes (None: not known), and the most fills when observed."""
        device = self.info.max_total_num_tokens
        host = self._host_tokens() if self.options.evict_host else 0
        if device is None or host is None:
            return None, FILLS_WITHOUT_SIZES
        # One more than what fills the room: the last one has to find it full.
        return device + host + tokens - 1, auto_fills(2 * (device + host), tokens)

    def _host_tokens(self) -> int | None:
        for snapshot in reversed(self.snapshots.values()):
            # The gauge is exported as 0 before the scheduler has reported for the first time.
            if measured := snapshot.value(HOST_TOTAL_TOKENS):
                return int(measured)
        return self.info.host_tokens

    def _gone(self, records: Sequence[RequestRecord]) -> bool | None:
        left_l1 = self._left_l1(records)
        if not self.options.evict_host or left_l1 is not True:
            return left_l1
        in_l2 = self._any(records, lambda observer, one: observer.in_l2(one.rid))
        return None if in_l2 is None else not in_l2

    def _left_l1(self, records: Sequence[RequestRecord]) -> bool | None:
        # What A itself found in the cache (a chat template's beginning) is every prompt's, and stays.
        return self._every(records, lambda observer, one: observer.left_l1(one.rid, one.cached_tokens or 0))

    def _note_eviction(self, eviction: Eviction) -> None:
        if eviction.decided_by == "size":
            self._note("fills_by_size", f"nobody could tell when the prefix left: sent {eviction.fills} fills by size")
        elif eviction.decided_by == "limit":
            self._note("fills_exhausted", f"the prefix was not seen to leave after {eviction.fills} fills")
        elif eviction.decided_by == "asked" and eviction.left_l1 is False:
            self._note("still_in_l1", f"after the {eviction.fills} fills asked for, the prefix is still in L1")
        if not self.options.evict_host and not self.options.control and eviction.left_l2 and eviction.left_l1:
            self._note("left_l2_too", "the prefix is not in L2 either: C can only recompute it (or read it from L3)")

    def _ask_backed_up(self, records: Sequence[RequestRecord]) -> bool | None:
        if self.info.hicache.write_policy == "write_back":
            return None  # It is copied when it is evicted, so not yet.
        return self._every(records, lambda observer, one: observer.backed_up(one.rid))

    def _why_not_backed_up(self) -> str:
        if self.info.hicache.write_policy == "write_through_selective" and not self.options.second_hit:
            return "write_through_selective has not backed up all of A yet: only what was hit twice is (second_hit)"
        return "not all of A's prefix is backed up before the eviction: C may have to recompute some of it"

    # --- steps ---------------------------------------------------------------------------------------

    def _send(
        self, series: str, prompts: Sequence[tuple[Prompt, Round | None]], number: int | None = None
    ) -> list[RequestRecord]:
        """Send requests and keep their records. A failed one ends a run of one round; several bear some failures.

        ``number`` is the round of those that have no prefix of a round.
        """
        calls = [
            self._call(series, prompt, round_, len(self.records) + place, number)
            for place, (prompt, round_) in enumerate(prompts)
        ]
        if not calls:
            return []
        try:
            records = generate_all(calls, self.options.clients, self.server.generate)
        except ManyInterrupted as interrupt:
            self.records.extend(interrupt.records)
            raise
        self.records.extend(records)
        for record in records:
            self._failures = self._failures + 1 if record.error is not None else 0
            lasting = record.status == 0 or self._failures >= FAILURES_BORNE
            if record.error is not None and (lasting or self.options.rounds == 1):
                raise Stopped(f"request {record.order} ({series}) failed: {record.error}")
        return records

    def _call(self, series: str, prompt: Prompt, round_: Round | None, order: int, number: int | None) -> GenerateCall:
        return GenerateCall(
            rid=f"kvw-{self.run_id}-{order:03d}-{series}",
            series=series,
            order=order,
            prompt=prompt,
            output_tokens=self.options.output_tokens,
            dp_rank=self.options.dp_rank,
            keep_prompt=self.options.keep_prompts and series in ("A", "B", "C"),
            api=self.options.api,
            model=self.info.model_path or "default",
            round=number if round_ is None else round_.number,
            prefix_tokens=None if round_ is None else round_.prefix_tokens,
        )

    def _settle(self, records: Sequence[RequestRecord]) -> bool | None:
        """Wait until the requests' copies are done, so that the next step starts from a known state.

        None: nobody can tell.
        """
        rids = tuple(record.rid for record in records if record.error is None)
        if not rids:
            return None
        pause_s = self.options.poll_interval_s
        seen = wait_until(
            lambda: self._ask(lambda observer: observer.settled(rids)), self.patience_s, pause_s, self.clock
        )
        if seen is False:
            named = rids[0] if len(rids) == 1 else f"{rids[0]} and {len(rids) - 1} more"
            self._note("not_settled", f"{named}: its release or its copies were not seen within {self.patience_s:g} s")
            # The journals may be another server's: dozens of fills must not each wait as long.
            self.patience_s = min(self.patience_s, IMPATIENCE_S)
        elif seen is None:
            wait_until_quiet(self.server.metrics, pause_s, self.clock)
        return seen

    def _flush(self) -> None:
        self.progress.phase("Fault: emptying the cache before C")
        self.flush = self.server.flush_cache()
        if not self.flush.ok:
            raise Stopped(f"the cache could not be emptied ({self.flush.status}): {self.flush.message}")

    def _every(
        self, records: Sequence[RequestRecord], question: Callable[[Observer, RequestRecord], bool | None]
    ) -> bool | None:
        """True when it is so for each, None when nobody can tell for one of them."""
        answers = [self._ask(partial(_about, record, question)) for record in records]
        if not answers or None in answers:
            return None
        return all(answers)

    def _any(
        self, records: Sequence[RequestRecord], question: Callable[[Observer, RequestRecord], bool | None]
    ) -> bool | None:
        every = self._every(records, lambda observer, one: None if (a := question(observer, one)) is None else not a)
        return None if every is None else not every

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
            # A later one of the same name takes the place, and comes after all others.
            self.snapshots.pop(moment, None)
            self.snapshots[moment] = self.server.metrics()
        except MetricsUnavailable as problem:
            if "no_metrics" not in self._notes:
                self._note("no_metrics", str(problem))

    def _read_settings(self, moment: str) -> None:
        """Stop as soon as the server is another one: what follows would not belong to what was seen before."""
        try:
            settings = flat_settings(self.server.server_info().raw_server)
        except ServerInfoUnavailable:
            return  # The next request says what is wrong.
        self.reads.append(SettingsRead(moment, settings, self.server.identity()))
        log = logged(self.reads[-2:])
        if log.changes:
            one = log.changes[0]
            more = f" and {len(log.changes) - 1} more" if len(log.changes) > 1 else ""
            raise Stopped(
                f"the server's settings changed between {one.after} and {one.before}: "
                f"{one.name} from {one.one} to {one.other}{more}"
            )
        if log.restarts:
            raise Stopped(f"{log.restarts[0]}, and with them its cache")

    def _note(self, code: str, message: str) -> None:
        self._noted[code] += 1
        self._notes.setdefault(code, Finding(Severity.WARN, code, message))


def _about(
    record: RequestRecord, question: Callable[[Observer, RequestRecord], bool | None], observer: Observer
) -> bool | None:
    return question(observer, record)


def _tail(prompt: Prompt) -> Prompt:
    return Prompt(text=prompt.text[-NUDGE_TOKENS:]) if prompt.text else Prompt(prompt.ids[-NUDGE_TOKENS:])
