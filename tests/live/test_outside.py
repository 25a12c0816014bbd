"""A real server that is only looked at from outside: what is said of it, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from attach_fixtures import load
from outside_tools import kvwitness, publishing, running, serving

from kvwitness.tracer.stand.releases import NEWEST

pytestmark = [pytest.mark.stand, pytest.mark.timeout(900)]


def test_outside_only_under_load_the_servers_word_is_reported_and_no_more(tmp_path: Path) -> None:
    bundle, recorded = tmp_path / "bundle", tmp_path / "outside"
    with serving(NEWEST, tmp_path / "server", extra_args=publishing(tmp_path)) as server:
        with load(server.url) as seen:
            arguments = ("--outside", "--url", server.url, "--out", str(recorded), "--stacks")
            with running("attach", *arguments) as recorder:
                recorder.said("recording SGLang")
                run = kvwitness("run", "abc", "--url", server.url, "--out", str(bundle))
                answered = seen.answers
                assert recorder.interrupt() == 0, recorder.err
        assert seen.wrong == [] and answered > 8
    by_series = {row["series"]: row for row in run["requests"]}
    assert by_series["C"]["grade"] == "reported" and by_series["C"]["l2"] >= 1488
    assert by_series["C"]["sentence"].startswith("L2 read reported by the server, not confirmed")
    shown = kvwitness("show", str(recorded))["outside"]["statement"]
    assert shown["grade"] == "reported"
    assert "reported by the server, not confirmed" in shown["sentence"] and "kvwitness" in shown["raise_it"]
    assert shown["reported"]["L2"] >= 1488 and shown["complete"]
    assert kvwitness("verify", str(recorded))["ok"]
