"""Building blocks of a chain of evidence: a link that holds, a link that is missing and how to obtain it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvwitness.patches.schema.events import ResidentNode
from kvwitness.tracer.ledger.described import Ranks
from kvwitness.tracer.ledger.facts import HookState, InstanceFacts, Moment, RequestFacts
from kvwitness.tracer.model import EventRef, Link, LinkEvidence
from kvwitness.tracer.verdicts.view import InstanceView

HOOK_OF_LINK: dict[Link, tuple[str, ...]] = {
    Link.BORN: ("born",),
    Link.BACKED_UP: ("backed_up",),
    Link.LEFT_L1: ("left_l1",),
    Link.RESIDENT_L1: ("resident_l1", "left_l1", "epoch"),
    Link.RESIDENT_L2: ("resident_l2", "epoch"),
    Link.READ: ("read",),
    Link.USED: ("used",),
    Link.PREFETCHED: ("prefetched",),
    Link.CONTENT: ("content",),
}
"""Names under which hooks declare that a link rests on them (kvwitness.patches.contract.Hook.links).

A residency also says that something did not happen (no eviction, no reset): it rests on those who would have seen it.
"""

AT_ATTACH: Final = ResidentNode.__name__
"""Kind of the event that stands in for the links that lie before the attaching."""
FOUND_IN_L1: Final = "resident in L1 when kvwitness was attached"
FOUND_IN_L2: Final = "resident in L2 when kvwitness was attached"

REMEDY: dict[Link, str] = {
    Link.BORN: "start the recorder before the first request of the series (kvwitness serve, or KVWITNESS_DIR), "
    "or attach while the cache holds the prefix",
    Link.BACKED_UP: "check the write policy and the host pool's size; wait for the backup before evicting",
    Link.LEFT_L1: "evict the prefix from L1 with other prefixes before the repeat, with the recorder running",
    Link.RESIDENT_L1: "repeat the request while its prefix is still in L1",
    Link.RESIDENT_L2: "repeat the request while L2 still holds the prefix: larger host pool, fewer fills, no flush",
    Link.READ: "let the load-back complete: enough free L1, prefix above the load-back threshold, server alive",
    Link.USED: "let the request finish its prefill with the recorder running",
    Link.PREFETCHED: "use the prefetch policy wait_complete or timeout, and look at the storage backend's errors",
    Link.CONTENT: "look for faulty memory, and for whatever else writes to the host pool; then record again with "
    "KVWITNESS_DIGEST=all",
    Link.WITNESSES_AGREE: "look at the disagreement below; the server's own numbers may be wrong in this release",
    Link.RECORD_COMPLETE: "record again without losing events: larger KVWITNESS_QUOTA_MB, every rank, no restart",
}


class Evidence:
    """Collects the links of one claim on one instance."""

    def __init__(self, view: InstanceView, request: RequestFacts | None = None) -> None:
        """``request``: whose claim it is; what was told of its prompt is part of it."""
        self._instance = view.instance
        self._doubted = view.doubted
        self._told = [] if request is None else [request.queued.seq]
        """Where the prefixes were told that are compared."""
        self._links: list[LinkEvidence] = []
        self._unsound = _unsound_of(view)
        self._installed = _installed_of(view)
        self._moments: list[Moment] = []

    def hold(self, link: Link, detail: str, *moments: Moment | None, also: tuple[Link, ...] = ()) -> None:
        """The link was seen, in these events; it does not hold where a hook that it rests on is not sound.

        ``also``: links whose hooks it rests on, too.
        """
        wrong = next((self._unsound[each] for each in (link, *also) if each in self._unsound), None)
        self._moments.extend(m for m in moments if m is not None)
        if wrong is not None:
            self.miss(link, wrong, *moments, remedy="see kvwitness doctor")
            return
        self._links.append(LinkEvidence(link, True, detail, self._refs(moments)))

    def miss(self, link: Link, detail: str, *moments: Moment | None, remedy: str = "") -> None:
        """The link is missing; say what is missing, and how to obtain it."""
        if link in self._unsound:
            detail = f"{detail}: {self._unsound[link]}"  # The likely cause: nobody was looking.
        self._links.append(LinkEvidence(link, False, detail, self._refs(moments), remedy or REMEDY[link]))

    def prefix_told(self, *seqs: int) -> None:
        """The claim compares a prefix that was told from these events on."""
        self._told.extend(seq for seq in seqs if seq)

    @property
    def told(self) -> tuple[int, ...]:
        """The events from which on the compared prefixes were told."""
        return tuple(self._told)

    def is_sound(self, link: Link) -> bool:
        """Whether the hooks that the link rests on are there to be trusted."""
        return link not in self._unsound

    @property
    def moments(self) -> tuple[Moment, ...]:
        """The events of the links that were put forward as holding."""
        return tuple(self._moments)

    @property
    def missing(self) -> LinkEvidence | None:
        """The first link that does not hold."""
        return next((link for link in self._links if not link.holds), None)

    def _refs(self, moments: Iterable[Moment | None]) -> tuple[EventRef, ...]:
        instance = self._instance.instance
        return tuple(EventRef(instance, m.seq, m.kind) for m in moments if m is not None)

    def complete(self) -> tuple[LinkEvidence, ...]:
        """All links, closed by the check that no event is missing between the first and the last of them."""
        numbers = [ref.seq for link in self._links for ref in link.events]
        if numbers:
            first, last = min(*self._told, *numbers, max(numbers)), max(numbers)
            late = self._unwatched(first) or next((why for seq in self._told if (why := self._doubted.get(seq))), None)
            holes = [gap for gap in self._instance.gaps if gap[0] <= last and gap[1] >= first]
            if late is not None:
                self.miss(Link.RECORD_COMPLETE, late)
            elif holes:
                detail = "; ".join(f"events {a} to {b}: {cause}" for a, b, cause in holes[:3])
                self.miss(Link.RECORD_COMPLETE, detail)
            else:
                detail = f"events {first} to {last} without a hole"
                self._links.append(LinkEvidence(Link.RECORD_COMPLETE, True, detail))
        return tuple(self._links)

    def _unwatched(self, first: int) -> str | None:
        """A hook that a link rests on and that was installed only after the first event of the claim."""
        told = self._instance.told_at
        if told > first:
            return f"what the instance is was told with event {told}, the claim begins with event {first}"
        for link in self._links:
            since, name = self._installed.get(link.link, (0, ""))
            if link.holds and since > first:
                return f"hook {name} was installed with event {since}, the claim begins with event {first}"
        return None


def _unsound_of(view: InstanceView) -> dict[Link, str]:
    """:func:`unsound_links`, worked out once per instance."""
    known = view.unsound
    if known is None:
        known = view.unsound = unsound_links(view.instance)
    return known


def _installed_of(view: InstanceView) -> dict[Link, tuple[int, str]]:
    """For each link the event since which all hooks that it rests on are there, and the last of them; once."""
    if view.installed is None:
        hooks = relevant_hooks(view.instance)
        view.installed = {
            link: max((hook.since, hook.name) for hook in serving)
            for link, names in HOOK_OF_LINK.items()
            if (serving := [hook for hook in hooks if not {*names}.isdisjoint(hook.links)])
        }
    return view.installed


def relevant_hooks(instance: InstanceFacts) -> list[HookState]:
    """One state per hook name, of the families that this instance's tree uses: the installed one if any."""
    family = instance.facts.instance.family
    best: dict[str, HookState] = {}
    for hook in instance.hooks:
        if hook.family not in ("common", family) and family is not None:
            continue
        known = best.get(hook.name)
        if known is None or (known.status != "installed" and hook.status == "installed"):
            best[hook.name] = hook
    return list(best.values())


def unsound_links(instance: InstanceFacts) -> dict[Link, str]:
    """Links that cannot hold on this instance because a hook that they rest on is absent or failed."""
    if not instance.hooks:
        return dict.fromkeys(HOOK_OF_LINK, "the journal does not say which hooks were installed")
    if instance.facts.ranks == Ranks() or not instance.facts.instance.page_size:
        return dict.fromkeys(HOOK_OF_LINK, "the journal does not say what the instance is: its ranks, its page size")
    wrong: dict[Link, str] = {}
    hooks = relevant_hooks(instance)
    for link, names in HOOK_OF_LINK.items():
        for name in names:
            why = _unserved(instance, [hook for hook in hooks if name in hook.links])
            if why is not None:
                wrong[link] = why
    anchor = next((pool for pool in instance.facts.instance.pools if pool.pool == 0), None)
    if anchor is None or not anchor.hooked:
        wrong.setdefault(Link.RESIDENT_L2, "the host pool's allocations are not seen in this configuration")
    mode = instance.facts.transit_mode
    if mode is not None:
        wrong[Link.RESIDENT_L2] = f"host memory mode {mode}: host memory is transit here, not a tier"
    return wrong


def _unserved(instance: InstanceFacts, serving: Iterable[HookState]) -> str | None:
    """Why the hooks that serve something are not there to be trusted; None when they are."""
    found = False
    for hook in serving:
        found = True
        if hook.status != "installed":
            why = f"{hook.status}: {hook.detail}" if hook.detail else hook.status
            return f"hook {hook.name} is not installed ({why})"
        if instance.hook_failures.get(hook.name):
            return f"hook {hook.name} failed {instance.hook_failures[hook.name]} times"
    return None if found else "no hook serves this link"
