"""Which journals are of one server, and which of its ranks serve the same requests. Pure functions.

The processes of one start of a server share a random id. Journals from before there was one are of one start only as
far as all that they say of it is the same, and they began close together. Where that leaves a doubt, nothing is
confirmed that takes more than one rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from kvwitness.tracer.ledger.described import Process
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.verdicts.places import Place, named, place_of, places_of, replica_of, sizes_of, width_of

TOGETHER_NS: Final = 120 * 10**9
"""The ranks of a server begin to record no further apart than this, and so does what they serve together."""


class Server(msgspec.Struct, frozen=True):
    """The journals of one start of one server."""

    ranks: tuple[InstanceFacts, ...]
    doubt: str = ""
    """Why it is not known which of them work together, although there are others of this start."""

    @property
    def expected(self) -> frozenset[Place]:
        """The places that it consists of; none where it cannot be told."""
        found = [places_of(rank.facts.ranks) for rank in self.ranks]
        return frozenset[Place]().union(*found) if all(found) else frozenset()

    @property
    def seen(self) -> frozenset[Place]:
        """Those of them that recorded."""
        return frozenset(filter(None, (place_of(rank.facts.ranks) for rank in self.ranks)))


class Group(msgspec.Struct, frozen=True):
    """The journals of the ranks that serve the same requests together."""

    ranks: tuple[InstanceFacts, ...]
    places: frozenset[Place]
    """Where there has to be a rank each; none where it cannot be told which."""
    recorded: frozenset[Place]
    """Of which of them there is a journal, also where it is not known which of several."""
    server: frozenset[Place]
    """The places of the whole server: by what they differ is how they are named."""
    doubt: str = ""
    """Why it stands alone although others may belong to it."""


def distinct(instances: Iterable[InstanceFacts]) -> tuple[InstanceFacts, ...]:
    """The instances; a journal that is there twice counts once."""
    known: dict[str, list[InstanceFacts]] = defaultdict(list)
    found: list[InstanceFacts] = []
    for instance in instances:
        if instance not in known[instance.instance]:
            known[instance.instance].append(instance)
            found.append(instance)
    return tuple(found)


def servers(instances: Sequence[InstanceFacts]) -> tuple[Server, ...]:
    """The journals by the start of a server that they are of."""
    started: dict[tuple[object, ...], list[InstanceFacts]] = defaultdict(list)
    for instance in instances:
        started[_start(instance)].append(instance)
    return tuple(server for ranks in started.values() for close in _close(ranks) for server in _servers(close))


def groups(instances: Sequence[InstanceFacts]) -> tuple[Group, ...]:
    """The journals by the requests that their ranks serve."""
    return tuple(group for server in servers(instances) for group in _groups(server))


def servers_by_journal(instances: Sequence[InstanceFacts]) -> dict[str, Server]:
    """The server of each journal, by the journal's name."""
    return {rank.instance: server for server in servers(instances) for rank in server.ranks}


def _start(instance: InstanceFacts) -> tuple[object, ...]:
    """The id of the start, or, where there is none, everything that the processes of one start say alike."""
    process = instance.facts.process or Process()
    if process.start is not None:
        return (process.start,)
    return (None, process.host, process.key, *_described(instance))


def _described(instance: InstanceFacts) -> tuple[object, ...]:
    """What all ranks of one server say alike."""
    process, said = instance.facts.process or Process(), instance.facts.instance
    shown = instance.facts.shown.get("process")
    arguments = shown.get("arguments") if isinstance(shown, dict) else None
    return (
        process.sglang,
        msgspec.json.encode(arguments, order="deterministic"),
        sizes_of(instance.facts.ranks),
        instance.facts.ranks.attn_tp_size,
        # Not what is a rank's own: its place, the layers of its stage, the tokens that its memory had room for.
        msgspec.structs.replace(
            said, ranks=None, layers=None, bytes_per_token=None, device_tokens=None, host_tokens=None
        ),
    )


def _has_id(instance: InstanceFacts) -> bool:
    return instance.facts.process is not None and instance.facts.process.start is not None


def _close(ranks: Sequence[InstanceFacts]) -> Iterator[list[InstanceFacts]]:
    """Those without an id, apart where there is a pause between the beginnings of their journals."""
    if _has_id(ranks[0]):
        yield list(ranks)
        return
    ordered = sorted(ranks, key=lambda rank: rank.wall_ns)
    begin = 0
    for i in range(1, len(ordered) + 1):
        if i == len(ordered) or ordered[i].wall_ns - ordered[i - 1].wall_ns > TOGETHER_NS:
            yield ordered[begin:i]
            begin = i


def _servers(ranks: list[InstanceFacts]) -> Iterator[Server]:
    if all(places_of(rank.facts.ranks) == {(0, 0, 0)} for rank in ranks):
        # Each is a whole server.
        yield from (Server((rank,)) for rank in ranks)
    else:
        yield Server(tuple(ranks), _doubt(ranks))


def _doubt(ranks: Sequence[InstanceFacts]) -> str:
    if len({_described(rank) for rank in ranks}) > 1:
        return "they do not describe one server"
    places = [place_of(rank.facts.ranks) for rank in ranks]
    if None in places:
        return "one of them does not say which rank it is"
    if len({(sizes_of(rank.facts.ranks), rank.facts.ranks.attn_tp_size) for rank in ranks}) > 1:
        return "they do not say the same of how many they are"
    twice = next((place for place in places if place is not None and places.count(place) > 1), None)
    if twice is not None:
        return f"there are several journals of {named([twice], places_of(ranks[0].facts.ranks))}"
    walls = [rank.wall_ns for rank in ranks]
    if not _has_id(ranks[0]) and max(walls) - min(walls) > TOGETHER_NS:
        return "their journals begin too far apart to be of one start"
    return ""


def _groups(server: Server) -> Iterator[Group]:
    replicas: dict[frozenset[Place], list[InstanceFacts]] = defaultdict(list)
    for rank in server.ranks:
        replicas[replica_of(rank.facts.ranks)].append(rank)
    for places, ranks in replicas.items():
        alone = all(width_of(rank.facts.ranks) == 1 for rank in ranks)
        doubt = "" if alone else server.doubt or _unlike(ranks)
        # What is not known to work together stands alone.
        together = [[rank] for rank in ranks] if alone or doubt else [ranks]
        seen = frozenset(filter(None, (place_of(rank.facts.ranks) for rank in ranks)))
        yield from (Group(tuple(some), places, seen, server.expected, doubt) for some in together)


def _unlike(ranks: Sequence[InstanceFacts]) -> str:
    """Why ranks that serve the same requests cannot be compared."""
    if len({(rank.facts.process or Process()).key for rank in ranks}) > 1:
        return "their prompts are digested with different keys and cannot be compared"
    room: dict[int, set[tuple[int | None, int | None]]] = defaultdict(set)
    for rank in ranks:
        place, said = place_of(rank.facts.ranks), rank.facts.instance
        if place is not None and not _has_id(rank):
            room[place[1]].add((said.device_tokens, said.host_tokens))
    return "their pools are not of the same size" if any(len(sizes) > 1 for sizes in room.values()) else ""
