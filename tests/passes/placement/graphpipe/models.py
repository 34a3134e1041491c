"""Small models whose branches are known, and every valid way of running them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage, crossing_values, recomputed_nodes
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Phase, Schedule
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.cost.memory_check import device_memory
from autopipe.passes.cost.stages import stage_costs
from tests.passes.cost.graphs import Builder

Shape = int | tuple["str", tuple["Shape", ...]]
"""A linear layer of some inner width, or ("series" | "parallel", parts)."""


def shapes(depth: int = 2) -> st.SearchStrategy[Shape]:
    """Nested series and parallel parts; branches are added up."""
    leaf = st.sampled_from([8, 64, 256])
    return st.recursive(
        leaf,
        lambda inner: st.tuples(
            st.sampled_from(["series", "parallel"]),
            st.lists(inner, min_size=2, max_size=3).map(tuple),
        ),
        max_leaves=4,
    )


def model(shape: Shape, batch: int) -> Graph:
    """A graph of that shape."""
    builder = Builder(batch, 16)

    def grow(part: Shape, data: str) -> str:
        if isinstance(part, int):
            return (
                builder.linear(builder.linear(data, part), 16)
                if part > 16
                else builder.linear(data, 16)
            )
        kind, parts = part
        if kind == "series":
            for each in parts:
                data = grow(each, data)
            return data
        first, *rest = (grow(each, data) for each in parts)
        for other in rest:
            first = builder.add(first, other)
        return first

    return builder.finish(grow(shape, "x"))


@dataclass(frozen=True)
class Judge:
    """The price of a placement, by the costs of its finished stages."""

    problem: Problem
    samples: SampleAxes

    @staticmethod
    def of(problem: Problem) -> Judge:
        return Judge(problem, sample_axes(problem.graph))

    def place(self, stages: list[tuple[tuple[int, ...], int]]) -> Placement:
        found = []
        first = 0
        for nodes, degree in stages:
            devices = tuple(range(first, first + degree))
            size = self.problem.micro_batch_size
            found.append(Stage(nodes, devices, size, self.samples.splits(nodes, degree)))
            first += degree
        return Placement(tuple(found))

    def seconds(self, placement: Placement) -> float:
        """Of a micro-batch on the slowest stage, messages and a share of the step's end
        included.
        """
        problem = self.problem
        link = problem.cluster.levels[0].link
        costs = stage_costs(problem, placement)
        found = [
            cost.forward_s
            + cost.backward_s
            + (cost.gradient_s + cost.update_s) / problem.micro_batches
            for cost in costs
        ]
        sent: set[tuple[str, int]] = set()
        for name, source, target in crossing_values(problem.graph, placement):
            size = problem.graph.type_of(name).bytes
            found[target] += link.seconds(size / len(placement.stages[target].devices))
            if (name, source) not in sent:
                sent.add((name, source))
                found[source] += link.seconds(size / len(placement.stages[source].devices))
        return max(found)

    def fits(self, placement: Placement) -> bool:
        used = device_memory(self.problem, placement, stage_costs(self.problem, placement))
        return all(need <= self.problem.memory_of(device) for device, need in enumerate(used))


def partitions(graph: Graph, most: int) -> Iterator[list[tuple[int, ...]]]:
    """Every partition of the nodes into at most so many convex stages whose graph has no circle, in
    an order that follows its edges.
    """
    reads = [
        [p for name in node.inputs if (p := graph.producer(name)) is not None]
        for node in graph.nodes
    ]

    def grow(node: int, groups: list[list[int]]) -> Iterator[list[list[int]]]:
        if node == len(reads):
            yield [list(group) for group in groups]
            return
        for group in groups:
            group.append(node)
            yield from grow(node + 1, groups)
            group.pop()
        if len(groups) < most:
            yield from grow(node + 1, [*groups, [node]])

    for groups in grow(0, []):
        owner = {node: index for index, group in enumerate(groups) for node in group}
        needs = [
            {owner[p] for node in group for p in reads[node]} - {index}
            for index, group in enumerate(groups)
        ]
        order: list[int] = []
        while len(order) < len(groups):
            ready = [g for g in range(len(groups)) if g not in order and needs[g] <= set(order)]
            if not ready:
                break
            order.append(ready[0])
        if len(order) == len(groups):
            yield [tuple(groups[index]) for index in order]


def degrees(stages: int, devices: int, size: int) -> Iterator[tuple[int, ...]]:
    """Every number of devices for each stage that shares `size` samples equally, at most `devices`
    together.
    """
    allowed = [degree for degree in range(1, devices + 1) if size % degree == 0]
    return (each for each in itertools.product(allowed, repeat=stages) if sum(each) <= devices)


def check_stages(graph: Graph, placement: Placement) -> None:
    """Raise InfeasibleError unless C1 to C3 hold.

    C1: the stages part the nodes, and each is convex: no way leads out of it and back. C2: where a
    node reads what another stage computes there is an edge between the two, from the earlier to the
    later. C3: no device has two stages.
    """
    owner: dict[int, int] = {}
    for index, stage in enumerate(placement.stages):
        for node in stage.nodes:
            if owner.setdefault(node, index) != index:
                raise InfeasibleError(
                    f"C1: {graph.nodes[node].name!r} is in stages {owner[node]} and {index}"
                )
    if len(owner) != len(graph.nodes):
        raise InfeasibleError(f"C1: {len(graph.nodes) - len(owner)} nodes are in no stage")
    devices = [device for stage in placement.stages for device in stage.devices]
    if len(set(devices)) != len(devices):
        raise InfeasibleError("C3: a device has two stages")
    recomputed = recomputed_nodes(graph)
    behind = [0] * len(graph.nodes)
    for index, reader in enumerate(graph.nodes):
        for name in reader.inputs:
            producer = graph.producer(name) if name else None
            if producer is None or producer in recomputed:
                continue
            if owner[producer] > owner[index] and index not in recomputed:
                raise InfeasibleError(
                    f"C2: stage {owner[index]} reads {name!r} of the later stage {owner[producer]}"
                )
            behind[index] |= behind[producer]
            if owner[producer] != owner[index]:
                behind[index] |= 1 << owner[producer]
        if behind[index] >> owner[index] & 1 and index not in recomputed:
            raise InfeasibleError(
                f"C1: a way leads out of stage {owner[index]} and back to {reader.name!r}"
            )


def check_schedule(schedule: Schedule) -> None:
    """Raise InfeasibleError unless C4 holds on every device: micro-batches in order, forward before
    backward.
    """
    for device, order in enumerate(schedule.tasks):
        done: dict[tuple[int, Phase], int] = {}
        for task in order:
            last = done.get((task.stage, task.phase), -1)
            if task.micro_batch <= last:
                raise InfeasibleError(
                    f"C4: {task} comes after micro-batch {last}", where=f"device {device}"
                )
            if task.phase is not Phase.FORWARD and task.micro_batch > done.get(
                (task.stage, Phase.FORWARD), -1
            ):
                raise InfeasibleError(
                    f"C4: {task} comes before its forward", where=f"device {device}"
                )
            done[task.stage, task.phase] = task.micro_batch
