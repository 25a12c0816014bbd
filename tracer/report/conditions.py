"""Under which conditions a run was made, as dotted names and values, and where two runs differ. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec

from kvwitness.tracer.bundle.summary import PROCESSES, RAW
from kvwitness.tracer.ledger.facts import InstanceFacts
from kvwitness.tracer.protocol.settings import NOT_SET, NOT_THERE, PASSING

UNKNOWN: Final = "unknown"

_NO_CONDITION: Final = (
    # Of the run: what it drew or found, not what it was asked to do.
    "run.id",
    "run.seed",
    "run.options.seed",
    "run.stopped",
    "run.journals",
    "run.eviction*",
    "run.flush*",
    "run.findings*",
    "run.settings_read*",
    "run.missing_rounds*",
    "run.earlier_parts*",
    # Of the moment.
    "memory.*",
    "host.memory_available_bytes",
    "host.gpus.*.memory_used_mib",
    "server.url",
    *(f"arguments.{name}" for name in PASSING),
    # Of the process.
    "instance.ranks*",
    "instance.attach.stopped_us",
    "instance.attach.pause_us",
    "instance.attach.snapshot*",
    "instance.process.role",
    "instance.process.pid",
    "instance.process.start",
    "instance.process.host",
    "instance.process.key",
    "instance.process.arguments.random_seed",
)


class Difference(msgspec.Struct, frozen=True):
    """A condition that is not the same in two runs."""

    name: str
    one: str
    other: str


def conditions_of(environment: Mapping[str, Any], instances: Sequence[InstanceFacts]) -> dict[str, str]:
    """What a run is compared by: the settings of run, host and server, and what the schedulers recorded."""
    found = dict(_flat_sections({k: v for k, v in environment.items() if k not in (RAW, PROCESSES, UNKNOWN)}))
    raw = environment.get(RAW)
    answered = raw.get("server_info") if isinstance(raw, Mapping) else None
    if isinstance(answered, Mapping):
        found |= dict(_flat("arguments", answered, NOT_SET))
    if instances:
        found |= instance_conditions(instances[0])
    return {name: value for name, value in found.items() if not _passing(name)}


def instance_conditions(instance: InstanceFacts) -> dict[str, str]:
    """What one scheduler recorded of its own settings."""
    return {name: value for name, value in _flat("instance", instance.facts.shown, NOT_SET) if not _passing(name)}


def recorded_by(instance: InstanceFacts) -> dict[str, str]:
    """Those, and what its recording itself was like: the way in, and for how long the process stood still."""
    return instance_conditions(instance) | dict(
        _flat("instance.attach", instance.facts.shown.get("attach") or {}, NOT_SET)
    )


def server_arguments(environment: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """All that the server answered about itself, as dotted names and values."""
    raw = environment.get(RAW)
    answered = raw.get("server_info") if isinstance(raw, Mapping) else None
    if not isinstance(answered, Mapping):
        return ()
    return tuple(pair for key, value in answered.items() for pair in _flat(str(key), value, NOT_SET))


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[Difference, ...]:
    """Each condition that differs, in the order of the first run; also what only one of them has."""
    names = [*one, *(name for name in other if name not in one)]
    pairs = ((name, one.get(name, NOT_THERE), other.get(name, NOT_THERE)) for name in names)
    return tuple(Difference(name, left, right) for name, left, right in pairs if left != right)


def unknown_conditions(environment: Mapping[str, Any]) -> tuple[str, ...]:
    """What the bundle itself lists as not readable."""
    listed = environment.get(UNKNOWN)
    return tuple(str(one) for one in listed) if isinstance(listed, list | tuple) else ()


def _passing(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in _NO_CONDITION)


def _flat_sections(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in environment.items():
        yield from _flat(name, value)


def _flat(name: str, value: Any, none: str = UNKNOWN) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner, none)
    elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}.{index}", inner, none)
    elif value is None:
        yield name, none
    else:
        yield name, value if isinstance(value, str) else msgspec.json.encode(value).decode()
