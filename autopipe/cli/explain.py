"""`autopipe explain`: why a plan, a stage, a node or a device's step is as it is, and what else
would have cost.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import click
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from autopipe.api.plan_folder import CONFIGURATION_FILE, open_plan
from autopipe.api.request import request_of
from autopipe.cli.options import MODEL, PATH, standard_options
from autopipe.cli.output import Output, count_text, group_text, plain_table, seconds_text
from autopipe.cli.plan_report import degrees_text, over_text, reason_lines, strategy_text
from autopipe.configs.configuration import load_configuration
from autopipe.ir.codec import encode
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.plan import Alternative, Choice
from autopipe.ir.timeline import StagePrediction
from autopipe.ir.words import bytes_text, plural, printable
from autopipe.passes.degree_table import DegreeRow, degree_rows
from autopipe.passes.degrees import DEGREES
from autopipe.passes.explain import (
    Change,
    DeviceReport,
    NodeReport,
    WhatIf,
    cheapest,
    device_report,
    granted,
    is_quick,
    move_changes,
    node_report,
    opened_request,
    split_changes,
    stage_changes,
    what_ifs,
)
from autopipe.passes.pipeline import PlanResult
from autopipe.passes.placement.explicit import Explicit, NodeNames
from autopipe.passes.schedule.breakdown import stage_parts

Explanation = tuple[dict[str, object], Sequence[RenderableType]]
"""For programs to read, and for a person."""


@click.command()
@click.argument("folder", metavar="DIR", type=PATH)
@click.option(
    "--node",
    metavar="NAME",
    help="Why this node is where and split as it is: its name, or its number.",
)
@click.option(
    "--stage", metavar="K", type=click.IntRange(min=0), help="Why this stage is as it is."
)
@click.option(
    "--device",
    metavar="D",
    type=click.IntRange(min=0),
    help="What this device does, and whom it waits for.",
)
@click.option(
    "--degrees",
    is_flag=True,
    help="Step, memory and MFU of all degrees, and why they are not the plan's.",
)
@click.option(
    "--why-not",
    metavar="DEGREES",
    help=(
        "The same of some: tensor=8, or pipeline=4,tensor=2,data=8, or schedule=NAME for schedules "
        "that begin so."
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
    """Explain the plan in DIR: how far it is from the ideal, the other candidates, and what would
    help most.

    Of a node or a stage the next best choices are told, each with the step that planning it gives:
    everything else stays as it is, and the plan's scheduler orders it anew.

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
            "--node, --stage, --device, --degrees and --why-not are one at a time"
        )
    wanted, family = ({}, None) if why_not is None else asked_degrees(why_not)
    planned = open_plan(folder, model)
    if planned.plan.summary.costs is not None and planned.request.costs is None:
        hint = f"put it where costs says in {folder / CONFIGURATION_FILE}, or plan again"
        raise ConfigurationError(
            "the plan was made with measured costs, and their file is gone", hint, str(folder)
        )
    if node is not None:
        data, screen = explained_node(planned, node)
    elif stage is not None:
        data, screen = explained_stage(planned, stage)
    elif device is not None:
        data, screen = explained_device(planned, device)
    elif degrees or why_not is not None:
        with output.progress("degrees") as bar:
            data, screen = explained_degrees(planned, folder, wanted, family, bar.advance)
    else:
        data, screen = explained_plan(planned, folder, output)
    output.result({"plan": folder, **data}, *screen)


_ALIASES = {"pp": "pipeline", "dp": "data", "tp": "tensor"}
"""Abbreviations of degrees that people write."""


def asked_degrees(words: str) -> tuple[dict[str, int], str | None]:
    """Return (degrees, schedule) of the words of --why-not. Raises ConfigurationError for other
    words.
    """
    found: dict[str, int] = {}
    family = None
    for word in words.split(","):
        name, _, value = word.strip().partition("=")
        name = _ALIASES.get(name.lower(), name.lower())
        if name == "schedule" and value:
            family = value
        elif name in DEGREES and value.isdecimal() and 0 < int(value) < 2**20:
            found[name] = int(value)
        else:
            hint = "write degrees such as pipeline=4,tensor=2,data=8, or schedule=NAME"
            raise ConfigurationError(f"{word.strip()!r} is no degree", hint, "--why-not")
    return found, family


def explained_degrees(
    planned: PlanResult,
    folder: Path,
    wanted: dict[str, int],
    family: str | None,
    tell: Callable[[int, str], None],
) -> Explanation:
    """Return a row for each factorisation of the devices: its step, memory and MFU, and why it is
    not the plan.
    """
    plan = planned.plan
    summary = planned.plan.summary
    rows = degree_rows(planned, wanted, family, lambda what: tell(0, what))
    commands = [
        None if row.choice is None else choice_command(folder, planned, row.choice) for row in rows
    ]
    data: dict[str, object] = {
        "summary": encode(summary),
        "degrees": degrees_text(summary),
        "rows": [
            {**encode(row), "command": command} for row, command in zip(rows, commands, strict=True)
        ],
    }
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
    return data, screen


def _step_cells(row: DegreeRow, plan_s: float) -> Iterator[str]:
    """Yield the figures of a row with a step."""
    assert row.step_time_s is not None
    yield row.schedule
    yield f"{row.micro_batches} of {row.micro_batch_size}"
    yield seconds_text(row.step_time_s)
    yield over_text(row.step_time_s, plan_s)
    yield bytes_text(row.peak_memory_bytes or 0)
    yield "-" if row.mfu is None else f"{row.mfu:.1%}"


_MOST_WAITS = 8
_LEAST_S = 1e-12
"""Less is rounding of floats."""


def explained_device(planned: PlanResult, device: int) -> Explanation:
    plan = planned.plan
    _check(device, planned.problem.cluster.size, "device")
    report = device_report(plan.placement, plan.prediction, planned.timeline, device)
    kind = planned.problem.cluster.devices[device].name
    limit = plan.memory_limits[device]
    step_s = plan.summary.step_time_s
    busy_s = report.busy_s
    data = {
        "device": report,
        "kind": kind,
        "busy_s": busy_s,
        "step_time_s": step_s,
        "memory_limit_bytes": limit,
    }
    stages = f"{plural(len(report.stages), 'stage')} {', '.join(map(str, report.stages))}"
    table = plain_table("does", "tasks", "seconds", "of the step", right=1)
    for name, count, seconds in _device_rows(report):
        if seconds > _LEAST_S:
            table.add_row(
                name, count, seconds_text(seconds), f"{seconds / step_s:.1%}" if step_s else "-"
            )
    return data, (
        f"device {device}, {kind}: {stages if report.stages else 'no stage'}",
        f"memory: at most {bytes_text(report.peak_bytes)} of {bytes_text(limit)},"
        f" {bytes_text(report.static_bytes)} of it all through the step",
        f"busy {busy_s / step_s if step_s else 0.0:.1%} of the step of {seconds_text(step_s)}:",
        table,
    )


def _device_rows(report: DeviceReport) -> Iterator[tuple[str, str, float]]:
    """(what, how often, seconds), all of which add up to the step."""
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
    for device, seconds in report.waits[:_MOST_WAITS]:
        yield f"waits for device {device}", "", seconds
    yield "waits for other devices", "", sum(seconds for _, seconds in report.waits[_MOST_WAITS:])
    yield "waits for messages on their way", "", report.messages_s
    yield "waits at the end", "", report.end_s


def price_table(prices: Sequence[Change], chosen_s: float) -> Table:
    """A row a change: its step, how much longer than the chosen one, and the most memory on any
    device.
    """
    table = plain_table("what else", "step", "slowdown", "memory", right=1, no_wrap=True)
    for each in prices:
        if each.step_s is None:
            table.add_row(f"{each.what}: {each.refused}")
        else:
            told = (
                seconds_text(each.step_s),
                over_text(each.step_s, chosen_s),
                bytes_text(each.peak_memory_bytes or 0),
            )
            table.add_row(each.what, *told)
    return table


def price_forms(prices: Sequence[Change], chosen_s: float) -> list[dict[str, object]]:
    return [
        {
            "what": each.what,
            "step_time_s": each.step_s,
            "longer_s": None if each.step_s is None else each.step_s - chosen_s,
            "peak_memory_bytes": each.peak_memory_bytes,
            "refused": each.refused,
        }
        for each in prices
    ]


_MOST_EDGES = 12


def explained_node(planned: PlanResult, name: str) -> Explanation:
    problem = planned.problem
    plan = planned.plan
    summary = planned.plan.summary
    node = _node_called(planned, name)
    splits = cheapest(planned, split_changes(problem, plan.placement, node), wanted=3)
    moves = cheapest(planned, move_changes(problem, plan.placement, node), wanted=2)
    prices = sorted((*splits, *moves), key=lambda each: each.rank)
    report = node_report(problem, plan.placement, node)
    data = {
        "node": report,
        "split": {split.axis: split.degree for split in report.splits},
        "step_time_s": summary.step_time_s,
        "others": price_forms(prices, summary.step_time_s),
    }
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
        "backward for a"
        f" micro-batch{share}",
    ]
    if report.recomputed:
        screen.append(
            "each stage that reads its values computes it for itself: that costs less than "
            "sending them"
        )
    screen.append(_edge_table(report))
    if prices:
        now = (
            f"the step takes {seconds_text(summary.step_time_s)} now; {summary.schedule} orders "
            "the others, too"
        )
        screen += [price_table(prices, summary.step_time_s), now]
    else:
        screen.append("nothing else can be done with it in this plan")
    return data, screen


def _node_called(planned: PlanResult, name: str) -> int:
    names = NodeNames(planned.problem.graph)
    entry = int(name) if name.isdecimal() and not names.has(name) else name
    try:
        meant = names.meant(entry)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, hint=error.hint, where="--node") from error
    if len(meant) > 1:
        numbers = ", ".join(map(str, meant[:8])) + (", ..." if len(meant) > 8 else "")
        raise ConfigurationError(
            f"{name!r} is {len(meant)} {plural(len(meant), 'node')}",
            f"give one's number: {numbers}",
            "--node",
        )
    return meant[0]


def _edge_table(report: NodeReport) -> Table:
    table = plain_table("value", "bytes", "other end", "what moves")
    table.columns[1].justify = "right"
    for edge in report.edges[:_MOST_EDGES]:
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
    if len(report.edges) > _MOST_EDGES:
        table.add_row(f"... and {len(report.edges) - _MOST_EDGES} more")
    return table


def explained_stage(planned: PlanResult, number: int) -> Explanation:
    problem = planned.problem
    plan = planned.plan
    _check(number, len(plan.placement.stages), "stage")
    stage = plan.placement.stages[number]
    predicted = plan.prediction.stages[number]
    parts = stage_parts(problem, plan.placement, plan.prediction)[number]
    step_s = plan.summary.step_time_s
    busy_s = device_report(
        plan.placement, plan.prediction, planned.timeline, stage.devices[0]
    ).busy_s
    prices = cheapest(planned, stage_changes(problem, plan.placement, number), wanted=4)
    data = {
        "stage": number,
        **{
            name: getattr(stage, name)
            for name in ("devices", "nodes", "micro_batch_size", "recompute")
        },
        "predicted": predicted,
        "parts": parts,
        "busy_s": busy_s,
        "step_time_s": step_s,
        "others": price_forms(prices, step_s),
    }
    first, last = (problem.graph.nodes[stage.nodes[end]].name for end in (0, -1))
    inside = {
        "collectives": parts.forward.exchange_s + parts.backward.exchange_s,
        "running forward again": parts.backward.recomputation_s,
        "what several devices compute": parts.forward.repetition_s + parts.backward.repetition_s,
    }
    told = ", ".join(
        f"{name} {seconds_text(seconds)}" for name, seconds in inside.items() if seconds
    )
    return data, (
        f"stage {number} of {len(plan.placement.stages)}: devices {group_text(stage.devices)}, "
        f"{len(stage.nodes)} {plural(len(stage.nodes), 'node')}"
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
        price_table(prices, step_s),
    )


def _stage_host_lines(predicted: StagePrediction) -> Iterator[str]:
    """Yield a line about the host's time for a micro-batch, if it counts."""
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
    """For each neighbour the bytes of all messages and the seconds of the longest."""
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


def _check(number: int, count: int, what: str) -> None:
    if number >= count:
        there = f"0 to {count - 1}" if count > 1 else "0 alone"
        raise ConfigurationError(
            f"the plan has no {what} {number}", hint=f"{what}s: {there}", where=f"--{what}"
        )


def explained_plan(planned: PlanResult, folder: Path, output: Output) -> Explanation:
    """Why the plan was chosen; every what-if is granted once, which may take a while."""
    plan = planned.plan
    summary = planned.plan.summary
    helps = _what_would_help(planned, folder, output)
    told: list[dict[str, object]] = [
        {**encode(each), "command": alternative_command(folder, planned, each)}
        for each in plan.alternatives
    ]
    following = next_best(plan.alternatives)
    data: dict[str, object] = {
        "summary": encode(summary),
        "degrees": degrees_text(summary),
        "breakdown": plan.breakdown,
        "host_bound_stages": plan.host_bound_stages,
        "alternatives": told,
        "next_best": None if following is None else told[plan.alternatives.index(following)],
        "helps": helps,
    }
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
        over = over_text(following.step_time_s, summary.step_time_s)
        what = f"{strategy_text(following)} with {following.choice.schedule}"
        screen.append(f"next best: {what}, {seconds_text(following.step_time_s)} ({over}):")
        screen.append(Text(f"  {alternative_command(folder, planned, following)}"))
    screen.append(_help_table(helps, summary.samples_per_s))
    screen.append(
        f"more: autopipe explain {shlex.quote(str(folder))} --node NAME, --stage K or --device D"
    )
    return data, screen


def next_best(alternatives: Sequence[Alternative]) -> Alternative | None:
    """The alternative with the shortest step after the chosen one, which is the first of the
    shortest.
    """
    stepped = sorted(
        (each for each in alternatives if each.same_as is None), key=lambda each: each.rank
    )
    return stepped[1] if len(stepped) > 1 and stepped[1].step_time_s is not None else None


def _what_would_help(planned: PlanResult, folder: Path, output: Output) -> list[WhatIf]:
    again = is_quick(planned) and not isinstance(planned.request.strategy, Explicit)
    if again and not planned.request.model.is_file():
        output.warn(
            f"nothing is planned again: the model of the plan is not at {planned.plan.model}",
            "name the file with --model FILE",
        )
        again = False
    changes = list(what_ifs(planned))
    helps = []
    configuration = load_configuration(folder / CONFIGURATION_FILE)
    nodes = configuration.cluster.nodes
    twice = "twice the devices"
    cluster = replace(configuration.cluster, nodes=None if nodes is None else 2 * nodes)
    doubled = replace(configuration, gpus=2 * planned.problem.cluster.size, cluster=cluster)
    with output.progress("what would help", total=len(changes) + 1) as bar:
        for what, request in changes:
            bar.advance(0, note=what)
            helps.append(granted(planned, what, request, again))
            bar.advance()
        bar.advance(0, note=twice)
        try:
            request = request_of(doubled, planned.request.model)
        except AutopipeError as error:
            return [*helps, WhatIf(twice, again, refused=" ".join(error.message.split()))]
        request = replace(request, strategy=opened_request(planned).strategy)
        return [*helps, granted(planned, twice, request, again)]


def _help_table(helps: Sequence[WhatIf], now: float) -> Table:
    """Changes that would help, the most helpful first; `now` are the plan's samples a second."""
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


def alternative_command(folder: Path, planned: PlanResult, alternative: Alternative) -> str:
    """The command that plans what an alternative chose, all else as in the plan of `folder`."""
    return choice_command(folder, planned, alternative.choice)


def choice_command(folder: Path, planned: PlanResult, choice: Choice) -> str:
    """Return the command that plans a choice, all else as in the plan of `folder`."""
    target = ".".join(
        (str(folder), choice.strategy, *([choice.schedule] if choice.schedule else []))
    )
    model = min(planned.plan.model, os.path.relpath(planned.plan.model), key=len)
    words = ["autopipe", "plan", model, "--config", str(folder / CONFIGURATION_FILE)]
    return shlex.join([*words, *_choice_flags(planned, choice), "-o", target])


def _choice_flags(planned: PlanResult, choice: Choice) -> Iterator[str]:
    """The flags that set what the effective configuration of the plan has otherwise."""
    problem = planned.problem
    strategy = cast(Any, planned.request.strategy)
    options = dict(choice.options)
    yield from ("--strategy", choice.strategy)
    # The plan's own strategy keeps its options: those that are not the choice's go back to their
    # defaults.
    for field in dataclasses.fields(strategy) if strategy.name == choice.strategy else ():
        if field.name not in options and getattr(strategy, field.name) != field.default:
            yield from ("--set", f"strategy.{field.name}={json.dumps(field.default)}")
    for name, value in options.items():
        yield from ("--set", f"strategy.{name}={value}")
    if choice.schedule is not None:
        yield from ("--schedule", choice.schedule)
    count = "auto" if choice.micro_batches is None else str(choice.micro_batches)
    if count != str(problem.micro_batches):
        yield from ("--micro-batches", count)
    if choice.recompute != problem.recompute:
        yield from ("--set", f"recompute={choice.recompute}")
    if choice.scores not in (None, planned.model.scores):
        yield from ("--set", f"loss.scores={choice.scores}")
    if choice.shard != problem.optimizer.shard:
        yield from ("--set", f"optimizer.zero_stage={int(choice.shard)}")
