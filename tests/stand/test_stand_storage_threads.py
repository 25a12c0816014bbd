"""Hooks on the storage threads of real releases, with a storage class of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_stand_copies import run_in_stand

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.schema import events as ev
from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.progress import SilentProgress

pytestmark = [pytest.mark.stand, pytest.mark.timeout(600)]


@pytest.mark.parametrize("release", ["0.5.23", pytest.param("0.5.17", marks=pytest.mark.slow)])
def test_what_raises_on_a_storage_thread_is_recorded_with_its_request(tmp_path: Path, release: str) -> None:
    environment = ensure_environment(SilentProgress(), release=release)
    script = Path(__file__).with_name("check_storage_threads.py")
    out = run_in_stand(environment, str(script), str(tmp_path), KVWITNESS_STAND="1")
    journal = read_journal(Path(out.splitlines()[-1]))
    names = {e.id: e.text for e in journal.events if isinstance(e, ev.Text)}
    assert not journal.gaps and not [e for e in journal.events if isinstance(e, ev.HookFailed)]
    assert [(e.tokens, e.completed) for e in journal.events if isinstance(e, ev.StorageBackedUp)] == [(64, 64)]
    found = [(names[e.req], e.tokens) for e in journal.events if isinstance(e, ev.StorageLookedUp)]
    assert found == [("hit", 64), ("fine", 32)]
    failed = [(e.work, names.get(e.req, ""), e.error) for e in journal.events if isinstance(e, ev.StorageFailed)]
    assert failed == [
        (ev.StorageWork.WRITE, "", "OSError: write refused on purpose"),
        (ev.StorageWork.LOOK_UP, "lost", "OSError: look-up refused on purpose"),
        (ev.StorageWork.READ, "torn", "OSError: read refused on purpose"),
    ]


@pytest.mark.slow
def test_prefetches_of_hiradixcache_are_recorded_with_what_they_brought(tmp_path: Path) -> None:
    environment = ensure_environment(SilentProgress(), release="0.5.17")
    script = Path(__file__).with_name("check_prefetch.py")
    out = run_in_stand(environment, str(script), str(tmp_path), KVWITNESS_STAND="1")
    journal = read_journal(Path(out.splitlines()[-1]))
    names = {e.id: e.text for e in journal.events if isinstance(e, ev.Text)}
    assert not journal.gaps and not [e for e in journal.events if isinstance(e, ev.HookFailed)]
    asked = {names[e.req]: (e.start, e.tokens, e.issued) for e in journal.events if isinstance(e, ev.PrefetchAsked)}
    assert asked["whole"] == (0, 64, 1) and asked["behind"] == (64, 32, 1) and asked["short"] == (0, 8, 0)
    done = {
        names[e.req]: (e.start, e.completed, e.existing, e.loaded, e.deadline, e.slots)
        for e in journal.events
        if isinstance(e, ev.PrefetchDone)
    }
    assert done == {
        "whole": (0, 64, 0, 64, 0, (ev.Run(128, 64),)),
        "behind": (64, 32, 0, 32, 0, (ev.Run(256, 32),)),
        "again": (0, 96, 64, 32, 0, (ev.Run(512, 96),)),
        "late": (0, 32, 0, 32, 1, (ev.Run(896, 32),)),
        "torn": (0, 16, 0, 16, 0, (ev.Run(1024, 16),)),
        "part": (0, 16, 0, 16, 0, (ev.Run(768, 16),)),
    }
    stopped = [
        (names[e.req], names[e.policy], e.found, e.completed)
        for e in journal.events
        if isinstance(e, ev.PrefetchStopped)
    ]
    assert stopped == [("hasty", "best_effort", 0, 0), ("part", "best_effort", 64, 16), ("late", "timeout", 64, 32)]
    revoked = {names[e.req]: names[e.reason] for e in journal.events if isinstance(e, ev.PrefetchRevoked)}
    assert revoked.keys() == {"missed", "hasty"}
    assert revoked["hasty"] == "cut short by the prefetch policy best_effort"
    assert revoked["missed"].startswith("the look-up found 0 tokens")
