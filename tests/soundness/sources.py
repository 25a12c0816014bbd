"""The journals that mutants are made of: recorded ones, and simulated ones of every kind."""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

from journal_tools import FIXTURES

from kvwitness.collectors.journal import parse_journal, read_journal
from kvwitness.patches.schema.events import Event
from soundness.simulate import LIVELY, NONE, PLAIN, simulated

RECORDED = Path(__file__).parents[1] / "adapters" / "data"
"""Runs of older releases."""
DIGESTED = Path(__file__).parent / "data"
"""Runs with digests of pages."""
STORED = DIGESTED / "storage"
"""Runs with a storage (L3)."""
HABITS = (NONE, LIVELY, PLAIN)


def bases(simulations: int = 40) -> dict[str, list[Event]]:
    """Every journal to start from, by name."""
    found = {path.name: list(read_journal(path).events) for path in sorted(FIXTURES.glob("abc-*.kvwj"))}
    found |= _packed(RECORDED)
    for seed in range(simulations):
        found[f"simulated-{seed}"] = simulated(seed).events
    return found


def attached_bases(simulations: int = 24) -> dict[str, list[Event]]:
    """Journals that begin with a snapshot, by name."""
    found = {path.name: list(read_journal(path).events) for path in sorted(FIXTURES.glob("attach-*.kvwj"))}
    for seed in range(simulations):
        found[f"attached-{seed}"] = simulated(seed, attached=True, habits=HABITS[seed % 2]).events
    return found


def digested_bases(simulations: int = 24) -> dict[str, list[Event]]:
    """Journals with digests of pages, by name."""
    found = _packed(DIGESTED)
    for seed in range(simulations):
        share = 0.3 if seed % 3 else 1.0
        found[f"digested-{seed}"] = simulated(seed, digested=share, habits=HABITS[seed % 2]).events
    return found


def stored_bases(simulations: int = 30) -> dict[str, list[Event]]:
    """Journals with a storage (L3), by name."""
    found = _packed(STORED)
    for seed in range(simulations):
        found[f"stored-{seed}"] = simulated(seed, stored=True, habits=HABITS[seed % 2]).events
    return found


def lively_bases(simulations: int = 40) -> dict[str, list[Event]]:
    """Journals of servers that decode, have requests aborted and their weights changed, by name."""
    return {f"lively-{seed}": simulated(seed, habits=HABITS[1 + seed % 2]).events for seed in range(simulations)}


@cache
def small() -> dict[str, list[Event]]:
    """One small record of every generation and kind, for every field of every event."""
    found = {f"recorded {name}": events for name, events in bases(0).items()}
    found |= {f"recorded {name}": events for name, events in attached_bases(0).items()}
    stored = _packed(STORED)
    found |= {f"recorded {name}": stored[name] for name in sorted(stored)[-1:]}
    for name, options in SMALL.items():
        found[f"simulated {name}"] = _smallest(options)
    return found


SMALL: dict[str, dict[str, object]] = {
    "plain": {},
    "lively": {"habits": LIVELY},
    "decoding": {"habits": PLAIN},
    "attached": {"attached": True},
    "digested": {"digested": 1.0},
    "stored": {"stored": True},
    "stored, lively": {"stored": True, "habits": LIVELY},
    "attached, lively": {"attached": True, "habits": LIVELY},
}


def _smallest(options: dict[str, object]) -> list[Event]:
    """Of some seeds the shortest record in which something was read from a lower tier."""
    servers = [simulated(seed, **options) for seed in range(40)]  # type: ignore[arg-type]
    wanted = [s for s in servers if any(t.l2 for t in s.truths) and (not s.stored or any(t.l3 for t in s.truths))]
    return min((s.events for s in wanted), key=len)


def _packed(folder: Path) -> dict[str, list[Event]]:
    found = {}
    for path in sorted(folder.glob("*.kvwj.xz")):
        found[path.name] = list(parse_journal(lzma.decompress(path.read_bytes()), "scheduler-1-1.kvwj").events)
    return found
