"""`autopipe schedule`: searches a schedule for blocks that the user specifies."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from autopipe.cli.options import FORCE, PATH, standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import ConfigurationError, RenamedWarning
from autopipe.ir.words import plural

if TYPE_CHECKING:
    from autopipe.ir.block_schedule import BlockGraph

_MAX_BLOCKS = 2_000_000
"""Maximum number of blocks of a schedule: blocks of a micro-batch times micro-batches."""


@click.command()
@click.argument("placement", required=False, type=PATH)
@click.option("--shape", metavar="v|x|m|nn|k", help="Published placement shape, instead of a file.")
@click.option("--devices", type=click.IntRange(2, 4096), help="Number of devices of the shape [4].")
@click.option(
    "--mode",
    type=click.Choice(["train", "infer"]),
    help="Blocks of the shape: forward and backward (train), or forward only (infer) [train].",
)
@click.option(
    "--memory",
    type=click.IntRange(0),
    help="Memory limit of each device, in units of the memory of a block [no limit].",
)
@click.option(
    "--micro-batches",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="Number of micro-batches. All of them run the same blocks.",
)
@click.option(
    "--units", type=click.IntRange(1), hidden=True, help="Former name of --micro-batches."
)
@click.option(
    "--schedule",
    "name",
    metavar="NAME",
    default="tessel",
    help="Scheduler: tessel searches a schedule; other names are published schedules [tessel].",
)
@click.option(
    "--time-limit",
    metavar="SECONDS",
    type=float,
    default=10.0,
    help="Maximum duration of the search in seconds [10].",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, help="Seed of the search.")
@click.option(
    "-o", "--output", "target", metavar="FILE", type=PATH, help="JSON file for the schedule."
)
@FORCE
@standard_options
def schedule(
    output: Output,
    /,
    placement: Path | None,
    shape: str | None,
    micro_batches: int,
    units: int | None,
    name: str,
    time_limit: float,
    seed: int,
    target: Path | None,
    force: bool,
    **of_shape: Any,
) -> None:
    """Search the shortest schedule, or compute a published one (--schedule), for the blocks in the
    YAML file PLACEMENT or for a published placement shape.

    \b
    Example:
      autopipe schedule placement.yaml --micro-batches 32 -o schedule.json
      autopipe schedule --shape nn --devices 8 --memory 12 --micro-batches 64
      autopipe schedule --shape v --schedule 1f1b
    """
    from autopipe.api.showing import BlockView, blocks_title
    from autopipe.cli.show import block_view_screen
    from autopipe.ir.block_schedule import block_schedule_json, check_start_times
    from autopipe.ir.output_kinds import SCHEDULE, OutputFile, write_texts
    from autopipe.passes.schedule.published.blocks import schedule_blocks
    from autopipe.passes.schedule.tessel.model import SearchOptions, require_memory
    from autopipe.passes.schedule.tessel.search import search

    if not (math.isfinite(time_limit) and time_limit > 0):
        raise ConfigurationError(
            f"--time-limit is {time_limit:g}, expected a number above 0",
            hint="set --time-limit to a number of seconds",
        )
    if units is not None:
        micro_batches = _micro_batches_from_units_flag(units)
    graph = _read_or_make_graph(placement, shape, **of_shape)
    if micro_batches * len(graph.blocks) > _MAX_BLOCKS:
        most = _MAX_BLOCKS // len(graph.blocks)
        raise ConfigurationError(
            f"--micro-batches is {micro_batches}, and the maximum for {len(graph.blocks)} "
            f"{plural(len(graph.blocks), 'block')} is {most}",
            hint=f"set --micro-batches to at most {most}",
        )
    written_to = None
    if target is not None:
        written_to = OutputFile(target, SCHEDULE, () if placement is None else (placement,), force)
        written_to.check()
    require_memory(graph, micro_batches)
    if name == "tessel":
        with output.progress("searching", total=time_limit) as bar:

            def report_bounds(best: int | None, bound: int, seconds: float) -> None:
                bar.reach(seconds, "" if best is None else f"best {best}, at least {bound}")

            found = search(
                graph, micro_batches, SearchOptions(time_limit, seed, progress=report_bounds)
            )
    else:
        found = schedule_blocks(name, graph, micro_batches)
    check_start_times(found)
    form = block_schedule_json(found)
    if written_to is not None:
        write_texts({written_to: json.dumps(form) + "\n"})
    source = placement if placement is not None else Path(f"shape {shape}")
    view = BlockView(source, found, f"{blocks_title(found, str(source))}, {name}")
    written = [f"schedule in {target}"] if target is not None else []
    output.result(
        {"schedule": name, "file": target, **form}, *block_view_screen(view, output), *written
    )


def _micro_batches_from_units_flag(units: int) -> int:
    """Return the value of `--units`, the former name of `--micro-batches`, with a warning. Raise
    ConfigurationError if both flags are given.
    """
    source = click.get_current_context().get_parameter_source("micro_batches")
    if source is not ParameterSource.DEFAULT:
        raise ConfigurationError(
            "--units is the former name of --micro-batches, and both flags are set",
            hint="remove --units",
        )
    message = f"--units is deprecated, write --micro-batches {units}"
    warnings.warn(message, RenamedWarning, stacklevel=2)
    return units


def _read_or_make_graph(
    placement: Path | None,
    shape: str | None,
    devices: int | None,
    mode: str | None,
    memory: int | None,
) -> BlockGraph:
    from autopipe.configs.placement_file import read_placement
    from autopipe.passes.schedule.published import blocks

    if (placement is None) == (shape is None):
        what = (
            "a placement file and --shape are both set, expected one"
            if shape is not None
            else "a placement file or --shape is required"
        )
        raise ConfigurationError(what, hint="name a placement file, or set --shape NAME")
    if shape is not None:
        return blocks.shape_blocks(shape, devices or 4, train=mode != "infer", memory=memory)
    for flag, value in (("--devices", devices), ("--mode", mode), ("--memory", memory)):
        if value is not None:
            raise ConfigurationError(
                f"{flag} requires --shape, because the file {placement} contains this setting",
                hint=f"omit {flag}",
            )
    return read_placement(cast(Path, placement))
