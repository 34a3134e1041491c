"""`autopipe profile`: measure what a model's operators and the exchanges between ranks take on the machine at hand."""

from __future__ import annotations

from pathlib import Path

import click

from autopipe.cli.configuration_flags import configuration_options
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output
from autopipe.configs.configuration import Configuration


@click.command()
@click.argument("files", metavar="MODEL", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("-o", "--output", "target", type=click.Path(path_type=Path), help="File to write; default MODEL.costs.")
@click.option("--merge", is_flag=True, help="Join the cost files given in place of MODEL; later ones override.")
@click.option("--name", help="What to call the device; its product and threads without it.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="What to measure.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Of each rank on a CPU.")
@click.option(
    "--micro-batch-sizes", metavar="B,…", help="Samples in a micro-batch; 1, 2 and 4 where the model takes them."
)
@click.option("--degrees", metavar="D,…", default="2", show_default=True, help="Ways to split operators; none: ''.")
@click.option(
    "--ranks",
    type=click.IntRange(2, 64),
    help="Also measure messages and collectives between ranks.",
)
@click.option(
    "--source",
    type=click.Choice(["torch", "onnxruntime"]),
    default="torch",
    show_default=True,
    help="The generated code, or the kernels of ONNX Runtime, forward only.",
)
@click.option("--seconds", type=click.FloatRange(0.1), default=30.0, show_default=True, help="About how long it takes.")
@configuration_options
@standard_options
def profile(
    output: Output,
    files: tuple[Path, ...],
    target: Path | None,
    merge: bool,
    name: str | None,
    device: str,
    threads: int,
    micro_batch_sizes: str | None,
    degrees: str,
    ranks: int | None,
    source: str,
    seconds: float,
    configuration: Configuration,
) -> None:
    """Measure the operators of the ONNX file MODEL, forward and backward, and write a cost file for `plan --costs`.

    Each distinct operator is run with its local shapes as generated code runs it: whole, for each micro-batch size, and
    in the shares that splits leave.

    \b
    Example:
      autopipe profile gpt.onnx --ranks 2
      autopipe plan gpt.onnx --gpus 2 --cluster cpu-local --costs gpt.onnx.costs
      autopipe profile --merge gpt.onnx.costs dlrm.onnx.costs -o cpu.costs
    """
    from autopipe.cli.files import check_writable, write_texts
    from autopipe.cli.profiling.samples import parsed_sizes
    from autopipe.cli.profiling.screen import costs_screen
    from autopipe.ir.cost_file import costs_text, read_costs
    from autopipe.ir.measured_costs import Costs, merged

    refused: tuple[str, ...] = ()
    if merge:
        if target is None:
            raise click.UsageError("--merge needs -o FILE")
        check_writable(target)
        costs = merged(map(read_costs, files))
    else:
        from autopipe.cli.profiling.session import Profiling, check_ranks
        from autopipe.cli.request import request_of

        if len(files) > 1:
            raise click.UsageError("give one MODEL, or --merge and the cost files")
        target = target or Path(f"{files[0]}.costs")
        check_writable(target)
        if ranks is not None and device != "cuda":
            check_ranks(ranks, threads)
        profiling = Profiling(
            request=request_of(configuration, files[0]),
            sizes=None if micro_batch_sizes is None else parsed_sizes(micro_batch_sizes, "--micro-batch-sizes"),
            degrees=parsed_sizes(degrees, "--degrees"),
            device=device,
            name=name,
            threads=threads,
            ranks=ranks,
            source=source,
            seconds=seconds,
        )
        with output.progress("measuring", total=seconds) as bar:
            measured, refused = profiling.run(bar)
        costs = Costs((measured,))
    write_texts({target: costs_text(costs)})
    devices = [
        {"device": each.device, "operations": len(each.operations), "exchanges": len(each.exchanges)}
        for each in costs.devices
    ]
    data = {"costs": target, "devices": devices, "refused": refused}
    output.result(data, *costs_screen(costs, refused, target))
