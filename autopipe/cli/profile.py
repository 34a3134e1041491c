"""`autopipe profile`: measures the operators of a model and the communication between ranks on this
machine.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import RenderableType
from rich.table import Table

from autopipe.api.profile_settings import ProfileSettings
from autopipe.api.profiling import Profiled, merge_cost_files
from autopipe.api.profiling import profile as measure_costs
from autopipe.cli.options import FORCE, PATH, configuration_options, standard_options
from autopipe.cli.output import Output, plain_table
from autopipe.configs.configuration import Configuration
from autopipe.ir.measured_costs import OperationCost
from autopipe.ir.words import bytes_text, plural, seconds_text


@click.command()
@click.argument("files", metavar="MODEL", nargs=-1, required=True, type=PATH)
@click.option("-o", "--output", "target", type=PATH, help="Cost file to write [MODEL.costs].")
@click.option(
    "--merge",
    is_flag=True,
    help="Merge cost files, given instead of MODEL, into one file. Later files override earlier "
    "files.",
)
@click.option(
    "--name", help="Name of the device in the cost file [product name and number of threads]."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    default="auto",
    help="Device to measure.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Number of CPU threads per rank.",
)
@click.option(
    "--micro-batch-sizes",
    metavar="B,…",
    help="Micro-batch sizes to measure, in samples [1, 2 and 4 if the model supports them].",
)
@click.option(
    "--degrees",
    metavar="D,…",
    default="2",
    show_default=True,
    help="Split degrees to measure; '' for none.",
)
@click.option(
    "--ranks",
    type=click.IntRange(2, 64),
    help="Also measure P2P and collective communication between this number of ranks.",
)
@click.option(
    "--source",
    type=click.Choice(["torch", "onnxruntime"]),
    default="torch",
    show_default=True,
    help=(
        "Kernels to measure: those of generated code (torch), or the forward kernels of ONNX "
        "Runtime."
    ),
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1),
    default=30.0,
    show_default=True,
    help="Approximate duration of the measurement in seconds.",
)
@FORCE
@configuration_options
@standard_options
def profile(
    output: Output,
    /,
    files: tuple[Path, ...],
    target: Path | None,
    merge: bool,
    micro_batch_sizes: str | None,
    degrees: str,
    force: bool,
    configuration: Configuration,
    **flags: Any,
) -> None:
    """Measure the operators of the ONNX file MODEL, forward and backward, and write a cost file for
    `plan --costs`.

    Each distinct operator runs as in generated code: unsharded, with the shapes of each micro-batch
    size, and with the local shapes of each split degree.

    \b
    Example:
      autopipe profile gpt.onnx --ranks 2
      autopipe plan gpt.onnx --gpus 2 --cluster cpu-local --costs gpt.onnx.costs
      autopipe profile --merge gpt.onnx.costs dlrm.onnx.costs -o cpu.costs
    """
    if merge:
        if target is None:
            raise click.UsageError("--merge requires -o FILE")
        found = merge_cost_files(files, target, force=force)
    else:
        from autopipe.api.profile_samples import parsed_sizes

        if len(files) > 1:
            raise click.UsageError("name one MODEL, or use --merge with several cost files")
        settings = ProfileSettings(
            sizes=None
            if micro_batch_sizes is None
            else parsed_sizes(micro_batch_sizes, "--micro-batch-sizes"),
            degrees=parsed_sizes(degrees, "--degrees"),
            **flags,
        )
        found = measure_costs(files[0], configuration, settings, target, force=force, events=output)
    devices = [
        {
            "device": each.device,
            "operations": len(each.operations),
            "exchanges": len(each.exchanges),
        }
        for each in found.costs.devices
    ]
    data = {"costs": found.path, "devices": devices, "refused": found.refused}
    output.report(data, *costs_screen(found))


_MAX_LISTED_OPERATIONS = 12


def costs_screen(found: Profiled) -> Iterator[RenderableType]:
    """Yield the measured costs of each device, the operators that could not be measured, the file
    and the next command.
    """
    for device in found.costs.devices:
        yield device.device
        yield from (f"  {line}" for line in device.measured)
        yield f"  {len(device.operations)} {plural(len(device.operations), 'operation')} measured"
        if device.operations:
            yield _slowest_operations_table(device.operations)
        if (tasks := device.tasks) is not None:
            yield (
                f"  besides its operators a forward takes {seconds_text(tasks.forward_s)}, a "
                f"backward {seconds_text(tasks.backward_s)}; an operator whose gradients wait "
                f"{seconds_text(tasks.waiting_s)} more"
            )
        if device.host_launch_s:
            yield f"  the host takes {seconds_text(device.host_launch_s)} per operator"
        for each in device.exchanges:
            rate = (
                f", then {bytes_text(round(1 / each.fit.per_byte_s))}/s"
                if each.fit.per_byte_s
                else ""
            )
            what = f"{each.kind.replace('_', '-')} of {each.ranks} {plural(each.ranks, 'rank')}"
            yield f"  {what}: {seconds_text(each.fit.fixed_s)}{rate}"
    if found.refused:
        yield (
            f"{len(found.refused)} {plural(len(found.refused), 'operator')} could not be "
            f"measured; plans judge them by the roofline: {found.refused[0]}"
        )
    yield f"costs in {found.path}"
    yield f"next: autopipe plan MODEL --costs {shlex.quote(str(found.path))}"


def _slowest_operations_table(operations: Sequence[OperationCost]) -> Table:
    """The operations that take longest, backward included."""

    def total(cost: OperationCost) -> float:
        return cost.forward.seconds + (cost.backward.seconds if cost.backward else 0.0)

    table = plain_table("operator", "operands", "forward", "backward", "spread", right=2)
    for each in sorted(operations, key=total, reverse=True)[:_MAX_LISTED_OPERATIONS]:
        operands = " ".join(text for text in each.operation.operands if text)
        backward = "-" if each.backward is None else seconds_text(each.backward.seconds)
        spread = max(each.forward.spread, each.backward.spread if each.backward else 0.0)
        table.add_row(
            each.operation.operator,
            operands,
            seconds_text(each.forward.seconds),
            backward,
            f"{spread:.0%}",
        )
    if len(operations) > _MAX_LISTED_OPERATIONS:
        table.add_row(f"... {len(operations) - _MAX_LISTED_OPERATIONS} more")
    return table
