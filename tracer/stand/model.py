"""The tiny random models that the stand serves, written by the stand's own Python."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from kvwitness.tracer.stand.building import build_once, run_reported
from kvwitness.tracer.stand.environment import StandEnvironment
from kvwitness.tracer.stand.paths import patches_folder, stand_path
from kvwitness.tracer.stand.places import stand_home
from kvwitness.tracer.stand.progress import Progress

ModelKind = Literal["qwen2", "dsv2", "mellum", "lfm2"]
_MODULE = "kvwitness.patches.stand.make_model"


def model_root(kind: ModelKind, home: Path | None = None) -> Path:
    """Where the model is or will be: named by the text of the script that writes it."""
    script = (patches_folder() / "stand" / "make_model.py").read_bytes()
    base = home if home is not None else stand_home()
    return base / "models" / f"{kind}-{hashlib.sha256(script).hexdigest()[:16]}"


def ensure_model(
    environment: StandEnvironment,
    progress: Progress,
    kind: ModelKind = "qwen2",
    home: Path | None = None,
) -> Path:
    """Return the folder of the model `kind`, writing it first if there is no finished one (about 3 s).

    Raises StandBuildError if it cannot be written.
    """
    root = model_root(kind, home)

    def build(folder: Path) -> Mapping[str, str]:
        progress.phase(f"stand: writing the tiny {kind} model")
        env = os.environ | {"PYTHONPATH": str(stand_path()), "PYTHONSAFEPATH": "1"}
        argv = [str(environment.python), "-m", _MODULE, kind, str(folder)]
        run_reported(argv, folder / "build.log", progress, env)
        return {"kind": kind}

    return build_once(root, build, progress)
