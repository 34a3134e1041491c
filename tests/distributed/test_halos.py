"""Convolutions and poolings split along rows and columns: devices read their neighbours' edges and
compute the same.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from autopipe.ir.graph import Graph
from autopipe.ir.layout import are_even_splits
from autopipe.ir.ops import space_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.support.builder import Builder, evaluate
from tests.distributed.support.drawing import Case, cases, image_graphs
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import (
    assert_equal_steps,
    batch_of,
    drawn_parameters,
    expected_step,
    run_forward,
    run_step,
    schedule_of,
    write,
)
from tests.distributed.support.trained import check
from tests.distributed.support.zoo import SAMPLES, SmallModels

pytestmark = pytest.mark.distributed
FOUR = (0, 1, 2, 3)


@given(case=cases(True, image_graphs))
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
def test_random_windows_under_random_splits(pools: Pools, case: Case) -> None:
    assert case.loss is not None
    with TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        write(case.graph, case.placement, case.schedule, case.loss, program)
        count = case.schedule.micro_batches
        batch = batch_of(case.graph, count)
        expected = expected_step(case.graph, case.loss, program, batch, count)
        found = run_step(pools, program, batch)
    assert_equal_steps(found, expected, 1e-9)
    assert found.moved == communication_bytes(
        case.graph, case.placement, count, case.schedule.devices, case.loss
    )


def spatial(graph: Graph, node: int, degrees: dict[str, int]) -> tuple[Split, ...]:
    """Splits of the node's rows and columns, whatever the operator calls them, where they can
    be.
    """
    space = space_of(graph, graph.nodes[node])
    found: tuple[Split, ...] = ()
    for dimension, degree in degrees.items():
        place = {"rows": 2, "columns": 3}[dimension]
        words = space.results[0] or ()
        names = words[place] if len(words) == 4 else ()
        if len(names) == 1 and degree > 1 and space.axis(names[0]).kind.value == "parallel":
            split = (*found, Split(names[0], degree))
            found = split if are_even_splits(space, split) else found
    return found


@pytest.mark.parametrize(
    "degrees", [{"rows": 4}, {"columns": 2, "rows": 2}], ids=["strips", "squares"]
)
@pytest.mark.parametrize("name", ["unet", "wide-resnet"])
def test_models_in_strips_and_squares(
    pools: Pools, small_models: SmallModels, tmp_path: Path, name: str, degrees: dict[str, int]
) -> None:
    model = small_models.of(name)
    nodes = tuple(range(len(model.graph.nodes)))
    cuts = tuple((node, cut) for node in nodes if (cut := spatial(model.graph, node, degrees)))
    halved = {model.graph.nodes[node].op for node, _ in cuts}
    assert {"Conv", "MaxPool"} <= halved
    found = check(pools, model, Placement((Stage(nodes, FOUR, SAMPLES, cuts),)), tmp_path)
    assert found.moved["redistribute"] > 0


def test_each_edge_is_sent_once(pools: Pools, tmp_path: Path) -> None:
    """Eight rows over four devices, windows of three: one row from each neighbour there is, and
    nothing else.
    """
    builder = Builder()
    image = builder.input((4, 2, 8, 6))
    hidden = builder.node("Relu", image)
    made = builder.node(
        "Conv",
        hidden,
        builder.parameter((2, 2, 3, 3)),
        pads=(1, 1, 1, 1),
        strides=(1, 1),
        dilations=(1, 1),
    )
    graph = builder.graph(made)
    placement = Placement(
        (Stage((0, 1), FOUR, 4, ((0, (Split("x2", 4),)), (1, (Split("o0", 4),)))),)
    )
    schedule = schedule_of(graph, placement, 1, train=False)
    program = write(graph, placement, schedule, None, tmp_path / "program")
    assert [
        each.relayout.kind for each in program.stages[0].operations if hasattr(each, "relayout")
    ] == ["redistribute"]
    edge = 4 * 2 * 6 * 8
    moved = communication_bytes(graph, placement, 1, 4, None)
    assert {kind: size for kind, size in moved.items() if size} == {"redistribute": 6 * edge}
    batch = batch_of(graph, 1)
    found = run_forward(pools, tmp_path / "program", batch)
    known = drawn_parameters(graph, tmp_path / "program") | {image: torch.from_numpy(batch[image])}
    np.testing.assert_allclose(
        found[made], evaluate(graph, known)[made].numpy(), rtol=1e-9, atol=1e-12
    )
