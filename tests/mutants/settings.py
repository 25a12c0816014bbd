"""What is changed, what has to notice it, and where a copy of the checkout is made from."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """``settings.toml``. Paths are relative to ``root``, the checkout."""

    root: Path
    paths: tuple[str, ...]
    exceptions: tuple[str, ...]
    tests: tuple[str, ...]
    without: tuple[str, ...]
    python_path: tuple[str, ...]
    leave_out: tuple[str, ...]

    def files(self) -> Iterator[str]:
        """The modules whose code is changed, in order."""
        for path in self.paths:
            found = self.root / path
            if not found.exists():
                raise FileNotFoundError(f"{path} is named in the settings and does not exist")
            for module in sorted(found.rglob("*.py")) if found.is_dir() else [found]:
                name = module.relative_to(self.root).as_posix()
                if name not in self.exceptions:
                    yield name


def read_settings(path: Path, root: Path) -> Settings:
    """The settings in ``path`` for the checkout at ``root``."""
    raw: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    code, tests, tree = raw["code"], raw["tests"], raw.get("tree", {})
    return Settings(
        root=root,
        paths=tuple(code["paths"]),
        exceptions=tuple(code.get("except", ())),
        tests=tuple(tests["paths"]),
        without=tuple(tests.get("without", ())),
        python_path=tuple(tree.get("python-path", (".",))),
        leave_out=tuple(tree.get("leave-out", ())),
    )
