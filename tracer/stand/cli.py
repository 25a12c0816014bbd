"""`kvwitness stand`: make, start and find the CPU stand."""

from __future__ import annotations

import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import get_args

import click

from kvwitness.patches.stand.faults import UnknownFaultError
from kvwitness.tracer.cli.errors import with_log
from kvwitness.tracer.cli.output import json_option, print_json
from kvwitness.tracer.stand.building import StandBuildError, is_ready
from kvwitness.tracer.stand.environment import (
    StandEnvironment,
    ensure_environment,
    environment_ready,
    environment_root,
    venv_python,
)
from kvwitness.tracer.stand.model import ModelKind, ensure_model, model_root
from kvwitness.tracer.stand.paths import stand_path
from kvwitness.tracer.stand.places import stand_home
from kvwitness.tracer.stand.progress import reporting
from kvwitness.tracer.stand.releases import NEWEST, RELEASES, UnsupportedError
from kvwitness.tracer.stand.server import ServerOptions, StandServer, StandServerError

MODEL_KINDS: tuple[ModelKind, ...] = get_args(ModelKind)

_release_option = click.option(
    "--sglang",
    "--release",
    "release",
    type=click.Choice(list(RELEASES)),
    default=NEWEST,
    show_default=True,
    help="Release to run.",
)


@click.group(name="stand")
def stand_group() -> None:
    """SGLang with HiCache on a CPU: for demonstrations and tests, without a GPU.

    \b
    Example:
      kvwitness stand serve --sglang 0.5.17
    """


def _ensure(kind: ModelKind, release: str) -> tuple[StandEnvironment, Path]:
    try:
        with reporting() as progress:
            environment = ensure_environment(progress, release=release)
            return environment, ensure_model(environment, progress, kind)
    except StandBuildError as error:
        raise with_log(error, "kvwitness stand") from error


@stand_group.command()
@_release_option
@click.option("--model", "kind", type=click.Choice(MODEL_KINDS), default="qwen2", show_default=True)
@json_option
def ensure(kind: ModelKind, release: str, as_json: bool) -> None:
    """Build the environment and the model (once, about 3 GB).

    An older release's environment shares most of the newest's, which is built first.

    \b
    Example:
      kvwitness stand ensure --sglang 0.5.17
    """
    environment, model = _ensure(kind, release)
    if as_json:
        print_json({"environment": str(environment.root), "python": str(environment.python), "model": str(model)})
    else:
        click.echo(f"environment {environment.root}\nmodel       {model}")


@stand_group.command()
@_release_option
@click.option("--model", "kind", type=click.Choice(MODEL_KINDS), default="qwen2", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Loopback port; a free one by default.")
@click.option(
    "--write-policy",
    type=click.Choice(["write_through", "write_through_selective", "write_back"]),
    default="write_through",
    show_default=True,
)
@click.option("--io-backend", type=click.Choice(["direct", "kernel"]), default="direct", show_default=True)
@click.option(
    "--mem-layout",
    type=click.Choice(["layer_first", "page_first", "page_first_direct", "page_head"]),
    default="layer_first",
    show_default=True,
)
@click.option("--hicache/--no-hicache", default=True, show_default=True, help="Without: the control of a run.")
@click.option("--page-size", type=int, default=16, show_default=True, help="Tokens in a page.")
@click.option("--max-total-tokens", type=int, default=4096, show_default=True, help="Device pool.")
@click.option("--hicache-ratio", type=float, default=4.0, show_default=True, help="Host pool / device pool.")
@click.option("--tree-core", type=click.Choice(["rust", "python"]), default=None)
@click.option("--tp-size", type=int, default=1, show_default=True)
@click.option("--overlap/--no-overlap", default=False, show_default=True)
@click.option("--faults", default="", help="As KVWITNESS_STAND_FAULT, for example copy-zero:h2d.")
@click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="For the server; may be given many times.")
@click.option("--workdir", type=click.Path(path_type=Path), default=None, help="Where server.log goes.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    help="Record here (KVWITNESS_DIR); without it the server runs without kvwitness.",
)
@json_option
@click.argument("extra_args", nargs=-1, type=click.UNPROCESSED)
def serve(
    kind: ModelKind,
    release: str,
    port: int,
    env: tuple[str, ...],
    workdir: Path | None,
    directory: Path | None,
    as_json: bool,
    extra_args: tuple[str, ...],
    **options: object,
) -> None:
    """Start a server in the foreground and print its address. EXTRA_ARGS, after --, go to SGLang.

    \b
    Example:
      kvwitness stand serve --port 30000 --dir kvwitness-data -- --log-level debug
    """
    pairs = dict(pair.partition("=")[::2] for pair in env)
    if directory is not None:
        pairs["KVWITNESS_DIR"] = str(directory.absolute())
    chosen = ServerOptions(extra_args=extra_args, extra_env=pairs, **options)  # type: ignore[arg-type]
    environment, model = _ensure(kind, release)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        server = StandServer(environment, model, chosen, workdir=workdir, port=port)
        with ExitStack() as running:
            with reporting() as progress:
                progress.phase(f"Starting SGLang {environment.release} on the CPU")
                running.enter_context(server)
            if as_json:
                print_json({"url": server.url, "pid": server.pid, "log": str(server.log)})
            else:
                click.echo(f"{server.url}\npid {server.pid}, log {server.log}; interrupt to stop")
                if directory is not None:
                    click.echo(f"kvwitness records into {directory}")
            server.wait()
            server.check_alive()
    except (UnknownFaultError, UnsupportedError) as error:
        raise click.UsageError(str(error)) from error
    except StandServerError as error:
        raise with_log(error, "kvwitness stand") from error
    except KeyboardInterrupt:
        click.echo("stopped", err=True)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@stand_group.command()
@_release_option
@json_option
def where(release: str, as_json: bool) -> None:
    """Show where the stand's parts are, and whether they are built.

    \b
    Example:
      kvwitness stand where --json
    """
    root = environment_root(release)
    places: dict[str, str | bool] = {
        "home": str(stand_home()),
        "environment": str(root),
        "environment_ready": environment_ready(root),
        "python": str(venv_python(root)),
        "path": str(stand_path(stand=True)),
    }
    for kind in MODEL_KINDS:
        model = model_root(kind)
        places[f"model_{kind}"] = str(model)
        places[f"model_{kind}_ready"] = is_ready(model)
    if as_json:
        print_json(places)
        return
    for name, value in places.items():
        click.echo(f"{name:18} {value}")


if __name__ == "__main__":
    sys.exit(stand_group())
