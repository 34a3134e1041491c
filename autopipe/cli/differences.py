"""Differences between the decisions of two plans of one model, in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopipe.cli.compared import ComparedPlan
from autopipe.cli.figures import devices_text
from autopipe.cli.plan_folder import CONFIGURATION_FILE
from autopipe.cli.request import request_of
from autopipe.configs.load import load_configuration
from autopipe.ir.errors import AutopipeError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split
from autopipe.ir.plan import Plan
from autopipe.ir.plan_file import plan_digest
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.pipeline import read_for
from autopipe.passes.placement.given import NodeEntry, NodeNames, degrees_of, entries_of, layer_globs, role_globs

_MOST_LINES = 6
"""Lines for each kind of decision; what concerns most nodes comes first."""
_MOST_ENTRIES = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Nodes of which one plan says `before` and the other `after`."""

    before: str
    after: str
    nodes: tuple[int, ...]
    entries: tuple[NodeEntry, ...]
    """Short names of the nodes."""

    def __str__(self) -> str:
        named = [f"{each[0]} to {each[1]}" if isinstance(each, tuple) else str(each) for each in self.entries]
        shown = ", ".join(named[:_MOST_ENTRIES]) + (", ..." if len(named) > _MOST_ENTRIES else "")
        return f"{self.before} → {self.after}: {_nodes_text(len(self.nodes))} ({shown})"


@dataclass(frozen=True, slots=True)
class Difference:
    """One kind of decision that two plans make differently, with the changes of most nodes first."""

    what: str
    """`devices`, `splits` or `recompute`."""
    changes: tuple[Change, ...]

    @property
    def count(self) -> int:
        """Number of nodes."""
        return sum(len(change.nodes) for change in self.changes)

    @property
    def lines(self) -> Iterator[str]:
        """Lines for the terminal: the largest changes, and how many more there are."""
        yield f"{self.what} of {_nodes_text(self.count)}"
        yield from (f"  {change}" for change in self.changes[:_MOST_LINES])
        rest = self.changes[_MOST_LINES:]
        if rest:
            ways = f"{len(rest)} other ways" if len(rest) > 1 else "another way"
            yield f"  {_nodes_text(sum(len(change.nodes) for change in rest))} in {ways}"


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Decisions of a plan that differ from those of the plan it is compared with."""

    same: bool
    """True if the decisions and their predictions are equal."""
    known: bool
    """True if their nodes can be compared: both models are there, and have the same nodes."""
    orders: bool
    """True if tasks are in another order, though stages are equal."""
    differences: tuple[Difference, ...] = ()

    @staticmethod
    def with_first(plans: Sequence[ComparedPlan]) -> tuple[PlanDiff, ...]:
        """How each plan differs from the first; their models are read, each once, where there is more than one."""
        graphs: dict[tuple[str, str], Graph | None] = {}
        for each in plans if len(plans) > 1 else ():
            key = each.plan.model, each.plan.graph_digest
            if key not in graphs:
                graphs[key] = _graph_of(each.folder, each.plan)
        first = plans[0].plan
        return tuple(
            _contrast(first, each.plan, *(graphs.get((plan.model, plan.graph_digest)) for plan in (first, each.plan)))
            for each in plans
        )

    @property
    def lines(self) -> Iterator[str]:
        """Lines for the terminal."""
        if self.same:
            yield "the same decisions"
        elif not self.known:
            yield "nodes cannot be compared: a model is not at its place, has changed, or is another"
        elif not self.differences:
            yield "the same placement" + (", tasks in another order" if self.orders else "")
        for difference in self.differences:
            yield from difference.lines

    def form(self) -> dict[str, object]:
        """The same for a program."""
        kinds = {
            each.what: [
                {"before": change.before, "after": change.after, "nodes": len(change.nodes), "named": change.entries}
                for change in each.changes
            ]
            for each in self.differences
        }
        return {"same": self.same, "known": self.known, **kinds}


def _contrast(first: Plan, plan: Plan, before: Graph | None, after: Graph | None) -> PlanDiff:
    orders = plan.schedule.tasks != first.schedule.tasks
    if plan_digest(plan) == plan_digest(first):
        return PlanDiff(True, True, False)
    if before is None or after is None or NodeNames(before).names != NodeNames(after).names:
        return PlanDiff(False, False, orders)
    return PlanDiff(False, True, orders, tuple(differences(before, first.placement, plan.placement)))


def _graph_of(folder: Path, plan: Plan) -> Graph | None:
    """The graph of the plan in `folder`; None where its model is gone or has changed."""
    try:
        configuration = replace(load_configuration(folder / CONFIGURATION_FILE), costs="roofline")
        request = request_of(configuration, Path(plan.model))
        graph = read_for(request, plan.summary.micro_batch_size).graph
    except (AutopipeError, OSError):
        return None
    return graph if graph.digest() == plan.graph_digest else None


def differences(graph: Graph, before: Placement, after: Placement) -> Iterator[Difference]:
    """Differences of two placements by node of `graph`: where it runs, how it is split, and whether it is computed
    again.
    """
    names = NodeNames(graph)
    samples = sample_axes(graph)
    one, other = _NodeDecisions(samples, before), _NodeDecisions(samples, after)
    yield from _grouped("devices", names, one.devices, other.devices, layer_globs)
    yield from _grouped("splits", names, one.splits, other.splits, role_globs)
    yield from _grouped("recompute", names, one.recompute, other.recompute, layer_globs)


class _NodeDecisions:
    """Decisions of a placement for each node, as texts; of several pipelines, of each of them."""

    def __init__(self, samples: SampleAxes, placement: Placement) -> None:
        self._samples = samples
        self._stages = [
            {node: stage for stage in placement.stages if stage.pipeline == pipeline for node in stage.nodes}
            for pipeline in range(placement.pipelines)
        ]

    def devices(self, node: int) -> str:
        return " and ".join(devices_text(stages[node].devices) for stages in self._stages)

    def splits(self, node: int) -> str:
        return " and ".join(self._split_text(node, stages[node].splits_of(node)) for stages in self._stages)

    def recompute(self, node: int) -> str:
        return " and ".join("yes" if stages[node].recompute else "no" for stages in self._stages)

    def _split_text(self, node: int, splits: tuple[Split, ...]) -> str:
        return " ".join(f"{axis}:{degree}" for axis, degree in degrees_of(self._samples, node, splits)) or "none"


def _grouped(
    what: str,
    names: NodeNames,
    one: Callable[[int], str],
    other: Callable[[int], str],
    globs: Callable[[NodeNames, list[int]], Iterator[str]],
) -> Iterator[Difference]:
    everywhere = range(len(names.names))
    found: dict[tuple[str, str], list[int]] = {}
    for node in everywhere:
        if one(node) != other(node):
            found.setdefault((one(node), other(node)), []).append(node)
    if found:
        largest = sorted(found.items(), key=lambda each: (-len(each[1]), each[1]))
        yield Difference(
            what,
            tuple(
                Change(*pair, tuple(nodes), entries_of(names, nodes, everywhere, set(nodes), globs(names, nodes)))
                for pair, nodes in largest
            ),
        )


def _nodes_text(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"
