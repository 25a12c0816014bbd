"""For every test: no journal stays open behind it, and Ctrl-C interrupts.

A server is asked where it records by the journals that its process holds open, and a fake server's process is that of
the tests.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from kvwitness.patches.recorder import Recorder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Behind `&` in a script the shell has SIGINT ignored, for the commands that tests start as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def journals_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the recorders that a test has made and left open."""
    opened: list[Recorder] = []
    begin = Recorder.__init__

    def tracked(self: Recorder, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        opened.append(self)

    monkeypatch.setattr(Recorder, "__init__", tracked)
    yield
    for recorder in opened:
        recorder.close()
