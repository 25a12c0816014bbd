"""The control: the same load on a server without HiCache, to see that it recomputes what C reused."""

from __future__ import annotations

import msgspec

from kvwitness.collectors.server_info import ServerInfo
from kvwitness.tracer.protocol.options import AbcOptions
from kvwitness.tracer.protocol.settings import control_differences

_NAMED = 5


class ControlRefused(Exception):
    """The server is no control for this run; the message says why, in one line."""


def check_control(subject: ServerInfo, control: ServerInfo) -> None:
    """Refuse a control server that has an L2 as well, or differs in more than that. Raises :class:`ControlRefused`."""
    if control.hicache.enabled is not False:
        state = "HiCache on" if control.hicache.enabled else "not said whether HiCache is off"
        raise ControlRefused(f"the control server has {state}: start it without --enable-hierarchical-cache")
    if control.radix_cache_disabled != subject.radix_cache_disabled:
        raise ControlRefused(
            "the control server's radix cache is off: only HiCache may be, or it never reuses anything"
        )
    if differences := control_differences(subject.raw_server, control.raw_server):
        more = f" and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
        raise ControlRefused(
            f"the control server differs in more than HiCache: {'; '.join(differences[:_NAMED])}{more}"
        )


def control_options(options: AbcOptions, seed: int) -> AbcOptions:
    """The options of the control run of a run with ``options`` and ``seed``."""
    return msgspec.structs.replace(options, control=True, seed=seed)
