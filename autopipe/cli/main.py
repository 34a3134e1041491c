"""The `autopipe` command: the table of its sub-commands, and the conversion of errors to messages
and exit codes.
"""

from __future__ import annotations

import difflib
import errno
import gc
import importlib
import io
import json
import os
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from typing import Final, TextIO

import click

from autopipe.ir import VERSION
from autopipe.ir.errors import AutopipeError, ConfigurationError, RenamedWarning

COMMANDS: Final = {
    "export": "Write a PyTorch module as an ONNX file that trains as the module does.",
    "inspect": "Say what a model is, and what of it is not supported.",
    "plan": "Decide which device computes what, and when.",
    "codegen": "Write one PyTorch program a device for a plan.",
    "launch": "Run a program's ranks on the devices at hand.",
    "generate": "Generate tokens with a decoder whose ranks keep its cache.",
    "verify": "Check that the ranks compute what one device computes.",
    "show": "Show a plan's or a schedule's timeline and memory, in the terminal or as a page.",
    "explain": "Say why a plan is as it is, and what other choices would have cost.",
    "compare": "Show plans side by side.",
    "schedule": "Search the best schedule of blocks given by hand.",
    "profile": "Measure what a model's operators take on the machine at hand.",
    "checkpoint": "Look at checkpoints, check them, write trained weights as ONNX.",
    "zoo": "Build models of the papers as ONNX files.",
    "bench": "Say where the papers' tables and figures are computed again.",
    "config": "Show and check configurations, list cluster presets.",
}
"""Commands and their descriptions, in the order in which `autopipe --help` lists them. The function
of command NAME is in the module `autopipe.cli.NAME`.
"""

INTERRUPTED_EXIT_CODE: Final = 130
BROKEN_PIPE_EXIT_CODE: Final = 141
ALLOCATIONS_PER_COLLECTION: Final = 100_000
"""Number of allocations between two runs of the garbage collector. Graphs and tables consist of
many small objects without reference cycles. With Python's default of 700, garbage collection takes
an eighth of the time of a search.
"""
_MAX_ERROR_CHARACTERS: Final = 4000
"""Maximum number of characters in the line of an error."""
_DISK_FULL_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk or an exceeded quota."""
_COMMANDS_WITH_RANKS: Final = ("launch", "generate", "verify")
"""Commands that start ranks through a fork server."""
_FLAGS_WITHOUT_RANKS: Final = frozenset({"-h", "--help", "--dry-run", "--static"})
"""Flags with which these commands start no ranks."""
RUN_EXTRA_MODULES: Final = frozenset({"torch"})
"""Modules that only the extra `run` installs. All other modules that autopipe imports are always
installed.
"""


REPORTED_PACKAGES: Final = (
    ("torch",),
    ("onnx",),
    ("onnxruntime", "onnxruntime-gpu"),
)
"""Packages whose versions `--debug` prints, each with the names of its distributions."""


class CommandTable(click.Group):
    """A group that lists its commands from `COMMANDS` and imports one only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"autopipe.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command), f"{cmd_name} is no click command"
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that `args` begin with. Raise ConfigurationError for an unknown
        command, with the most similar name as the hint.
        """
        if args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = (
                f"did you mean '{near[0]}'?" if near else "list the commands with autopipe --help"
            )
            raise ConfigurationError(f"the command '{args[0]}' does not exist", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=CommandTable, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="autopipe")
def autopipe() -> None:
    """Turn an ONNX model into one readable PyTorch program per device.

    \b
    Example:
      autopipe zoo build gpt -o gpt.onnx --set loss=true
      autopipe plan gpt.onnx --gpus 4
      autopipe codegen gpt.onnx.plan
      autopipe launch gpt.onnx.plan/program --device cpu --steps 5
    """


def main(
    arguments: Sequence[str] | None = None,
    command: click.Command | None = None,
    name: str = "autopipe",
) -> int:
    """Run the command line `arguments` (default: those of the process) and return the exit code.

    `command` is `autopipe` by default. Another program, called `name`, can pass its own command to
    get the same options and error handling.

    Errors of the command end here. An AutopipeError is printed as `error:` and `hint:` lines and
    returns its own exit code; an error in the command line returns 2, an interrupt 130, any other
    error 70. With --json the error is also printed to stdout as one JSON object, with --debug the
    traceback is printed to stderr.
    """
    gc.set_threshold(ALLOCATIONS_PER_COLLECTION)
    own = sys.__stdout__
    # If other code has replaced stdout, the stream is not changed here, because that code is
    # responsible for closing it.
    if own is not None and sys.stdout is own:
        if isinstance(own, io.TextIOWrapper):
            # Encodings such as ASCII, latin-1 and cp1252 lack the line characters of tables. With
            # `replace`, these characters become question marks instead of errors.
            own.reconfigure(errors="replace")
        sys.stdout = stream_with_complete_writes(own)
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = words[: words.index("--")] if "--" in words else words
    if arguments is None and command is None and starts_ranks(options):
        from autopipe.backends.torch.fork_server import start_early

        start_early()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("default", RenamedWarning)
            warnings.showwarning = _WarningPrinter().show
            code = (command or autopipe).main(args=words, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe (`autopipe show … | head`). stdout is redirected to the
        # null device, so that the interpreter does not flush into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE_EXIT_CODE
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return INTERRUPTED_EXIT_CODE
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    # This is the only place that catches every error. It prints one line and returns an exit code.
    except Exception as error:  # noqa: BLE001
        if "--debug" in options:
            traceback.print_exception(error)
            click.echo(version_report(), err=True)
        failure = _as_autopipe_error(error)
        _print_error(failure, as_json="--json" in options)
        return failure.exit_code
    return code if isinstance(code, int) else 0


class _WarningPrinter:
    """Prints each distinct RenamedWarning of a command as one `warning:` line on stderr."""

    def __init__(self) -> None:
        self._printed = set[str]()

    def show(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        """Replacement of `warnings.showwarning`. Other warnings are printed in Python's format."""
        if not issubclass(category, RenamedWarning):
            text = warnings.formatwarning(message, category, filename, lineno, line)
            click.echo(text, err=True, nl=False)
        elif str(message) not in self._printed:
            from autopipe.cli.output import Output

            self._printed.add(str(message))
            Output().warn(str(message))


def starts_ranks(words: Sequence[str]) -> bool:
    """Return True if a valid command line with these words starts ranks."""
    return (
        bool(words) and words[0] in _COMMANDS_WITH_RANKS and _FLAGS_WITHOUT_RANKS.isdisjoint(words)
    )


def _as_autopipe_error(error: Exception) -> AutopipeError:
    """Return the error in the form in which the user sees it."""
    match error:
        case AutopipeError():
            return error
        case click.UsageError():
            command = error.ctx.command_path if error.ctx else "autopipe"
            return ConfigurationError(
                error.format_message().rstrip("."), hint=f"run '{command} --help'"
            )
        case click.ClickException():
            return ConfigurationError(error.format_message())
        case ModuleNotFoundError() if error.name in RUN_EXTRA_MODULES:
            return ConfigurationError(
                f"this command requires {error.name}", hint="pip install 'autopipe[run]'"
            )
        case OSError() if error.filename is not None and error.strerror:
            # The path comes from the user, for example a name that is too long or a folder that
            # cannot be read. So the message of the operating system suffices.
            return ConfigurationError(error.strerror, where=os.fsdecode(error.filename))
        case OSError() if error.errno in _DISK_FULL_ERRNOS:
            hint = (
                f"free disk space, also in the folder of temporary files, {tempfile.gettempdir()}"
            )
            return ConfigurationError(
                f"a file cannot be written: {os.strerror(error.errno or 0)}", hint
            )
        case _:
            return AutopipeError(
                f"internal error: {type(error).__name__}: {error}", hint="rerun with --debug"
            )


def version_report() -> str:
    """Return one line per version that a bug report needs: autopipe, Python, packages, platform.

    The packages are not imported.
    """
    import importlib.metadata
    import platform

    versions = {"autopipe": VERSION, "Python": platform.python_version()}
    for names in REPORTED_PACKAGES:
        versions[names[0]] = "not installed"
        for name in names:
            try:
                versions[names[0]] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
            break
    versions["platform"] = platform.platform()
    return "\n".join(f"{name} {version}" for name, version in versions.items())


def _print_error(error: AutopipeError, as_json: bool) -> None:
    """Print the error's lines on stderr and, with `as_json`, its JSON object on stdout. Of a very
    long line, which a file with megabytes of names can cause, only the beginning and the end are
    printed.
    """
    from autopipe.ir.words import printable

    half = _MAX_ERROR_CHARACTERS // 2
    place = f"{error.where}: " if error.where else ""
    for kind, text in (("error", place + " ".join(error.message.split())), ("hint", error.hint)):
        if text:
            line = (
                text if len(text) <= _MAX_ERROR_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
            )
            told = f"{kind}: {printable(line)}"
            if sys.stderr.isatty():
                # The error is wrapped only on a terminal, because programs that read stderr expect
                # it on one line.
                columns = max(20, os.get_terminal_size(sys.stderr.fileno()).columns)
                told = textwrap.fill(told, columns, break_long_words=False, break_on_hyphens=False)
            click.echo(told, err=True)
    if as_json:
        parts = {
            "message": error.message,
            "hint": error.hint,
            "where": error.where,
            "exit_code": error.exit_code,
        }
        click.echo(json.dumps({"error": {"kind": type(error).__name__, **parts}}))


def stream_with_complete_writes(stream: TextIO) -> TextIO:
    """Return a stream that writes each text completely.

    If stdout is unbuffered, as PYTHONUNBUFFERED requests in most containers, and a signal arrives
    during a write, Python drops the rest of the text that the pipe has not accepted. A long result
    would be truncated although the command succeeds. The caller must keep a reference to `stream`,
    because the returned object closes it when it is deleted.
    """
    raw = getattr(stream, "buffer", None)
    if isinstance(raw, io.RawIOBase):
        writer = io.BufferedWriter(raw)
        return io.TextIOWrapper(
            writer, encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
    return stream


if __name__ == "__main__":
    sys.exit(main())
