"""Command `compare`: open several plans, and determine which decisions differ from those of the
first plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from autopipe.api.events import Events, SilentEvents
from autopipe.api.plan_folder import graph_of_plan, open_prediction
from autopipe.api.summary_text import degrees_text
from autopipe.api.timeline_figure import Picture, one_device_per_group, plan_picture
from autopipe.ir.codec import encode
from autopipe.ir.errors import AutopipeError
from autopipe.ir.graph import Graph
from autopipe.ir.model_parts import ModelPart
from autopipe.ir.placement import Placement, Stage, devices_text
from autopipe.ir.plan import Plan, Summary, plan_digest
from autopipe.ir.timeline import Timeline
from autopipe.passes.analysis.layer_ranges import model_parts
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.placement.explicit import (
    NodeEntry,
    NodeNames,
    layer_globs,
    node_degrees,
    node_entries,
    role_globs,
)


@dataclass(frozen=True, slots=True)
class ComparisonPlan:
    """A compared plan and a step simulated from its predictions."""

    folder: Path
    plan: Plan
    timeline: Timeline

    def __str__(self) -> str:
        return str(self.folder)

    @property
    def named_picture(self) -> tuple[str, Picture]:
        """The folder of the plan, and the figure of the step. If the step has more than
        `MOST_DEVICES` devices, the figure shows only one of the devices that run the same tasks.
        """
        return str(self.folder), one_device_per_group(plan_picture(self.plan, self.timeline))


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes for which one plan decided `before` and the other plan `after`."""

    before: str
    after: str
    nodes: tuple[int, ...]
    entries: tuple[NodeEntry, ...]
    """Short names for the nodes. A pair of names stands for all nodes from the first to the second.
    """
    parts: tuple[ModelPart, ...] = ()
    """The parts of the model that consist of the nodes, such as layers; () for splits."""


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Differences between the decisions of a plan and those of the first plan."""

    same: bool
    """True if the decisions and their predictions are equal."""
    known: bool
    """True if the nodes can be compared: both models are available and have the same nodes."""
    orders: bool
    """True if the order of the tasks differs."""
    changes: tuple[tuple[str, tuple[Change, ...]], ...] = ()
    """For each kind of decision that differs (`devices`, `splits`, `recompute`), its changes; those
    of the most nodes come first.
    """

    @property
    def data(self) -> dict[str, object]:
        """The differences as data of `compare --json`."""
        found: dict[str, object] = {"same": self.same, "known": self.known}
        for what, changes in self.changes:
            found[what] = [
                {
                    "before": each.before,
                    "after": each.after,
                    "nodes": len(each.nodes),
                    "named": each.entries,
                    "layers": each.parts,
                }
                for each in changes
            ]
        return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """Plans, and the differences of each from the first plan."""

    plans: tuple[ComparisonPlan, ...]
    diffs: tuple[PlanDiff, ...]

    @property
    def data(self) -> list[dict[str, object]]:
        """The plans as data of `compare --json`."""
        first = self.plans[0].plan.summary
        return [
            {
                "plan": each.folder,
                "model": each.plan.model,
                "mode": each.plan.mode,
                "batch_size": each.plan.batch_size,
                "summary": encode(each.plan.summary),
                "degrees": degrees_text(each.plan.summary),
                "breakdown": each.plan.breakdown,
                "speedup": speedup(first, each.plan.summary),
                "differences": diff.data,
            }
            for each, diff in zip(self.plans, self.diffs, strict=True)
        ]


def compare(folders: Sequence[Path], events: Events | None = None) -> Comparison:
    """Compare the plans in the folders `folders` with the first of them. Warn if their models,
    batches or modes differ. Raises ConfigurationError if a folder has no plan.
    """
    events = events or SilentEvents()
    plans = tuple(ComparisonPlan(folder, *open_prediction(folder)) for folder in folders)
    for what, name in (("models", "model"), ("batches", "batch_size"), ("modes", "mode")):
        values = {str(getattr(each.plan, name)) for each in plans}
        if len(values) > 1:
            events.warn(f"the plans differ in their {what}: {', '.join(sorted(values))}")
    return Comparison(plans, tuple(plan_diffs(plans)))


def speedup(first: Summary, other: Summary) -> float | None:
    """Return the samples per second of `other` divided by those of `first`, None if `first` has
    none.
    """
    return other.samples_per_s / first.samples_per_s if first.samples_per_s else None


def plan_diffs(plans: Sequence[ComparisonPlan]) -> list[PlanDiff]:
    """Return the differences of each plan from the first plan."""
    graphs: dict[tuple[str, str], Graph | None] = {}
    diffs: list[PlanDiff] = []
    first = plans[0].plan
    for each in plans:
        plan = each.plan
        key = plan.model, plan.graph_digest
        if key not in graphs:
            # The graph is None if the ONNX file of the plan is missing or has changed. Placements
            # are then not compared.
            graphs[key] = None
            with suppress(AutopipeError, OSError):
                if len(plans) > 1:
                    graph = graph_of_plan(each.folder, plan)
                    graphs[key] = graph if graph.digest() == plan.graph_digest else None
        before = graphs[first.model, first.graph_digest]
        after = graphs[key]
        orders = plan.schedule.tasks != first.schedule.tasks
        if plan_digest(plan) == plan_digest(first):
            diffs.append(PlanDiff(True, True, False))
        elif before is None or after is None or NodeNames(before).names != NodeNames(after).names:
            diffs.append(PlanDiff(False, False, orders))
        else:
            diffs.append(
                PlanDiff(
                    False, True, orders, tuple(_changes(before, first.placement, plan.placement))
                )
            )
    return diffs


def _changes(
    graph: Graph, before: Placement, after: Placement
) -> Iterator[tuple[str, tuple[Change, ...]]]:
    """Yield the changes per kind of decision: the devices of each node of `graph`, its splits, and
    whether it is recomputed. If there are several pipelines, a decision lists the values of all of
    them.
    """
    names = NodeNames(graph)
    samples = sample_axes(graph)
    everywhere = range(len(graph.nodes))
    placements = [
        [
            {
                node: stage
                for stage in placement.stages
                if stage.pipeline == pipeline
                for node in stage.nodes
            }
            for pipeline in range(placement.pipelines)
        ]
        for placement in (before, after)
    ]

    def devices(stage: Stage, _: int) -> str:
        return devices_text(stage.devices)

    def splits(stage: Stage, node: int) -> str:
        degrees = node_degrees(samples, node, stage.splits_of(node))
        return " ".join(f"{axis}:{degree}" for axis, degree in degrees) or "none"

    def recompute(stage: Stage, _: int) -> str:
        return "yes" if stage.recompute else "no"

    for decision, globs in ((devices, layer_globs), (splits, role_globs), (recompute, layer_globs)):
        found: dict[tuple[str, str], list[int]] = {}
        for node in everywhere:
            one, other = (
                " and ".join(decision(stages[node], node) for stages in each) for each in placements
            )
            if one != other:
                found.setdefault((one, other), []).append(node)
        changes = (
            Change(
                *pair,
                tuple(nodes),
                node_entries(names, nodes, everywhere, set(nodes), globs(names, nodes)),
                # Nodes of one split have one role in all layers, and are only a part of each.
                () if decision is splits else model_parts(graph, nodes),
            )
            for pair, nodes in sorted(found.items(), key=lambda each: (-len(each[1]), each[1]))
        )
        if found:
            yield decision.__name__, tuple(changes)
