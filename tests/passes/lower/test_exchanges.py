"""Exchanges between the nodes of a stage: as few as the layouts ask for, and the same in lowering
and in costs.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.cluster import Cluster
from autopipe.ir.graph import DType, Graph
from autopipe.ir.ops import OPERATORS, qualified_name, signature_of
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Mode, Problem
from autopipe.ir.program import Collective, Compute, StageCode
from autopipe.passes.cost.communication import redistribution_seconds, reduction_cost
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.cost.stage_work import stage_collective_seconds, stage_work
from autopipe.passes.lower.lower import lower
from tests.distributed.support.builder import Builder
from tests.distributed.support.drawing import graphs, placements
from tests.distributed.support.running import schedule_of
from tests.passes.cost.graphs import cluster

TWO = (0, 1)


def code_of(graph: Graph, *splits: tuple[int, str], loss: str | None = None) -> StageCode:
    """The one stage of a graph on two devices."""
    cuts = tuple((node, (Split(axis, 2),)) for node, axis in splits)
    placement = Placement((Stage(tuple(range(len(graph.nodes))), TWO, 4, cuts),))
    return lower(
        graph, placement, schedule_of(graph, placement, 1, train=loss is not None), loss
    ).stages[0]


def exchanges(code: StageCode) -> list[tuple[str, int]]:
    return [
        (each.relayout.kind, each.relayout.dimension)
        for each in code.operations
        if isinstance(each, Collective)
    ]


def two_products() -> tuple[Builder, str]:
    """x · w · w', the second reducing over what the first's columns cut."""
    builder = Builder()
    hidden = builder.node(
        "Tanh", builder.node("MatMul", builder.input((4, 6)), builder.parameter((6, 8)))
    )
    return builder, builder.node("MatMul", hidden, builder.parameter((8, 6)))


def test_columns_then_rows_need_one_sum() -> None:
    builder, result = two_products()
    code = code_of(builder.graph(builder.node("Tanh", result)), (0, "n"), (1, "x1"), (2, "k"))
    assert exchanges(code) == [("all_reduce", 0)]
    assert [value.shape for _, value in code.parameters] == [(6, 4), (4, 6)]


def test_partial_sums_that_are_read_in_shards_are_scattered() -> None:
    builder, result = two_products()
    graph = builder.graph(builder.node("Tanh", builder.node("Sigmoid", result)))
    assert exchanges(code_of(graph, (0, "n"), (1, "x1"), (2, "k"), (3, "x1"), (4, "x1"))) == [
        ("reduce_scatter", 1)
    ]
    assert exchanges(code_of(graph, (0, "n"), (1, "x1"), (2, "k"), (3, "x0"))) == [
        ("reduce_scatter", 0),
        ("all_gather", 0),
    ]


def test_readers_that_differ_get_the_sum_whole() -> None:
    builder, result = two_products()
    first = builder.node("Tanh", result)
    second = builder.node("Sigmoid", result)
    graph = builder.graph(builder.node("Add", first, second))
    assert exchanges(
        code_of(graph, (0, "n"), (1, "x1"), (2, "k"), (3, "x0"), (4, "x1"), (5, "x1"))
    ) == [
        ("all_reduce", 0),
        ("slice", 0),
        ("slice", 1),
        ("all_to_all", 1),
    ]


def test_the_loss_of_a_split_vocabulary_gathers_nothing() -> None:
    builder = Builder()
    table = builder.parameter((8, 6))
    hidden = builder.node("Gather", table, builder.input((4,), DType.INT64))
    logits = builder.node("MatMul", hidden, builder.node("Transpose", table, perm=(1, 0)))
    loss = builder.node("SoftmaxCrossEntropyLoss", logits, builder.input((4,), DType.INT64))
    graph = builder.graph(loss)
    code = code_of(graph, (0, "d0"), (1, "d0"), (2, "n"), (3, "c"), loss=loss)
    assert exchanges(code) == [("all_reduce", 0)], "of what is looked up"
    assert [value.shape for _, value in code.parameters] == [(4, 6)], "the table, once"
    logits_of = next(
        each for each in code.operations if isinstance(each, Compute) and each.node == 2
    )
    assert logits_of.signature.result().shape == (4, 4)


@given(st.data(), st.booleans(), st.sampled_from(["fp32", "bf16"]))
@settings(max_examples=80, deadline=None)
def test_costs_count_the_collectives_that_are_lowered(
    data: st.DataObject, train: bool, precision: str
) -> None:
    graph, loss = data.draw(graphs(train))
    placement = data.draw(placements(graph).filter(lambda placement: placement.pipelines == 1))
    schedule = schedule_of(graph, placement, 1, train=train)
    found = lower(graph, placement, schedule, loss, precision=precision)
    links: Cluster = cluster(4)
    mode = Mode.TRAIN if train else Mode.INFER
    problem = Problem(
        graph, roofline_costs(graph, precision), links, 4, 1, mode, loss, precision=precision
    )
    for code, work in zip(found.stages, stage_work(problem, placement), strict=True):
        counted, _ = stage_collective_seconds(work)
        assert abs(counted - _seconds(graph, code, links)) < 1e-15


def _seconds(graph: Graph, code: StageCode, links: Cluster) -> float:
    """Return the seconds of a lowered stage's forward: of its collectives, at the bytes that they
    send, and of the statistics that operators exchange along joint axes.
    """
    total = 0.0
    for each in code.operations:
        if isinstance(each, Collective):
            total += redistribution_seconds(links, code.devices, each.relayout, each.itemsize)
        elif each.joint:
            signature = signature_of(graph, graph.nodes[each.node])
            row = OPERATORS[qualified_name(signature.node)]
            for told in row.statistics(
                signature, row.space(signature), {cut.axis: cut.degree for cut in each.splits}
            ):
                price = reduction_cost(links, code.devices, told.kind, each.mesh_of(told.axes))
                total += 0.0 if told.backward else told.times * price.seconds(told.bytes)
    return total
