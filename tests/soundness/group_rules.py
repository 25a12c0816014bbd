"""Which journals of a recording are the ranks of one group, and which stay of a request is the same on each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvwitness.patches.schema import events as ev
from soundness.relations import Relations
from soundness.rules import Rules, Why
from soundness.things import Stay

TOGETHER_NS = 120 * 10**9
"""Ranks of one start have opened their journals within this time."""
SIZES = (
    "page_size",
    "bytes_per_token",
    "layers",
    "tree_class",
    "tree_core",
    "write_policy",
    "host_memory_mode",
    "device_tokens",
)
BY_STAGE = ("bytes_per_token", "layers", "device_tokens")
Place = tuple[int, int, int]


@dataclass(eq=False)
class Member:
    """One journal, as a rank of something."""

    name: str
    wall_ns: int
    r: Relations

    def rank(self, name: str, missing: int = 0) -> int:
        value = (self.r.facts.get("ranks") or {}).get(name)
        return value if isinstance(value, int) else missing

    @property
    def place(self) -> Place:
        return (
            self.rank("dp_rank"),
            self.rank("pp_rank"),
            self.rank("attn_tp_rank", self.rank("tp_rank")),
        )

    @property
    def size(self) -> int:
        """How many ranks its group has."""
        return max(self.rank("attn_tp_size", self.rank("tp_size", 1)), 1) * max(self.rank("pp_size", 1), 1)

    @property
    def start(self) -> Any:
        """The id of the server's start, where it is told."""
        return self.r.process.get("start")

    @property
    def shown(self) -> tuple[object, ...]:
        """What the ranks of one start have in common."""
        sizes = tuple(self.rank(name, 1) for name in ("tp_size", "pp_size", "dp_size", "attn_tp_size"))
        # Stages of a pipeline have layers of their own.
        names = SIZES if sizes[1] == 1 else [name for name in SIZES if name not in BY_STAGE]
        facts = tuple(str(self.r.facts.get(name)) for name in names)
        return self.r.process.get("sglang"), str(self.r.process.get("arguments")), sizes, facts

    @cached_property
    def order(self) -> list[tuple[object, Stay]]:
        """The first stays of all requests in the order of queueing: id, prompt and the stay."""
        stays = sorted((use.first for use in self.r.uses if use.stays), key=lambda stay: stay.queued.seq)
        return [(prompt_of(stay), stay) for stay in stays]


def prompt_of(stay: Stay) -> tuple[object, ...]:
    """What says that two requests are one: id, length and digests of the prompt (as far as they are the prompt's)."""
    use, tokens = stay.use, stay.use.first.queued.prompt_tokens
    cells = tuple(use.digests[: tokens // use.grid]) if use.grid else ()
    end = next((e.digests for e in use.told if isinstance(e, ev.PrefixPoint) and e.position == tokens), ())
    return use.rid, tokens, cells, end


@dataclass(eq=False)
class GroupClaim:
    """A claim about a request, as one of the whole group that served it."""

    members: list[Member]
    at: Member
    stay: Stay
    found: dict[str, Stay | None] = field(default_factory=dict)
    """By member: its stay for this request."""


class Ranks:
    """The groups of a recording."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self._groups: dict[int, list[int]] = {}

    def group(self, at: int) -> list[int]:
        """The journals of the same start and replica, this one among them."""
        if at not in self._groups:
            mine = self.members[at]
            self._groups[at] = [
                n for n, m in enumerate(self.members) if n == at or (mine.size > 1 and self._one_start(mine, m))
            ]
        return self._groups[at]

    def _one_start(self, a: Member, b: Member) -> bool:
        if a.place[0] != b.place[0]:
            return False
        if a.start is not None or b.start is not None:
            return bool(a.start == b.start)
        return a.shown == b.shown and abs(a.wall_ns - b.wall_ns) <= TOGETHER_NS

    def claim(self, at: int, stay: Stay) -> GroupClaim:
        members = [self.members[n] for n in self.group(at)]
        claim = GroupClaim(members, self.members[at], stay)
        claim.found = {str(n): self._same(at, n, stay) for n in self.group(at)}
        return claim

    def counterparts(self, at: int, stay: Stay) -> list[tuple[int, Stay]]:
        """The journals of the group, and the stay of the request on each."""
        found = [(n, self._same(at, n, stay)) for n in self.group(at)]
        return [(n, other) for n, other in found if other is not None]

    def _same(self, at: int, other: int, stay: Stay) -> Stay | None:
        """The stay on another rank: the same request by id and prompt, at the same place in the order."""
        if at == other:
            return stay
        here, there = self.members[at].order, self.members[other].order
        key = prompt_of(stay)
        if not (candidates := [first for prompt, first in there if prompt == key]):
            return None
        mine = [first for prompt, first in here if prompt == key]
        count, theirs = Counter(p for p, _ in here), Counter(p for p, _ in there)
        if len(mine) == len(candidates):
            twin = candidates[mine.index(stay.use.first)]
        else:
            # Some are missing: what both ranks have equally often says which.
            anchors = {p for p in count if count[p] == theirs[p]}
            place = _before(here, stay.use.first, anchors)
            fits = [c for c in candidates if _before(there, c, anchors) == place]
            alike = [m for m in mine if _before(here, m, anchors) == place]
            if len(fits) != 1 or len(alike) != 1:
                return None
            (twin,) = fits
        number = stay.use.stays.index(stay)
        return twin.use.stays[number] if number < len(twin.use.stays) else None


def _before(order: list[tuple[object, Stay]], stay: Stay, anchors: set[object]) -> int:
    """How many of the anchors were queued before."""
    at = next(i for i, (_, first) in enumerate(order) if first is stay)
    return sum(prompt in anchors for prompt, _ in order[:at])


GROUP: Rules[GroupClaim] = Rules("a group of ranks that served a request together")


@GROUP
def every_rank_was_recorded_once(c: GroupClaim) -> Iterator[Why]:
    """A group has as many journals as it has ranks, of one start, each at a place of its own."""
    places = Counter(member.place for member in c.members)
    if len(c.members) < c.at.size:
        yield (f"{c.at.size - len(c.members)} of {c.at.size} ranks of its start were not recorded",)
    elif len(c.members) > c.at.size or max(places.values()) > 1:
        yield ("more journals than ranks, or two of one rank",)


@GROUP
def the_ranks_have_one_key_and_one_description(c: GroupClaim) -> Iterator[Why]:
    """Ranks of one start have the same digest key, release, model, arguments and sizes."""
    if len({str(member.r.process.get("key")) for member in c.members}) > 1:
        yield ("the ranks digest with different keys",)
    if len({member.shown for member in c.members}) > 1:
        yield ("the ranks describe different servers",)


@GROUP
def every_rank_served_the_request(c: GroupClaim) -> Iterator[Why]:
    """Every rank has the request: the same id, the same prompt, the same place in the order."""
    if any(stay is None for stay in c.found.values()):
        yield "the request is not on every rank at the same place", c.stay.queued


@GROUP
def the_ranks_agree_on_the_order(c: GroupClaim) -> Iterator[Why]:
    """What several ranks have, they have before this request on each of them, or behind it on each of them."""
    own = c.at.order
    for member in c.members:
        twin = next(
            (stay for stay in c.found.values() if stay is not None and any(s is stay for _, s in member.order)), None
        )
        if member is c.at or twin is None:
            continue
        counts, theirs = Counter(prompt for prompt, _ in own), Counter(prompt for prompt, _ in member.order)
        equal = {prompt for prompt in counts if counts[prompt] == theirs[prompt]}
        before = [p for p, s in own if p in equal and s.queued.seq < c.stay.use.first.queued.seq]
        there = [p for p, s in member.order if p in equal and s.queued.seq < twin.use.first.queued.seq]
        if Counter(before) != Counter(there):
            yield "the ranks have the requests in another order", c.stay.queued
