"""`autopipe explain`: print the reasons of a plan, and the cost of other choices."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.api import explanation
from autopipe.api.explanation import (
    DegreesExplanation,
    DeviceExplanation,
    NodeExplanation,
    PlanExplanation,
    StageExplanation,
)
from autopipe.api.summary_text import degrees_text
from autopipe.cli.options import MODEL, PATH, standard_options
from autopipe.cli.output import Output, group_text, plain_table
from autopipe.cli.plan_report import reason_lines, strategy_text, text_over_chosen
from autopipe.ir.timeline import StagePrediction
from autopipe.ir.words import bytes_text, count_text, plural, printable, seconds_text
from autopipe.passes.analysis.layer_ranges import layer_label
from autopipe.passes.degree_table import DegreeRow
from autopipe.passes.explain import Change, DeviceReport, NodeReport, WhatIf
from autopipe.passes.pipeline import PlanResult


@click.command()
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--node",
    metavar="NAME",
    help="Explain the placement and splits of a node, by name or number.",
)
@click.option(
    "--stage", metavar="K", type=click.IntRange(min=0), help="Explain the choice of a stage."
)
@click.option(
    "--device",
    metavar="D",
    type=click.IntRange(min=0),
    help="Show the tasks of a device, and the devices for which it waits.",
)
@click.option(
    "--degrees",
    is_flag=True,
    help="Show step time, memory and MFU of all degrees, and why the plan uses others.",
)
@click.option(
    "--why-not",
    metavar="DEGREES",
    help=(
        "Show step time, memory and MFU of these degrees: tensor=8, pipeline=4,tensor=2,data=8, "
        "or schedule=NAME for all schedules whose names start with NAME."
    ),
)
@MODEL
@standard_options
def explain(
    output: Output,
    folder: Path,
    node: str | None,
    stage: int | None,
    device: int | None,
    degrees: bool,
    why_not: str | None,
    model: Path | None,
) -> None:
    """Explain the plan in DIR: the parts of its step time beyond the ideal, the other candidates,
    and the changes of the cluster that would help most.

    --node and --stage list the next best choices for a node or stage. Each has the step time of the
    plan with only this choice changed, scheduled again by the scheduler of the plan.

    \b
    Example:
      autopipe explain gpt.onnx.plan
      autopipe explain gpt.onnx.plan --node /layers.1/attention/query/Add
      autopipe explain gpt.onnx.plan --stage 1
      autopipe explain gpt.onnx.plan --device 3
      autopipe explain gpt.onnx.plan --degrees
      autopipe explain gpt.onnx.plan --why-not tensor=2
    """
    if sum(each is not None for each in (node, stage, device, degrees or None, why_not)) > 1:
        raise click.UsageError(
            "--node, --stage, --device, --degrees and --why-not are mutually exclusive"
        )
    found = explanation.explain(
        folder,
        node=node,
        stage=stage,
        device=device,
        degrees=degrees,
        why_not=why_not,
        model=model,
        events=output,
    )
    output.result({"plan": folder, **found.data}, *_explanation_screen(found))


def _explanation_screen(found: explanation.Explanation) -> Sequence[RenderableType]:
    """Return the texts and tables that a terminal shows of an explanation."""
    match found:
        case NodeExplanation():
            return _node_screen(found)
        case StageExplanation():
            return _stage_screen(found)
        case DeviceExplanation():
            return _device_screen(found)
        case DegreesExplanation():
            return _degrees_screen(found)
        case PlanExplanation():
            return _plan_screen(found)
    raise TypeError(f"no screen for {type(found).__name__}")


def _degrees_screen(found: DegreesExplanation) -> list[RenderableType]:
    plan = found.planned.plan
    summary = plan.summary
    rows = found.rows
    family = found.family
    commands = found.commands
    heads = (
        "pipeline",
        "data",
        "tensor",
        "schedule",
        "micro-batches",
        "step",
        "slowdown",
        "memory",
        "MFU",
    )
    table = plain_table(*heads, right=5, no_wrap=True)
    reasons = plain_table("degrees", "why not")
    for row in rows:
        names = tuple(str(each or "any") for each in (row.pipeline, row.data, row.tensor))
        reasons.add_row(
            " × ".join(names), row.reason if family is None else f"{row.schedule}: {row.reason}"
        )
        if row.step_time_s is not None:
            table.add_row(*names, *_step_cells(row, summary.step_time_s))
    screen: list[RenderableType] = [
        f"{plan.model}: {summary.strategy} with {summary.schedule}, "
        f"{seconds_text(summary.step_time_s)}:"
        f" {degrees_text(summary)}",
        *([table] if table.rows else []),
        reasons,
        (
            "parts are relative to the step of the plan; each row has the micro-batches that are "
            "best for it"
        ),
    ]
    if commands[0] is not None and not rows[0].is_plan:
        screen.append(f"the first row ({rows[0].text}):")
        screen.append(Text(f"  {commands[0]}"))
    return screen


def _step_cells(row: DegreeRow, plan_s: float) -> Iterator[str]:
    """Yield the cells of a row that has a step."""
    assert row.step_time_s is not None
    yield row.schedule
    yield f"{row.micro_batches} of {row.micro_batch_size}"
    yield seconds_text(row.step_time_s)
    yield text_over_chosen(row.step_time_s, plan_s)
    yield bytes_text(row.peak_memory_bytes or 0)
    yield "-" if row.mfu is None else f"{row.mfu:.1%}"


_MAX_LISTED_WAITS = 8
_MIN_SHOWN_S = 1e-12
"""Shorter times, in seconds, are rounding errors and not shown."""


def _device_screen(found: DeviceExplanation) -> Sequence[RenderableType]:
    device = found.device
    report = found.report
    kind = found.kind
    limit = found.memory_limit_bytes
    step_s = found.planned.plan.summary.step_time_s
    busy_s = report.busy_s
    stages = f"{plural(len(report.stages), 'stage')} {', '.join(map(str, report.stages))}"
    table = plain_table("does", "tasks", "seconds", "of the step", right=1)
    for name, count, seconds in _device_rows(report):
        if seconds > _MIN_SHOWN_S:
            table.add_row(
                name, count, seconds_text(seconds), f"{seconds / step_s:.1%}" if step_s else "-"
            )
    return (
        f"device {device}, {kind}: {stages if report.stages else 'no stage'}",
        f"memory: at most {bytes_text(report.peak_bytes)} of {bytes_text(limit)},"
        f" {bytes_text(report.static_bytes)} of it all through the step",
        f"busy {busy_s / step_s if step_s else 0.0:.1%} of the step of {seconds_text(step_s)}:",
        table,
    )


def _device_rows(report: DeviceReport) -> Iterator[tuple[str, str, float]]:
    """Yield (activity, number of tasks, seconds). The seconds add up to the step."""
    words = {
        "F": "forward",
        "B": "backward",
        "I": "gradients of inputs",
        "W": "gradients of weights",
    }
    for task, count, seconds in report.tasks:
        yield f"{words[task[-1]]} of stage {task[:-1]}", str(count), seconds
    yield "sums gradients", "", report.gradients_s
    yield "updates parameters", "", report.update_s
    for device, seconds in report.waits[:_MAX_LISTED_WAITS]:
        yield f"waits for device {device}", "", seconds
    yield (
        "waits for other devices",
        "",
        sum(seconds for _, seconds in report.waits[_MAX_LISTED_WAITS:]),
    )
    yield "waits for messages on their way", "", report.messages_s
    yield "waits at the end", "", report.end_s


def _change_table(changes: Sequence[Change], chosen_s: float) -> Table:
    """Return a table with one row per change: its step time, the difference from `chosen_s` (the
    step time of the plan in seconds), and the peak memory of the fullest device.
    """
    table = plain_table("what else", "step", "slowdown", "memory", right=1, no_wrap=True)
    for each in changes:
        if each.step_s is None:
            table.add_row(f"{each.what}: {each.refused}")
        else:
            told = (
                seconds_text(each.step_s),
                text_over_chosen(each.step_s, chosen_s),
                bytes_text(each.peak_memory_bytes or 0),
            )
            table.add_row(each.what, *told)
    return table


_MAX_LISTED_EDGES = 12


def _node_screen(found: NodeExplanation) -> list[RenderableType]:
    plan = found.planned.plan
    summary = plan.summary
    node = found.node
    report = found.report
    changes = found.changes
    split = ", ".join(map(str, report.splits)) or (
        "not split" if len(report.devices) > 1 else "whole"
    )
    each = (
        ""
        if report.share == 1
        else f": each computes {Fraction(report.share).limit_denominator(1 << 20)} of it"
    )
    predicted = plan.prediction.stages[report.stage]
    taken = report.forward_s + report.backward_s
    whole = predicted.forward_s + predicted.backward_s
    share = f", {taken / whole:.1%} of the stage" if whole else ""
    screen: list[RenderableType] = [
        f"node {node} {report.name!r}, {report.op}: stage {report.stage}, devices "
        f"{group_text(report.devices)},"
        f" {split}{each}",
        f"takes {seconds_text(report.forward_s)} forward and {seconds_text(report.backward_s)} "
        f"backward for a micro-batch{share}",
    ]
    if report.recomputed:
        screen.append(
            "each stage that reads its values computes it for itself: that costs less than "
            "sending them"
        )
    screen.append(_edge_table(report))
    if changes:
        now = (
            f"the step takes {seconds_text(summary.step_time_s)} now; {summary.schedule} orders "
            "the others, too"
        )
        screen += [_change_table(changes, summary.step_time_s), now]
    else:
        screen.append("nothing else can be done with it in this plan")
    return screen


def _edge_table(report: NodeReport) -> Table:
    table = plain_table("value", "bytes", "other end", "what moves")
    table.columns[1].justify = "right"
    for edge in report.edges[:_MAX_LISTED_EDGES]:
        node = printable(edge.node)
        moved = []
        if edge.exchanges:
            moved.append(
                f"{' and '.join(edge.exchanges).replace('_', '-')}, {seconds_text(edge.exchange_s)}"
            )
        if edge.stage is None:
            node = node or "the model's own"
        elif edge.stage != report.stage:
            node += f" (stage {edge.stage})"
            moved.append("a message between the stages")
        value = f"{'reads' if edge.reads else 'gives'} {printable(edge.value)}"
        table.add_row(value, bytes_text(edge.bytes), node, "; ".join(moved) or "nothing")
    if len(report.edges) > _MAX_LISTED_EDGES:
        table.add_row(f"... and {len(report.edges) - _MAX_LISTED_EDGES} more")
    return table


def _stage_screen(found: StageExplanation) -> Sequence[RenderableType]:
    planned = found.planned
    problem = planned.problem
    plan = planned.plan
    number = found.number
    stage = found.stage
    predicted = found.predicted
    parts = found.parts
    busy_s = found.busy_s
    step_s = plan.summary.step_time_s
    changes = found.changes
    first, last = (problem.graph.nodes[stage.nodes[end]].name for end in (0, -1))
    label = layer_label(problem.graph, stage.nodes)
    inside = {
        "collectives": parts.forward.exchange_s + parts.backward.exchange_s,
        "running forward again": parts.backward.recomputation_s,
        "what several devices compute": parts.forward.repetition_s + parts.backward.repetition_s,
    }
    told = ", ".join(
        f"{name} {seconds_text(seconds)}" for name, seconds in inside.items() if seconds
    )
    return (
        f"stage {number} of {len(plan.placement.stages)}: devices {group_text(stage.devices)}, "
        f"{f'{label}, ' if label else ''}{len(stage.nodes)} {plural(len(stage.nodes), 'node')}"
        f" from {first!r} to {last!r}, micro-batches of {stage.micro_batch_size}",
        f"takes {seconds_text(predicted.forward_s)} forward and "
        f"{seconds_text(predicted.backward_s)} backward for a"
        f" micro-batch; {bytes_text(predicted.parameter_bytes)} of parameters",
        *([f"of that: {told}"] if told else []),
        *_stage_host_lines(predicted),
        *_message_lines(planned, number),
        (
            f"its devices are busy {busy_s / step_s if step_s else 0.0:.1%} of the step of "
            f"{seconds_text(step_s)}"
        ),
        _change_table(changes, step_s),
    )


def _stage_host_lines(predicted: StagePrediction) -> Iterator[str]:
    """Yield a line about the host's time for a micro-batch if it is known."""
    host = predicted.on_host
    device = predicted.on_device
    if host is None or device is None:
        return
    whose = "host" if predicted.host_bound else "device"
    yield (
        f"it is bound by the {whose}: the host takes {seconds_text(host.forward_s)} forward and"
        f" {seconds_text(host.backward_s)} backward, the device "
        f"{seconds_text(device.forward_s)} and"
        f" {seconds_text(device.backward_s)}"
    )


def _message_lines(planned: PlanResult, stage: int) -> Iterator[str]:
    """Yield one line per neighbour of a stage: the bytes of all messages and the seconds of the
    longest message.
    """
    found: dict[tuple[int, int], tuple[int, float]] = {}
    for each in planned.plan.prediction.messages:
        ends = each.source_stage, each.target_stage
        if stage in ends:
            size, seconds = found.get(ends, (0, 0.0))
            found[ends] = size + each.forward_bytes, max(seconds, each.forward_s)
    for (source, target), (size, seconds) in sorted(found.items()):
        other = f"from stage {source}" if target == stage else f"to stage {target}"
        way = (
            f"{seconds_text(seconds)} each way for a micro-batch"
            if seconds
            else "on the same devices"
        )
        yield f"values {other}: {bytes_text(size)}, {way}"


def _plan_screen(found: PlanExplanation) -> list[RenderableType]:
    plan = found.planned.plan
    summary = plan.summary
    following = explanation.next_best_alternative(plan.alternatives)
    degrees = degrees_text(summary)
    screen: list[RenderableType] = [
        f"{plan.model}: {summary.strategy} with {summary.schedule}, {plan.mode},"
        f" {count_text(summary.devices, 'device')}{f': {degrees}' if degrees else ''}",
        *reason_lines(plan),
    ]
    if following is None:
        screen.append(
            "no other candidate" + ("" if plan.alternatives else ": the strategy was named")
        )
    else:
        assert following.step_time_s is not None
        over = text_over_chosen(following.step_time_s, summary.step_time_s)
        what = f"{strategy_text(following)} with {following.choice.schedule}"
        screen.append(f"next best: {what}, {seconds_text(following.step_time_s)} ({over}):")
        screen.append(Text(f"  {found.commands[plan.alternatives.index(following)]}"))
    screen.append(_help_table(found.helps, summary.samples_per_s))
    screen.append(
        f"more: autopipe explain {shlex.quote(str(found.folder))} --node NAME, --stage K or "
        "--device D"
    )
    return screen


def _help_table(helps: Sequence[WhatIf], now: float) -> Table:
    """Return a table of changes with the highest throughput first. `now` is the throughput of the
    plan in samples per second.
    """
    again = any(each.planned_again for each in helps)
    how = (
        "planned again, by the same strategy and schedule"
        if again
        else "the same placement, ordered anew"
    )
    table = plain_table(f"what would help ({how})", "samples/s", "faster", right=1, no_wrap=True)
    for each in sorted(helps, key=lambda one: -(one.samples_per_s or 0.0)):
        if each.samples_per_s is None:
            table.add_row(f"{each.what}: {each.refused}")
        else:
            change = f"{each.samples_per_s / now - 1:+.1%}" if now else "-"
            table.add_row(each.what, f"{each.samples_per_s:,.1f}", change)
    return table
