"""S20: the same load restores nothing under write_through and everything under write_back: two bundles, compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from journal_tools import renumbered, to_bytes
from report.runs import ENVIRONMENT, bundle_of, record
from soundness.simulate import Server

from kvwitness.patches.schema import events as ev
from kvwitness.tracer.cli.application import application

from .test_journals import FILL, A, with_facts

COPY = (ev.HostAlloc, ev.BackupQueued, ev.BackupAcked)


def run(path: Path, policy: str, *, acknowledged: bool, queued: bool = True) -> Path:
    """A, another prompt that pushes it out of L1, and A again."""
    server = Server(0, page=16, l1=96, l2=800, quiet=True)
    for rid, tokens in (("a", A), ("fill", FILL)):
        server.serve([(rid, tokens)])
        if not acknowledged:
            for node in server.nodes():
                node.slots = None
            server.free = list(range(server.host_total))
    server.serve([("c", A)])
    events = [
        event
        for event in server.events
        if acknowledged
        or not (isinstance(event, ev.BackupAcked) or (not queued and (isinstance(event, COPY) or _goes_out(event))))
    ]
    journal = path.parent / f"{path.name}-journal" / "scheduler-1-1.kvwj"
    journal.parent.mkdir()
    journal.write_bytes(to_bytes(with_facts(renumbered(events), write_policy=policy)))
    plain = {"cached_tokens": None, "cached_tokens_details": None, "prompt_tokens": 65}
    records = [record(rid, rid.upper() if rid != "fill" else "evict", at, **plain)
               for at, rid in enumerate(("a", "fill", "c"))]  # fmt: skip
    return bundle_of(path, records, journals=[journal], environment=ENVIRONMENT)


def _goes_out(event: ev.Event) -> bool:
    return isinstance(event, ev.TransferStarted) and event.direction == ev.Direction.D2H


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(application, ["compare", *map(str, arguments)], prog_name="kvwitness")


@pytest.mark.parametrize(
    ("queued", "why"), [(True, "(3 queued, and none acknowledged)"), (False, "(0 and none was even queued)")]
)
def test_the_policy_and_the_missing_backups_are_named(tmp_path: Path, queued: bool, why: str) -> None:
    through = run(tmp_path / "through", "write_through", acknowledged=False, queued=queued)
    back = run(tmp_path / "back", "write_back", acknowledged=True)
    refused = compare(through, back)
    assert refused.exit_code == 2
    assert "instance.write_policy: write_through | write_back" in refused.stderr
    assert f"one: acknowledged backups are missing {why}: L2 had nothing to restore" in refused.stderr
    allowed = compare(back, through, "--allow-differences")
    assert allowed.exit_code == 0
    assert f"other: acknowledged backups are missing {why}: L2 had nothing to restore" in allowed.stdout
    told = json.loads(compare(through, back, "--json").stdout)
    one, other = told["copies"]
    assert (one["acknowledged"], one["loaded"]) == (0, 0)
    assert other["acknowledged"] == other["backups"] > 0 and other["loaded"] == 64


def test_runs_that_copied_alike_say_nothing_of_it(tmp_path: Path) -> None:
    one, other = (run(tmp_path / name, "write_back", acknowledged=True) for name in ("one", "other"))
    assert "copies:" not in compare(one, other).output
