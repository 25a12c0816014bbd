"""The server's settings while a run goes on, and beside those of the control server. Pure, but for who asks.

A run compares requests of one server with one configuration. So its settings are read before the first series and
after each one, with the processes that serve: a server that was restarted has lost its cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, Final

import msgspec

from kvwitness.collectors.environment import ProcessIdentity

NOT_SET: Final = "not set"
"""An argument that the server has and was not given."""
NOT_THERE: Final = "not there"
"""A setting that one of the two does not mention."""

PASSING: Final = (
    "url",
    "host",
    "port",
    "nccl_port",
    "random_seed",
    "dist_init_addr",
    "launch_command",
    "status",
    "internal_states*",
    "startup*",
    "*memory_usage*",
    "*throughput*",
)
"""What /server_info tells of the moment or the address, and not of how the server works."""

CLOCK_STEP_S: Final = 5.0
_OF_HICACHE: Final = ("enable_hierarchical_cache", "hicache_*")


class SettingChange(msgspec.Struct, frozen=True):
    """A setting that is not the same any more."""

    after: str
    """The last moment at which it was the old one."""
    before: str
    """The first at which it was the new one."""
    name: str
    one: str
    other: str


class SettingsRead(msgspec.Struct, frozen=True):
    """The settings at one moment of a run."""

    moment: str
    settings: Mapping[str, str]
    processes: tuple[ProcessIdentity, ...]
    """Those that serve; empty where they cannot be seen."""


class SettingsLog(msgspec.Struct, frozen=True):
    """What reading the settings again and again has shown."""

    moments: tuple[str, ...] = ()
    """When they were read."""
    changes: tuple[SettingChange, ...] = ()
    restarts: tuple[str, ...] = ()
    """One line for each time at which other processes served than before."""
    processes: str = ""
    """Whether the processes could be watched, and why not."""


def flat_settings(raw: Mapping[str, Any]) -> dict[str, str]:
    """``/server_info`` as dotted names and texts, without what passes."""
    return {name: text for name, text in _flat("", raw) if not _matches(name, PASSING)}


def logged(reads: Sequence[SettingsRead]) -> SettingsLog:
    """Compare each reading with the one before it."""
    changes: list[SettingChange] = []
    restarts: list[str] = []
    for one, other in pairwise(reads):
        for name, left, right in _differences(one.settings, other.settings):
            changes.append(SettingChange(one.moment, other.moment, name, left, right))
        if one.processes and other.processes and not _same(one.processes, other.processes):
            restarts.append(f"between {one.moment} and {other.moment} the server's processes were replaced")
    seen = any(read.processes for read in reads)
    return SettingsLog(
        tuple(read.moment for read in reads),
        tuple(changes),
        tuple(restarts),
        "watched" if seen else "the server's processes cannot be seen from here: a restart shows by its settings alone",
    )


def setting_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Each setting in which two answers of /server_info differ, as a line."""
    pairs = _differences(flat_settings(one), flat_settings(other))
    return tuple(f"{name}: {left} and {right}" for name, left, right in pairs)


def control_differences(subject: Mapping[str, Any], control: Mapping[str, Any]) -> tuple[str, ...]:
    """Each setting but HiCache's own in which the control server is another one, as a line."""
    one, other = (
        {name: text for name, text in flat_settings(raw).items() if not _matches(name, _OF_HICACHE)}
        for raw in (subject, control)
    )
    return tuple(f"{name}: {left} and {right}" for name, left, right in _differences(one, other))


def _same(one: Sequence[ProcessIdentity], other: Sequence[ProcessIdentity]) -> bool:
    """The same processes. When they started is reckoned from the wall clock, which may be set meanwhile."""
    return len(one) == len(other) and all(
        left.pid == right.pid and abs(left.started - right.started) < CLOCK_STEP_S
        for left, right in zip(one, other, strict=True)
    )


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    if not one or not other:
        return  # One of them was not told: nothing follows.
    for name in [*one, *(name for name in other if name not in one)]:
        left, right = one.get(name, NOT_THERE), other.get(name, NOT_THERE)
        if left != right:
            yield name, left, right


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not name):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else str(key), inner)
    elif value is None:
        yield name, NOT_SET
    else:
        yield name, value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
