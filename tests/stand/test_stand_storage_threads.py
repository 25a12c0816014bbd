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
