"""How this program is called here, so that the commands it proposes can be copied."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

NAME: Final = "kvwitness"


def program() -> str:
    """``kvwitness`` where the shell finds this program by that name, else its path from here."""
    own = Path(sys.argv[0])
    if own.name != NAME or not own.is_file():
        return NAME
    found = shutil.which(NAME)
    if found is not None and Path(found).resolve() == own.resolve():
        return NAME
    path = own.absolute()
    return shlex.quote(os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path))


def runnable(text: str) -> str:
    """``text`` with the commands in it, in backquotes, as they can be called here."""
    return text.replace(f"`{NAME} ", f"`{program()} ")
