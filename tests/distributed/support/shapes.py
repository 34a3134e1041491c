"""A chain placed in every shape that a scheduler asks for: two waves, opposite pipelines, a V,
loops, shared ends.
"""

from __future__ import annotations

from autopipe.ir.errors import AutopipeError
from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import Schedule
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.registry import scheduler_class
from tests.distributed.support.builder import Builder
from tests.passes.cost.graphs import cluster

SAMPLES = 8
_ENDS = 5
"""Nodes of a tied chain that are in no layer."""


def tied_chain(layers: int) -> tuple[Graph, str]:
    """An embedding, layers of two nodes, the embedding's table once more as the head, and the
    loss.
    """
    builder = Builder()
    table = builder.parameter((6, 4))
    value = builder.node("Gather", table, builder.input((SAMPLES, 3), DType.INT64))
    for _ in range(layers):
        value = builder.node("Tanh", builder.node("MatMul", value, builder.parameter((4, 4))))
    head = builder.node("Transpose", table, perm=(1, 0))
    loss = builder.mean_square(builder.node("MatMul", value, head))
    return builder.graph(loss), loss


def line(graph: Graph, devices: tuple[int, ...], pipeline: int = 0) -> tuple[Stage, ...]:
    """Stages of equal numbers of layers on these devices, one after the other."""
    each = (len(graph.nodes) - _ENDS) // len(devices)
    starts = [0, *(1 + each * stage for stage in range(1, len(devices))), len(graph.nodes)]
    cuts = zip(starts, starts[1:], devices, strict=False)
    return tuple(
        Stage(tuple(range(low, high)), (device,), SAMPLES, (), False, pipeline)
        for low, high, device in cuts
    )


def shared_ends(graph: Graph, ranks: int) -> tuple[Stage, ...]:
    """Embedding and head on all ranks, layers between them one rank after the other."""
    axes = sample_axes(graph)
    there = tuple(range(ranks))
    between = len(graph.nodes) - _ENDS
    first = (0,)
    last = tuple(range(1 + between, len(graph.nodes)))
    stages = [Stage(first, there, SAMPLES, axes.splits(first, ranks))]
    each = between // ranks
    stages += (
        Stage(tuple(range(1 + each * rank, 1 + each * (rank + 1))), (rank,), SAMPLES)
        for rank in there
    )
    return (*stages, Stage(last, there, SAMPLES, axes.splits(last, ranks)))


def placements(graph: Graph, ranks: int) -> tuple[Placement, ...]:
    """Two waves, two opposite pipelines, a V, two loops, a chain between shared ends, a chain."""
    there = tuple(range(ranks))
    back = tuple(reversed(range(ranks)))
    stages = (
        line(graph, (there + back) * 2),
        line(graph, there) + line(graph, back, 1),
        line(graph, there + back),
        line(graph, there * 2),
        shared_ends(graph, ranks),
        line(graph, there),
    )
    return tuple(map(Placement, stages))


def problem_of(graph: Graph, loss: str, micro_batches: int, ranks: int) -> Problem:
    batch = SAMPLES * micro_batches
    return Problem(
        graph, roofline_costs(graph, "fp32"), cluster(ranks), batch, micro_batches, Mode.TRAIN, loss
    )


def scheduled(name: str, problem: Problem) -> tuple[Placement, Schedule] | None:
    """The first placement that the scheduler takes, with what it makes of it; None where it takes
    none.
    """
    scheduler = scheduler_class(name)()
    for placement in placements(problem.graph, problem.cluster.size):
        try:
            scheduler.requires(problem, placement)
        except AutopipeError as error:
            assert "\n" not in str(error)
            continue
        return placement, scheduler.run(problem, placement)
    return None
