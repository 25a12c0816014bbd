"""All commands: help, errors, machine-readable results."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvwitness.tracer.cli.application import application

from .conftest import Command


def walk(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None, name
            yield from walk(inner, (*path, name))


TREE = list(walk(application))


@pytest.mark.parametrize(("path", "command"), TREE, ids=[" ".join(path) or "kvwitness" for path, _ in TREE])
def test_help_has_an_example(kvwitness: Command, path: tuple[str, ...], command: click.Command) -> None:
    result = kvwitness(*path, "--help")
    assert result.exit_code == 0
    assert "Example:\n" in result.output
    assert f"    {' '.join(('kvwitness', *path))}" in result.output


@pytest.mark.parametrize(("path", "command"), TREE, ids=[" ".join(path) or "kvwitness" for path, _ in TREE])
def test_every_command_has_json(kvwitness: Command, path: tuple[str, ...], command: click.Command) -> None:
    if not isinstance(command, click.Group):
        assert "--json" in kvwitness(*path, "--help").output


@pytest.mark.parametrize("path", [path for path, command in TREE if isinstance(command, click.Group)], ids=" ".join)
def test_lists_of_commands_are_not_cut_off(
    kvwitness: Command, path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = kvwitness(*path, "--help").output.partition("Commands:\n")[2].splitlines()
    assert listed
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)
    assert all(len(line.split()) > 2 for line in listed)  # one line each


def test_help_imports_no_command() -> None:
    code = (
        "import sys\nfrom kvwitness.tracer.cli.application import application\n"
        "try: application(['--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('rich', 'msgspec', 'httpx', 'jinja2', 'psutil') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


BAD = [
    ("nonsense",),
    ("--nonsense",),
    ("verify",),
    ("verify", "{tmp}/missing"),
    ("verify", "{tmp}"),
    ("show", "{tmp}/missing"),
    ("show", "{tmp}/empty"),
    ("show", "{tmp}/not.zip"),
    ("explain", "{tmp}/missing", "--rid", "A"),
    ("explain", "{bundle}"),
    ("explain", "{bundle}", "--rid", "nobody"),
    ("explain", "{bundle}", "--rid", "abc-"),
    ("export", "{tmp}/missing", "--otlp", "http://127.0.0.1:1"),
    ("export", "{bundle}", "--otlp", "http://127.0.0.1:1", "--protocol", "smtp"),
    ("collect", "--dir", "{tmp}/missing", "--otlp", "http://127.0.0.1:1"),
    ("serve",),
    ("serve", "--", "{tmp}/no-such-program"),
    ("serve", "--dir", "/dev/null/x", "--", sys.executable),
    ("run", "nonsense"),
    ("run", "abc", "--url", "http://127.0.0.1:1"),
    ("run", "abc", "--url", "http://127.0.0.1:1", "--out", "{bundle}"),
    ("run", "abc", "--url", "http://127.0.0.1:1", "--out", "{tmp}/new", "--fills", "many"),
]  # fmt: skip


@pytest.mark.parametrize("args", BAD, ids=" ".join)
def test_bad_input_is_one_line_and_exit_code_2(
    kvwitness: Command, tmp_path: Path, bundle: Path, args: tuple[str, ...]
) -> None:
    (tmp_path / "not.zip").write_text("hello")
    (tmp_path / "empty").mkdir()
    result = kvwitness(*(arg.format(tmp=tmp_path, bundle=bundle) for arg in args))
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.count("; ") >= 1


def test_a_server_that_is_not_there(kvwitness: Command, tmp_path: Path) -> None:
    result = kvwitness("run", "abc", "--url", "http://127.0.0.1:1", "--out", tmp_path / "new")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "no server answers" in result.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "args",
    [("show", "{bundle}"), ("show", "{data}"), ("explain", "{bundle}", "--rid", "C"), ("verify", "{bundle}")],
    ids=lambda args: args[0],
)
def test_json_parses(kvwitness: Command, bundle: Path, data: Path, args: tuple[str, ...]) -> None:
    result = kvwitness(*(arg.format(bundle=bundle, data=data) for arg in args), "--json")
    assert result.exit_code == 0
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stderr == ""


def test_version(kvwitness: Command) -> None:
    assert kvwitness("--version").output.startswith("kvwitness, version ")
