"""Every schedule that can be chosen runs on four ranks and computes what torch computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.ir.errors import AutopipeError
from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.schedule import Schedule, StageGraph
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.roofline import annotate
from autopipe.passes.registry import scheduler_class, scheduler_names
from autopipe.passes.schedule.predict import predict
from autopipe.passes.schedule.simulate import simulate
from tests.distributed.support.builder import Builder
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import assert_equal_steps, batch_of, expected_step, run_step, write
from tests.passes.cost.graphs import cluster

pytestmark = pytest.mark.distributed

RANKS = 4
LAYERS = 16
SAMPLES = 4

There = tuple(range(RANKS))
Back = There[::-1]


def tied_chain() -> tuple[Graph, str]:
    """An embedding, `LAYERS` layers of two nodes, the embedding's table once more as the head, and the loss."""
    builder = Builder()
    table = builder.parameter((6, 4))
    value = builder.node("Gather", table, builder.input((SAMPLES, 3), DType.INT64))
    for _ in range(LAYERS):
        value = builder.node("Tanh", builder.node("MatMul", value, builder.parameter((4, 4))))
    head = builder.node("Transpose", table, perm=(1, 0))
    loss = builder.mean_square(builder.node("MatMul", value, head))
    return builder.graph(loss), loss


def line(graph: Graph, devices: tuple[int, ...], pipeline: int = 0) -> tuple[Stage, ...]:
    """Stages of equal numbers of layers on these devices, one after the other."""
    each = 2 * LAYERS // len(devices)
    starts = [0, *(1 + each * stage for stage in range(1, len(devices))), len(graph.nodes)]
    cuts = zip(starts, starts[1:], devices, strict=False)
    return tuple(Stage(tuple(range(low, high)), (device,), SAMPLES, (), False, pipeline) for low, high, device in cuts)


def shared_ends(graph: Graph) -> tuple[Stage, ...]:
    """Embedding and head on all ranks, layers between them one rank after the other."""
    axes = sample_axes(graph)
    first, last = (0,), tuple(range(1 + 2 * LAYERS, len(graph.nodes)))
    stages = [Stage(first, There, SAMPLES, axes.splits(first, RANKS))]
    each = 2 * LAYERS // RANKS
    stages += (Stage(tuple(range(1 + each * rank, 1 + each * (rank + 1))), (rank,), SAMPLES) for rank in There)
    return (*stages, Stage(last, There, SAMPLES, axes.splits(last, RANKS)))


def placements(graph: Graph) -> tuple[Placement, ...]:
    """Two waves, two opposite pipelines, a V, two loops, a chain between shared ends, a chain."""
    stages = (
        line(graph, (There + Back) * 2),
        line(graph, There) + line(graph, Back, 1),
        line(graph, There + Back),
        line(graph, There * 2),
        shared_ends(graph),
        line(graph, There),
    )
    return tuple(map(Placement, stages))


def problem_of(graph: Graph, loss: str, micro_batches: int) -> Problem:
    batch = SAMPLES * micro_batches
    return Problem(graph, annotate(graph, "fp32"), cluster(RANKS), batch, micro_batches, Mode.TRAIN, loss)


def scheduled(name: str, problem: Problem) -> tuple[Placement, Schedule] | None:
    """The first placement that the scheduler takes, with what it makes of it; None where it takes none."""
    scheduler = scheduler_class(name)()
    for placement in placements(problem.graph):
        try:
            scheduler.requires(problem, placement)
        except AutopipeError as error:
            assert "\n" not in str(error)
            continue
        return placement, scheduler.run(problem, placement)
    return None


@pytest.mark.parametrize("micro_batches", [8, 5])
@pytest.mark.parametrize("name", [name for name in scheduler_names() if name != "csv"])  # csv follows a file
def test_gradients_are_those_of_one_device(pools: Pools, tmp_path: Path, name: str, micro_batches: int) -> None:
    """Five micro-batches, which come out even nowhere, with messages that are waited for where they are made."""
    graph, loss = tied_chain()
    problem = problem_of(graph, loss, micro_batches)
    found = scheduled(name, problem)
    if found is None:
        assert micro_batches == 5, f"{name} takes none of the placements"
        return
    placement, schedule = found
    stages = StageGraph.of(problem, placement)
    schedule.verify(stages, train=True)
    assert simulate(schedule, stages.stage_devices, predict(problem, placement)).end > 0
    write(graph, placement, schedule, loss, tmp_path / "program")
    batch = batch_of(graph, micro_batches)
    expected = expected_step(graph, loss, tmp_path / "program", batch, micro_batches)
    options = ("--blocking",) if micro_batches == 5 else ()
    assert_equal_steps(run_step(pools, tmp_path / "program", batch, *options), expected, 1e-9)
