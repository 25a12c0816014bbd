"""The cache as one instance's events tell it: every part of its state, typed, each in a room of its own."""

from __future__ import annotations

from typing import Final

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.ledger import facts as ft
from kvwitness.tracer.ledger.attached import Unseen
from kvwitness.tracer.ledger.chains import Chain
from kvwitness.tracer.ledger.describing import Describing
from kvwitness.tracer.ledger.digests import PageDigests
from kvwitness.tracer.ledger.evictions import L1Evictions, L2Evictions
from kvwitness.tracer.ledger.hostpool import Content, HostView
from kvwitness.tracer.ledger.names import Names
from kvwitness.tracer.ledger.opened import OpenBackup, OpenLoad
from kvwitness.tracer.ledger.prefixes import Prefixes
from kvwitness.tracer.ledger.requests import OpenRequest, Requests
from kvwitness.tracer.ledger.runs import overlap
from kvwitness.tracer.ledger.states import StatePools
from kvwitness.tracer.ledger.storage import StorageView
from kvwitness.tracer.ledger.transfers import Transfers
from kvwitness.tracer.ledger.tree import TreeView

ANCHOR_POOL: Final = 0
"""Number of the host pool whose slots are the identity of full-attention KV."""
FOREVER: Final = 2**63
"""Until the record ends."""


class State:
    """What is known after the events so far. Rules change it, and nothing else does."""

    def __init__(self) -> None:
        self.before = 0
        """The number of the event before the one that is looked at."""
        self.contradictions: list[ft.Contradiction] = []
        self.closed = 0
        """The event that ended the record; 0: none yet."""
        # What the process says of itself.
        self.names = Names()
        self.told = Describing()
        self.failures: dict[str, int] = {}
        self.weights: list[ft.WeightsChange] = []
        # Requests and their prefixes.
        self.requests = Requests()
        self.prefixes = Prefixes()
        self.batches = 0
        """The largest number of a batch so far."""
        # L1.
        self.epoch = 0
        self.epochs: list[ft.EpochFact] = []
        self.residencies: list[ft.Residency] = []
        self.tree = TreeView(0, self.residencies.append)
        self.evictions = L1Evictions()
        self.inserting: dict[int, tuple[int, OpenBackup]] = {}
        """Node -> request and backup since the last insert of which only the next one says whose prefix it copies."""
        # L2.
        self.host = HostView(1, self.residencies.append)
        self.emptied = 0
        """The event that emptied the host pool, until the reset of the tree that belongs to it; 0: none."""
        self.counted = 0
        """The last event that carried the host pool's own count."""
        self.host_evictions = L2Evictions()
        self.rejections: list[ft.Rejection] = []
        self.states = StatePools(self.names.get)
        # Copies between them.
        self.transfers = Transfers()
        self.backups: list[OpenBackup] = []
        self.backup_nodes: dict[int, int] = {}
        """What wrote or held slots (a backup, a node that was found) -> the node."""
        self.loads: list[OpenLoad] = []
        self.copying: dict[int, OpenLoad] = {}
        """Loads of this epoch whose completion was not seen yet."""
        self.pages = PageDigests()
        # L3, and what was there at the attaching.
        self.storage = StorageView()
        self.prefetches: list[ft.Prefetch] = []
        self.attached = Unseen()
        self.found: list[ft.Found] = []

    # --- who an event is about -----------------------------------------------------------------------

    def request(self, number: int) -> OpenRequest | None:
        """The request that a number stands for now."""
        return self.requests.get(self.names.get(number))

    def chain(self, number: int) -> Chain | None:
        """The digests of its tokens."""
        return self.requests.chain(self.names.get(number))

    def nameless(self, number: int) -> bool:
        """A request is named whose name was not recorded."""
        return number != 0 and self.names.get(number) is None

    # --- what happens to several rooms at once -------------------------------------------------------

    def reset(self, moment: ft.Moment) -> None:
        """The cache was emptied: a new epoch."""
        self.tree.finish(moment)
        self.host.finish(moment)
        self.states.cleared(None, moment)
        self.epoch += 1
        self.epochs.append(ft.EpochFact(self.epoch, moment))
        self.tree = TreeView(self.epoch, self.residencies.append)
        self.host = HostView(self.host.page, self.residencies.append, self.host.available)
        self.requests.reset()
        self.transfers.reset()
        self.inserting.clear()
        self.lost_while_copying(None)
        self.copying.clear()
        self.attached.reset()

    def lost_while_copying(self, slots: tuple[ev.Run, ...] | None) -> None:
        """Slots (None: all) were given back or taken for something else: a read of them under way is worth nothing."""
        for load in self.copying.values():
            if slots is None or overlap(load.queued.slots, slots):
                load.freed = True

    def contents(self) -> list[Content]:
        """What the pages of the host pool hold."""
        return self.host.contents()

    def live(self) -> set[str]:
        """Whose prefixes a tier holds, or is about to."""
        return {*self.tree.owners(), *(c.chain.rid for c in self.contents() if c.chain is not None)}
