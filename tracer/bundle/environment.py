"""``environment.json`` of a bundle that was recorded from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvwitness.collectors.environment import HostFacts, ServerProcesses
from kvwitness.tracer.bundle.summary import PROCESSES
from kvwitness.tracer.outside.records import HOST, SERVER, HostReading, Server, parse_recording


def environment_of_recording(
    files: Mapping[str, bytes], why: str, host: HostFacts, processes: ServerProcesses
) -> dict[str, Any]:
    """Its contents. ``unknown`` gathers everything that could not be read."""
    recording = parse_recording(files)
    servers, readings = recording.of(SERVER, Server), recording.of(HOST, HostReading)
    server = dict(servers[0].facts) if servers else {}
    machine: dict[str, Any] = msgspec.to_builtins(host)
    if any(one.startswith("gpus") for one in machine["unknown"]):
        machine["gpus"] = None  # An empty list would say that there are none.
    unknown = [f"host: {one}" for one in machine.pop("unknown")]
    unknown += [f"server: {one}" for one in server.pop("unknown", ())]
    if processes.reason:
        unknown.append(f"processes: {processes.reason}")
    head = recording.head
    return {
        "unknown": unknown,
        "recording": {
            "from": "outside: no process of the server was touched",
            "url": head.url if head else None,
            "ended": why,
            "interval_s": head.interval_s if head else None,
            "memory_before": _memory(readings[:1]),
            "memory_after": _memory(readings[-1:]),
        },
        "host": machine,
        "server": server,
        PROCESSES: msgspec.to_builtins(processes.processes),
    }


def _memory(readings: tuple[HostReading, ...]) -> dict[str, Any] | None:
    if not readings:
        return None
    found = msgspec.to_builtins(readings[0])
    return {name: value for name, value in found.items() if name not in ("type", "at_ns")}
