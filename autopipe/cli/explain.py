"""`autopipe explain`: why a plan, a stage, a node or a device's step is as it is, and what else would have cost."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import click
from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.options import standard_options
from autopipe.cli.output import Output, bytes_text, group_text, plain_table, printable, seconds_text
from autopipe.cli.plan_folder import CONFIGURATION_FILE, open_plan
from autopipe.cli.plan_text import (
    distance_lines,
    over_text,
    prediction_line,
    schedule_line,
    strategy_text,
    weighed_screen,
)
from autopipe.cli.request import request_of
from autopipe.configs.configuration import load_configuration
from autopipe.ir.codec import encode
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.plan import Alternative, Choice, Plan
from autopipe.passes.explain import (
    DeviceReport,
    Edge,
    EditPrice,
    NodeReport,
    WhatIf,
    WhatIfResult,
    cheapest,
    device_report,
    granted,
    is_quick,
    move_changes,
    node_report,
    split_changes,
    stage_changes,
    what_ifs,
)
from autopipe.passes.pipeline import PlanResult
from autopipe.passes.placement.given import Given, NodeNames
from autopipe.passes.schedule.breakdown import StageParts, stage_parts


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
      autopipe explain gpt.onnx.plan --node /layers.1/attention/query/Add
      autopipe explain gpt.onnx.plan --stage 1
      autopipe explain gpt.onnx.plan --device 3
    """

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


_MOST_WAITS = 8
_LEAST_S = 1e-12
"""Less is rounding of floats."""


@dataclass(frozen=True, slots=True)
class DeviceExplanation:
    plan: Plan
    kind: str
    """The product that it is."""
    report: DeviceReport

    def screen(self) -> Iterator[RenderableType]:
        report, step_s = self.report, self.plan.summary.step_time_s
        stages = f"stage{'s' if len(report.stages) > 1 else ''} {', '.join(map(str, report.stages))}"
        yield f"device {report.device}, {self.kind}: {stages if report.stages else 'no stage'}"
        limit = self.plan.memory_limits[report.device]
        yield (
            f"memory: at most {bytes_text(report.peak_bytes)} of {bytes_text(limit)},"
            f" {bytes_text(report.static_bytes)} of it all through the step"
        )
        yield f"busy {report.busy_s / step_s if step_s else 0.0:.1%} of the step of {seconds_text(step_s)}:"
        table = plain_table("does", "tasks", "seconds", "of the step", right=1)
        for name, count, seconds in self._rows():
            if seconds > _LEAST_S:
                table.add_row(name, count, seconds_text(seconds), f"{seconds / step_s:.1%}" if step_s else "-")
        yield table

    def data(self) -> dict[str, object]:
        return {
            "device": self.report,
            "kind": self.kind,
            "busy_s": self.report.busy_s,
            "step_time_s": self.plan.summary.step_time_s,
            "memory_limit_bytes": self.plan.memory_limits[self.report.device],
        }

    def _rows(self) -> Iterator[tuple[str, str, float]]:
        """(what, how often, seconds), all of which add up to the step."""
        report = self.report
        words = {"F": "forward", "B": "backward", "I": "gradients of inputs", "W": "gradients of weights"}
        for task, count, seconds in report.tasks:
            yield f"{words[task[-1]]} of stage {task[:-1]}", str(count), seconds
        yield "sums gradients", "", report.gradients_s
        yield "updates parameters", "", report.update_s
        for device, seconds in report.waits[:_MOST_WAITS]:
            yield f"waits for device {device}", "", seconds
        if report.waits[_MOST_WAITS:]:
            yield "waits for other devices", "", sum(seconds for _, seconds in report.waits[_MOST_WAITS:])
        yield "waits for messages on their way", "", report.messages_s
        yield "waits at the end", "", report.end_s


def price_table(prices: Sequence[EditPrice], chosen_s: float) -> Table:
    """A row a change: its step, how much longer than the chosen one, and the most memory on any device."""
    table = plain_table("what else", "step", "longer", "memory", right=1, no_wrap=True)
    for each in prices:
        if each.step_s is None:
            table.add_row(f"{each.what}: {each.refused}")
        else:
            told = seconds_text(each.step_s), over_text(each.step_s, chosen_s), bytes_text(each.peak_memory_bytes or 0)
            table.add_row(each.what, *told)
    return table


def price_forms(prices: Sequence[EditPrice], chosen_s: float) -> list[dict[str, object]]:
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


@dataclass(frozen=True, slots=True)
class NodeExplanation:
    plan: Plan
    report: NodeReport
    prices: Sequence[EditPrice]

    def screen(self) -> Iterator[RenderableType]:
        report, summary = self.report, self.plan.summary
        split = ", ".join(map(str, report.splits)) or ("not split" if len(report.devices) > 1 else "whole")
        each = "" if report.share == 1 else f": each computes {Fraction(report.share).limit_denominator(1 << 20)} of it"
        yield (
            f"node {report.node} {report.name!r}, {report.op}: stage {report.stage}, devices"
            f" {group_text(report.devices)}, {split}{each}"
        )
        taken, whole = report.forward_s + report.backward_s, self._stage_s()
        share = f", {taken / whole:.1%} of the stage" if whole else ""
        yield (
            f"takes {seconds_text(report.forward_s)} forward and {seconds_text(report.backward_s)} backward for a"
            f" micro-batch{share}"
        )
        if report.recomputed:
            yield "each stage that reads its values computes it for itself: that costs less than sending them"
        yield self._edges()
        if self.prices:
            yield price_table(self.prices, summary.step_time_s)
            yield f"the step takes {seconds_text(summary.step_time_s)} now; {summary.schedule} orders the others, too"
        else:
            yield "nothing else can be done with it in this plan"

    def data(self) -> dict[str, object]:
        step_s = self.plan.summary.step_time_s
        splits = {split.axis: split.degree for split in self.report.splits}
        return {"node": self.report, "split": splits, "step_time_s": step_s, "others": price_forms(self.prices, step_s)}

    def _stage_s(self) -> float:
        predicted = self.plan.prediction.stages[self.report.stage]
        return predicted.forward_s + predicted.backward_s

    def _edges(self) -> Table:
        table = plain_table("value", "bytes", "other end", "what moves")
        table.columns[1].justify = "right"
        for edge in self.report.edges[:_MOST_EDGES]:
            value = f"{'reads' if edge.reads else 'gives'} {printable(edge.value)}"
            table.add_row(value, bytes_text(edge.bytes), self._other(edge), self._moved(edge))
        if len(self.report.edges) > _MOST_EDGES:
            table.add_row(f"... and {len(self.report.edges) - _MOST_EDGES} more")
        return table

    def _other(self, edge: Edge) -> str:
        if edge.stage is None:
            return printable(edge.node) or "the model's own"
        node = printable(edge.node)
        return node if edge.stage == self.report.stage else f"{node} (stage {edge.stage})"

    def _moved(self, edge: Edge) -> str:
        moved = [f"{' and '.join(edge.exchanges).replace('_', '-')}, {seconds_text(edge.exchange_s)}"]
        found = moved if edge.exchanges else []
        if edge.stage not in (None, self.report.stage):
            found.append("a message between the stages")
        return "; ".join(found) or "nothing"


def alternative_command(folder: Path, planned: PlanResult, alternative: Alternative) -> str:
    """The command that plans what an alternative chose, all else as in the plan of `folder`."""
    choice = alternative.choice
    target = ".".join((str(folder), choice.strategy, *([choice.schedule] if choice.schedule else [])))
    words = ["autopipe", "plan", _short(planned.plan.model), "--config", str(folder / CONFIGURATION_FILE)]
    return shlex.join([*words, *_choice_words(planned, choice), "-o", target])


def _choice_words(planned: PlanResult, choice: Choice) -> Iterator[str]:
    """The flags that set what the effective configuration of the plan has otherwise."""
    problem = planned.problem
    yield from ("--strategy", choice.strategy)
    for name, value in _options(planned, choice):
        yield from ("--set", f"strategy.{name}={value}")
    if choice.schedule is not None:
        yield from ("--schedule", choice.schedule)
    count = "auto" if choice.micro_batches is None else str(choice.micro_batches)
    if count != str(problem.micro_batches):
        yield from ("--micro-batches", count)
    if choice.recompute != problem.recompute:
        yield from ("--set", f"recompute={choice.recompute}")
    if choice.shard != problem.optimizer.shard:
        yield from ("--set", f"optimizer.shard={json.dumps(choice.shard)}")


def _options(planned: PlanResult, choice: Choice) -> Iterator[tuple[str, str]]:
    """The options of the choice, and of the plan's own strategy, whose options stay, the defaults of the others."""
    wanted = dict(choice.options)
    strategy = cast(Any, planned.request.strategy)
    if strategy.name == choice.strategy:
        for field in dataclasses.fields(strategy):
            if field.name not in wanted and getattr(strategy, field.name) != field.default:
                yield field.name, json.dumps(field.default)
    yield from wanted.items()


def _short(path: str) -> str:
    """The path, from here where that is shorter."""
    return min(path, os.path.relpath(path), key=len)


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    folder: Path
    planned: PlanResult
    helps: Sequence[WhatIfResult]

    def screen(self) -> Iterator[RenderableType]:
        plan, summary = self.planned.plan, self.planned.plan.summary
        yield f"{plan.model}: {summary.strategy} with {summary.schedule}, {plan.mode}, {summary.devices} devices"
        yield prediction_line(summary)
        yield schedule_line(plan)
        if plan.breakdown is not None:
            yield from distance_lines(plan.breakdown, summary.devices, len(set(plan.device_names)))
        yield from weighed_screen(plan.alternatives, summary.step_time_s)
        following = next_best(plan.alternatives)
        if following is None:
            yield "no other plan was weighed" + ("" if plan.alternatives else ": the strategy was named")
        else:
            assert following.step_time_s is not None
            over = over_text(following.step_time_s, summary.step_time_s)
            what = f"{strategy_text(following)} with {following.choice.schedule}"
            yield f"next best: {what}, {seconds_text(following.step_time_s)} ({over}):"
            yield f"  {alternative_command(self.folder, self.planned, following)}"
        yield from self._helps()
        yield f"more: autopipe explain {self.folder} --node NAME, --stage K or --device D"

    def data(self) -> dict[str, object]:
        plan = self.planned.plan
        following = next_best(plan.alternatives)
        forms = [encode(each) for each in plan.alternatives]
        commands = [alternative_command(self.folder, self.planned, each) for each in plan.alternatives]
        told = [{**form, "command": command} for form, command in zip(forms, commands, strict=True)]
        return {
            "plan": self.folder,
            "summary": encode(plan.summary),
            "breakdown": plan.breakdown,
            "alternatives": told,
            "next_best": None if following is None else told[plan.alternatives.index(following)],
            "helps": self.helps,
        }

    def _helps(self) -> Iterator[RenderableType]:
        """Changes that would help, the most helpful first."""
        now = self.planned.plan.summary.samples_per_s
        again = any(each.planned_again for each in self.helps)
        how = "planned again, by the same strategy and schedule" if again else "the same placement, ordered anew"
        table = plain_table(f"what would help ({how})", "samples/s", "faster", right=1, no_wrap=True)
        for each in sorted(self.helps, key=lambda one: -(one.samples_per_s or 0.0)):
            if each.samples_per_s is None:
                table.add_row(f"{each.what}: {each.refused}")
            else:
                table.add_row(each.what, f"{each.samples_per_s:,.1f}", f"{each.samples_per_s / now - 1:+.1%}")
        yield table


def next_best(alternatives: Sequence[Alternative]) -> Alternative | None:
    """The alternative with the shortest step after the chosen one, which is the first of the shortest."""
    stepped = sorted((each for each in alternatives if each.same_as is None), key=lambda each: each.rank)
    return stepped[1] if len(stepped) > 1 and stepped[1].step_time_s is not None else None


@dataclass(frozen=True, slots=True)
class StageExplanation:
    planned: PlanResult
    stage: int
    parts: StageParts
    busy_s: float
    """Seconds of a step in which its devices do something."""
    prices: Sequence[EditPrice]

    def screen(self) -> Iterator[RenderableType]:
        plan = self.planned.plan
        stage, predicted = plan.placement.stages[self.stage], plan.prediction.stages[self.stage]
        nodes = self.planned.problem.graph.nodes
        yield (
            f"stage {self.stage} of {len(plan.placement.stages)}: devices {group_text(stage.devices)},"
            f" {len(stage.nodes)} nodes from {nodes[stage.nodes[0]].name!r} to {nodes[stage.nodes[-1]].name!r},"
            f" micro-batches of {stage.micro_batch_size}"
        )
        yield (
            f"takes {seconds_text(predicted.forward_s)} forward and {seconds_text(predicted.backward_s)} backward for a"
            f" micro-batch; {bytes_text(predicted.parameter_bytes)} of parameters"
        )
        told = self._told()
        if told:
            yield f"of that: {', '.join(told)}"
        for source, target, size, seconds in self._messages():
            other = f"from stage {source}" if target == self.stage else f"to stage {target}"
            way = f"{seconds_text(seconds)} each way for a micro-batch" if seconds else "on the same devices"
            yield f"values {other}: {bytes_text(size)}, {way}"
        share = self.busy_s / plan.summary.step_time_s if plan.summary.step_time_s else 0.0
        yield f"its devices are busy {share:.1%} of the step of {seconds_text(plan.summary.step_time_s)}"
        yield price_table(self.prices, plan.summary.step_time_s)

    def data(self) -> dict[str, object]:
        plan = self.planned.plan
        stage, step_s = plan.placement.stages[self.stage], plan.summary.step_time_s
        return {
            "stage": self.stage,
            "devices": stage.devices,
            "nodes": stage.nodes,
            "micro_batch_size": stage.micro_batch_size,
            "recompute": stage.recompute,
            "predicted": plan.prediction.stages[self.stage],
            "parts": self.parts,
            "busy_s": self.busy_s,
            "step_time_s": step_s,
            "others": price_forms(self.prices, step_s),
        }

    def _told(self) -> list[str]:
        parts = {
            "collectives": self.parts.forward.exchange_s + self.parts.backward.exchange_s,
            "running forward again": self.parts.backward.recomputation_s,
            "what several devices compute": self.parts.forward.repetition_s + self.parts.backward.repetition_s,
        }
        return [f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds]

    def _messages(self) -> list[tuple[int, int, int, float]]:
        """(source, target, bytes, the longest message's seconds) for each neighbour."""
        found: dict[tuple[int, int], tuple[int, float]] = {}
        for each in self.planned.plan.prediction.messages:
            if self.stage in (each.source_stage, each.target_stage):
                size, seconds = found.get((each.source_stage, each.target_stage), (0, 0.0))
                both = size + each.forward_bytes, max(seconds, each.forward_s)
                found[each.source_stage, each.target_stage] = both
        return [(*ends, *figures) for ends, figures in sorted(found.items())]


def opened(folder: Path) -> PlanResult:
    """The plan in `folder`. Raises as `open_plan` does, and where the costs that it was made with are gone."""
    planned = open_plan(folder)
    if planned.plan.summary.costs is not None and planned.request.costs is None:
        raise ConfigurationError(
            "the plan was made with measured costs, and their file is gone",
            hint=f"put it where costs says in {folder / CONFIGURATION_FILE}, or plan again",
            where=str(folder),
        )
    return planned


def explained_plan(planned: PlanResult, folder: Path, output: Output) -> PlanExplanation:
    """Why the plan was chosen; every wish is granted once, which may take a while."""
    again = is_quick(planned) and not isinstance(planned.request.strategy, Given)
    asked = list(what_ifs(planned))
    helps = []
    with output.progress("what would help", total=len(asked) + 1) as bar:
        for wish in asked:
            bar.advance(0, note=wish.what)
            helps.append(granted(planned, wish, again))
            bar.advance()
        bar.advance(0, note="twice the devices")
        helps.append(_twice_the_devices(planned, folder, again))
    return PlanExplanation(folder, planned, helps)


def _twice_the_devices(planned: PlanResult, folder: Path, again: bool) -> WhatIfResult:
    what = "twice the devices"
    configuration = load_configuration(folder / CONFIGURATION_FILE)
    doubled = 2 * planned.problem.cluster.size
    nodes = configuration.cluster.nodes
    cluster = replace(configuration.cluster, nodes=None if nodes is None else 2 * nodes)
    try:
        request = request_of(replace(configuration, gpus=doubled, cluster=cluster), planned.request.model)
    except AutopipeError as error:
        return WhatIfResult(what, again, refused=" ".join(error.message.split()))
    return granted(planned, WhatIf(what, request), again)


def explained_node(planned: PlanResult, name: str) -> NodeExplanation:
    """Why a node is where it is. Raises ConfigurationError for a name that no node has, or several."""
    problem, placement = planned.problem, planned.plan.placement
    node = _node_called(planned, name)
    splits = cheapest(planned, split_changes(problem, placement, node), wanted=3)
    moves = cheapest(planned, move_changes(problem, placement, node), wanted=2)
    prices = sorted((*splits, *moves), key=lambda each: each.rank)
    return NodeExplanation(planned.plan, node_report(problem, placement, node), prices)


def _node_called(planned: PlanResult, name: str) -> int:
    names = NodeNames(planned.problem.graph)
    entry = int(name) if name.isdecimal() and not names.has(name) else name
    try:
        meant = names.meant(entry)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, hint=error.hint, where="--node") from error
    if len(meant) > 1:
        numbers = ", ".join(map(str, meant[:8])) + (", ..." if len(meant) > 8 else "")
        raise ConfigurationError(f"{name!r} is {len(meant)} nodes", f"give one's number: {numbers}", "--node")
    return meant[0]


def explained_stage(planned: PlanResult, stage: int) -> StageExplanation:
    """Why a stage is as it is. Raises ConfigurationError where there is none of that number."""
    problem, plan = planned.problem, planned.plan
    _check(stage, len(plan.placement.stages), "stage")
    parts = stage_parts(problem, plan.placement, plan.prediction)[stage]
    device = plan.placement.stages[stage].devices[0]
    busy_s = device_report(plan.placement, plan.prediction, planned.timeline, device).busy_s
    prices = cheapest(planned, stage_changes(problem, plan.placement, stage), wanted=4)
    return StageExplanation(planned, stage, parts, busy_s, prices)


def explained_device(planned: PlanResult, device: int) -> DeviceExplanation:
    """Report of a device. Raises ConfigurationError where there is none of that number."""
    plan = planned.plan
    _check(device, planned.problem.cluster.size, "device")
    report = device_report(plan.placement, plan.prediction, planned.timeline, device)
    return DeviceExplanation(plan, planned.problem.cluster.devices[device].name, report)


def _check(number: int, count: int, what: str) -> None:
    if number >= count:
        there = f"0 to {count - 1}" if count > 1 else "0 alone"
        raise ConfigurationError(f"the plan has no {what} {number}", hint=f"{what}s: {there}", where=f"--{what}")
