"""Snapshots of journals that are finished, damaged, or being written by several threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from kvwitness.collectors.journal import JournalUnreadable, parse_journal, read_journal
from kvwitness.patches.recorder import Recorder
from kvwitness.patches.schema import format as fmt
from kvwitness.patches.schema.events import Queued
from kvwitness.tracer.bundle.snapshot import cut_after, snapshot_bytes, snapshot_journal, whole_records

from .runs import record_journal

CHUNK = 1 << 12


def test_a_finished_journal(tmp_path: Path) -> None:
    source = record_journal(tmp_path, ["a", "b"])
    snapshot_journal(source, tmp_path / "copies" / source.name)
    assert read_journal(tmp_path / "copies" / source.name) == read_journal(source)


def test_only_used_chunks_are_copied(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="r", quota_bytes=64 << 20)
    recorder.emit(Queued, 1, 10, 0)
    content = snapshot_bytes(recorder.path)
    assert recorder.path.stat().st_size > 60 << 20
    assert len(content) == fmt.HEADER_BYTES + fmt.CHUNK_BYTES
    journal = parse_journal(content, recorder.path.name)
    assert [event.seq for event in journal.events] == [1]
    assert not journal.closed
    assert journal.anomalies == ()
    recorder.close()


def test_a_journal_that_several_threads_write_has_no_holes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, role="r", quota_bytes=64 << 20, chunk_bytes=CHUNK)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            recorder.emit(Queued, 1, 10, 0)
            time.sleep(0.0002)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        last = 0
        for _ in range(8):
            time.sleep(0.01)
            journal = parse_journal(snapshot_bytes(recorder.path), "j.kvwj")
            assert journal.gaps == ()
            assert journal.anomalies == ()
            assert journal.events[-1].seq == len(journal.events) > last
            last = journal.events[-1].seq
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    recorder.close()
    whole = read_journal(recorder.path)
    assert parse_journal(snapshot_bytes(recorder.path), recorder.path.name) == whole


def test_damage_is_copied_as_it_is(tmp_path: Path) -> None:
    source = record_journal(tmp_path, ["a", "b", "c"])
    raw = bytearray(source.read_bytes())
    _, end, _ = list(whole_records(bytes(raw[fmt.HEADER_BYTES :])))[1]
    raw[fmt.HEADER_BYTES + end + 20] ^= 0xFF
    source.write_bytes(raw)
    journal = parse_journal(snapshot_bytes(source), source.name)
    assert journal.anomalies
    assert journal == read_journal(source)


def test_a_file_cut_off_in_a_chunk_header(tmp_path: Path) -> None:
    source = record_journal(tmp_path, ["a"])
    source.write_bytes(source.read_bytes()[: fmt.HEADER_BYTES + 7])
    assert snapshot_bytes(source) == source.read_bytes()


@pytest.mark.parametrize("content", [b"", b"KVWJRNL1", b"x" * 5000, fmt.FILE_MAGIC + bytes(5000)])
def test_not_a_journal(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.kvwj"
    path.write_bytes(content)
    with pytest.raises(JournalUnreadable):
        snapshot_bytes(path)
    with pytest.raises(JournalUnreadable):
        snapshot_bytes(tmp_path / "missing.kvwj")


def test_cut_after(tmp_path: Path) -> None:
    raw = record_journal(tmp_path, ["a", "b", "c"]).read_bytes()
    chunk = raw[fmt.HEADER_BYTES :]
    seqs = [seq for _, _, seq in whole_records(chunk)]
    assert len(seqs) > 4
    for last in range(1, seqs[-1] + 1):
        kept = cut_after(chunk, last)
        assert [seq for _, _, seq in whole_records(kept)] == list(range(1, last + 1))
        assert len(kept) == len(chunk)
    assert cut_after(chunk, 0) == b""
    begin, _, _ = list(whole_records(chunk))[3]
    in_flight = bytearray(chunk)
    in_flight[begin : begin + fmt.COMMIT.size] = bytes(fmt.COMMIT.size)  # written, not committed
    assert not any(cut_after(bytes(in_flight), 3)[begin:])
