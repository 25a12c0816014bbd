"""What a recording from outside says, and how far: at most "reported by the server, not confirmed"."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from kvwitness.collectors.kv_events import KvDamaged, KvGap, KvLine, KvMessage, KvRestart
from kvwitness.collectors.kv_wire import KvKind
from kvwitness.collectors.stacks import StackSamples
from kvwitness.tracer.model import CrossCheck, Grade
from kvwitness.tracer.outside import counting
from kvwitness.tracer.outside.counting import Totals, totals
from kvwitness.tracer.outside.kv_ledger import KvFacts, RankLedger, incomplete, kv_ledger
from kvwitness.tracer.outside.records import (
    FILES,
    HOST,
    KV_EVENTS,
    METRICS_LINES,
    SERVER,
    STACKS,
    Counted,
    HostReading,
    Lost,
    Recording,
    Server,
    Unanswered,
)

RAISE_IT: Final = (
    "kvwitness attach --url {url} where the server is on standby; "
    "else start it with kvwitness serve, which records from the first request on"
)
_EDGE_NS: Final = 5_000_000_000
"""Events are published when a scheduler's step ends, and the counters are read at any moment: what moved this close
to the first or the last reading is counted on either side of it."""
_REPORTED: Final = "reported by the server, not confirmed"


class WitnessState(msgspec.Struct, frozen=True):
    """One witness: what it gave, and what is wrong with it (nothing, when ``gaps`` is empty)."""

    name: str
    recorded: str
    gaps: tuple[str, ...] = ()


class Statement(msgspec.Struct, frozen=True):
    """The claim of a recording, with everything that it rests on and that speaks against it."""

    grade: Grade
    sentence: str
    raise_it: str
    """How to get more than the server's word."""
    reported: dict[str, int]
    """Prompt tokens by tier as the server counts them; a tier that it never counted has no key."""
    witnesses: tuple[WitnessState, ...]
    checks: tuple[CrossCheck, ...]
    """The witnesses side by side."""
    complete: bool
    """The recording ended in order and lost nothing."""
    begin_ns: int | None
    end_ns: int | None
    gaps: tuple[str, ...]
    """What is missing from the recording as a whole."""


def state(recording: Recording) -> Statement:
    """Derive the statement. Pure: the same recording gives the same statement anywhere."""
    counted = totals(recording.of(METRICS_LINES, Counted))
    facts = _server_facts(recording)
    ledgers = kv_ledger(kv_lines(recording))
    kv_facts = _kv_facts(counted, facts)
    doubts = [doubt for ledger in ledgers or (None,) for doubt in incomplete(ledger, kv_facts)]
    reported = {
        tier: int(amount)
        for tier, name in (
            ("L1", counting.CACHED_DEVICE),
            ("L2", counting.CACHED_HOST),
            ("L3", counting.CACHED_STORAGE),
        )
        if (amount := counted.get(name)) is not None
    }
    reported = _without_tiers(reported, counted, facts)
    grade, sentence = sentence_of(reported, bool(counted.intervals))
    head, end = recording.head, recording.end
    gaps = tuple(_gaps(recording))
    return Statement(
        grade=grade,
        sentence=sentence,
        raise_it=RAISE_IT.format(url=head.url if head else "URL") if grade is not Grade.UNKNOWN else "",
        reported=reported,
        witnesses=tuple(_witnesses(recording, counted, ledgers, doubts)),
        checks=tuple(_checks(counted, ledgers, tuple(doubts), facts)),
        complete=not gaps,
        begin_ns=head.begin_ns if head else None,
        end_ns=end.at_ns if end else recording.last_ns,
        gaps=gaps,
    )


def sentence_of(reported: Mapping[str, int], answered: bool) -> tuple[Grade, str]:
    """The claim about prompt tokens by tier as the server counts them, and its grade."""
    read = {tier: tokens for tier, tokens in reported.items() if tokens}
    if read:
        told = ", ".join(f"{tier} reads of {tokens} tokens" for tier, tokens in sorted(read.items(), reverse=True))
        return Grade.REPORTED, f"{told} {_REPORTED}"
    if not answered:
        return Grade.UNKNOWN, "unknown: the server's counters were not read"
    return Grade.UNKNOWN, "no reuse was reported by the server in this time"


def _without_tiers(reported: dict[str, int], counted: Totals, facts: Mapping[str, object]) -> dict[str, int]:
    """Releases before 0.5.9 count cached tokens without their tier; only load-backs tell of L2 there."""
    if reported:
        return reported
    loaded = counted.get(counting.LOADED)
    return {"L2": int(loaded) // _ranks(facts)} if loaded else {}


# --- the witnesses --------------------------------------------------------------------------------------


def _witnesses(
    recording: Recording, counted: Totals, ledgers: tuple[RankLedger, ...], doubts: list[str]
) -> Iterator[WitnessState]:
    absent = recording.head.not_recorded if recording.head else {}
    unanswered = recording.of(METRICS_LINES, Unanswered)
    gaps = [*(one.problem for one in unanswered[:3]), *([f"{len(unanswered)} times no answer"] if unanswered else [])]
    gaps += [f"the server's counters were reset before {at} ns: it was restarted" for at in counted.resets]
    yield WitnessState(
        "/metrics", _or_absent(f"{counted.intervals} intervals", counted.intervals, absent, "metrics"), tuple(gaps)
    )
    messages = len(recording.of(KV_EVENTS, KvMessage))
    told = f"{messages} messages of {len(ledgers)} dp rank{'s' if len(ledgers) != 1 else ''}"
    yield WitnessState("KV events", _or_absent(told, messages, absent, "kv_events"), tuple(doubts))
    servers = recording.of(SERVER, Server)
    pairs = itertools.pairwise(servers)
    again = [f"other processes from {b.at_ns} ns on" for a, b in pairs if _pids(a) != _pids(b)]
    yield WitnessState("server info", _or_absent(f"{len(servers)} times", len(servers), absent, "server"), tuple(again))
    hosts = recording.of(HOST, HostReading)
    yield WitnessState("host", _or_absent(_memory(hosts), len(hosts), absent, "host"))
    stacks = recording.of(STACKS, StackSamples)
    inside = sum(one.load_back_samples for one in stacks)
    told = f"{sum(one.samples for one in stacks)} samples, {inside} of them within a load-back"
    yield WitnessState("stacks", _or_absent(told, len(stacks), absent, "stacks"))


def _pids(server: Server) -> frozenset[object]:
    return frozenset(process.get("pid") for process in server.processes)


def _or_absent(told: str, count: int, absent: dict[str, str], name: str) -> str:
    return told if count else f"none: {absent.get(name, 'nothing came')}"


def _memory(hosts: tuple[HostReading, ...]) -> str:
    if not hosts:
        return ""
    first, last = hosts[0].available, hosts[-1].available
    return f"{len(hosts)} readings, memory left {first >> 20} MiB before and {last >> 20} MiB after"


def kv_lines(recording: Recording) -> Iterator[KvLine]:
    """The KV events of a recording; lines that were lost are a gap in every rank."""
    for line in recording.lines.get(KV_EVENTS, ()):
        if isinstance(line, KvMessage | KvGap | KvRestart | KvDamaged):
            yield line
        elif isinstance(line, Lost):
            # Of which rank they were is not known: every rank's residency ends here.
            for rank in sorted({one.rank for one in recording.of(KV_EVENTS, KvMessage)}):
                yield KvGap(rank, -1, -1, line.to_ns, f"{line.lines} lines could not be recorded ({line.cause})")


def _gaps(recording: Recording) -> Iterator[str]:
    yield from recording.damage
    if recording.head is None:
        yield "how the recording began is not recorded"
    if recording.end is None:
        yield f"the collector was killed, or could not write its end: its last line is of {recording.last_ns} ns"
    for name in FILES:
        if lost := recording.of(name, Lost):
            count = sum(one.lines for one in lost)
            yield f"{name}: {count} lines lost from {lost[0].from_ns} to {lost[-1].to_ns} ns: {lost[-1].cause}"
    for rank_restart in recording.of(KV_EVENTS, KvRestart):
        yield f"the server was restarted before {rank_restart.got_ns} ns (KV events of dp rank {rank_restart.rank})"
    for line in recording.of(METRICS_LINES, Counted):
        if line.reset:
            yield f"the server was restarted between {line.from_ns} and {line.at_ns} ns (its counters went down)"
    unanswered = recording.of(METRICS_LINES, Unanswered)
    if unanswered:
        yield f"/metrics did not answer {len(unanswered)} times from {unanswered[0].at_ns} to {unanswered[-1].at_ns} ns"


# --- side by side ---------------------------------------------------------------------------------------


def _checks(
    counted: Totals, ledgers: tuple[RankLedger, ...], doubts: tuple[str, ...], facts: Mapping[str, object]
) -> Iterator[CrossCheck]:
    if (check := host_check(counted, facts)) is not None:
        yield check
    divide = 1 if facts.get("counters_carry_rank") else _ranks(facts)
    if not ledgers:
        return
    for name, counter, tier, kind in (
        ("tokens evicted from L1", counting.EVICTED, "L1", KvKind.REMOVED),
        ("tokens copied to L2", counting.BACKED_UP, "L2", KvKind.STORED),
    ):
        amount = counted.get(counter)
        if amount is None:
            continue
        moved = [one.left if kind is KvKind.REMOVED else one.came for one in ledgers]
        least = sum(tokens(tier, counted.from_ns + _EDGE_NS, counted.to_ns - _EDGE_NS) for tokens in moved)
        most = sum(tokens(tier, counted.from_ns - _EDGE_NS, counted.to_ns + _EDGE_NS) for tokens in moved)
        yield _against_events(name, amount, (least, most), divide, doubts, tier)


def host_check(counted: Totals, facts: Mapping[str, object]) -> CrossCheck | None:
    """The server's cached tokens of L2 against its load-backs; None where it has counted neither.

    ``facts``: what the server says that it is, for counters that are summed over its ranks.
    """
    host, loaded = counted.get(counting.CACHED_HOST), counted.get(counting.LOADED)
    if host is None and loaded is None:
        return None
    divide = 1 if facts.get("counters_carry_rank") else _ranks(facts)
    return _host_against_loads(host, loaded, divide, bool(counted.resets))


def _host_against_loads(host: float | None, loaded: float | None, divide: int, reset: bool) -> CrossCheck:
    witness = "metrics: cached tokens of L2 against tokens loaded back"
    ours, theirs = _tokens(host, "cached"), _tokens(loaded, "loaded back")
    if reset:
        return CrossCheck(witness, None, ours, theirs, "the counters were reset in between")
    if host is None:
        return CrossCheck(witness, None, ours, theirs, "this server counts cached tokens without their tier")
    amount, explanation = _divided(loaded or 0.0, divide, (host, host))
    if host == amount:
        return CrossCheck(witness, True, ours, theirs, explanation)
    if host > amount:
        why = (
            "the server credits L2 with tokens whose load-back was refused (SGLang 0.5.9 to 0.5.19 report what the "
            "match promised)"
        )
    else:
        why = (
            "load-backs for requests that had not finished when the counters were read, that were aborted, or that "
            "were retracted and loaded again"
        )
    return CrossCheck(witness, False, ours, theirs, f"known causes: {why}")


def _against_events(
    name: str, amount: float, events: tuple[int, int], divide: int, doubts: tuple[str, ...], tier: str
) -> CrossCheck:
    witness = f"metrics against KV events: {name}"
    least, most = events
    told = f"{least}" if least == most else f"{least} to {most}"
    ours, theirs = _tokens(amount, "by the counters"), f"{told} tokens by the KV events"
    if doubts:
        return CrossCheck(witness, None, ours, theirs, f"the KV events are incomplete: {doubts[0]}")
    value, explanation = _divided(amount, divide, events)
    if least <= value <= most:
        return CrossCheck(witness, True, ours, theirs, explanation)
    if tier == "L1":
        cause = "slots freed by an eviction that held a copy of what the tree kept"
    else:
        cause = "a copy counts when it is queued here and when it is acknowledged there"
    return CrossCheck(witness, False, ours, theirs, f"known causes: {cause}")


def _divided(amount: float, divide: int, expected: tuple[float, float]) -> tuple[float, str]:
    """A counter that sums ranks without saying so: divided, and the explanation says by what."""
    least, most = expected
    if divide > 1 and amount and amount % divide == 0 and not least <= amount <= most:
        return amount / divide, f"the counter is summed over {divide} ranks and carries no rank label: divided by them"
    return amount, ""


def _tokens(amount: float | None, what: str) -> str:
    return "not counted" if amount is None else f"{amount:.0f} tokens {what}"


# --- facts ----------------------------------------------------------------------------------------------


def _server_facts(recording: Recording) -> dict[str, object]:
    """What the server said that it is; counters that carry a rank may appear later than that."""
    servers = recording.of(SERVER, Server)
    carry = any(server.facts.get("counters_carry_rank") for server in servers)
    return {**servers[0].facts, "counters_carry_rank": carry} if servers else {}


def _ranks(facts: Mapping[str, object]) -> int:
    """Ranks that work on the same tokens."""
    sizes = (facts.get("tp_size"), facts.get("pp_size"))
    product = 1
    for size in sizes:
        product *= size if isinstance(size, int) and size > 0 else 1
    return product


def _kv_facts(counted: Totals, facts: Mapping[str, object]) -> KvFacts:
    tokens, version = facts.get("max_total_num_tokens"), facts.get("version")
    return KvFacts(
        served=bool(counted.get(counting.PROMPT_TOKENS)),
        device_tokens=tokens if isinstance(tokens, int) else None,
        evicted=counted.get(counting.EVICTED),
        backed_up=counted.get(counting.BACKED_UP),
        version=version if isinstance(version, str) else None,
    )
