from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import ConfigurationError, InfeasibleError, OutOfMemoryError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Constraint, Mode, Optimizer, Problem
from autopipe.passes.analysis.chain import linear_order, make_chain
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.measured import with_micro_batch_size
from autopipe.passes.cost.memory_check import device_memory
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.pipedream import PipeDream
from tests.passes.cost.graphs import (
    HOST_LAUNCHES,
    Builder,
    cluster,
    edge_bytes,
    perceptron,
    problem,
)
from tests.passes.placement.pipedream.test_search import chains


def place(graph: Graph, chain: list[tuple[int, int, int, int]]) -> Placement:
    axes = sample_axes(graph)
    return Placement(
        tuple(
            Stage(
                tuple(range(first, stop)),
                tuple(range(device, device + degree)),
                8,
                axes.splits(range(first, stop), degree),
            )
            for first, stop, device, degree in chain
        )
    )


def prices(given: Problem, placement: Placement) -> list[float]:
    """Seconds of each stage a micro-batch, from the costs of the finished placement."""
    found = []
    edges = edge_bytes(given, placement)
    for index, (stage, cost) in enumerate(
        zip(placement.stages, stage_costs(given, placement), strict=True)
    ):
        link = given.cluster.levels[0].link
        coming = sum(size for (_, target), size in edges.items() if target == index) / len(
            stage.devices
        )
        going = sum(size for (source, _), size in edges.items() if source == index) / len(
            stage.devices
        )
        messages = sum(link.seconds(size) for size in (coming, going) if size)
        found.append(
            cost.forward_s
            + cost.backward_s
            + messages
            + (cost.gradient_s + cost.update_s) / given.micro_batches
        )
    return found


def fits(given: Problem, placement: Placement) -> bool:
    used = device_memory(given, placement, stage_costs(given, placement))
    return all(need <= given.memory_of(device) for device, need in enumerate(used))


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.sampled_from([8, 64, 512]), min_size=2, max_size=4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([10**9, 600_000]),
    st.sampled_from([Optimizer(), Optimizer("adamw", shard=True)]),
    st.sampled_from(HOST_LAUNCHES),
)
def test_no_other_chain_is_faster(
    widths: list[int],
    devices: int,
    micro_batches: int,
    memory: int,
    optimizer: Optimizer,
    host_launch: float,
) -> None:
    graph = perceptron(widths)
    devices_there = cluster(devices, memory=memory, host_launch=host_launch)
    given = problem(graph, devices_there, micro_batches, optimizer=optimizer)
    best: dict[int, float] = {}
    for stages in range(1, devices + 1):
        for chain in chains(len(graph.nodes), devices, stages, (1, 2)):
            placement = place(graph, chain)
            if fits(given, placement):
                best[stages] = min(max(prices(given, placement)), best.get(stages, float("inf")))
    if not best:
        # Too little memory, which is said; or too many devices for the operators: fewer are used.
        try:
            assert PipeDream().run(given).devices < devices
        except InfeasibleError as error:
            assert memory < 10**9 and "over the limit" in str(error)
        return
    answer = PipeDream().run(given)
    answer.verify(graph)
    stages = len(answer.stages)
    found = prices(given, answer)
    assert fits(given, answer)
    assert all(bool(stage.splits) == (len(stage.devices) > 1) for stage in answer.stages)
    assert max(found) == pytest.approx(best[stages])
    step = sum(found) + (micro_batches - 1) * max(found)
    assert all(
        step <= (count + micro_batches - 1) * slowest * 1.0011 for count, slowest in best.items()
    )


def test_equal_layers_come_out_even() -> None:
    given = problem(perceptron([256] * 17), cluster(4), micro_batches=16)
    answer = PipeDream(replicate=False).run(given)
    assert [len(stage.nodes) for stage in answer.stages] == [8, 8, 8, 8]
    assert [stage.devices for stage in answer.stages] == [(0,), (1,), (2,), (3,)]


def test_stages_beside_a_heavy_one_are_even_too() -> None:
    builder = Builder(64, 64)
    data = "x"
    for _ in range(12):
        data = builder.relu(builder.linear(data, 64))
    given = problem(
        builder.finish(builder.linear(data, 2048)), cluster(4, flops=1e10), micro_batches=16
    )
    answer = PipeDream(replicate=False).run(given)
    assert [len(stage.nodes) for stage in answer.stages] == [8, 8, 8, 1]


def test_fewer_operators_than_devices_use_as_many_as_they_can() -> None:
    given = problem(perceptron([16, 16]), cluster(4))
    assert PipeDream(replicate=False).run(given).devices == 2


def test_no_stage_at_most_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="max_stages is 0"):
        PipeDream(max_stages=0).requires(problem(perceptron([16, 16]), cluster(2)))


def test_too_little_memory_names_stage_limit_and_excess() -> None:
    given = problem(perceptron([64] * 5), cluster(2, memory=20_000), optimizer=Optimizer("adamw"))
    with pytest.raises(
        InfeasibleError,
        match=r"stage \d of 2 needs .* on device \d, .* over the limit of 19.53 KiB",
    ):
        PipeDream().run(given)


def test_recomputation_where_memory_asks_for_it() -> None:
    graph = perceptron([16] * 25, batch=64)
    loose = problem(graph, cluster(2), micro_batches=8)
    plain = PipeDream(replicate=False).run(loose)
    need = max(device_memory(loose, plain, stage_costs(loose, plain)))
    tight = replace(loose, memory_limit=int(need * 0.75))
    with pytest.raises(OutOfMemoryError, match="over the limit"):
        PipeDream(replicate=False).run(tight)
    answer = PipeDream(replicate=False).run(replace(tight, recompute="auto"))
    assert answer.stages[0].recompute
    assert fits(replace(tight, recompute="auto"), answer)
    assert all(
        stage.recompute for stage in PipeDream().run(replace(loose, recompute="full")).stages
    )


def test_inference_has_no_backward_to_balance() -> None:
    answer = PipeDream(replicate=False).run(
        problem(perceptron([64] * 9), cluster(2), mode=Mode.INFER)
    )
    assert [len(stage.nodes) for stage in answer.stages] == [8, 8]


def test_weights_made_by_nodes_travel_with_their_reader() -> None:
    builder = Builder(8, 16)
    weight = builder.node("Transpose", (builder.parameter("w", (16, 16)),), (16, 16), perm=(1, 0))
    data = "x"
    for _ in range(4):
        data = builder.relu(data)
    graph = builder.finish(builder.matmul(data, weight))
    assert linear_order(graph) == (1, 2, 3, 4, 0, 5)


def test_blocks_are_limited_and_part_named_groups() -> None:
    graph = perceptron([16, 4] * 200)
    chain = make_chain(graph, np.ones(len(graph.nodes)), 50, ((100, 101), (300,)))
    assert {100, 102, 300, 301} <= set(chain.cuts)
    assert 40 <= chain.blocks <= 56
    assert sorted(chain.nodes(0, chain.blocks)) == list(range(len(graph.nodes)))
    widest = max(np.diff(chain.cuts))
    assert widest <= 2 * len(graph.nodes) / 25, "cuts are spread over the work"


def ask(*constraints: Constraint, devices: int = 4) -> Placement:
    given = problem(perceptron([64] * 9), cluster(devices), constraints=constraints)
    answer = PipeDream().run(given)
    answer.verify(given.graph)
    return answer


def test_constraints_are_obeyed() -> None:
    answer = ask(Constraint("matmul0", stage=0), Constraint("matmul2", stage=1))
    assert 0 in answer.stages[0].nodes
    assert 2 in answer.stages[1].nodes
    answer = ask(Constraint("re:(matmul|relu)[01]", devices=(0, 1)))
    assert {0, 1} <= set(answer.stages[0].nodes)
    assert answer.stages[0].devices == (0, 1)
    answer = ask(Constraint("matmul1[024]", split=(("b", 2),)))
    assert all(
        len(stage.devices) == 2 for stage in answer.stages if {10, 12, 14} & set(stage.nodes)
    )


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (Constraint("matmul0", devices=(0, 2)), "not adjacent"),
        (Constraint("matmul0", split=(("n", 2),)), "splits samples only"),
    ],
)
def test_constraints_that_no_chain_fulfils_are_refused(constraint: Constraint, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        ask(constraint)


def test_constraints_that_contradict_the_order_are_refused() -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"no chain of stages over 4 devices satisfies the constraint on 'matmul0'",
    ):
        ask(Constraint("matmul0", stage=1), Constraint("matmul2", stage=0))


def test_a_sweep_takes_the_micro_batch_with_the_shortest_step() -> None:
    """Launches are what small micro-batches lose, filling the pipeline what large ones do."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    whole = problem(perceptron([63] * 9, batch=64), cluster(4, flops=1e10), 1)
    given = replace(whole, micro_batch_sizes=sizes)
    chosen = PipeDream(sweep=True, replicate=False).run(given).stages[0].micro_batch_size
    steps = {}
    for size in sizes:
        sized = with_micro_batch_size(whole, size)
        found = prices(sized, PipeDream(replicate=False).run(sized))
        steps[size] = sum(found) + (sized.micro_batches - 1) * max(found)
    assert chosen == min(steps, key=lambda size: steps[size])
    assert 1 < chosen < 64


def test_a_sweep_leaves_out_sizes_that_memory_does_not_hold() -> None:
    whole = problem(perceptron([64] * 9, batch=4096), cluster(2, latency=1e-3), 1)
    given = replace(whole, micro_batch_sizes=(1, 64, 4096))
    free = PipeDream(sweep=True).run(given)
    need = max(device_memory(whole, free, stage_costs(whole, free)))
    assert free.stages[0].micro_batch_size == 4096
    assert (
        PipeDream(sweep=True).run(replace(given, memory_limit=need // 4)).stages[0].micro_batch_size
        == 64
    )
    with pytest.raises(InfeasibleError, match="over the limit"):
        PipeDream(sweep=True).run(replace(given, memory_limit=1000))
