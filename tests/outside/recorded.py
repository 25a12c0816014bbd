"""Runs of real servers with hooks and with KV events at once.

Each: warm-up, A, B, four other prompts, C, further prompts until L2 had to evict as well, D. 0.5.23 has a
UnifiedRadixCache with the Rust core and maps on the wire, 0.5.17 a HiRadixCache and arrays, 0.5.10.post1 tells of
L1 alone, and not of what leaves it while L2 keeps a copy.
"""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

import msgspec

from kvwitness.collectors.journal import Journal, parse_journal
from kvwitness.collectors.kv_events import KvMessage
from kvwitness.collectors.kv_wire import Redactor, decode
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.ledger.facts import InstanceFacts

DATA = Path(__file__).parent / "data"
RELEASES = ("0.5.23", "0.5.17", "0.5.10.post1")


@cache
def messages(release: str) -> tuple[KvMessage, ...]:
    raw = msgspec.msgpack.decode(lzma.decompress((DATA / f"{release}-frames.msgpack.xz").read_bytes()))
    redactor = Redactor((DATA / f"{release}.key").read_bytes())
    found = []
    for parts in raw:
        batch = redactor.keep(decode(parts[-1]))
        found.append(KvMessage(0, int.from_bytes(parts[-2], "big"), batch.at_ns, False, batch))
    return tuple(found)


@cache
def journal(release: str) -> Journal:
    return parse_journal(lzma.decompress((DATA / f"{release}.kvwj.xz").read_bytes()), "scheduler-1-1.kvwj")


@cache
def facts(release: str) -> InstanceFacts:
    return derive(journal(release))
