"""What the environment asks of the recorder.

``KVWITNESS_DIR``
    Folder for the journals; unset: nothing is patched.
``KVWITNESS_STANDBY``
    ``1``: nothing is recorded and nothing of a running scheduler is patched until ``kvwitness attach`` asks for
    it, through a socket below ``KVWITNESS_DIR`` (kvwitness.patches.standby).
``KVWITNESS_QUOTA_MB``
    Size of one process's journal, allocated when it opens (default 256).
``KVWITNESS_PROFILE``
    ``1``: time every hook's observers and record the figures when the journal closes (``make bench``).
``KVWITNESS_DIGEST``
    Digest KV pages when they are backed up and again when they were loaded (kvwitness.patches.page_digests):
    ``sample`` (one page in 16), ``all``, or ``1/N`` (one page in N). Unset or ``0``: no digests.
``KVWITNESS_START``
    Which start of a server the process belongs to, where that is not inherited (kvwitness.patches.start).
``KVWITNESS_FAULT``
    For tests of kvwitness itself, comma-separated: ``raise`` (every hook raises), ``drop:EVENT`` (events of
    this name are not recorded, as if the hook were dead), ``start-at-rid:TEXT`` (record nothing
    before a request is queued whose id contains the text).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DIGEST_VARIABLE: Final = "KVWITNESS_DIGEST"
SAMPLED_EVERY: Final = 16
"""One page in so many, where no other share is asked for."""


class ConfigError(ValueError):
    """An environment variable is not understood; the message is one line that says which and why."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Defects of the recorder itself, asked for by a test."""

    raise_in_hooks: bool = False
    dropped_events: frozenset[str] = frozenset()
    start_at_rid: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """The recorder's settings, read once per process."""

    directory: Path
    quota_bytes: int
    faults: Faults
    profile: bool = False
    standby: bool = False
    digest_every: int = 0
    """Of every so many pages of a backup one is digested; 0: none."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Config:
        """Read the variables above. Raises :class:`ConfigError`."""
        quota = environ.get("KVWITNESS_QUOTA_MB", "256")
        if not quota.isdigit() or int(quota) < 2:
            raise ConfigError(f"KVWITNESS_QUOTA_MB={quota!r}: give a whole number of MiB, 2 or more")
        return cls(
            directory=Path(environ["KVWITNESS_DIR"]),
            quota_bytes=int(quota) << 20,
            faults=_parse_faults(environ.get("KVWITNESS_FAULT", "")),
            profile=environ.get("KVWITNESS_PROFILE") == "1",
            standby=environ.get("KVWITNESS_STANDBY", "") not in ("", "0"),
            digest_every=parse_digest(environ.get(DIGEST_VARIABLE, "")),
        )


def parse_digest(text: str) -> int:
    """One page in how many is digested; 0: none. Raises :class:`ConfigError`."""
    known = {"": 0, "0": 0, "sample": SAMPLED_EVERY, "all": 1}
    if text in known:
        return known[text]
    share = text.removeprefix("1/")
    if share == text or not share.isdecimal() or int(share) < 1:
        raise ConfigError(f"{DIGEST_VARIABLE}={text!r}: known are sample, all, 1/N and 0")
    return int(share)


def _parse_faults(text: str) -> Faults:
    raise_in_hooks, dropped, at_rid = False, set[str](), ""
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = item.partition(":")
        if name == "raise" and not value:
            raise_in_hooks = True
        elif name == "drop" and value:
            dropped.add(value)
        elif name == "start-at-rid" and value:
            at_rid = value
        else:
            raise ConfigError(f"KVWITNESS_FAULT={item!r}: known are raise, drop:EVENT, start-at-rid:TEXT")
    return Faults(raise_in_hooks, frozenset(dropped), at_rid)
