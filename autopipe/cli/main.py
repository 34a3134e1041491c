"""The `autopipe` command: the table of sub-commands, and what goes wrong as one line and an exit code."""

from __future__ import annotations

import difflib
import gc
import importlib
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Final, TextIO

import click

from autopipe import __version__
from autopipe.ir.errors import AutopipeError, ConfigurationError

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "inspect": ("autopipe.cli.inspect:inspect", "Say what a model is, and what of it is not supported."),
    "plan": ("autopipe.cli.plan:plan", "Decide which device computes what, and when."),
    "codegen": ("autopipe.cli.codegen:codegen", "Write one PyTorch program a device for a plan."),
    "launch": ("autopipe.cli.launch:launch", "Run a program's ranks on the devices at hand."),
    "verify": ("autopipe.cli.verify:verify", "Check that the ranks compute what one device computes."),
    "show": (
        "autopipe.cli.show:show",
        "Show a plan's or a schedule's timeline and memory, in the terminal or as a page.",
    ),
    "explain": (
        "autopipe.cli.explain:explain",
        "Say why a plan is as it is, and what other choices would have cost.",
    ),
    "compare": ("autopipe.cli.compare:compare", "Show plans side by side."),
    "schedule": ("autopipe.cli.schedule:schedule", "Search the best schedule of blocks given by hand."),
    "profile": ("autopipe.cli.profile:profile", "Measure what a model's operators take on the machine at hand."),
    "checkpoint": (
        "autopipe.cli.checkpoint:checkpoint",
        "Look at checkpoints, check them, write trained weights as ONNX.",
    ),
    "zoo": ("autopipe.cli.zoo:zoo", "Build models of the papers as ONNX files."),
    "bench": ("autopipe.cli.bench:bench", "Say where the papers' tables and figures are computed again."),
    "config": ("autopipe.cli.config:config", "Show and check configurations, list cluster presets."),
}
"""A command's name -> (`module:attribute` of its click command, what the list of commands says of it).

One line a command, in the order a user meets them.
"""


def whole_writes(stream: TextIO) -> TextIO:
    """The stream, such that each write is written whole.

    Unbuffered, as PYTHONUNBUFFERED asks for in most containers, Python drops what a pipe did not take at once when a
    signal comes meanwhile: a long result would end in the middle, and the command in success. The stream itself has to
    be kept by somebody: what is made here closes it when it ends.
    """
    raw = getattr(stream, "buffer", None)
    if isinstance(raw, io.RawIOBase):
        return io.TextIOWrapper(
            io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
    return stream


INTERNAL_ERROR: Final = 70
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
YOUNG_OBJECTS: Final = 100_000
"""New objects between two looks for cycles. Graphs and tables are many small values without any: the default of 700
costs a search an eighth of its time."""
MOST_SHOWN: Final = 4000
"""Characters of an error's line."""
RUN_EXTRA: Final = frozenset({"torch"})
"""Modules that come with the extra `run`; everything else autopipe imports is always installed."""


class CommandTable(click.Group):
    """A group that lists its commands from `COMMANDS` and imports one only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command `cmd_name`; None where there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command), f"{module}:{attribute} is no click command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that `args` begin with; raises ConfigurationError with the nearest match for an unknown one."""
        if args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "see 'autopipe --help' for the commands there are"
            raise ConfigurationError(f"no such command '{args[0]}'", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table alone."""
        if COMMANDS:
            with formatter.section("Commands"):
                formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(cls=CommandTable, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="autopipe")
def autopipe() -> None:
    """Turn an ONNX model into one readable PyTorch program per device.

    \b
    Example:
      autopipe zoo build gpt -o gpt.onnx --set loss=true
      autopipe plan gpt.onnx --gpus 4
      autopipe codegen gpt.onnx.plan
      autopipe launch gpt.onnx.plan/program --device cpu --steps 5
    """


def main(arguments: Sequence[str] | None = None, command: click.Command | None = None, name: str = "autopipe") -> int:
    """Run the command line `arguments` (default: those of the process) and return the exit code.

    `command` is `autopipe` unless another program of that `name` has these options and errors, too.

    Nothing else catches: an AutopipeError becomes `error:` and `hint:` lines and its own exit code, a mistake in the
    command line 2, an interrupt 130, anything else 70. With --json the error also goes to stdout as one object,
    with --debug the traceback to stderr.
    """
    gc.set_threshold(YOUNG_OBJECTS)
    own = sys.__stdout__
    if own is not None and sys.stdout is own:  # What somebody put in its place is theirs to close.
        sys.stdout = whole_writes(own)
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = words[: words.index("--")] if "--" in words else words
    try:
        code = (command or autopipe).main(args=words, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`autopipe show … | head`); keep the interpreter from flushing into the closed pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except Exception as error:  # noqa: BLE001 - the one place where every error becomes a line and an exit code
        if "--debug" in options:
            traceback.print_exception(error)
        failure = _described(error)
        _report(failure, as_json="--json" in options)
        return failure.exit_code
    return code if isinstance(code, int) else 0


def _described(error: Exception) -> AutopipeError:
    """The error as the user shall read it."""
    match error:
        case AutopipeError():
            return error
        case click.UsageError():
            command = error.ctx.command_path if error.ctx else "autopipe"
            return ConfigurationError(error.format_message().rstrip("."), hint=f"see '{command} --help'")
        case click.ClickException():
            return ConfigurationError(error.format_message())
        case ModuleNotFoundError() if error.name in RUN_EXTRA:
            return ConfigurationError(f"this command needs {error.name}", hint="pip install 'autopipe[run]'")
        case OSError() if error.filename is not None and error.strerror:
            # The file system's word on a path that was given: a name that is too long, a folder that may not be read.
            return ConfigurationError(error.strerror, where=os.fsdecode(error.filename))
        case _:
            return AutopipeError(f"internal error: {type(error).__name__}: {error}", hint="rerun with --debug")


def _one_line(text: str) -> str:
    """Shorten `text` for the terminal to its beginning and end, where a file has names or lists of megabytes."""
    from autopipe.cli.output import printable

    half = MOST_SHOWN // 2
    return printable(text if len(text) <= MOST_SHOWN else f"{text[:half]} ... {text[-half:]}")


def _report(error: AutopipeError, as_json: bool) -> None:
    """Print the error's lines on stderr and, for `as_json`, its object on stdout."""
    place = f"{error.where}: " if error.where else ""
    click.echo(f"error: {_one_line(place + ' '.join(error.message.split()))}", err=True)
    if error.hint:
        click.echo(f"hint: {_one_line(error.hint)}", err=True)
    if as_json:
        parts = {"message": error.message, "hint": error.hint, "where": error.where, "exit_code": error.exit_code}
        click.echo(json.dumps({"error": {"kind": type(error).__name__, **parts}}))


if __name__ == "__main__":
    sys.exit(main())
