"""`autopipe launch`: run the ranks of a program."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from autopipe.api.dry_run import rehearse
from autopipe.api.launch_settings import LaunchSettings, SettingError, interval, launch_flags
from autopipe.api.launching import open_launch
from autopipe.cli.launch_display import show_measured, show_profile, shown_steps
from autopipe.cli.options import FORCE, MODEL, PATH, Command, stepwise_options
from autopipe.cli.output import Output
from autopipe.ir.words import plural

_POSITIVE_SECONDS = click.FloatRange(min=0, min_open=True)


def _parse_interval(
    context: click.Context, parameter: click.Parameter, text: str | None
) -> tuple[int, float] | None:
    """Return (steps, minutes) for a text such as `50` or `30m`, None for None."""
    try:
        return None if text is None else interval(text)
    except SettingError as error:
        raise click.BadParameter(error.message, context, parameter) from None


def launch_option(name: str) -> Callable[[Command], Command]:
    """Return click's option for the setting `name` of `LaunchSettings`."""
    field, flag = launch_flags()[name]
    if name in _SHARED_OPTIONS:
        return _SHARED_OPTIONS[name]
    kind = str(field.type)
    words = f"--{name.replace('_', '-')}"
    details: dict[str, Any] = {"help": flag.help}
    if flag.metavar is not None:
        details["metavar"] = flag.metavar
    if flag.environment is not None:
        details["envvar"] = flag.environment
    if field.default is not None and field.default is not False:
        details["default"] = field.default
        details["show_default"] = flag.shows_default
    if name == "checkpoint_every":
        details["callback"] = _parse_interval
    elif flag.choices:
        details["type"] = click.Choice(flag.choices)
    elif kind == "bool":
        details["is_flag"] = True
    elif kind == "bool | None":
        words = f"{words}/--no-{words.removeprefix('--')}"
        details["default"] = None
    elif kind.startswith("Path"):
        details["type"] = PATH
    elif kind.startswith("int"):
        details["type"] = click.IntRange(min=None if flag.minimum is None else int(flag.minimum))
    elif kind == "float":
        details["type"] = _POSITIVE_SECONDS
    return click.option(words, **details)


_SHARED_OPTIONS = {"model": MODEL, "force": FORCE}
"""Options that several commands have, by setting."""


def _launch_options(command: Command) -> Command:
    """Give `command` the options of all launch settings, and pass it a `LaunchSettings` as
    `settings`.
    """

    @functools.wraps(command)
    def with_settings(*args: Any, **kwargs: Any) -> Any:
        values = {name: kwargs.pop(name) for name in launch_flags()}
        return command(*args, settings=LaunchSettings(**values), **kwargs)

    for name in reversed(tuple(launch_flags())):
        launch_option(name)(with_settings)
    return with_settings  # type: ignore[return-value]


@click.command()
@click.argument("program", type=PATH)
@_launch_options
@stepwise_options
def launch(output: Output, /, program: Path, settings: LaunchSettings) -> None:
    """Run the ranks of PROGRAM, a folder that codegen wrote.

    If a rank makes no progress for longer than a time-out and waits for no other rank, the launch
    reports this rank and its task, and stops all ranks.

    \b
    Example:
      autopipe launch gpt.plan/program --steps 10 --checkpoint ckpt --checkpoint-every 5
    """
    debug = bool(click.get_current_context().params["debug"])
    with _usage_errors():
        opened = open_launch(program, settings, live=not output.as_json, debug=debug, events=output)
        if settings.dry_run:
            report = rehearse(opened.manifest, settings)
            output.result(report, rehearsal_table(report))
            return
        try:
            launched = opened.start(partial(shown_steps, output, settings.log_every))
        except KeyboardInterrupt:
            if settings.checkpoint is not None:
                words = [*sys.argv[1:], *([] if settings.resume else ["--resume"])]
                output.note(f"to go on: {shlex.join(['autopipe', *words])}")
            raise
    if launched.profile is not None:
        show_profile(launched.profile, output)
    if launched.run is not None:
        show_measured(launched.run, launched.steps, output)
    output.result(
        {
            "program": program,
            "steps": launched.steps,
            **({"evaluations": launched.evaluations} if launched.evaluations else {}),
        }
    )


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Context manager that raises errors in the settings as click's errors in the command line."""
    try:
        yield
    except SettingError as error:
        if error.where:
            raise click.BadParameter(error.message, param_hint=error.where) from error
        raise click.UsageError(error.message) from error


def rehearsal_table(report: Mapping[str, Any]) -> Table:
    table = Table("one step of", f"rank {report['rank']} of {report['world_size']}")
    table.add_row("stages", ", ".join(map(str, report["stages"])))
    table.add_row("tasks", " ".join(report["tasks"]))
    for way in ("sent", "received"):
        for rank, size in report[f"{way}_bytes"].items():
            table.add_row(
                f"{way} {'to' if way == 'sent' else 'from'} rank {rank}",
                f"{size:,} {plural(size, 'byte')}",
            )
    for kind, size in report["communication_bytes"].items():
        # The rows above list the bytes of messages by rank, so the kind "send" is omitted here.
        if size and kind != "send":
            table.add_row(kind.replace("_", "-"), f"{size:,} {plural(size, 'byte')}")
    table.add_row(
        "parameters", f"{report['parameters']:,} ({report['parameter_bytes'] / 2**20:.1f} MiB)"
    )
    table.add_row("peak memory", f"{report['peak_memory_bytes'] / 2**20:.0f} MiB")
    return table
