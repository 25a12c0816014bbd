"""The whole product on a real SGLang server: the stand, the hooks, the journals, the verdicts, the bundle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stand_fixtures import StartServer, play_story

from kvwitness.collectors.journal import find_journals, read_journal
from kvwitness.patches.schema.events import HookFailed, Inserted, LoadDone, LoadQueued, Prefill
from kvwitness.tracer.bundle.read import open_bundle
from kvwitness.tracer.bundle.rows import one_of_series
from kvwitness.tracer.bundle.verify import verify_bundle
from kvwitness.tracer.demo.run import DemoOptions, DemoResult, run_demo
from kvwitness.tracer.demo.variants import VARIANTS, wrong_about_c
from kvwitness.tracer.judgement import SCHEDULER_ROLE, judge
from kvwitness.tracer.model import Grade, RequestVerdict, Tier
from kvwitness.tracer.stand.paths import stand_path
from kvwitness.tracer.stand.progress import SilentProgress

pytestmark = [pytest.mark.stand, pytest.mark.timeout(900)]


def about(result: DemoResult, series: str) -> RequestVerdict | None:
    record = one_of_series(result.run.records, series)
    assert record is not None
    return {verdict.rid: verdict for verdict in result.bundle.verdicts}.get(record.rid)


def demo(tmp_path: Path, variant: str = "none", **options: object) -> DemoResult:
    chosen = DemoOptions(variant=VARIANTS[variant], **options)  # type: ignore[arg-type]
    return run_demo(chosen, tmp_path / "bundle", SilentProgress())


def test_a_repeat_request_gets_a_proven_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temp"))
    result = demo(tmp_path)
    assert not list((tmp_path / "temp").glob("kvwitness-*")), "what the bundle holds is kept twice"
    a, b, c = (about(result, series) for series in "ABC")
    assert a is not None and (a.tier, a.grade, a.sentence) == (Tier.RECOMPUTED, Grade.RECOMPUTED, "recomputed")
    assert b is not None and (b.tier, b.grade, b.sentence) == (Tier.L1, Grade.CONFIRMED, "L1 read confirmed")
    assert c is not None and (c.tier, c.grade, c.sentence) == (Tier.L2, Grade.CONFIRMED, "L2 read confirmed")
    # Every witness was there and agreed: the response, the scheduler's request, the counters in /metrics.
    assert {check.agrees for check in c.checks} == {True}
    assert {check.witness.split(":")[0] for check in c.checks} == {
        "cached tokens by the response",
        "cached tokens by the scheduler",
        "metrics",
    }
    sent = {record.series: record for record in result.run.records}
    assert sent["C"].output_ids == sent["A"].output_ids
    report = verify_bundle(result.bundle.path)
    assert report.ok, report.problems
    opened = open_bundle(result.bundle.path)
    assert opened.verdicts == result.bundle.verdicts
    # As with any other run, so that it can be compared with one.
    assert opened.environment["model"]["weights_sha256"] and set(opened.environment["memory"]) == {"before", "after"}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("none", "kill", "byte-flip")])
def test_what_goes_wrong_is_said_and_nothing_is_confirmed(tmp_path: Path, variant: str) -> None:
    result = demo(tmp_path, variant)
    c = about(result, "C")
    assert wrong_about_c(VARIANTS[variant], c) is None
    assert c is None or c.grade not in (Grade.CONFIRMED, Grade.VERIFIED)
    assert verify_bundle(result.bundle.path).ok


def test_after_kill_9_everything_recorded_before_is_in_the_bundle(tmp_path: Path) -> None:
    """The scheduler dies while C's load-back copies: A and B keep their verdicts, C's load has no end."""
    result = demo(tmp_path, "kill")
    a, b = about(result, "A"), about(result, "B")
    assert a is not None and a.grade is Grade.RECOMPUTED
    assert b is not None and b.grade is Grade.CONFIRMED
    (path,) = [p for p in find_journals(result.bundle.path) if p.name.startswith(SCHEDULER_ROLE)]
    journal = read_journal(path)
    kinds = {type(event) for event in journal.events}
    assert LoadQueued in kinds and LoadDone not in kinds
    assert not journal.closed and not journal.gaps
    c = about(result, "C")
    assert wrong_about_c(VARIANTS["kill"], c) is None
    assert c is not None and any("killed" in note for note in c.notes)
    assert verify_bundle(result.bundle.path).ok
    assert "killed" in (result.bundle.path / "summary.md").read_text()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tree_core": "python"}, id="python-core"),
        pytest.param({"write_policy": "write_back"}, id="write_back", marks=pytest.mark.slow),
        pytest.param(
            {"write_policy": "write_through_selective", "second_hit": True}, id="selective", marks=pytest.mark.slow
        ),
        pytest.param({"overlap": True}, id="overlap", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2}, id="tp2", marks=pytest.mark.slow),
        pytest.param({"page_size": 1}, id="page1", marks=pytest.mark.slow),
        pytest.param({"page_size": 64}, id="page64", marks=pytest.mark.slow),
    ],
)
def test_settings(tmp_path: Path, options: dict[str, object]) -> None:
    result = demo(tmp_path, **options)
    grades = [(v.tier, v.grade) for v in (about(result, s) for s in "ABC") if v is not None]
    assert grades == [
        (Tier.RECOMPUTED, Grade.RECOMPUTED),
        (Tier.L1, Grade.CONFIRMED),
        (Tier.L2, Grade.CONFIRMED),
    ]


@pytest.mark.slow
def test_a_policy_that_backs_up_nothing_on_the_first_hit_says_so(tmp_path: Path) -> None:
    c = about(demo(tmp_path, write_policy="write_through_selective"), "C")
    assert c is not None
    assert "write_through_selective" in str(c.ranges)
    assert any(r.tier is Tier.RECOMPUTED and "backup" in r.detail for r in c.ranges)


def test_with_every_hook_raising_the_server_answers_the_same(start_server: StartServer, tmp_path: Path) -> None:
    plain = play_story(start_server().url)
    data = tmp_path / "data"
    server = start_server(extra_env={"KVWITNESS_DIR": str(data), "KVWITNESS_FAULT": "raise"})
    broken = play_story(server.url)
    assert (broken.a, broken.b, broken.c) == (plain.a, plain.b, plain.c)
    server.stop()
    journals = [read_journal(path) for path in find_journals(data)]
    (scheduler,) = [journal for journal in journals if journal.role == SCHEDULER_ROLE]
    failed = [event for event in scheduler.events if isinstance(event, HookFailed)]
    names = {event.hook for event in failed}
    # Each hook that this story passes through failed, and each failure was counted.
    assert len(names) >= 20
    assert all("raised on purpose" in event.error for event in failed)
    assert not any(isinstance(event, Inserted | Prefill) for event in scheduler.events)
    assert all(v.grade is not Grade.CONFIRMED for v in judge(journals).verdicts)


PROBE = """
import atexit, json, os, sys, threading

def plugin():
    def report():
        import multiprocessing
        cache = sys.modules.get("sglang.srt.mem_cache.unified_radix_cache")
        if cache is None:
            return
        found = {
            "modules": sorted(m for m in sys.modules if m.startswith("kvwitness")),
            "hooked": [n for n, f in vars(cache.UnifiedRadixCache).items() if hasattr(f, "__kvwitness_hook__")],
            "finders": [type(f).__module__ for f in sys.meta_path if type(f).__module__.startswith("kvwitness")],
            "threads": [t.name for t in threading.enumerate()],
            "files": [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                      if os.path.exists(f"/proc/self/fd/{fd}")],
        }
        with open(os.path.join(os.environ["PROBE_DIR"], f"{os.getpid()}.json"), "w") as out:
            json.dump(found, out)
    atexit.register(report)
"""


def test_installed_but_not_enabled_leaves_every_process_alone(start_server: StartServer, tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    info = probe / "kvw_probe-1.dist-info"
    info.mkdir(parents=True)
    (probe / "kvw_probe.py").write_text(PROBE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvw-probe\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nkvw_probe = kvw_probe:plugin\n")
    # The stand needs its own plugin, so look for what kvwitness itself would have brought.
    path = f"{stand_path(stand=True)}:{probe}"
    server = start_server(extra_env={"PYTHONPATH": path, "PROBE_DIR": str(tmp_path)})
    story = play_story(server.url)
    assert story.c.host_tokens > 0
    server.stop()
    reports = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert len(reports) >= 2, "the scheduler and the HTTP process"
    for found in reports:
        own = [m for m in found["modules"] if not m.startswith("kvwitness.patches.stand")]
        # The two ways in, for releases with and without a plugin group, and nothing behind them.
        assert own == ["kvwitness", "kvwitness.patches", "kvwitness.patches.entry", "kvwitness.patches.way_in"]
        assert found["hooked"] == []
        assert [m for m in found["finders"] if not m.startswith("kvwitness.patches.stand")] == []
        assert not [name for name in found["threads"] if "kvwitness" in name]
        assert not [file for file in found["files"] if file.endswith(".kvwj")]
