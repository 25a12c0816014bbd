"""The page about the model (docs/rules.md), made from its declaration: ``python -m kvwitness.tracer.rules.page``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvwitness.patches.schema.events import REGISTRY, Event
from kvwitness.tracer.rules.declare import Rules
from kvwitness.tracer.rules.fields import Field, event_fields, fact_fields
from kvwitness.tracer.rules.model import MODEL

_HEAD = """# Rules

```sh
make rules                       # makes this page again from the declaration
kvwitness explain BUNDLE C       # which of them a request's record breaks, if any
```

Every event that kvwitness records is held against a model of the cache before anything is claimed. For each event
type this page says what must hold before it (*must*: a guard) and what holds after it (*then*: an effect). Where a
guard does not hold, the record contradicts itself; the place is named, and nothing is confirmed that rests on events
across it. These are the only rules by which it is decided whether events fit together; what a claim needs beside that
is in the [evidence model](evidence-model.md).

What this does not say: that SGLang keeps to it. The rules hold over every recorded journal of the tests, and over what
was seen of SGLang 0.4.6 to 0.5.23; a release that does otherwise would lose claims, and gain none.
"""


def page(rules: Rules) -> str:
    """All of it."""
    return "\n".join([_HEAD, *_events(rules), *_fields(rules), ""])


def _events(rules: Rules) -> Iterator[str]:
    for kind in (REGISTRY[code] for code in sorted(REGISTRY)):
        own = [rule for rule in rules.all if rule.kind is kind]
        if not own:
            continue
        yield f"## {kind.__name__}\n\n{_about(kind)}\n"
        for rule in own:
            name = rule.name.split(": ", 1)[1]
            what = "must" if rule.guard else "then"
            yield f"* **{what}: {name}.** {rule.says}"
        yield ""


def _about(kind: type[Event]) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _fields(rules: Rules) -> Iterator[str]:
    yield "## Every field\n"
    yield "No field of an event is believed unread: a guard or an effect reads it, or it is free.\n"
    yield from _table("event", "guards", "effects", event_fields(rules))
    yield "\nThe same of every fact that an instance tells of itself, by the module that reads it:\n"
    yield from _table("fact", "read in", "", fact_fields())


def _table(what: str, guards: str, effects: str, fields: Iterable[Field]) -> Iterator[str]:
    yield f"| {what} | field | {guards} | {effects} |"
    yield "|---|---|---|---|"
    for field in fields:
        free = f"free: {field.free}" if field.free else ""
        read = "; ".join(field.guards) or free
        yield f"| {field.owner} | `{field.name}` | {read} | {'; '.join(field.effects)} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(MODEL), "utf-8")
