"""What one scheduler recorded of itself, as conditions of a run."""

from __future__ import annotations

from pathlib import Path

from kvwitness.collectors.journal import read_journal
from kvwitness.patches.config import Config, Faults
from kvwitness.patches.instance import describe_process
from kvwitness.patches.schema.events import FactKind
from kvwitness.patches.witness import Witness
from kvwitness.tracer.ledger.derive import derive
from kvwitness.tracer.report.conditions import conditions_of, differences, instance_conditions


class Arguments:
    page_size = 16


def test_which_start_host_and_key_it_was_is_no_condition(tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        w = Witness(Config(tmp_path / name, 4 << 20, Faults()))
        w.open("scheduler")
        w.facts(FactKind.PROCESS, describe_process(w, "scheduler", Arguments()))
        w.close()
        (path,) = (tmp_path / name).glob("*.kvwj")
        found.append(derive(read_journal(path)))
    one, other = found
    told, also = one.facts.process, other.facts.process
    assert told is not None and also is not None and told.start != also.start and told.key != also.key
    assert differences(conditions_of({}, [one]), conditions_of({}, [other])) == ()
    assert instance_conditions(one)["instance.process.arguments.page_size"] == "16"
