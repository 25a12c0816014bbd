"""Which requests on the ranks of a group are the same request. Pure functions over what the ledgers know.

All ranks of a group process the same requests in the same order. An id is the client's, and can be used again: a
request is the same on two ranks where its prompt is, and its place among the others. Ids that every rank saw once,
in one order, divide the records into stretches; within each, what was sent under an id several times is the same in
turn if both ranks have as many of it. Where the order leaves a choice, none is made.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Final, NamedTuple

import msgspec

from kvwitness.tracer.ledger.facts import InstanceFacts, RequestFacts
from kvwitness.tracer.verdicts.groups import TOGETHER_NS, Group, groups

OTHER_PROMPT: Final = "the ranks recorded different prompts under its id"
OTHER_ORDER: Final = "the ranks did not record it in the same order, or not at the same time"
NOT_CLEAR: Final = "its id was used several times, and which of them is the same on all ranks is not clear"
OTHER_ATTEMPT: Final = "not all ranks recorded the same attempt of it"


class Use(msgspec.Struct, frozen=True):
    """One request on one rank: all its attempts."""

    instance: InstanceFacts
    attempts: tuple[RequestFacts, ...]

    @property
    def rid(self) -> str:
        return self.attempts[0].rid

    @property
    def last(self) -> RequestFacts:
        """The attempt that counts."""
        return self.attempts[-1]

    @property
    def judged(self) -> bool:
        """Whether everything about it is remembered."""
        return self.last.queued.seq not in self.instance.context

    @property
    def wall_ns(self) -> int:
        return self.instance.wall_time_ns(self.attempts[0].queued.t_ns)


class Served(msgspec.Struct, frozen=True):
    """One request on the ranks that recorded it."""

    uses: tuple[Use, ...]
    group: Group
    wrong: str = ""
    """Why it is not known to be the same request on all of them."""


class Prompt(NamedTuple):
    """A prompt as far as it can be compared; None: no digest of it was recorded."""

    tokens: int
    cells: bytes | None
    whole: bytes | None

    def may_be(self, other: Prompt) -> bool:
        """Nothing shows that they are two."""
        return self.tokens == other.tokens and all(
            None in pair or pair[0] == pair[1] for pair in zip(self[1:], other[1:], strict=True)
        )


def prompt_of(instance: InstanceFacts, request: RequestFacts) -> Prompt:
    """What was recorded of a request's prompt."""
    chain, tokens = request.chain, request.prompt_tokens
    if chain is None or not chain.grid:
        return Prompt(tokens, None, None)
    count = min(tokens // chain.grid, len(chain.cells))
    # Each covers all before it.
    cells = chain.cells[count - 1] if count and count == tokens // chain.grid else None
    return Prompt(tokens, cells, chain.points.get(tokens))


def served(instances: Sequence[InstanceFacts]) -> tuple[Served, ...]:
    """All requests, in the order in which the first of their ranks tells of them."""
    at = {
        (id(instance), use.attempts[0].queued.seq): (i, number)
        for i, instance in enumerate(instances)
        for number, use in enumerate(uses_of(instance))
    }

    def order(use: Use) -> tuple[int, int]:
        return at[id(use.instance), use.attempts[0].queued.seq]

    found = [
        msgspec.structs.replace(one, uses=tuple(sorted(one.uses, key=order)))
        for group in groups(instances)
        for one in _served(group)
    ]
    return tuple(sorted(found, key=lambda one: order(one.uses[0])))


def uses_of(instance: InstanceFacts) -> list[Use]:
    """The requests of one rank with their attempts, in the order of their first queueing."""
    found: list[list[RequestFacts]] = []
    current: dict[str, list[RequestFacts]] = {}
    for request in instance.requests:
        if request.attempt == 1 or request.rid not in current:
            current[request.rid] = []
            found.append(current[request.rid])
        current[request.rid].append(request)
    return [Use(instance, tuple(attempts)) for attempts in found]


def _served(group: Group) -> Iterator[Served]:
    ranks = [uses_of(rank) for rank in group.ranks]
    if len(ranks) == 1:
        yield from (Served((use,), group) for use in ranks[0])
        return
    # What is only remembered because others rest on it is not the same on all ranks.
    yield from (Served(uses, group) for uses in _in_turn([[u for u in uses if not u.judged] for uses in ranks]))
    yield from _Alignment(group, [[use for use in uses if use.judged] for uses in ranks]).served()


def _in_turn(ranks: Sequence[Sequence[Use]]) -> Iterator[tuple[Use, ...]]:
    """The uses of each id, one after the other."""
    by_rid: dict[str, list[list[Use]]] = defaultdict(lambda: [[] for _ in ranks])
    for number, uses in enumerate(ranks):
        for use in uses:
            by_rid[use.rid][number].append(use)
    for lists in by_rid.values():
        for together in zip_longest(*lists):
            yield tuple(use for use in together if use is not None)


class _Alignment:
    """The requests of several ranks, brought into line with those of the first."""

    def __init__(self, group: Group, ranks: Sequence[Sequence[Use]]) -> None:
        self._group = group
        self._ranks = ranks
        counts = [Counter(use.rid for use in uses) for uses in ranks]
        self._again = {rid for count in counts for rid, times in count.items() if times > 1}
        """Ids that were used several times, on any rank."""
        self._wrong: dict[str, str] = {}
        """What does not fit, by id; of ids that were used once."""
        self._partners: list[dict[int, int]] = []
        """For each further rank: of a use of the first rank, by its number, the number there."""
        self._not_clear: list[set[int]] = [set() for _ in ranks]

    def served(self) -> Iterator[Served]:
        """Each request with all ranks that recorded it."""
        for number in range(1, len(self._ranks)):
            self._align(number)
        once = [[use for use in uses if use.rid not in self._again] for uses in self._ranks]
        for uses in _in_turn(once):
            wrong = self._wrong.get(uses[0].rid) or _attempts(uses)
            yield Served(uses, self._group, wrong)
        yield from self._used_again()

    def _align(self, number: int) -> None:
        mine, theirs = self._ranks[0], self._ranks[number]
        there = {use.rid: j for j, use in enumerate(theirs) if use.rid not in self._again}
        common = [(i, there[use.rid]) for i, use in enumerate(mine) if use.rid in there]
        alike = []
        for i, j in common:
            if not _same_prompt(mine[i], theirs[j]):
                self._wrong[mine[i].rid] = OTHER_PROMPT
            elif abs(mine[i].wall_ns - theirs[j].wall_ns) > TOGETHER_NS:
                self._wrong[mine[i].rid] = OTHER_ORDER
            else:
                alike.append((i, j))
        anchors = list(_in_order(alike))
        for i, _ in set(alike) - set(anchors):
            self._wrong[mine[i].rid] = OTHER_ORDER
        self._partners.append({})
        if self._again:
            edges = [(-1, -1), *anchors, (len(mine), len(theirs))]
            for (i, j), (to_i, to_j) in pairwise(edges):
                self._stretch(number, range(i + 1, to_i), range(j + 1, to_j), anchored=bool(anchors))

    def _stretch(self, number: int, mine: range, theirs: range, *, anchored: bool) -> None:
        """The ids that were used several times, between two requests that both ranks are known to have in common."""
        ranks = self._ranks[0], self._ranks[number]
        own, others = (
            [i for i in part if uses[i].rid in self._again] for uses, part in zip(ranks, (mine, theirs), strict=True)
        )
        if not own or not others:
            return
        sound = anchored or all(_from_its_start(self._group.ranks[n]) for n in (0, number))
        sound = sound and not any(
            _hole(self._group.ranks[n], self._ranks[n], part) for n, part in ((0, mine), (number, theirs))
        )
        alike = _alike([ranks[0][i] for i in own], [ranks[1][j] for j in others])
        pairs = sorted(
            (own[a], others[b]) for mine_alike, theirs_alike in alike if len(mine_alike) == len(theirs_alike)
            for a, b in zip(mine_alike, theirs_alike, strict=True)
        )  # fmt: skip
        good = {(i, j) for i, j in _in_order(pairs) if sound and _same(ranks[0][i], ranks[1][j])}
        # One that does not fit shows that the others of its id are not in line, either.
        bad = {ranks[0][i].rid for i, j in set(pairs) - good}
        found = {i: j for i, j in good if ranks[0][i].rid not in bad}
        self._partners[-1].update(found)
        there = set(found.values())
        for mine_alike, theirs_alike in alike:
            if theirs_alike:
                self._not_clear[0].update(own[a] for a in mine_alike if own[a] not in found)
            if mine_alike:
                self._not_clear[number].update(others[b] for b in theirs_alike if others[b] not in there)

    def _used_again(self) -> Iterator[Served]:
        left: list[list[Use]] = [[] for _ in self._ranks]
        taken: list[set[int]] = [set() for _ in self._ranks]
        unclear = {id(self._ranks[n][i]) for n, numbers in enumerate(self._not_clear) for i in numbers}
        for i, use in enumerate(self._ranks[0]):
            if use.rid not in self._again:
                continue
            partners = [(n, known[i]) for n, known in enumerate(self._partners, 1) if i in known]
            if not partners:
                left[0].append(use)
                continue
            for n, j in partners:
                taken[n].add(j)
            uses = (use, *(self._ranks[n][j] for n, j in partners))
            yield Served(uses, self._group, NOT_CLEAR if id(use) in unclear else _attempts(uses))
        for n, uses_there in enumerate(self._ranks[1:], 1):
            left[n] = [use for j, use in enumerate(uses_there) if use.rid in self._again and j not in taken[n]]
        for uses in _in_turn(left):
            doubtful = len(uses) > 1 or any(id(use) in unclear for use in uses)
            yield Served(uses, self._group, NOT_CLEAR if doubtful else "")


def _same_prompt(a: Use, b: Use) -> bool:
    return prompt_of(a.instance, a.attempts[0]).may_be(prompt_of(b.instance, b.attempts[0]))


def _same(a: Use, b: Use) -> bool:
    return _same_prompt(a, b) and abs(a.wall_ns - b.wall_ns) <= TOGETHER_NS


def _alike(mine: Sequence[Use], theirs: Sequence[Use]) -> list[tuple[list[int], list[int]]]:
    """The uses of two ranks, by their numbers, that can be of one request by id and prompt."""
    prompts = [[prompt_of(use.instance, use.attempts[0]) for use in uses] for uses in (mine, theirs)]
    by_length: dict[tuple[str, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, uses in enumerate((mine, theirs)):
        for number, use in enumerate(uses):
            by_length[use.rid, prompts[side][number].tokens][side].append(number)
    found: list[tuple[list[int], list[int]]] = []
    for sides in by_length.values():
        by_prompt: dict[Prompt, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for side, numbers in enumerate(sides):
            for number in numbers:
                by_prompt[prompts[side][number]][side].append(number)
        # Of one whose digests are not known it may be any.
        known = all(prompt.cells or prompt.whole for prompt in by_prompt)
        found += by_prompt.values() if known else [sides]
    return found


def _attempts(uses: Iterable[Use]) -> str:
    """The attempts of a request are queued again with what was generated before."""
    return OTHER_ATTEMPT if len({(use.last.attempt, use.last.prompt_tokens) for use in uses}) > 1 else ""


def _in_order(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Of pairs in the order of the first, those that no other one crosses."""
    ends = list(accumulate((j for _, j in pairs), max))
    begins = list(accumulate((j for _, j in reversed(pairs)), min))[::-1]
    for at, (i, j) in enumerate(pairs):
        if (not at or ends[at - 1] < j) and (at + 1 == len(pairs) or j < begins[at + 1]):
            yield i, j


def _from_its_start(instance: InstanceFacts) -> bool:
    """Whether its first request is the first that the server was sent."""
    return instance.facts.attach is None and not instance.remembers_from


def _hole(instance: InstanceFacts, uses: Sequence[Use], part: range) -> bool:
    """Whether something of a stretch was not recorded: a request can be missing in it."""
    first = uses[part.start - 1].attempts[0].queued.seq if part.start > 0 else 0
    last = uses[part.stop].attempts[0].queued.seq if part.stop < len(uses) else instance.last_seq
    return any(begin <= last and end >= first for begin, end, _ in instance.gaps)
