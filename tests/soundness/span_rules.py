"""What has to be true of the record from the first event that a claim rests on to the last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvwitness.patches.schema import events as ev
from soundness.record_rules import Flaw
from soundness.relations import Relations
from soundness.rules import At, Refusal, Rules, Why
from soundness.things import Stay

TREE_FAMILY = {"HiRadixCache": "hiradix", "UnifiedRadixCache": "unified"}
LINKS = {
    "L1": ("born", "resident_l1", "left_l1", "used", "epoch"),
    "L2": ("born", "backed_up", "left_l1", "resident_l2", "read", "used", "epoch"),
    "L3": ("prefetched", "resident_l2", "read", "used", "epoch"),
    "prefetched": ("prefetched",),
    "content": ("content",),
}

OWN = ("tree.match_prefix", "request.next_round", "policy.add_one_req", "results.prefill", "scheduler.run_batch")
"""Hooks that see what a request does: a failure for one request is none for another that is over or not there yet."""
OFTEN = 4
"""From this failure of a hook on, not every one leaves an event."""


@dataclass(eq=False)
class Span:
    """The stretch of a record that a claim rests on."""

    r: Relations
    tier: str
    stay: Stay
    first: int
    last: int
    links: tuple[str, ...]
    flaws: list[Flaw]

    def hooks(self, told: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """The hooks for these links in a report of what is installed, by name."""
        facts = self.r.facts
        family = facts.get("family") or TREE_FAMILY.get(facts.get("tree_class", ""), "")
        found: dict[str, list[dict[str, Any]]] = {}
        for hook in told:
            # What is no hook tells of none.
            sound = isinstance(hook, dict) and isinstance(hook.get("links", []), list | tuple)
            if sound and hook.get("family", "common") in ("common", family):
                found.setdefault(str(hook.get("name")), []).append(hook)
        return {
            name: variants
            for name, variants in found.items()
            if any(link in hook.get("links", ()) for hook in variants for link in self.links)
        }


RECORDED: Rules[Span] = Rules("the record that a claim rests on, from its first event to its last")


@RECORDED
def the_instance_was_described_before(s: Span) -> Iterator[Why]:
    """Page size and bytes per token of the instance are told before the first event that counts."""
    if not s.r.instance_facts or s.r.instance_facts[0][0] > s.first:
        yield ("no facts of the instance",)
    elif not s.r.facts.get("page_size") or not s.r.bytes_per_token:
        yield ("no page size, or no bytes per token",)


@RECORDED
def host_memory_is_a_tier(s: Span) -> Iterator[Why]:
    """Host memory keeps what is written to it (mode ``cache``)."""
    if s.tier != "L1" and (s.r.facts.get("host_memory_mode") or "cache") != "cache":
        yield ("host memory is transit here",)


@RECORDED
def the_hooks_were_there_all_the_time(s: Span) -> Iterator[Why]:
    """Every hook that serves a link of the claim was installed before the first event that counts, and stayed so."""
    before = [told for told in s.r.coverage if told[0] < s.first]
    if not before:
        yield ("which hooks were there is not known",)
        return
    for seq, told in [before[-1], *(c for c in s.r.coverage if s.first < c[0] <= s.last)]:
        hooks = s.hooks(told)
        for link in s.links:
            if not any(link in hook.get("links", ()) for each in hooks.values() for hook in each):
                yield f"no hook records {link}", At(seq)
        for name, variants in hooks.items():
            if not any(hook.get("status") == "installed" for hook in variants):
                yield f"{name} was not installed", At(seq)


@RECORDED
def no_hook_failed_meanwhile(s: Span) -> Iterator[Why]:
    """No call of such a hook failed between the first event that counts and the last; of a hook that sees one request
    alone, since that request was queued."""
    names = {name for _, told in s.r.coverage for name in s.hooks(told)}
    for event in s.r.of(ev.HookFailed):
        name = s.r.name(event.hook, event.seq)
        since = s.stay.queued.seq if name in OWN else s.first
        if (name is None or name in names) and event.seq < s.last and (event.seq > since or event.count >= OFTEN):
            yield f"{name} failed", event


@RECORDED
def nothing_of_it_is_in_doubt(s: Span) -> Iterator[Why]:
    """No rule of the record is broken between the first event that counts and the last."""
    for flaw in s.flaws:
        if flaw.first <= s.last and s.first <= flaw.last:
            yield (Refusal(flaw.rule, f"events {flaw.first} to {flaw.last}: {flaw.why}", ()),)
