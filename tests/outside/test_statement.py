"""What a recording from outside claims, and what speaks against it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvwitness.collectors.kv_events import KvMessage
from kvwitness.tracer.model import CrossCheck, Grade
from kvwitness.tracer.outside import counting
from kvwitness.tracer.outside.records import (
    KV_EVENTS,
    METRICS_LINES,
    RECORDING,
    SERVER,
    Counted,
    End,
    Head,
    Line,
    Lost,
    Server,
    Unanswered,
    Writer,
    parse_recording,
    read_recording,
)
from kvwitness.tracer.outside.statement import Statement, state

from .recorded import messages

S = 10**9
HEAD = Head("http://127.0.0.1:30000", "0.1", 1, 1.0, True, {"stacks": "not asked for"})
END = End(99 * S, "ended by the user")


def said(
    *counted: Line, server: dict[str, object] | None = None, kv: tuple[Line, ...] = (), end: bool = True
) -> Statement:
    files = {
        RECORDING: (HEAD, END) if end else (HEAD,),
        METRICS_LINES: counted,
        SERVER: (Server(1, server or {}, ()),),
        KV_EVENTS: kv,
    }
    raw = {name: b"".join(msgspec.json.encode(line) + b"\n" for line in lines) for name, lines in files.items()}
    return state(parse_recording(raw))


def counted(*, reset: bool = False, from_ns: int = 0, at_ns: int = S, **gained: float) -> Counted:
    names = {
        "device": counting.CACHED_DEVICE,
        "host": counting.CACHED_HOST,
        "loaded": counting.LOADED,
        "evicted": counting.EVICTED,
        "backed_up": counting.BACKED_UP,
    }
    return Counted(from_ns, at_ns, reset, {names[name]: value for name, value in gained.items()}, {})


def check(statement: Statement, about: str) -> CrossCheck:
    return next(one for one in statement.checks if about in one.witness)


def test_the_best_that_can_be_said_is_reported() -> None:
    statement = said(counted(device=1488.0, host=1504.0, loaded=1504.0))
    assert statement.grade is Grade.REPORTED
    assert statement.sentence == (
        "L2 reads of 1504 tokens, L1 reads of 1488 tokens reported by the server, not confirmed"
    )
    assert "kvwitness attach --url http://127.0.0.1:30000" in statement.raise_it
    assert "kvwitness serve" in statement.raise_it and statement.complete


def test_nothing_counted_is_no_claim() -> None:
    assert said(counted()).sentence == "no reuse was reported by the server in this time"
    assert said().sentence == "unknown: the server's counters were not read"
    assert said().grade is Grade.UNKNOWN


def test_a_release_that_tells_no_tiers_has_its_load_backs_alone() -> None:
    assert said(counted(loaded=96.0)).sentence == "L2 reads of 96 tokens reported by the server, not confirmed"


@pytest.mark.parametrize("ranks", [2, 4])
def test_s28_a_counter_that_is_summed_over_ranks_is_divided(ranks: int) -> None:
    server: dict[str, object] = {"tp_size": ranks, "pp_size": 1}
    statement = said(counted(host=1488.0, loaded=1488.0 * ranks), server=server)
    found = check(statement, "tokens loaded back")
    assert found.agrees is True
    assert found.explanation == (f"the counter is summed over {ranks} ranks and carries no rank label: divided by them")
    labelled = {**server, "counters_carry_rank": True}
    assert check(said(counted(host=1488.0, loaded=2976.0), server=labelled), "loaded back").agrees is False


def test_s16_a_promise_that_was_not_loaded_is_shown_side_by_side() -> None:
    found = check(said(counted(device=1994.0, host=6.0, loaded=0.0)), "tokens loaded back")
    assert found.agrees is False and (found.ours, found.theirs) == ("6 tokens cached", "0 tokens loaded back")
    assert "load-back was refused" in found.explanation


def test_counters_and_kv_events_are_compared_over_the_same_time() -> None:
    kv = messages("0.5.23")
    first, last = kv[0].batch.at_ns, kv[-1].batch.at_ns
    facts: dict[str, object] = {"max_total_num_tokens": 4096}
    line = counted(from_ns=first - 5 * S, at_ns=last + 5 * S, evicted=18080.0, backed_up=16880.0)
    statement = said(line, server=facts, kv=kv)
    assert check(statement, "evicted from L1").agrees is True
    assert check(statement, "copied to L2").agrees is True
    wrong = counted(from_ns=first - 5 * S, at_ns=last + 5 * S, evicted=18096.0, backed_up=16880.0)
    found = check(said(wrong, server=facts, kv=kv), "evicted from L1")
    assert found.agrees is False and "known causes" in found.explanation


def test_s25_a_witness_that_is_incomplete_is_compared_with_nothing() -> None:
    kv = messages("0.5.10.post1")
    line = counted(at_ns=kv[-1].batch.at_ns + 5 * S, evicted=18032.0, backed_up=16880.0)
    statement = said(line, server={"max_total_num_tokens": 4096, "version": "0.5.10.post1"}, kv=kv)
    assert check(statement, "evicted from L1").agrees is None
    events = next(one for one in statement.witnesses if one.name == "KV events")
    assert any("tells of L2" in gap for gap in events.gaps)


def test_a_restarted_server_and_a_silent_one_are_gaps() -> None:
    statement = said(counted(host=16.0, loaded=16.0), counted(reset=True, at_ns=2 * S), Unanswered(3 * S, "no answer"))
    assert not statement.complete
    assert any("was restarted between" in gap for gap in statement.gaps)
    assert any("did not answer 1 times" in gap for gap in statement.gaps)
    assert check(statement, "loaded back").agrees is None


def test_a_killed_collector_is_a_gap() -> None:
    (gap,) = said(counted(), end=False).gaps
    assert "the collector was killed" in gap


def test_lines_that_were_lost_end_what_the_kv_events_know() -> None:
    kv: tuple[Line, ...] = (*messages("0.5.23"), Lost(3, S, 2 * S, "No space left on device"))
    statement = said(counted(), kv=kv)
    assert any("3 lines lost" in gap for gap in statement.gaps)
    events = next(one for one in statement.witnesses if one.name == "KV events")
    assert any("could not be recorded" in gap for gap in events.gaps)


# --- the files ------------------------------------------------------------------------------------------


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    line: KvMessage = messages("0.5.23")[3]
    with Writer(tmp_path / "r") as writer:
        writer.write(RECORDING, HEAD)
        writer.write(KV_EVENTS, line)
        writer.write(RECORDING, END)
    found = read_recording(tmp_path / "r")
    assert found.of(KV_EVENTS, KvMessage) == (line,) and found.head == HEAD and found.end == END
    assert found.damage == ()


def test_a_line_that_is_cut_off_costs_that_line_alone(tmp_path: Path) -> None:
    with Writer(tmp_path / "r") as writer:
        writer.write(RECORDING, HEAD)
        writer.write(METRICS_LINES, counted(host=1.0))
        writer.write(METRICS_LINES, counted(host=2.0))
    file = tmp_path / "r" / METRICS_LINES
    file.write_bytes(file.read_bytes()[:-7])
    found = read_recording(tmp_path / "r")
    assert len(found.of(METRICS_LINES, Counted)) == 1
    assert found.damage == (f"{METRICS_LINES}: line 2 is cut off",)


FULL = """
import resource, signal, sys
from pathlib import Path
from kvwitness.tracer.outside.records import *
from kvwitness.tracer.outside.records import METRICS_LINES
resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.RLIM_INFINITY))
with Writer(Path(sys.argv[1])) as writer:
    for at in range(10):
        writer.write(METRICS_LINES, Unanswered(at, "x" * 80))
    assert writer.problems, "the limit was not felt"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.write(METRICS_LINES, Unanswered(10, "room again"))
    assert not writer.problems
"""


def test_a_full_disk_loses_lines_counts_them_and_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path / "r")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = read_recording(tmp_path / "r")
    assert found.damage == ()
    written = found.of(METRICS_LINES, Unanswered)
    (lost,) = found.of(METRICS_LINES, Lost)
    assert len(written) - 1 + lost.lines == 10 and written[-1].problem == "room again"
    assert lost.cause in (os.strerror(errno.EFBIG), "the disk is full")


def test_a_killed_writer_leaves_whole_lines(tmp_path: Path) -> None:
    code = FULL.split("resource.setrlimit")[0] + (
        "writer = Writer(Path(sys.argv[1]))\n"
        "for at in range(10**6):\n"
        "    writer.write(METRICS_LINES, Unanswered(at, 'x'))\n"
        "    if at == 50: print('going', flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "going\n"
        process.send_signal(signal.SIGKILL)
    found = read_recording(tmp_path / "r")
    assert len(found.of(METRICS_LINES, Unanswered)) > 50 and found.damage == ()
