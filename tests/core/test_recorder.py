"""The journal: what was recorded is there afterwards, what was lost is counted, damage is told from silence."""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from journal_tools import encode_event

from kvwitness.collectors.journal import JournalUnreadable, parse_journal, read_journal
from kvwitness.patches.recorder import JournalError, Recorder
from kvwitness.patches.schema import format as fmt
from kvwitness.patches.schema.events import (
    REGISTRY,
    BackupAcked,
    HookFailed,
    HostFree,
    LoadDone,
    Run,
    Tail,
    Text,
)

SMALL = 2 << 20


def recorder(folder: Path, **options: int) -> Recorder:
    return Recorder(folder, role="scheduler", quota_bytes=options.pop("quota_bytes", SMALL), **options)


def test_what_is_recorded_reads_back_with_its_types(tmp_path: Path) -> None:
    r = recorder(tmp_path)
    number = r.text("request-1")
    r.emit(HostFree, 0, number, 100, tail=Tail.ints([16, 32, 64, 16]))
    r.emit(LoadDone, 7, 1488, 1523712, 5_000_000, tail=Tail.ints([3, 4]))
    r.close()
    journal = read_journal(r.path)
    text, freed, done, closed = journal.events
    assert isinstance(text, Text) and text.text == "request-1"
    assert isinstance(freed, HostFree) and freed.slots == (Run(16, 32), Run(64, 16)) and freed.req == number
    assert isinstance(done, LoadDone) and done.nodes == (3, 4) and done.duration_ns == 5_000_000
    assert [event.seq for event in journal.events] == [1, 2, 3, 4]
    assert journal.closed and not journal.gaps and not journal.anomalies
    assert closed.t_ns >= text.t_ns


@pytest.mark.parametrize("kept", [4096, 3])
def test_every_kind_and_length_is_written_to_the_documented_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Byte for byte as another, slower encoder writes it, also when few lengths are remembered."""
    monkeypatch.setattr("kvwitness.patches.recorder._SHAPES_KEPT", kept)
    r = recorder(tmp_path)
    for kind in REGISTRY.values():
        values = [1] * (len(kind.PACK.unpack(bytes(kind.PACK.size))) - 5)
        lengths = (0,) if kind.READ_TAIL is None else range(10) if kind.READ_TAIL is Tail.read_text else (0, 32, 64)
        for length in lengths:
            r.emit(kind, *values, tail=b"x" * length)
    journal = read_journal(r.path)
    assert not journal.gaps and not journal.anomalies
    assert {type(event) for event in journal.events} == set(REGISTRY.values())
    written = b"".join(encode_event(event) for event in journal.events)
    start = fmt.HEADER_BYTES + fmt.CHUNK_HEADER.size
    assert r.path.read_bytes()[start : start + len(written)] == written


def test_values_that_do_not_fit_leave_nothing_but_a_missing_number(tmp_path: Path) -> None:
    r = recorder(tmp_path)
    with pytest.raises(struct.error):
        r.emit(BackupAcked, 1, 1 << 70, -1)
    r.emit(BackupAcked, 2, 2, -1)
    journal = read_journal(r.path)
    assert [event.seq for event in journal.events] == [2] and not journal.anomalies
    assert [(gap.first, gap.last) for gap in journal.gaps] == [(1, 1)]


def test_a_text_is_recorded_once(tmp_path: Path) -> None:
    r = recorder(tmp_path)
    assert r.text("a") == r.text("a") != r.text("b")
    assert sum(isinstance(e, Text) for e in read_journal(r.path).events) == 2


def test_closing_gives_the_unused_space_back(tmp_path: Path) -> None:
    r = recorder(tmp_path, quota_bytes=16 << 20)
    before = r.path.stat().st_size
    r.emit(BackupAcked, 1, 1, -1)
    r.close()
    r.close()
    assert r.path.stat().st_size < before / 8


def test_killed_process_leaves_everything_that_it_recorded(tmp_path: Path) -> None:
    """kill -9 right after the last event: the journal opens, nothing before it is missing."""
    script = """
import os, sys
from pathlib import Path
from kvwitness.patches.recorder import Recorder
from kvwitness.patches.schema.events import BackupAcked
r = Recorder(Path(sys.argv[1]), role="scheduler", quota_bytes=4 << 20)
for i in range(5000):
    r.emit(BackupAcked, i, i, -1)
print("ready", flush=True)
sys.stdin.read()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    (path,) = tmp_path.glob("*.kvwj")
    journal = read_journal(path)
    acked = [event.node for event in journal.events if isinstance(event, BackupAcked)]
    assert acked == list(range(5000))
    assert not journal.closed and not journal.gaps and not journal.anomalies


def test_quota_loss_is_counted_and_shows_as_a_gap(tmp_path: Path) -> None:
    r = recorder(tmp_path, quota_bytes=fmt.HEADER_BYTES + 4096, chunk_bytes=4096)
    for i in range(500):
        r.emit(BackupAcked, i, i, -1)
    journal = read_journal(r.path)
    kept = len(journal.events)
    assert 0 < kept < 500
    assert journal.lost_quota == 500 - kept
    assert [(gap.first, gap.last) for gap in journal.gaps] == [(kept + 1, 500)]


def test_an_event_larger_than_a_chunk_is_counted(tmp_path: Path) -> None:
    r = recorder(tmp_path, quota_bytes=1 << 16, chunk_bytes=4096)
    r.emit(HostFree, 0, 0, 0, tail=Tail.ints(range(2000)))
    r.emit(BackupAcked, 1, 1, -1)
    journal = read_journal(r.path)
    assert journal.lost_oversize == 1
    assert [(gap.first, gap.last) for gap in journal.gaps] == [(1, 1)]


def test_full_disk_is_one_clear_error_when_it_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(JournalError, match="No space left on device"):
        recorder(tmp_path)
    assert not list(tmp_path.glob("*.kvwj")), "a journal that could not be allocated must not stay behind"


def test_threads_share_one_journal_without_losing_an_event(tmp_path: Path) -> None:
    r = recorder(tmp_path, quota_bytes=32 << 20)
    start = threading.Barrier(4)

    def work(thread: int) -> None:
        start.wait()
        for i in range(2000):
            r.emit(BackupAcked, thread, i, -1)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    journal = read_journal(r.path)
    assert not journal.gaps and not journal.anomalies
    for n in range(4):
        mine = [e.node for e in journal.events if isinstance(e, BackupAcked) and e.transfer == n]
        assert mine == list(range(2000))


def test_reading_while_the_process_still_writes(tmp_path: Path) -> None:
    r = recorder(tmp_path)
    for i in range(10):
        r.emit(BackupAcked, i, i, -1)
        assert len(read_journal(r.path).events) == i + 1


@pytest.mark.parametrize("cut", [1, 7, 8, 20, 40])
def test_a_torn_last_record_is_dropped_and_the_rest_is_read(tmp_path: Path, cut: int) -> None:
    r = recorder(tmp_path)
    for i in range(10):
        r.emit(BackupAcked, i, i, -1)
    written = r.path.read_bytes().rstrip(b"\0")
    size = len(encode_event(BackupAcked(1, 1, 9, 9, -1)))
    end = fmt.HEADER_BYTES + fmt.CHUNK_HEADER.size + 10 * size
    assert end - len(written) < fmt.ALIGN + 8
    journal = parse_journal(r.path.read_bytes()[: end - cut], "cut.kvwj")
    assert len(journal.events) == 9
    assert not journal.closed


def test_a_damaged_record_ends_what_is_believed_of_its_thread(tmp_path: Path) -> None:
    r = recorder(tmp_path)
    for i in range(10):
        r.emit(BackupAcked, i, i, -1)
    raw = bytearray(r.path.read_bytes())
    size = len(encode_event(BackupAcked(1, 1, 9, 9, -1)))
    raw[fmt.HEADER_BYTES + fmt.CHUNK_HEADER.size + 5 * size + 30] ^= 1
    journal = parse_journal(bytes(raw), "damaged.kvwj")
    assert len(journal.events) == 5
    assert "damaged record" in journal.anomalies[0]


def test_a_file_that_is_no_journal_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.kvwj"
    path.write_bytes(b"hello")
    with pytest.raises(JournalUnreadable, match="not a kvwitness journal"):
        read_journal(path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    r = recorder(tmp_path)
    raw = bytearray(r.path.read_bytes())
    raw[8:12] = (fmt.SCHEMA_VERSION + 1).to_bytes(4, "little")
    with pytest.raises(JournalUnreadable, match="newer than this kvwitness reads"):
        parse_journal(bytes(raw), "new.kvwj")


def test_hook_failures_are_counted_and_do_not_flood_the_journal(tmp_path: Path) -> None:
    r = recorder(tmp_path)
    for _ in range(1000):
        r.hook_failed("tree.insert", RuntimeError("boom"))
    failed = [e for e in read_journal(r.path).events if isinstance(e, HookFailed)]
    assert len(failed) < 20
    assert failed[-1].count == 512 and "boom" in failed[0].error


def test_event_codes_and_layouts_do_not_change_within_a_schema_version() -> None:
    """A journal written today must mean the same tomorrow: a change here needs a new SCHEMA_VERSION."""
    import dataclasses

    found = {
        code: (cls.__name__, cls.PACK.format, [f.name for f in dataclasses.fields(cls)][2:])
        for code, cls in sorted(REGISTRY.items())
    }
    expected = (Path(__file__).parent / "schema-1.txt").read_text()
    assert "\n".join(f"{code} {name} {layout} {' '.join(names)}" for code, (name, layout, names) in found.items()) == (
        expected.rstrip("\n")
    )
