"""Digests of KV pages in L1: taken when a page is copied to L2, and again when it was copied back.

Asked for by ``KVWITNESS_DIGEST``. Both digests are of what lies in the *device* pool, so equal digests say that the
bytes that a load-back put into L1 are the bytes that the backup took out of L1, whatever lay on the way: the copy
to the host, the host pool, the copy back. They do not say that the forward pass read these bytes, nor that they
were computed rightly.

**When.** A backup's pages are digested in the copy's own stream, inside the function that copies, so before the
event is recorded that SGLang waits for: until then it keeps the pages. A load's pages are digested by the
thread of this module, in a stream of its own that waits for the load's last event: nobody waits for it, and the
forward pass does not either. The pages of a load belong to the radix tree then; they can be evicted and written
to again before the digest was taken. The journal shows it: the digest is recorded after it was taken, and what
is recorded after the eviction does not count.

**Which.** One page in N of every backup, from a random one on, at least one. Loads digest the pages of which there
is a digest.

**What.** The sums of :mod:`kvwitness.patches.page_sums` per page and layer, then a keyed hash of each, so that a
journal does not tell the sums.

On the scheduler thread no tensor of the device is read and nothing is waited for: kernels are enqueued, in plain
torch, and the figures are fetched by the thread. SGLang 0.5.2 to 0.5.23, pools of CPU and CUDA devices with one
tensor of rows per layer. Elsewhere, and after a failure (out of memory), there are no digests: the failure is
in the journal, and claims stay what they are without.
"""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec

from kvwitness.patches.page_sums import Rows
from kvwitness.patches.schema.events import DIGEST_BYTES, BackupDigested, Direction, LoadDigested

if TYPE_CHECKING:
    from kvwitness.patches.witness import Witness

P = ParamSpec("P")

NAME: Final = "page_digests"
"""Under this name failures are counted in the journal."""

_WAITING_AT_MOST: Final = 256
"""Transfers whose digests were not fetched yet; further ones are left out of the sample."""
_END_S: Final = 5.0


class Job:
    """The pages of one launched copy that are digested."""

    __slots__ = ("direction", "event", "rows", "slots", "sources", "sums", "transfer")

    def __init__(self, direction: int, slots: list[int], sources: list[tuple[Any, list[int] | slice]]) -> None:
        self.direction = direction
        self.slots = slots
        """The first host slot of each page."""
        self.sources = sources
        """Device slots of the copied operations, and which of their pages. Kept alive: kernels read them."""
        self.rows: Rows | None = None
        self.sums: Any = None
        self.event: Any = None
        """Recorded when what is to be read is there (loads), or when it was read (backups)."""
        self.transfer = 0

    def pages(self, page: int) -> Any:
        """The device slots of the chosen pages, ``(pages, page size)``, in the order of :attr:`slots`."""
        import torch

        parts: list[Any] = []
        for indices, chosen in self.sources:
            pages = indices.reshape(-1, page)
            parts += [pages[chosen]] if isinstance(chosen, slice) else [pages[i : i + 1] for i in chosen]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _guarded(method: Callable[Concatenate[Digester, P], None]) -> Callable[Concatenate[Digester, P], None]:
    """A failure ends the digests of this process, and nothing else."""

    def guarded(self: Digester, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.ended:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)

    return guarded


class Digester:
    """Takes the digests of one process: about one page in ``every`` of each backup.

    Its methods are called on the scheduler thread, wait for nothing and never raise.
    """

    def __init__(self, w: Witness, every: int) -> None:
        self.ended = False
        self._w = w
        self._every = every
        self._key = w.digest_key
        self._rows: Rows | None = None
        self._chance = random.Random()
        """Not the generator that SGLang draws from."""
        self._digested: Any = None
        """Host page number -> whether what was backed up to it last has a digest (a tensor of the CPU)."""
        self._job: Job | None = None
        self._unnamed: dict[int, Job] = {}
        """Backups by the acknowledgement that SGLang keeps for them, until they have a transfer's number."""
        self._streams: dict[Any, Any] = {}
        self._ready: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="kvwitness-digests", daemon=True)
        self._thread.start()

    # --- scheduler thread ----------------------------------------------------------------------------

    @_guarded
    def queued(self, direction: int, operations: Sequence[Any]) -> None:
        """What waits is about to be launched in one copy: choose the pages."""
        self._job = None
        if self._ready.qsize() >= _WAITING_AT_MOST:
            return
        slots: list[int] = []
        sources: list[tuple[Any, list[int] | slice]] = []
        page = self._w.page_size
        for operation in operations:
            heads = operation.host_indices[::page]
            if not len(heads) or len(operation.host_indices) % page or heads.device.type != "cpu":
                continue
            if direction == Direction.D2H:
                chosen: list[int] | slice = self._choose(heads // page)
            else:
                chosen = self._known(heads // page)
            found = heads[chosen].tolist()
            if found:
                slots += found
                sources.append((operation.device_indices, chosen))
        if slots:
            self._job = Job(direction, slots, sources)

    def _choose(self, numbers: Any) -> slice:
        """Every so many pages of a backup, from a random one on; remembers which host pages that are."""
        import torch

        chosen = slice(self._chance.randrange(min(self._every, len(numbers))), None, self._every)
        room = int(numbers.max()) + 1
        if self._digested is None or len(self._digested) <= room:
            grown = torch.zeros(2 * room + 1, dtype=torch.bool)
            if self._digested is not None:
                grown[: len(self._digested)] = self._digested
            self._digested = grown
        self._digested[numbers] = False
        self._digested[numbers[chosen]] = True
        return chosen

    def _known(self, numbers: Any) -> list[int]:
        """Which pages of a load have a digest."""
        if self._digested is None:
            return []
        if int(numbers.max()) >= len(self._digested):
            numbers = numbers.clamp(max=len(self._digested) - 1)  # Never written by a backup: the last is spare.
        found: list[int] = self._digested[numbers].nonzero().flatten().tolist()
        return found

    @_guarded
    def copied(self, device_pool: Any) -> None:
        """The backup was enqueued in the current stream: enqueue the digests behind it."""
        job = self._job
        if job is None or job.direction != Direction.D2H or job.sums is not None:
            return
        import torch

        with torch.inference_mode():
            if self._rows is None:
                self._rows = Rows(device_pool, self._w.page_size)
            job.rows = self._rows
            job.sums = job.rows.sums(job.pages(job.rows.page))
        if job.rows.device.type == "cuda":
            job.event = torch.cuda.Event()
            job.event.record()

    @_guarded
    def launched(self, ack: Any) -> None:
        """The copy has an acknowledgement; the transfer's number follows."""
        job, self._job = self._job, None
        if job is None or self._rows is None or (job.direction == Direction.D2H and job.sums is None):
            return
        if job.direction == Direction.H2D:
            job.event, job.rows = ack.finish_event, self._rows
        self._unnamed[id(ack)] = job

    @_guarded
    def named(self, ack: Any, transfer: int) -> None:
        """The launched copy is transfer ``transfer``."""
        job = self._unnamed.pop(id(ack), None)
        if job is not None:
            job.transfer = transfer
            self._ready.put(job)

    def fail(self, error: Exception) -> None:
        """No digests from here on."""
        self.ended, self._job = True, None
        self._unnamed.clear()
        self._w.failed(NAME, error)

    def stop(self) -> None:
        """Take no more; :meth:`join` waits for those under way."""
        self.ended = True
        self._ready.put(None)

    def join(self) -> None:
        """Wait until the thread has ended (while the process ends, or on another thread than the scheduler's)."""
        self._thread.join(_END_S)

    # --- own thread ----------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._ready.get()) is not None:
            try:
                self._record(job, self._fetch(job))
            except Exception as error:
                self.fail(error)

    def _fetch(self, job: Job) -> Any:
        """The sums on the host, ``(layers, pages)``. Waits for the device, without the GIL."""
        import torch

        rows = job.rows
        assert rows is not None
        with torch.inference_mode(), self._own_stream(rows.device, job.event):
            sums = job.sums if job.sums is not None else rows.sums(job.pages(rows.page))
            return sums.cpu()

    @contextlib.contextmanager
    def _own_stream(self, device: Any, event: Any) -> Iterator[None]:
        """Work of the device goes into a stream of this thread's own, behind ``event``."""
        if device.type != "cuda":
            yield
            return
        import torch

        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(self._streams[device]):
            self._streams[device].wait_event(event)
            yield

    def _record(self, job: Job, sums: Any) -> None:
        event = BackupDigested if job.direction == Direction.D2H else LoadDigested
        for slot, numbers in zip(job.slots, sums.t().tolist(), strict=True):
            self._w.emit(event, job.transfer, slot, tail=b"".join(map(self._hash, numbers)))

    def _hash(self, number: int) -> bytes:
        raw = struct.pack("<q", number)
        return blake2b(raw, key=self._key, digest_size=DIGEST_BYTES, person=b"kv page").digest()
