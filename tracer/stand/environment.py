"""The virtual environment that the stand's SGLang runs in: built once, pinned, outside the checkout."""

from __future__ import annotations

import functools
import hashlib
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kvwitness.tracer.stand.building import StandBuildError, build_once, is_ready, run_reported
from kvwitness.tracer.stand.places import stand_home
from kvwitness.tracer.stand.progress import Progress
from kvwitness.tracer.stand.releases import NEWEST, known_release

SGLANG_RELEASE = NEWEST
# Raise it when the way an environment is laid out or installed changes while the pins do not.
LAYOUT_VERSION = 1
# About 3 GB of downloads and 6 GB unpacked, with room for pip's temporary files.
MIN_FREE_BYTES = 12 * 10**9
# An older release brings itself, transformers and a few more.
MIN_FREE_BYTES_SHARING = 2 * 10**9

# Makes a process of an older release a stand before it runs anything, and does nothing in any other
# process. kvwitness itself is found through the PYTHONPATH that the stand gives its servers.
_ENTER_THE_STAND = (
    'import os; os.environ.get("KVWITNESS_STAND") == "1" and '
    '__import__("kvwitness.patches.stand.boot", fromlist=["boot"]).from_pth()\n'
)


@dataclass(frozen=True)
class StandEnvironment:
    """A finished environment."""

    root: Path
    release: str
    shared: StandEnvironment | None = None
    """The environment whose packages this one sees besides its own: an older release's is the newest's."""

    @property
    def python(self) -> Path:
        """The interpreter that has SGLang."""
        return venv_python(self.root)

    @property
    def torch_extensions(self) -> Path:
        """Where SGLang's just-in-time C++ extensions are built. Apart from the user's own folder, since
        two SGLang installations that share one rebuild each other's extensions in turn."""
        return self.root / "torch-extensions"


# Makes a virtual environment with everything in the pins file at `venv`: the seam that tests replace.
Installer = Callable[[Path, Path, Path, Progress], None]


def venv_python(root: Path) -> Path:
    return root / "venv" / "bin" / "python"


def pins_text(release: str = SGLANG_RELEASE) -> str:
    """The pins of one release: `name==version` lines, and nothing else."""
    return (resources.files("kvwitness.tracer.stand") / f"pins-{release}.txt").read_text()


def environment_key(pins: str, python_version: tuple[int, int], layout: int = LAYOUT_VERSION) -> str:
    """The folder name of an environment: the same for the same Python, pins and layout, else another."""
    text = f"layout {layout}\npython {python_version[0]}.{python_version[1]}\n{pins}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def environment_root(release: str = SGLANG_RELEASE, home: Path | None = None) -> Path:
    """Where the environment of `release` is or will be, for the Python this runs on.

    Raises UnsupportedError if the stand does not run `release`.
    """
    base = home if home is not None else stand_home()
    stands_for = pins_text(known_release(release).name)
    if release != NEWEST:
        # It is of no use without the very packages that it was made to share.
        stands_for += f"shared {environment_root(NEWEST, base).name}\n{_ENTER_THE_STAND}"
    return base / f"{release}-{environment_key(stands_for, sys.version_info[:2])}"


def environment_ready(root: Path) -> bool:
    """Whether a finished environment is at `root` whose interpreter is still there."""
    return is_ready(root) and venv_python(root).exists()


def ensure_environment(
    progress: Progress,
    *,
    release: str = SGLANG_RELEASE,
    home: Path | None = None,
    install: Installer | None = None,
) -> StandEnvironment:
    """Return the environment of `release`, building it first if there is no finished one.

    An older release's environment holds only what that release pins otherwise than the newest, whose
    environment is built first and has the rest. Raises UnsupportedError if the stand does not run
    `release`, and StandBuildError if there is too little room on the disk or pip fails.
    """
    root = environment_root(release, home)
    pins = pins_text(release)
    shared = None
    default: Installer = pip_install
    if release != NEWEST:
        shared = ensure_environment(progress, home=home, install=install)
        default = functools.partial(pip_install_sharing, shared)
    installer = install if install is not None else default

    def build(folder: Path) -> Mapping[str, str]:
        pins_file = folder / "pins.txt"
        pins_file.write_text(pins)
        installer(folder / "venv", pins_file, folder / "build.log", progress)
        return {"sglang": release, "python": ".".join(str(part) for part in sys.version_info[:3])}

    build_once(root, build, progress, usable=lambda folder: venv_python(folder).exists())
    return StandEnvironment(root=root, release=release, shared=shared)


def pip_install(venv: Path, pins_file: Path, log: Path, progress: Progress) -> None:
    """Build the environment with venv and pip, with whatever index the user's pip is set up for.

    Torch comes with its dependencies: the build on the default index does not import without its nvidia
    packages, GPU or not. Everything else comes without, because SGLang's own list would bring its CUDA
    kernels, which cannot be used here. Byte code is left to the first import: compiling all of it takes
    longer than the rest of the installation, and most of it is never imported.
    """
    _require_room(venv.parent, MIN_FREE_BYTES)
    progress.phase("stand: making a virtual environment")
    run_reported([sys.executable, "-m", "venv", str(venv)], log, progress)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--progress-bar", "off", "--no-input", "--no-compile"]
    progress.phase("stand: installing torch with its dependencies (about 2.5 GB)")
    torch = next(line for line in pins_file.read_text().split() if line.startswith("torch=="))
    run_reported([*pip, "--constraint", str(pins_file), torch], log, progress)
    progress.phase("stand: installing SGLang and what it imports (about 0.4 GB)")
    run_reported([*pip, "--no-deps", "--requirement", str(pins_file)], log, progress)
    progress.phase("stand: checking that SGLang and torch import")
    check = "import torch, torchvision, sglang.version; print(torch.__version__, sglang.version.__version__)"
    run_reported([str(venv / "bin" / "python"), "-c", check], log, progress)


def pip_install_sharing(shared: StandEnvironment, venv: Path, pins_file: Path, log: Path, progress: Progress) -> None:
    """Build an environment with the packages in the pins file, and all of `shared`'s for the rest.

    Its own packages come first on the path, so that its SGLang and that SGLang's pins win. Without their
    dependencies, as in `pip_install`; none of its processes has pip.
    """
    _require_room(venv.parent, MIN_FREE_BYTES_SHARING)
    release = next(line for line in pins_file.read_text().split() if line.startswith("sglang=="))
    progress.phase(f"stand: making a virtual environment for {release}")
    run_reported([sys.executable, "-m", "venv", "--without-pip", str(venv)], log, progress)
    progress.phase(f"stand: installing {release} and what only it pins (about 0.1 GB)")
    pip = [str(shared.python), "-m", "pip", "--python", str(venv_python(venv.parent)), "install"]
    options = ["--progress-bar", "off", "--no-input", "--no-compile", "--no-deps"]
    run_reported([*pip, *options, "--requirement", str(pins_file)], log, progress)
    packages = _site_packages(venv)
    (packages / "kvwitness_stand_shared.pth").write_text(f"{_site_packages(shared.python.parent.parent)}\n")
    (packages / "kvwitness_stand.pth").write_text(_ENTER_THE_STAND)
    progress.phase("stand: checking that SGLang and torch import")
    check = "import torch, transformers, sglang.version; print(torch.__version__, sglang.version.__version__)"
    run_reported([str(venv_python(venv.parent)), "-c", check], log, progress)


def _site_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def _require_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StandBuildError(
            f"the stand needs {needed / 1e9:.0f} GB free at {folder}, which has {free / 1e9:.1f} GB "
            "(KVWITNESS_STAND_HOME puts it elsewhere)"
        )
