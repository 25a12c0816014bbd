"""A small HiCache that writes a journal: the truth about every request is known.

Tokens are numbers, nodes are Python objects, the cache is a radix tree with an L1 of few pages and an L2 of a
few more, write-through. Requests come one at a time or in pairs; prompts share prefixes by chance, some are
chunked, some retracted, some are matched twice before they are admitted, ids are used twice, the cache is flushed.
On demand there is a storage (L3) that keeps what was backed up; prefetches from it come to their end or are cut short.

:class:`Habits` are what a server does on demand as well: it decodes and takes what it generated into its
tree, processes results late (the overlap schedule), has requests aborted, changes its weights.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

from kvwitness.patches.schema import events as ev

GRID = 16
BYTES = 1024
LINKS = {
    "tree.match_prefix": ["resident_l1", "resident_l2", "left_l1"],
    "tree.insert": ["born"],
    "tree.evict": ["left_l1"],
    "tree.reset_full": ["epoch"],
    "policy.add_one_req": ["used"],
    "controller.write": ["backed_up"],
    "controller.load": ["read"],
    "host_pool.free": ["resident_l2"],
    "storage.handle_prefetch_result": ["prefetched"],
    "scheduler.update_weights": ["weights"],
}
HOST, KEY = "5f0c6b1e2d3a4958", "c4d1a7e0b2f39586"
"""Digests, as the process facts give them."""
CONTENT = {"controller.start_writing": ["content"]}
LAYERS = 2


@dataclass(eq=False)
class Node:
    """A run of tokens below its parent."""

    number: int
    start: int
    tokens: tuple[int, ...]
    parent: Node | None
    children: list[Node] = field(default_factory=list)
    device: bool = True
    slots: list[int] | None = None
    """Host slots, one per token."""
    used: int = 0
    fetched: str = ""
    """The request for which storage filled its host slots."""
    made: list[int] = field(default_factory=list)
    """By which weights the KV of each token in L1 was computed: the number of changes before it ..."""
    made_host: list[int] = field(default_factory=list)
    """... and of each token in L2."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass
class Truth:
    """What really served one admission: tokens from L1, then from below, then computed."""

    rid: str
    l1: int
    l2: int
    """With those that storage brought for it."""
    prompt: int
    l3: int = 0
    """Of these."""
    shared: int = 0
    """Of ``l1``: what another request of the batch was loading back at that moment."""
    others: int = 0
    """Tokens that were reused and had been computed by other weights."""
    aborted: str = ""
    """At which stage, if it was."""


@dataclass(frozen=True)
class Habits:
    """What a server does besides; nothing of it unless asked for."""

    overlap: bool = False
    """A result is processed after the next pass was launched; a chunk is inserted before that, without a backup."""
    decodes: bool = False
    """More than one token is generated, requests end in later rounds, and what they generated gets into the tree."""
    aborts: bool = False
    weights: bool = False


NONE = Habits()
LIVELY = Habits(overlap=True, decodes=True, aborts=True, weights=True)
PLAIN = Habits(decodes=True, aborts=True, weights=True)
"""Without the overlap schedule."""


@dataclass(eq=False)
class Running:
    """A request after its prefill."""

    rid: str
    tokens: tuple[int, ...]
    generated: tuple[int, ...]
    truth: Truth
    aborted: str


@dataclass(eq=False)
class Fetch:
    """A prefetch from storage that was asked for."""

    tokens: tuple[int, ...]
    start: int
    asked: int


class Server:
    """One scheduler."""

    def __init__(
        self,
        seed: int,
        page: int | None = None,
        l1: int | None = None,
        l2: int | None = None,
        quiet: bool = False,
        digested: float = 0.0,
        stored: bool = False,
        habits: Habits = NONE,
        ranks: tuple[int, int] = (0, 1),
        start: str = "",
    ) -> None:
        """``quiet``: nothing happens by chance. ``digested``: the share of pages whose content is digested.
        ``stored``: there is a storage (L3). ``ranks``: its place, and how many there are. ``start``: which start of
        which server it belongs to (by default one of its own)."""
        self.habits = habits
        self.ranks = ranks
        self.start = start or f"{seed:032x}"
        self.fates = random.Random(f"fates {seed}")
        """What the habits draw from: without them nothing else is drawn."""
        self.running: list[Running] = []
        self.in_flight: set[Node] = set()
        """What is being loaded back for a request of this batch."""
        self.weights = 0
        """Changes of the weights so far; those of adapters do not count."""
        self.updates = 0
        self.rng = random.Random(seed)
        self.quiet = quiet
        self.digested = digested
        self.stored = stored
        self.store: dict[tuple[int, ...], list[int]] = {}
        """The prefixes that end with a page that storage holds, and by which weights that page was computed."""
        self.fetches: dict[str, Fetch] = {}
        self.backend = random.Random(f"storage {seed}")
        self.content = random.Random(f"content {seed}")
        self.host: dict[int, tuple[int, ...]] = {}
        """First slot of a host page -> the prefix that ends with what the page was written for."""
        self.late: list[tuple[int, int, tuple[bytes, ...]]] = []
        """Digests after a load that were not taken yet."""
        self.page = page or self.rng.choice((16, 16, 1, 4))
        self.l1 = l1 or self.rng.choice((96, 128, 192))
        self.host_total = l2 or self.rng.choice((96, 160, 400))
        self.events: list[ev.Event] = []
        self.truths: list[Truth] = []
        self.root = Node(1, 0, (), None)
        self.free = list(range(self.host_total))
        self.waiting: list[tuple[int, int]] = []
        """Backups queued: node, tokens."""
        self.writing: list[int] = []
        """First slots of the host pages that they write."""
        self.loading: list[tuple[int, int]] = []
        self.reading: list[int] = []
        self.locks: dict[str, set[Node]] = {}
        """What each request holds in L1."""
        self._cells: dict[str, int] = {}
        """Cells of each request that were digested."""
        self._numbers: dict[str, int] = {}
        self._counts: dict[str, int] = {}
        self._time = 1000 + 7 * ranks[0]
        self._node = 1
        self._facts()

    # --- writing -------------------------------------------------------------------------------------

    def emit(self, kind: type[ev.Event], *values: Any) -> None:
        self._time += self.rng.randrange(1, 50)
        self.events.append(kind(len(self.events) + 1, self._time, *values))

    def note(self, kind: type[ev.Event], *values: Any) -> None:
        """An event at once after the one before."""
        self._time += 1
        self.events.append(kind(len(self.events) + 1, self._time, *values))

    @property
    def locked(self) -> set[Node]:
        """What may not leave L1."""
        return set().union(*self.locks.values())

    def chance(self, probability: float) -> bool:
        return not self.quiet and self.rng.random() < probability

    def count(self, what: str) -> int:
        self._counts[what] = self._counts.get(what, 0) + 1
        return self._counts[what]

    def _facts(self, attached: bool = False) -> None:
        links = LINKS | CONTENT if self.digested else LINKS
        hooks = [{"name": n, "target": n, "status": "installed", "links": k, "detail": ""} for n, k in links.items()]
        if not attached:
            pending = [hook | {"status": "pending"} for hook in hooks]
            self.note(ev.Facts, ev.FactKind.COVERAGE, json.dumps({"hooks": pending}))
        self.emit(ev.Facts, ev.FactKind.COVERAGE, json.dumps({"hooks": hooks}))
        if not attached:
            self.emit(ev.Reset, 1)
        rank, size = self.ranks
        facts = {
            "ranks": {
                "tp_rank": rank,
                "tp_size": size,
                "pp_rank": 0,
                "pp_size": 1,
                "attn_tp_rank": rank,
                "attn_tp_size": size,
            },
            "family": "unified",
            "page_size": self.page,
            "bytes_per_token": BYTES,
            "host_memory_mode": "cache",
            "pools": [{"pool": 0, "hooked": True}],
        }
        if self.stored:
            facts |= {"storage": True}
        if self.digested:
            facts |= {"layers": LAYERS, "digest_every": 1}
        if attached:
            self._process()
        self.emit(ev.Facts, ev.FactKind.INSTANCE, json.dumps(facts))
        if not attached:
            self._process()

    def _process(self) -> None:
        arguments = {"model_path": "models/tiny", "page_size": self.page, "tp_size": self.ranks[1]}
        process = {"role": "scheduler", "sglang": "0.5.23", "arguments": arguments}
        process |= {"start": self.start, "host": HOST, "key": KEY}
        self.note(ev.Facts, ev.FactKind.PROCESS, json.dumps(process))

    def attach(self) -> None:
        """The journal begins here: what is there is written down as it is found, a parent before its children."""
        self.finish()
        self.events.clear()
        self.truths.clear()
        self._numbers.clear()
        self._facts(attached=True)
        self.emit(ev.SnapshotBegin, len(self.free))
        todo, count, tokens = [(child, ()) for child in self.root.children], 0, [0, 0]
        while todo:
            node, before = todo.pop(self.rng.randrange(len(todo)))
            prefix = (*before, *node.tokens)
            cells = range(node.start // GRID, node.end // GRID)
            digests = tuple(self.digest(prefix[: (i + 1) * GRID]) for i in cells)
            if digests:
                self.emit(ev.ResidentDigests, node.number, GRID, node.start // GRID, digests)
            parent = node.parent.number if node.parent is not None and node.parent is not self.root else -1
            l1, l2 = int(node.device), int(node.slots is not None)
            slots = self.runs(node.slots) if node.slots is not None else ()
            self.emit(ev.ResidentNode, node.number, parent, node.start, node.end, l1, l2, slots)
            count += 1
            tokens[0] += len(node.tokens) * l1
            tokens[1] += len(node.tokens) * l2
            todo += [(child, prefix) for child in node.children]
        self.emit(ev.SnapshotEnd, count, *tokens, 1)

    def req(self, rid: str) -> int:
        if rid not in self._numbers:
            self._numbers[rid] = self.count("text")
            self.emit(ev.Text, self._numbers[rid], rid)
        return self._numbers[rid]

    def digest(self, tokens: tuple[int, ...]) -> bytes:
        return hashlib.blake2b(repr(tokens).encode(), digest_size=8).digest()

    def digests(self, rid: str, tokens: tuple[int, ...], first: int = 0) -> None:
        cells = tuple(self.digest(tokens[: (i + 1) * GRID]) for i in range(first, len(tokens) // GRID))
        if cells:
            self.emit(ev.PrefixDigests, self.req(rid), GRID, first, cells)
        self._cells[rid] = len(tokens) // GRID

    def points(self, rid: str, tokens: tuple[int, ...], *positions: int) -> None:
        """The digests of what ends between two cells."""
        for position in positions:
            if position % GRID and position <= len(tokens):
                self.note(ev.PrefixPoint, self.req(rid), position, (self.digest(tokens[:position]),))

    def runs(self, slots: list[int]) -> tuple[ev.Run, ...]:
        found: list[ev.Run] = []
        for slot in slots:
            if found and found[-1].start + found[-1].length == slot:
                found[-1] = ev.Run(found[-1].start, found[-1].length + 1)
            else:
                found.append(ev.Run(slot, 1))
        return tuple(found)

    # --- tree ----------------------------------------------------------------------------------------

    def nodes(self) -> list[Node]:
        found, todo = [], list(self.root.children)
        while todo:
            node = todo.pop()
            found.append(node)
            todo += node.children
        return found

    def walk(self, tokens: tuple[int, ...]) -> list[Node]:
        """The path that holds the longest page-aligned prefix; a node is split where the prefix leaves it."""
        path: list[Node] = []
        node, at = self.root, 0
        while True:
            child = next((c for c in node.children if self._shared(c, tokens, at)), None)
            if child is None or not (child.device or child.slots):
                return path
            shared = self._shared(child, tokens, at)
            if shared < len(child.tokens):
                child = self._split(child, shared)
            child.used = self._time
            path.append(child)
            node, at = child, child.end

    def _shared(self, node: Node, tokens: tuple[int, ...], at: int) -> int:
        shared = 0
        for mine, theirs in zip(node.tokens, tokens[at:], strict=False):
            if mine != theirs:
                break
            shared += 1
        return shared - shared % self.page

    def _split(self, node: Node, length: int) -> Node:
        """The prefix gets a new number, the suffix keeps the old one."""
        assert node.parent is not None
        part = Node(self.new_node(), node.start, node.tokens[:length], node.parent, [node], node.device)
        part.fetched = node.fetched
        part.made, node.made = node.made[:length], node.made[length:]
        part.made_host, node.made_host = node.made_host[:length], node.made_host[length:]
        node.parent.children[node.parent.children.index(node)] = part
        if node.slots is not None:
            part.slots, node.slots = node.slots[:length], node.slots[length:]
        for held in (*self.locks.values(), self.in_flight):
            if node in held:
                held.add(part)
        node.parent, node.tokens, node.start = part, node.tokens[length:], part.end
        return part

    def new_node(self) -> int:
        self._node += 1
        return self._node

    def steps(self, path: list[Node]) -> tuple[ev.PathNode, ...]:
        return tuple(ev.PathNode(n.number, n.start, n.end, int(n.device)) for n in path)

    def held(self) -> int:
        return sum(len(n.tokens) for n in self.nodes() if n.device)

    def make_room(self, tokens: int, cause: int, reqs: tuple[int, ...]) -> bool:
        """Evict from L1, leaf by leaf (no child of a victim is in L1), the least recently used first."""
        missing = self.held() + tokens - self.l1
        if missing <= 0:
            return True
        call, freed = self.count("call"), 0
        self.emit(ev.EvictBegin, call, cause, missing, 0, 0, reqs)
        if self.habits.decodes:
            self.note(ev.L1Room, call, max(self.l1 - self.held(), 0))
        while freed < missing:
            leaves = [
                n for n in self.nodes() if n.device and n not in self.locked and not any(c.device for c in n.children)
            ]
            if not leaves:
                break
            victim = min(leaves, key=lambda n: n.used)
            backed = victim.slots is not None
            how = ev.Eviction.DEMOTED if backed else ev.Eviction.DROPPED
            size = len(victim.tokens)
            victim.device = False
            if not backed:
                self._drop(victim)
            self.emit(ev.EvictedL1, call, victim.number, victim.start, victim.end, how, size, 0 if backed else size)
            freed += size
        self.emit(ev.EvictEnd, call, freed)
        return freed >= missing

    def _drop(self, node: Node) -> None:
        for child in list(node.children):
            self._drop(child)
        if node.slots is not None:
            self._give_back(node)
        assert node.parent is not None
        node.parent.children.remove(node)

    def _give_back(self, node: Node) -> None:
        assert node.slots is not None
        self.free = sorted([*self.free, *node.slots])
        self.emit(ev.HostFree, 0, 0, len(self.free), self.runs(node.slots))
        node.slots = None
        node.fetched = ""

    def backup(self, node: Node, req: int) -> None:
        """Write-through: copy a node that has no host copy yet, if its parent has one."""
        size = len(node.tokens)
        if node.slots is not None or (node.parent is not self.root and node.parent and node.parent.slots is None):
            return
        while len(self.free) < size:
            # L2 leaves that are not in L1 any more.
            leaves = [n for n in self.nodes() if n.slots and not n.device and not n.children and n not in self.locked]
            if not leaves:
                self.emit(ev.BackupRejected, req, node.number, size, len(self.free))
                return
            self._drop(min(leaves, key=lambda n: n.used))
        pages = sorted(self.free)[:size] if self.page == 1 else self._pages(size)
        self.free = [slot for slot in self.free if slot not in set(pages)]
        node.slots, node.made_host = pages, list(node.made)
        self.emit(ev.HostAlloc, 0, req, len(self.free), self.runs(pages))
        self.emit(ev.BackupQueued, req, node.number, node.start, node.end, size, 0, self.runs(pages))
        self.waiting.append((node.number, size))
        self._written(node)

    def _pages(self, size: int) -> list[int]:
        whole = [slot for slot in sorted(self.free) if slot % self.page == 0]
        return [slot + i for slot in whole[: size // self.page] for i in range(self.page)]

    def copy_out(self) -> None:
        """Launch what waits to be backed up, and acknowledge it."""
        if not self.waiting:
            return
        transfer, size = self.count("transfer"), sum(size for _, size in self.waiting)
        nodes = tuple(number for number, _ in self.waiting)
        self.emit(ev.TransferStarted, transfer, ev.Direction.D2H, size, size * BYTES, 0, nodes)
        for number in nodes:
            held = [n for n in self.nodes() if n.number == number] if self.stored else []
            for node in held:
                self.emit(ev.StorageBackupQueued, node.number, len(node.tokens))
            self.emit(ev.BackupAcked, transfer, number, -1)
            for node in held:
                self._store(node)
        self.waiting.clear()
        for slot in self.writing:
            if self.content.random() < self.digested:
                self.emit(ev.BackupDigested, transfer, slot, self._of_page(self.host[slot]))
        self.writing.clear()

    def _prefix(self, node: Node) -> tuple[int, ...]:
        prefix: tuple[int, ...] = ()
        above: Node | None = node
        while above is not None:
            prefix, above = above.tokens + prefix, above.parent
        return prefix

    # --- storage -------------------------------------------------------------------------------------

    def _store(self, node: Node) -> None:
        prefix = self._prefix(node)
        for end in range(node.start + self.page, node.end + 1, self.page):
            # What storage has already it keeps.
            self.store.setdefault(prefix[:end], node.made_host[end - self.page - node.start : end - node.start])
        self.emit(ev.StorageBackedUp, len(node.tokens), len(node.tokens))

    def ask(self, rid: str, tokens: tuple[int, ...]) -> None:
        """A request is queued: what the cache lacks of its prompt is asked for."""
        path = self.match(rid, tokens, ev.MatchPurpose.OTHER)
        if path and path[-1].slots is None:
            return
        start = path[-1].end if path else 0
        asked = len(tokens) - 1 - start
        issued = asked >= self.page
        node = path[-1].number if path else self.root.number
        self.emit(ev.PrefetchAsked, self.req(rid), node, start, asked, int(issued))
        if issued:
            self.fetches[rid] = Fetch(tokens, start, asked)

    def fetch(self, rid: str) -> None:
        """The prefetch of a request comes to its end, or is ended."""
        fetch = self.fetches.pop(rid, None)
        if fetch is None:
            return
        number, end = self.req(rid), fetch.start
        while end + self.page <= fetch.start + fetch.asked and fetch.tokens[: end + self.page] in self.store:
            end += self.page
        found = end - fetch.start
        if self.backend.random() < 0.1:
            self.emit(ev.PrefetchStopped, number, self.req("best_effort"), 0, 0)
            self.emit(ev.PrefetchRevoked, number, self.req("cut short by the prefetch policy best_effort"))
            return
        self.emit(ev.StorageLookedUp, number, found)
        if not found or len(self.free) < found:
            self.emit(ev.PrefetchRevoked, number, self.req("nothing found, or no host memory was free"))
            return
        slots = self._pages(found) if self.page > 1 else sorted(self.free)[:found]
        self.free = [slot for slot in self.free if slot not in set(slots)]
        self.emit(ev.HostAlloc, 0, 0, len(self.free), self.runs(slots))
        read = found
        if self.backend.random() < 0.15:
            read = self.page * self.backend.randrange(found // self.page)
            self.emit(ev.PrefetchStopped, number, self.req("timeout"), found, read)
        self._graft(rid, fetch, slots[:read])
        self._release(slots[read:])

    def _graft(self, rid: str, fetch: Fetch, slots: list[int]) -> None:
        """What was read becomes a host node, but for what L2 has got meanwhile."""
        end = fetch.start + len(slots)
        path = self.walk(fetch.tokens[:end])
        at = path[-1].end if path else 0
        known = max(0, min(at, end) - fetch.start)
        if at < fetch.start or (path and path[-1].slots is None) or any(n.slots is None for n in path):
            self._release(slots)
            self.emit(ev.PrefetchDone, self.req(rid), fetch.start, len(slots), 0, 0, 0, self.runs(slots))
            return
        self._release(slots[:known])
        if known < len(slots):
            parent = path[-1] if path else self.root
            node = Node(self.new_node(), at, fetch.tokens[at:end], parent, device=False, slots=slots[known:])
            node.used, node.fetched = self._time, rid
            for page_end in range(at + self.page, end + 1, self.page):
                node.made_host += self.store[fetch.tokens[:page_end]]
            parent.children.append(node)
            for place, slot in enumerate(slots[known :: self.page] if self.page > 1 else slots[known:]):
                self.host[slot] = fetch.tokens[: at + (place + 1) * self.page]
        loaded = len(slots) - known
        self.emit(ev.PrefetchDone, self.req(rid), fetch.start, len(slots), known, loaded, 0, self.runs(slots))

    def _release(self, slots: list[int]) -> None:
        if slots:
            self.free = sorted([*self.free, *slots])
            self.emit(ev.HostFree, 0, 0, len(self.free), self.runs(slots))

    def _written(self, node: Node) -> None:
        prefix = self._prefix(node)
        for at, slot in enumerate((node.slots or [])[:: self.page]):
            self.host[slot] = prefix[: node.start + (at + 1) * self.page]
            self.writing.append(slot)

    def _of_page(self, prefix: tuple[int, ...], wrong: int = -1) -> tuple[bytes, ...]:
        return tuple(self.digest((layer, int(layer == wrong), *prefix)) for layer in range(LAYERS))

    def _digest_loads(self, transfer: int) -> None:
        for slot in self.reading:
            if self.content.random() < self.digested and slot in self.host:
                # Now and then memory fails, and now and then the digest comes late.
                wrong = self.content.randrange(LAYERS) if self.content.random() < 0.03 else -1
                taken = (transfer, slot, self._of_page(self.host[slot], wrong))
                if self.content.random() > 0.9:
                    self.late.append(taken)
                else:
                    self.emit(ev.LoadDigested, *taken)
        self.reading.clear()

    def flush(self) -> None:
        self.finish()
        self.copy_out()
        self.root = Node(self.new_node(), 0, (), None)
        self.free = list(range(self.host_total))
        self.emit(ev.HostClear, 0, len(self.free))
        self.emit(ev.Reset, 1)

    # --- requests ------------------------------------------------------------------------------------

    def update_weights(self, flush: bool) -> None:
        """Other weights; the cache is emptied with it, or not."""
        self.finish()
        if flush:
            self.flush()
        self.updates += 1
        kind = self.fates.choice(sorted(ev.WeightsKind.NAMES))
        adapter = kind in (ev.WeightsKind.LORA_LOADED, ev.WeightsKind.LORA_UNLOADED)
        self.weights += not adapter
        label = self.fates.choice(("", f"step-{self.updates}"))
        self.note(ev.WeightsUpdated, self.updates, kind, 1, int(flush), "" if adapter else label)

    def serve(
        self,
        batch: list[tuple[str, tuple[int, ...]]],
        retracted: bool = False,
        chunked: bool = False,
        refuse: bool = False,
    ) -> None:
        """Queue requests, match and admit them together, prefill, insert, release."""
        for rid, _ in batch:
            self.finish(rid)
        for rid, tokens in batch:
            if not retracted and rid in self._numbers:
                del self._numbers[rid]
            self.emit(ev.Queued, self.req(rid), len(tokens), int(retracted))
            if not retracted:
                self.digests(rid, tokens)
                self.emit(ev.PrefixPoint, self.req(rid), len(tokens), (self.digest(tokens),))
        if self.stored:
            for rid, tokens in batch:
                self.ask(rid, tokens)
            for rid, _ in batch:
                self.fetch(rid)
        batch = [(rid, tokens) for rid, tokens in batch if not self._given_up(rid)]
        admitted = [self.reused(rid, tokens, refuse) for rid, tokens in batch]
        if not admitted:
            return
        transfer = self._launch_loads()
        number = self.count("batch")
        for (rid, tokens), truth in zip(batch, admitted, strict=True):
            prefix = truth.l1 + truth.l2
            first_end = len(tokens)
            if len(batch) == 1 and len(tokens) - prefix > 2 * GRID and (chunked or self.chance(0.4)):
                first_end = prefix + (len(tokens) - prefix) // 2
                first_end -= first_end % self.page
            self._pass(rid, number, prefix, first_end, len(tokens))
            if first_end < len(tokens):
                number = self._next_chunk(rid, number, tokens, first_end)
        if self.habits.overlap or not self.habits.decodes:
            self._finish_loads(transfer)
            self._results(batch, admitted, number)
        else:
            self._results(batch, admitted, number)
            self._finish_loads(transfer)
        self.copy_out()
        for (rid, tokens), truth in zip(batch, admitted, strict=True):
            over = self.habits.decodes and rid not in [r.rid for r in self.running]
            again = not retracted and self.chance(0.1) and not over
            state = ev.ReleaseState.RETRACTED if again else ev.ReleaseState.FINISHED
            self.truths.append(truth)
            if again or not self.habits.decodes:
                self._ended([r for r in self.running if r.rid == rid])
                self._released(truth, state, 1)
                self.locks.pop(rid, None)
            if again:
                self.serve([(rid, tokens)], retracted=True)
        for request in [r for r in self.running if self.fates.random() < 0.5]:
            self._end(request)

    def _given_up(self, rid: str) -> bool:
        if not self.habits.aborts or self.fates.random() > 0.06:
            return False
        self.note(ev.AbortedInQueue, self.req(rid))
        return True

    def _next_chunk(self, rid: str, number: int, tokens: tuple[int, ...], end: int) -> int:
        """The second pass, and the insert of what the first one computed."""
        self._admitted_to(rid, end)
        following = self.count("batch")
        if self.habits.overlap:
            self.insert(rid, tokens[:end], backup=False)
            self._pass(rid, following, end, len(tokens), len(tokens))
            self.emit(ev.PrefillDone, self.req(rid), number, 0)
        else:
            self.emit(ev.PrefillDone, self.req(rid), number, 0)
            self.insert(rid, tokens[:end])
            self._pass(rid, following, end, len(tokens), len(tokens))
        return following

    def _admitted_to(self, rid: str, end: int) -> None:
        """What is admitted is the first chunk."""
        at = max(i for i, e in enumerate(self.events) if isinstance(e, ev.Admission) and e.req == self.req(rid))
        self.events[at] = dataclasses.replace(self.events[at], end=end)  # type: ignore[call-arg]

    def _results(self, batch: list[tuple[str, tuple[int, ...]]], admitted: list[Truth], number: int) -> None:
        """All requests of a batch get into the tree, then it is over."""
        for (rid, tokens), truth in zip(batch, admitted, strict=True):
            self.insert(rid, tokens)
            if not self.habits.decodes:
                continue
            if self.habits.aborts and self.fates.random() < 0.08:
                truth.aborted = "loading" if truth.l2 and not self.habits.overlap else "prefilling"
            last = self.fates.random() < 0.15 or bool(truth.aborted)
            generated = tuple(self.fates.randrange(1000, 2000) for _ in range(1 if last else self.fates.randint(2, 12)))
            late = "decoding" if self.habits.aborts and self.fates.random() < 0.08 else ""
            request = Running(rid, tokens, generated, truth, truth.aborted or late)
            if last:
                # Over with its first token: given back before the result is through.
                self._release_running(request)
            else:
                self.running.append(request)
        for rid, _ in batch:
            self.emit(ev.PrefillDone, self.req(rid), number, 1)

    def finish(self, rid: str = "") -> None:
        """A request that decodes comes to its end; without a name all do."""
        for request in [r for r in self.running if not rid or r.rid == rid]:
            self._end(request)

    def _end(self, request: Running) -> None:
        self.running.remove(request)
        request.truth.aborted = request.aborted
        sequence = (*request.tokens, *request.generated)[:-1]
        self.insert(request.rid, sequence)
        self._release_running(request)
        self.copy_out()

    def _ended(self, requests: list[Running]) -> None:
        self.running = [r for r in self.running if r not in requests]

    def _release_running(self, request: Running) -> None:
        state = ev.ReleaseState.ABORTED if request.aborted else ev.ReleaseState.FINISHED
        self._released(request.truth, state, len(request.generated))
        self.locks.pop(request.rid, None)

    def _released(self, truth: Truth, state: int, generated: int) -> None:
        number, prefix = self.req(truth.rid), truth.l1 + truth.l2
        self.emit(ev.Released, number, state, generated, prefix, truth.l1, truth.l2 - truth.l3, truth.l3)

    def _pass(self, rid: str, number: int, start: int, end: int, whole: int) -> None:
        self.emit(ev.Prefill, self.req(rid), number, start, end, int(end >= whole))

    def admit(self, rid: str, tokens: tuple[int, ...], refuse: bool = False) -> tuple[int, int]:
        """Match, load back, admit. Returns the reused prefix and how much of it came from L2."""
        truth = self.reused(rid, tokens, refuse)
        return truth.l1 + truth.l2, truth.l2

    def reused(self, rid: str, tokens: tuple[int, ...], refuse: bool = False) -> Truth:
        """The same, and returns all that is known of it."""
        path = self.match(rid, tokens)
        if self.chance(0.15):
            # No room this time: it is matched again, and the answer may be another.
            self.emit(ev.Admission, self.req(rid), 0, sum(len(n.tokens) for n in path if n.device), -1, 0)
            self.make_room(self.page, ev.Cause.DECODE, ())
            path = self.match(rid, tokens)
        device = sum(len(n.tokens) for n in path if n.device)
        lower = [n for n in path if not n.device]
        loaded = sum(len(n.tokens) for n in lower)
        fetched = shared = 0
        for node in path:
            shared += len(node.tokens) * (node.device and node in self.in_flight)
        self.locks.setdefault(rid, set()).update(path)
        if loaded:
            fits = not (refuse or self.chance(0.15)) and self.make_room(loaded, ev.Cause.LOAD_BACK, (self.req(rid),))
            if fits:
                slots = [slot for n in lower for slot in n.slots or ()]
                anchor = lower[-1].number
                self.emit(ev.LoadQueued, self.req(rid), anchor, device, device + loaded, loaded, self.runs(slots))
                self.loading.append((anchor, loaded))
                self.reading += slots[:: self.page]
                fetched = sum(len(n.tokens) for n in lower if n.fetched == rid)
                for node in lower:
                    node.device, node.made = True, list(node.made_host)
                self.in_flight.update(lower)
                self.emit(ev.LoadBackDecided, self.req(rid), anchor, loaded, loaded, loaded, 0)
            else:
                self.emit(ev.LoadBackDecided, self.req(rid), lower[-1].number, loaded, 0, loaded, 3)
                loaded = 0
        prefix = device + loaded
        self.emit(ev.Admission, self.req(rid), 1, prefix, len(tokens), loaded)
        self.make_room(len(tokens) - prefix, ev.Cause.PREFILL, (self.req(rid),))
        made = [by for node in path if node.device for by in node.made][:prefix]
        others = sum(by != self.weights for by in made)
        return Truth(rid, device, loaded, len(tokens), fetched, shared, others)

    def match(self, rid: str, tokens: tuple[int, ...], purpose: int = ev.MatchPurpose.ADMISSION) -> list[Node]:
        path = self.walk(tokens[:-1])
        # L1 on top, L2 below: what is in L1 under a node that is not does not count.
        cut = next((i for i, n in enumerate(path) if not n.device), len(path))
        path = path[:cut] + [n for n in path[cut:] if not n.device]
        device = sum(len(n.tokens) for n in path if n.device)
        host = sum(len(n.tokens) for n in path if not n.device)
        last = path[-1].number if path else self.root.number
        if purpose == ev.MatchPurpose.ADMISSION:
            self.points(rid, tokens, *dict.fromkeys((device, device + host)))
        self.emit(
            ev.Matched,
            self.req(rid),
            len(tokens) - 1,
            device,
            host,
            path[cut - 1].number if cut else self.root.number,
            last,
            0,
            0,
            purpose,
            self.steps(path),
        )
        return path

    def _launch_loads(self) -> int | None:
        if not self.loading:
            return None
        transfer, size = self.count("transfer"), sum(size for _, size in self.loading)
        nodes = tuple(number for number, _ in self.loading)
        self.emit(ev.TransferStarted, transfer, ev.Direction.H2D, size, size * BYTES, 0, nodes)
        return transfer

    def _finish_loads(self, transfer: int | None) -> None:
        if transfer is not None:
            size = sum(size for _, size in self.loading)
            nodes = tuple(number for number, _ in self.loading)
            self.emit(ev.LoadDone, transfer, size, size * BYTES, -1, nodes)
            self.loading.clear()
            for taken in self.late:
                self.emit(ev.LoadDigested, *taken)
            self.late.clear()
            self._digest_loads(transfer)
            self.in_flight.clear()

    def insert(self, rid: str, tokens: tuple[int, ...], backup: bool = True) -> None:
        """Put a computed prefix into the tree; what had left L1 on its path is there again."""
        keep = len(tokens) - len(tokens) % self.page
        tokens = tokens[:keep]
        path = self.walk(tokens)
        existing = 0
        for node in path:
            if not node.device:
                node.device, node.made = True, [self.weights] * len(node.tokens)
            else:
                existing += len(node.tokens)
        at = path[-1].end if path else 0
        if at < keep:
            parent = path[-1] if path else self.root
            node = Node(self.new_node(), at, tokens[at:], parent)
            node.used, node.made = self._time, [self.weights] * len(node.tokens)
            parent.children.append(node)
            path.append(node)
        self.locks.setdefault(rid, set()).update(path)
        number = self.req(rid)
        for node in path if backup else ():
            self.backup(node, number)
        known = self._cells.get(rid, 0)
        if keep // GRID > known:
            self.digests(rid, tokens, known)
        self.points(rid, tokens, keep)
        last = path[-1].number if path else self.root.number
        self.emit(ev.Inserted, number, keep, existing, last, self.steps(path))
        if self.habits.overlap and path:
            # Older trees walk to what they have just inserted.
            self.note(ev.Matched, 0, keep, keep, 0, last, last, 0, 0, ev.MatchPurpose.OTHER, self.steps(path))


def simulated(
    seed: int,
    attached: bool = False,
    digested: float = 0.0,
    stored: bool = False,
    habits: Habits = NONE,
    ranks: tuple[int, int] = (0, 1),
    start: str = "",
) -> Server:
    """A server after a dozen requests; ``attached``: recorded from somewhere in the middle on."""
    place: dict[str, Any] = {"habits": habits, "ranks": ranks, "start": start}
    if digested:
        server = Server(seed, l1=96, l2=400, digested=digested, **place)
    else:
        server = Server(seed, stored=stored, **place)
    rng = random.Random(f"work {seed}")
    pool = [tuple(rng.randrange(1000) for _ in range(rng.choice((24, 40, 56, 80)))) for _ in range(3)]
    number = 0
    rounds = rng.randint(8, 14)
    begin = rng.randint(2, rounds - 4) if attached else -1
    for turn in range(rounds):
        if turn == begin:
            server.attach()
        batch: list[tuple[str, tuple[int, ...]]] = []
        for _ in range(rng.choices((1, 2), (5, 1))[0]):
            base = rng.choice(pool)
            keep = rng.choice((len(base), len(base), rng.randint(1, len(base)), 17, 35))
            tokens = base[:keep] + tuple(rng.randrange(1000) for _ in range(rng.choice((1, 1, 3, 20))))
            number += rng.random() < 0.95
            rid = f"request-{number}"
            if rid not in [r for r, _ in batch]:
                batch.append((rid, tokens))
        if habits.decodes and server.fates.random() < 0.3:
            # Two readers of one load-back.
            number += 1
            batch.append((f"request-{number}", (*batch[0][1], 2000)))
        server.serve(batch)
        if rng.random() < (0.2 if stored else 0.05):
            server.flush()
        if habits.weights and server.fates.random() < 0.2:
            server.update_weights(server.fates.random() < 0.4)
    server.finish()
    server.emit(ev.Closed, 0, 0)
    return server
