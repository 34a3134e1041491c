"""Command `explain`: the reasons of a plan, of one of its nodes, stages or devices, and the cost of
other choices.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

from autopipe.api.events import Events, Progress, SilentEvents
from autopipe.api.plan_folder import CONFIGURATION_FILE, open_plan
from autopipe.api.request import make_request
from autopipe.api.summary_text import degrees_text
from autopipe.configs.configuration import load_configuration
from autopipe.ir.codec import encode
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.placement import Stage
from autopipe.ir.plan import Alternative, Choice
from autopipe.ir.timeline import StagePrediction
from autopipe.ir.words import plural
from autopipe.passes.analysis.layer_ranges import model_parts
from autopipe.passes.degree_table import DegreeRow, degree_rows
from autopipe.passes.degrees import DEGREES
from autopipe.passes.explain import (
    Change,
    DeviceReport,
    NodeReport,
    WhatIf,
    best_changes,
    device_report,
    is_quick,
    move_changes,
    node_report,
    request_with_open_options,
    split_changes,
    stage_changes,
    what_if_requests,
    what_if_result,
)
from autopipe.passes.pipeline import PlanResult
from autopipe.passes.placement.explicit import Explicit, NodeNames
from autopipe.passes.schedule.breakdown import StageOverhead, stage_overheads


class Explanation(Protocol):
    """The explanation of a plan or of a part of it."""

    @property
    def planned(self) -> PlanResult:
        """The plan that is explained."""

    @property
    def data(self) -> Mapping[str, object]:
        """The explanation as names and values, as `--json` prints it."""


def explain(
    folder: Path,
    *,
    node: str | None = None,
    stage: int | None = None,
    device: int | None = None,
    degrees: bool = False,
    why_not: str | None = None,
    model: Path | None = None,
    events: Events | None = None,
) -> Explanation:
    """Explain the plan in `folder`, or one part of it.

    At most one part is given: a `node` by its name or number, a `stage`, a `device`, all parallel
    `degrees`, or the degrees in the text `why_not`, such as `tensor=8`. `model` is the ONNX file if
    it is not where it was planned. Raises ConfigurationError if the folder holds no plan or the
    plan has no such part.
    """
    events = events or SilentEvents()
    wanted, family = ({}, None) if why_not is None else parse_degrees(why_not)
    planned = open_plan(folder, model)
    if planned.plan.summary.costs is not None and planned.request.costs is None:
        hint = (
            f"restore the file at the path of costs in {folder / CONFIGURATION_FILE}, or plan again"
        )
        raise ConfigurationError(
            "the plan uses measured costs, but the cost file does not exist", hint, str(folder)
        )
    if node is not None:
        return _explain_node(planned, node)
    if stage is not None:
        return _explain_stage(planned, stage)
    if device is not None:
        return _explain_device(planned, device)
    if degrees or why_not is not None:
        with events.progress("degrees") as bar:
            return _explain_degrees(planned, folder, wanted, family, bar)
    return _explain_plan(planned, folder, events)


_DEGREE_ALIASES = {"pp": "pipeline", "dp": "data", "tp": "tensor"}
"""Short names of the degrees of pipeline, data and tensor parallelism."""


def parse_degrees(words: str) -> tuple[dict[str, int], str | None]:
    """Return (degrees, schedule) for a text such as `tensor=8` or `schedule=NAME`: the wanted
    degrees by name, and the beginning of the names of the wanted schedules, None for all. Raises
    ConfigurationError for other words.
    """
    found: dict[str, int] = {}
    family = None
    for word in words.split(","):
        name, _, value = word.strip().partition("=")
        name = _DEGREE_ALIASES.get(name.lower(), name.lower())
        if name == "schedule" and value:
            family = value
        elif name in DEGREES and value.isdecimal() and 0 < int(value) < 2**20:
            found[name] = int(value)
        else:
            hint = "use degrees such as pipeline=4,tensor=2,data=8, or schedule=NAME"
            raise ConfigurationError(
                f"{word.strip()!r} is not a degree, expected NAME=NUMBER", hint, "--why-not"
            )
    return found, family


@dataclass(frozen=True, slots=True)
class DegreesExplanation:
    """One row per factorisation of the devices into parallel degrees."""

    planned: PlanResult
    rows: tuple[DegreeRow, ...]
    commands: tuple[str | None, ...]
    """For each row, the command that plans its degrees; None if there is none."""
    family: str | None
    """The beginning of the names of the schedules that were asked for, None for all schedules."""

    @property
    def data(self) -> Mapping[str, object]:
        """The summary of the plan and the rows with their commands."""
        summary = self.planned.plan.summary
        pairs = zip(self.rows, self.commands, strict=True)
        return {
            "summary": encode(summary),
            "degrees": degrees_text(summary),
            "rows": [{**encode(row), "command": command} for row, command in pairs],
        }


def _explain_degrees(
    planned: PlanResult,
    folder: Path,
    wanted: dict[str, int],
    family: str | None,
    bar: Progress,
) -> DegreesExplanation:
    rows = tuple(degree_rows(planned, wanted, family, lambda note: bar.advance(0, note)))
    commands = tuple(
        None if row.choice is None else choice_command(folder, planned, row.choice) for row in rows
    )
    return DegreesExplanation(planned, rows, commands, family)


@dataclass(frozen=True, slots=True)
class DeviceExplanation:
    """The tasks, waiting times and memory of one device."""

    planned: PlanResult
    device: int
    report: DeviceReport
    kind: str
    """Name of the device type."""

    @property
    def memory_limit_bytes(self) -> int:
        """Bytes that tensors may occupy on the device."""
        return self.planned.plan.memory_limits[self.device]

    @property
    def data(self) -> Mapping[str, object]:
        """The report of the device with the step time and the memory limit."""
        return {
            "device": self.report,
            "kind": self.kind,
            "busy_s": self.report.busy_s,
            "step_time_s": self.planned.plan.summary.step_time_s,
            "memory_limit_bytes": self.memory_limit_bytes,
        }


def _explain_device(planned: PlanResult, device: int) -> DeviceExplanation:
    plan = planned.plan
    _check_number(device, planned.problem.cluster.size, "device")
    report = device_report(plan.placement, plan.prediction, planned.timeline, device)
    kind = planned.problem.cluster.devices[device].name
    return DeviceExplanation(planned, device, report, kind)


def changes_json(changes: Sequence[Change], chosen_s: float) -> list[dict[str, object]]:
    """Return each change of a plan as names and values. `chosen_s` is the step time of the plan in
    seconds.
    """
    return [
        {
            "what": each.what,
            "step_time_s": each.step_s,
            "longer_s": None if each.step_s is None else each.step_s - chosen_s,
            "peak_memory_bytes": each.peak_memory_bytes,
            "refused": each.refused,
        }
        for each in changes
    ]


@dataclass(frozen=True, slots=True)
class NodeExplanation:
    """The stage, splits and cost of one node, and the cost of other splits and stages."""

    planned: PlanResult
    node: int
    report: NodeReport
    changes: tuple[Change, ...]
    """Other splits and stages, the shortest step first."""

    @property
    def data(self) -> Mapping[str, object]:
        """The report of the node and its other splits and stages."""
        step_s = self.planned.plan.summary.step_time_s
        return {
            "node": self.report,
            "split": {split.axis: split.degree for split in self.report.splits},
            "step_time_s": step_s,
            "others": changes_json(self.changes, step_s),
        }


def _explain_node(planned: PlanResult, name: str) -> NodeExplanation:
    problem = planned.problem
    placement = planned.plan.placement
    node = _find_node(planned, name)
    splits = best_changes(planned, split_changes(problem, placement, node), wanted=3)
    moves = best_changes(planned, move_changes(problem, placement, node), wanted=2)
    changes = tuple(sorted((*splits, *moves), key=lambda each: each.rank))
    return NodeExplanation(planned, node, node_report(problem, placement, node), changes)


def _find_node(planned: PlanResult, name: str) -> int:
    names = NodeNames(planned.problem.graph)
    entry = int(name) if name.isdecimal() and not names.has_name(name) else name
    try:
        meant = names.selected_nodes(entry)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, hint=error.hint, where="--node") from error
    if len(meant) > 1:
        numbers = ", ".join(map(str, meant[:8])) + (", ..." if len(meant) > 8 else "")
        raise ConfigurationError(
            f"{name!r} matches {len(meant)} {plural(len(meant), 'node')}, expected one",
            f"use the number of one node: {numbers}",
            "--node",
        )
    return meant[0]


@dataclass(frozen=True, slots=True)
class StageExplanation:
    """The nodes, devices and cost of one stage, and the cost of other boundaries and devices."""

    planned: PlanResult
    number: int
    parts: StageOverhead
    busy_s: float
    """Seconds of a step in which the first device of the stage computes."""
    changes: tuple[Change, ...]
    """Other boundaries and devices, the shortest step first."""

    @property
    def stage(self) -> Stage:
        """The stage in the placement."""
        return self.planned.plan.placement.stages[self.number]

    @property
    def predicted(self) -> StagePrediction:
        """Predicted times and memory of the stage."""
        return self.planned.plan.prediction.stages[self.number]

    @property
    def data(self) -> Mapping[str, object]:
        """The stage, its prediction and its other boundaries and devices."""
        step_s = self.planned.plan.summary.step_time_s
        names = ("devices", "nodes", "micro_batch_size", "recompute")
        return {
            "stage": self.number,
            **{name: getattr(self.stage, name) for name in names},
            "layers": model_parts(self.planned.problem.graph, self.stage.nodes),
            "predicted": self.predicted,
            "parts": self.parts,
            "busy_s": self.busy_s,
            "step_time_s": step_s,
            "others": changes_json(self.changes, step_s),
        }


def _explain_stage(planned: PlanResult, number: int) -> StageExplanation:
    problem = planned.problem
    plan = planned.plan
    _check_number(number, len(plan.placement.stages), "stage")
    device = plan.placement.stages[number].devices[0]
    report = device_report(plan.placement, plan.prediction, planned.timeline, device)
    return StageExplanation(
        planned,
        number,
        stage_overheads(problem, plan.placement, plan.prediction)[number],
        report.busy_s,
        best_changes(planned, stage_changes(problem, plan.placement, number), wanted=4),
    )


def _check_number(number: int, count: int, what: str) -> None:
    if number >= count:
        there = f"0 to {count - 1}" if count > 1 else "0 only"
        raise ConfigurationError(
            f"{what} {number} does not exist in the plan",
            hint=f"use {what} {there}",
            where=f"--{what}",
        )


@dataclass(frozen=True, slots=True)
class PlanExplanation:
    """The other candidates of the search, and the changes that would raise the throughput."""

    planned: PlanResult
    folder: Path
    commands: tuple[str, ...]
    """By alternative of the plan, the command that plans it."""
    helps: tuple[WhatIf, ...]

    @property
    def data(self) -> Mapping[str, object]:
        """The summary, the parts of the step, the alternatives and the helpful changes."""
        plan = self.planned.plan
        pairs = zip(plan.alternatives, self.commands, strict=True)
        forms: list[dict[str, object]] = [
            {**encode(each), "command": command} for each, command in pairs
        ]
        following = next_best_alternative(plan.alternatives)
        return {
            "summary": encode(plan.summary),
            "degrees": degrees_text(plan.summary),
            "breakdown": plan.breakdown,
            "host_bound_stages": plan.host_bound_stages,
            "alternatives": forms,
            "next_best": None if following is None else forms[plan.alternatives.index(following)],
            "helps": list(self.helps),
        }


def _explain_plan(planned: PlanResult, folder: Path, events: Events) -> PlanExplanation:
    helps = tuple(_helpful_changes(planned, folder, events))
    alternatives = planned.plan.alternatives
    commands = tuple(choice_command(folder, planned, each.choice) for each in alternatives)
    return PlanExplanation(planned, folder, commands, helps)


def next_best_alternative(alternatives: Sequence[Alternative]) -> Alternative | None:
    """Return the best alternative except the chosen one: the one with the shortest step. None if no
    other alternative has a step. The chosen alternative is the first of those with the shortest
    step.
    """
    stepped = sorted(
        (each for each in alternatives if each.same_as is None), key=lambda each: each.rank
    )
    return stepped[1] if len(stepped) > 1 and stepped[1].step_time_s is not None else None


def _helpful_changes(planned: PlanResult, folder: Path, events: Events) -> list[WhatIf]:
    """Return the throughput under each change of the cluster or of the micro-batches, one change at
    a time.
    """
    again = is_quick(planned) and not isinstance(planned.request.strategy, Explicit)
    if again and not planned.request.model.is_file():
        events.warn(
            "alternatives are not planned because the model of the plan does not exist: "
            f"{planned.plan.model}",
            "set the path of the model with --model FILE",
        )
        again = False
    changes = list(what_if_requests(planned))
    helps = []
    configuration = load_configuration(folder / CONFIGURATION_FILE)
    nodes = configuration.cluster.nodes
    twice = "twice the devices"
    cluster = replace(configuration.cluster, nodes=None if nodes is None else 2 * nodes)
    doubled = replace(configuration, gpus=2 * planned.problem.cluster.size, cluster=cluster)
    with events.progress("what would help", total=len(changes) + 1) as bar:
        for what, request in changes:
            bar.advance(0, note=what)
            helps.append(what_if_result(planned, what, request, again))
            bar.advance()
        bar.advance(0, note=twice)
        try:
            request = make_request(doubled, planned.request.model)
        except AutopipeError as error:
            return [*helps, WhatIf(twice, again, refused=" ".join(error.message.split()))]
        request = replace(request, strategy=request_with_open_options(planned).strategy)
        return [*helps, what_if_result(planned, twice, request, again)]


def choice_command(folder: Path, planned: PlanResult, choice: Choice) -> str:
    """Return the command that plans a choice, with all other settings of the plan in `folder`."""
    target = ".".join(
        (str(folder), choice.strategy, *([choice.schedule] if choice.schedule else []))
    )
    model = min(planned.plan.model, os.path.relpath(planned.plan.model), key=len)
    words = ["autopipe", "plan", model, "--config", str(folder / CONFIGURATION_FILE)]
    return shlex.join([*words, *_choice_flags(planned, choice), "-o", target])


def _choice_flags(planned: PlanResult, choice: Choice) -> Iterator[str]:
    """Yield the flags that override the effective configuration of the plan by a choice."""
    problem = planned.problem
    strategy = cast(Any, planned.request.strategy)
    options = dict(choice.options)
    yield from ("--strategy", choice.strategy)
    # The flags reset each option that the plan sets and the choice does not set to its default.
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
