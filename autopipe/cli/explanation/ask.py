"""From what a user asks about to its explanation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from autopipe.cli.explanation.device import DeviceExplanation
from autopipe.cli.explanation.node import NodeExplanation
from autopipe.cli.explanation.plan import PlanExplanation
from autopipe.cli.explanation.stage import StageExplanation
from autopipe.cli.output import Output
from autopipe.cli.plan_folder import CONFIGURATION_FILE, open_plan
from autopipe.cli.request import request_of
from autopipe.configs.load import load_configuration
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.passes.explain import (
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
    wishes,
)
from autopipe.passes.pipeline import PlanResult
from autopipe.passes.placement.given import Given, NodeNames
from autopipe.passes.schedule.breakdown import stage_parts


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
    asked = list(wishes(planned))
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
