"""Programs that must not outlive this one, however it ends."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import IO, cast


@contextlib.contextmanager
def killed_with_us(pid: int) -> Iterator[None]:
    """Kill the process group ``pid`` should this process die, even by SIGKILL, before the block ends.

    A shell waits on a pipe whose other end only this process holds. The kernel closes it when this
    process dies in whatever way, which no handler inside the process could promise.
    """
    watchdog = subprocess.Popen(
        ["/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$1"', "kvwitness-watchdog", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        # Killed before the pipe closes: it must never fire at a process id that others may have by then.
        watchdog.kill()
        watchdog.wait()
        cast(IO[bytes], watchdog.stdin).close()
