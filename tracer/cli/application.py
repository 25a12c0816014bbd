"""The command tree. Each command's module is imported when the command is used, so that help is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import click

from kvwitness.tracer.cli.errors import INTERRUPTED, UserError


class Lazy(NamedTuple):
    """A command before it is imported: ``module:attribute``, and its line in the list of commands."""

    target: str
    help: str


COMMANDS: Mapping[str, Lazy] = {
    "serve": Lazy("kvwitness.tracer.cli.serve:serve", "Run an SGLang server with tracing switched on."),
    "attach": Lazy("kvwitness.tracer.cli.attach:attach", "Begin to record on a running server, without a restart."),
    "detach": Lazy("kvwitness.tracer.cli.attach:detach", "Put a server's own functions back, and end the journals."),
    "watch": Lazy("kvwitness.tracer.cli.watch:watch", "A running server's requests, tiers and rates as they come."),
    "run": Lazy("kvwitness.tracer.cli.run:run", "Drive a server through a protocol and keep the evidence."),
    "show": Lazy("kvwitness.tracer.cli.show:show", "Table of all requests in a bundle or a journal folder."),
    "explain": Lazy("kvwitness.tracer.cli.explain:explain", "Say on what the verdict about a request rests."),
    "verify": Lazy("kvwitness.tracer.cli.verify:verify", "Check a bundle, and derive its verdicts again."),
    "sign": Lazy("kvwitness.tracer.cli.sign:sign", "Sign a bundle, so that others can tell whose it is."),
    "key": Lazy("kvwitness.tracer.cli.sign:key", "Make keys to sign bundles with."),
    "report": Lazy("kvwitness.tracer.cli.report:report", "Write a report about a bundle: one HTML page, or Markdown."),
    "compare": Lazy("kvwitness.tracer.cli.compare:compare", "Compare two bundles made under the same conditions."),
    "export": Lazy("kvwitness.tracer.cli.export:export", "Send a bundle's spans to an OTLP endpoint."),
    "collect": Lazy("kvwitness.tracer.cli.collect:collect", "Send spans to an OTLP endpoint while a server runs."),
    "jaeger": Lazy("kvwitness.tracer.cli.jaeger:jaeger", "Look at a bundle's traces in a Jaeger of its own."),
    "demo": Lazy("kvwitness.tracer.cli.demo:demo", "The whole job on a machine without a GPU."),
    "doctor": Lazy("kvwitness.tracer.cli.doctor:doctor", "What could be proven with an SGLang, and what not."),
    "declined": Lazy("kvwitness.tracer.cli.declined:declined", "A reported host hit that was never loaded, refuted."),
    "matrix": Lazy("kvwitness.tracer.cli.matrix:matrix", "The demo on every release that the stand runs."),
    "stand": Lazy("kvwitness.tracer.stand.cli:stand_group", "SGLang with HiCache on a CPU, for demos and tests."),
}


class LazyGroup(click.Group):
    """A group whose commands are named, and imported only when one of them is used."""

    def __init__(self, *args: Any, lazy: Mapping[str, Lazy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = self._lazy.get(cmd_name)
        if lazy is None:
            return None
        module, _, attribute = lazy.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in self._lazy.items()])


class Application(LazyGroup):
    """The root: every error of use is one line on standard error and exit code 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        try:
            code = super().main(args, prog_name, complete_var, False, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(error.exit_code)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "kvwitness"
            _usage_error(error, command).show()
            sys.exit(UserError.exit_code)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("kvwitness: interrupted", err=True)
            sys.exit(INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


def _usage_error(error: click.UsageError, command: str) -> UserError:
    return UserError(error.format_message().rstrip("."), command, f"see `{command} --help`")


@click.group(cls=Application, lazy=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kvwitness")
def application() -> None:
    """Evidence-grade tracing for SGLang's hierarchical KV cache (HiCache).

    Say for each request from which tier its KV state came (GPU, host memory, storage, recomputed), and
    prove it with recorded events.

    \b
    Example:
      kvwitness serve --dir data -- python -m sglang.launch_server --enable-hierarchical-cache ...
      kvwitness run abc --url http://127.0.0.1:30000 --out bundle
      kvwitness explain bundle --rid C
    """
