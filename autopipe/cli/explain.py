"""`autopipe explain`: why a plan is as it is, and what other choices would have cost."""

from __future__ import annotations

from pathlib import Path

import click

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--node", metavar="NAME", help="Why this node is where and split as it is: its name, or its number.")
@click.option("--stage", metavar="K", type=click.IntRange(min=0), help="Why this stage is as it is.")
@click.option("--device", metavar="D", type=click.IntRange(min=0), help="What this device does, and whom it waits for.")
@standard_options
def explain(output: Output, folder: Path, node: str | None, stage: int | None, device: int | None) -> None:
    """Explain the plan in DIR: how far it is from the ideal, what else was weighed, and what would help most.

    Of a node or a stage the next best choices are told, each with the step that planning it gives: everything else
    stays as it is, and the plan's scheduler orders it anew.

    \b
    Example:
      autopipe explain gpt.onnx.plan
      autopipe explain gpt.onnx.plan --node layer0/attention/query
      autopipe explain gpt.onnx.plan --stage 1
      autopipe explain gpt.onnx.plan --device 3
    """
    from autopipe.cli.explanation.ask import explained_device, explained_node, explained_plan, explained_stage, opened

    if sum(each is not None for each in (node, stage, device)) > 1:
        raise click.UsageError("--node, --stage and --device are one at a time")
    planned = opened(folder)
    if node is not None:
        shown = explained_node(planned, node)
        output.result({"plan": folder, **shown.data()}, *shown.screen())
    elif stage is not None:
        part = explained_stage(planned, stage)
        output.result({"plan": folder, **part.data()}, *part.screen())
    elif device is not None:
        one = explained_device(planned, device)
        output.result({"plan": folder, **one.data()}, *one.screen())
    else:
        whole = explained_plan(planned, folder, output)
        output.result(whole.data(), *whole.screen())
