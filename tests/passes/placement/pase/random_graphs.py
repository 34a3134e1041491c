"""Random small models of matmuls, additions and branches, and the costs of their splits."""

from __future__ import annotations

from hypothesis import strategies as st

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.cost.stages import StageCost, stage_costs, step_seconds
from tests.passes.cost.graphs import Builder

Splits = tuple[tuple[int, tuple[Split, ...]], ...]


@st.composite
def graphs(draw: st.DrawFn, branches: bool = True) -> Graph:
    """Three to six operators on samples of 12 or 24 numbers."""
    builder = Builder(draw(st.sampled_from([6, 8, 12])), draw(st.sampled_from([12, 24])))
    values = ["x"]
    for _ in range(draw(st.integers(3, 6))):
        data = draw(st.sampled_from(values)) if branches else values[-1]
        same = [
            other
            for other in values
            if builder.shapes[other] == builder.shapes[data] and other != data
        ]
        kind = draw(
            st.sampled_from(["linear", "relu", "add"] if same and branches else ["linear", "relu"])
        )
        if kind == "linear":
            values.append(builder.linear(data, draw(st.sampled_from([6, 12, 24]))))
        elif kind == "relu":
            values.append(builder.relu(data))
        else:
            values.append(builder.add(data, draw(st.sampled_from(same))))
    return builder.finish(values[-1])


def stage_of(problem: Problem, splits: Splits) -> StageCost:
    """The cost of the model in one stage on all devices."""
    nodes = tuple(range(len(problem.graph.nodes)))
    devices = tuple(range(problem.cluster.size))
    (cost,) = stage_costs(
        problem, Placement((Stage(nodes, devices, problem.micro_batch_size, splits),))
    )
    return cost


def seconds_of(problem: Problem, splits: Splits) -> float:
    """Seconds of a step."""
    return step_seconds(stage_of(problem, splits), problem.micro_batches)
