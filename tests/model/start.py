"""Start model.run in the stand's Python: ``python tests/model/start.py --workloads 100``.

That environment has neither Hypothesis nor kvwitness's own packages, and its pins stay as they are: a folder of links
to what this environment has is put on its path.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvwitness.tracer.stand.environment import ensure_environment
from kvwitness.tracer.stand.model import ensure_model
from kvwitness.tracer.stand.paths import stand_path
from kvwitness.tracer.stand.progress import reporting

_BROUGHT = ("hypothesis", "sortedcontainers", "_hypothesis_globals", "_hypothesis_ftz_detector")
"""All of them plain Python."""


def start(*arguments: str, capture: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``model.run`` with these arguments, and wait."""
    with reporting() as progress:
        environment = ensure_environment(progress)
        model = ensure_model(environment, progress)
    with tempfile.TemporaryDirectory(prefix="kvwitness-model-") as folder:
        links = Path(folder)
        for name in _BROUGHT:
            origin = _origin(name)
            (links / origin.name).symlink_to(origin)
        (links / "kvwitness").mkdir()
        for part in ("collectors", "tracer"):
            (links / "kvwitness" / part).symlink_to(_origin(f"kvwitness.{part}"))
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "KVWITNESS_", "PYTHON"))}
        env |= {
            "PYTHONPATH": os.pathsep.join((str(stand_path(stand=True)), folder, str(Path(__file__).parents[1]))),
            "PYTHONWARNINGS": "ignore",
            "KVWITNESS_DIR": str(links / "journals"),
            "TMPDIR": folder,
        }
        command = [str(environment.python), "-m", "model.run", str(model), *arguments]
        return subprocess.run(command, cwd=folder, env=env, text=True, capture_output=capture, check=False)


def _origin(name: str) -> Path:
    """The folder or file of a package of this environment."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{name} is not installed here")
    path = Path(spec.origin)
    return path.parent if path.name == "__init__.py" else path


if __name__ == "__main__":
    sys.exit(start(*sys.argv[1:], capture=False).returncode)
