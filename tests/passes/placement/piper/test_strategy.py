"""Piper's answers against every chain of stages that there is, priced one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage, crossing_values
from autopipe.ir.problem import Constraint, Mode, Optimizer, Problem
from autopipe.passes.analysis.chain import Blocks
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.cost.memory_check import device_memory
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.piper.stage_costs import StageParallelism, stage_parallelisms
from autopipe.passes.placement.piper.strategy import Piper, merge_nodes
from tests.passes.cost.graphs import HOST_LAUNCHES, Builder, cluster, perceptron, problem


@dataclass(frozen=True)
class Priced:
    seconds: float
    always: int
    each: int


class Exhaustive:
    """Every chain of stages of a problem's blocks, each stage priced by the costs of a placement
    that has it.
    """

    def __init__(self, given: Problem) -> None:
        self.given = given
        forward, backward = node_seconds(given.work, given.cluster.devices[0], given.precision)
        self.blocks: Blocks = merge_nodes(given.graph, forward + backward)
        self.ways: list[StageParallelism] = list(
            stage_parallelisms(given, self.blocks, sample_axes(given.graph))
        )
        self.recomputations = {"none": [False], "full": [True], "auto": [False, True]}[
            given.recompute
        ]
        self.price = cache(self._price)
        self.downsets = [
            held
            for held in range(1 << len(self.blocks.nodes))
            if all(
                not held >> block & 1 or need & ~held == 0
                for block, need in enumerate(self.blocks.needs)
            )
        ]

    def best(self) -> float:
        """The least time of a slowest stage; infinite where memory holds no chain."""
        return min(self._slowest(0, self.given.cluster.size, 0.0, []), default=float("inf"))

    def _slowest(
        self, held: int, left: int, slowest: float, chain: list[Priced]
    ) -> Iterator[float]:
        if held == self.downsets[-1]:
            limit = self.given.memory_of(0)
            kept = (min(place, self.given.micro_batches) for place in range(len(chain), 0, -1))
            if all(
                stage.always + stage.each * count <= limit
                for stage, count in zip(chain, kept, strict=True)
            ):
                yield slowest
            return
        for outer in self.downsets:
            if outer != held and held & ~outer == 0:
                for way in range(len(self.ways)):
                    for recompute in self.recomputations:
                        devices = self.ways[way].devices
                        if devices <= left:
                            found = self.price(held, outer, way, recompute)
                            worst = max(slowest, found.seconds)
                            yield from self._slowest(outer, left - devices, worst, [*chain, found])

    def _price(self, inner: int, outer: int, way: int, recompute: bool) -> Priced:
        given = self.given
        sharing = self.ways[way]
        parts = [inner, outer & ~inner, self.downsets[-1] & ~outer]
        stages = []
        for number, part in enumerate(parts):
            held = [block for block in range(len(self.blocks.nodes)) if part >> block & 1]
            nodes = tuple(sorted(node for block in held for node in self.blocks.nodes[block]))
            splits = tuple(sorted(split for block in held for split in sharing.splits[block]))
            if number == 1:
                devices = tuple(range(sharing.devices))
                stages.append(Stage(nodes, devices, given.micro_batch_size, splits, recompute))
            else:
                stages.append(Stage(nodes, (given.cluster.size - 1,), given.micro_batch_size))
        placement = Placement(tuple(stages))
        cost = stage_costs(given, placement)[1]
        link = given.cluster.slowest_link(range(given.cluster.size))
        crossing = {
            (name, 1 in (source, target) and target == 1)
            for name, source, target in crossing_values(given.graph, placement)
            if 1 in (source, target)
        }
        messages = sum(
            link.seconds(given.graph.type_of(name).bytes / sharing.replicas) for name, _ in crossing
        )
        seconds = cost.forward_s + cost.backward_s + messages
        seconds += (cost.gradient_s + cost.update_s) / given.micro_batches
        return Priced(seconds, cost.static_bytes + cost.transient_bytes, cost.kept_bytes)


def branched(widths: list[list[int]], last: int, batch: int = 8) -> Graph:
    """Branches of linear layers, added up, and a last layer."""
    builder = Builder(batch, widths[0][0])
    ends = []
    for branch in widths:
        data = "x"
        for width in branch[1:]:
            data = builder.relu(builder.linear(data, width))
        ends.append(data)
    data = ends[0]
    for end in ends[1:]:
        data = builder.add(data, end)
    return builder.finish(builder.linear(data, last))


@settings(deadline=None, max_examples=6)
@given(
    st.lists(st.lists(st.sampled_from([8, 512]), max_size=1), min_size=1, max_size=2),
    st.sampled_from([32, 256]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from(HOST_LAUNCHES),
)
def test_no_other_chain_has_a_faster_slowest_stage(
    middles: list[list[int]], last: int, devices: int, micro_batches: int, host_launch: float
) -> None:
    graph = branched([[16, *middle, 16] for middle in middles], last)
    given = problem(graph, cluster(devices, host_launch=host_launch), micro_batches)
    exhaustive = Exhaustive(given)
    answer = Piper(objective="slowest_stage").run(given)
    answer.verify(graph)
    assert slowest(exhaustive, answer) == pytest.approx(exhaustive.best())
    assert step(exhaustive, Piper().run(given)) <= step(exhaustive, answer) * (1 + 1e-9)


def slowest(exhaustive: Exhaustive, answer: Placement) -> float:
    """Seconds of the slowest stage of an answer."""
    return max(seconds(exhaustive, answer))


def step(exhaustive: Exhaustive, answer: Placement) -> float:
    """Seconds of a step, filling and draining included."""
    found = seconds(exhaustive, answer)
    return sum(found) + (exhaustive.given.micro_batches - 1) * max(found)


def seconds(exhaustive: Exhaustive, answer: Placement) -> list[float]:
    """Seconds of the stages of an answer, each found again among all that there are."""
    held = 0
    found = []
    for stage in answer.stages:
        own = sum(
            1 << block
            for block, nodes in enumerate(exhaustive.blocks.nodes)
            if set(nodes) <= set(stage.nodes)
        )
        ways = [
            exhaustive.price(held, held | own, way, stage.recompute).seconds
            for way, sharing in enumerate(exhaustive.ways)
            if sharing.devices == len(stage.devices)
            and stage.splits
            == tuple(
                sorted(
                    s
                    for block, splits in enumerate(sharing.splits)
                    if own >> block & 1
                    for s in splits
                )
            )
        ]
        found.append(ways[0])
        held |= own
    return found


@settings(deadline=None, max_examples=6)
@given(
    st.lists(st.lists(st.sampled_from([7, 511]), max_size=1), min_size=1, max_size=2),
    st.just(2),
    st.integers(1, 4),
    st.sampled_from(["none", "auto"]),
    st.floats(0.3, 1.0),
    st.booleans(),
    st.sampled_from(HOST_LAUNCHES),
)
def test_memory_is_kept_and_no_chain_that_keeps_it_is_faster(
    middles: list[list[int]],
    devices: int,
    micro_batches: int,
    recompute: str,
    share: float,
    shard: bool,
    host_launch: float,
) -> None:
    """Widths are odd, so that layers are not shared: only the samples are, with `shard` the
    optimizer's state too.
    """
    graph = branched([[15, *middle, 15] for middle in middles], 33)
    devices_there = cluster(devices, host_launch=host_launch)
    loose = problem(graph, devices_there, micro_batches, optimizer=Optimizer("adamw", shard=shard))
    alone = Placement((Stage(tuple(range(len(graph.nodes))), (0,), 8),))
    given = replace(
        loose,
        recompute=recompute,
        memory_limit=int(share * device_memory(loose, alone, stage_costs(loose, alone))[0]),
    )
    exhaustive = Exhaustive(given)
    best = exhaustive.best()
    if best == float("inf"):
        with pytest.raises(InfeasibleError, match="no chain of stages fits into the memory"):
            Piper().run(given)
        return
    answer = Piper(objective="slowest_stage").run(given)
    assert slowest(exhaustive, answer) == pytest.approx(best)
    assert max(device_memory(given, answer, stage_costs(given, answer))) <= given.memory_of(0)


def test_a_stage_may_hold_parts_of_two_branches() -> None:
    """Of two equal branches of three layers each, three devices get one layer of each."""
    given = problem(branched([[128] * 4, [128] * 4], 1), cluster(3), micro_batches=8)
    answer = Piper().run(given)
    products = [
        sum(given.graph.nodes[node].op == "MatMul" for node in stage.nodes[:9])
        for stage in answer.stages
    ]
    assert len(answer.stages) in (1, 3) and sum(products) == 7


def test_too_many_downsets_are_refused_with_their_number() -> None:
    given = problem(branched([[16] * 5 for _ in range(7)], 16), cluster(4))
    with pytest.raises(
        InfeasibleError, match=r"has \d{6,} downsets, .* at most max_downsets = 10000"
    ):
        Piper().run(given)


def test_options_and_constraints_are_checked() -> None:
    given = problem(perceptron([16] * 5), cluster(2))
    with pytest.raises(ConfigurationError, match="max_downsets is 0"):
        Piper(max_downsets=0).requires(given)
    free = Piper().run(given)
    name = given.graph.nodes[0].name
    obeyed = replace(
        given, constraints=(Constraint(name, stage=0, devices=free.stages[0].devices),)
    )
    assert Piper().run(obeyed) == free
    with pytest.raises(ConfigurationError, match="requires stage 5"):
        Piper().run(replace(given, constraints=(Constraint(name, stage=5),)))


def test_recomputation_as_asked_for() -> None:
    given = problem(perceptron([16] * 9, batch=64), cluster(2), micro_batches=8)
    assert not any(
        stage.recompute for stage in Piper().run(replace(given, recompute="auto")).stages
    )
    assert all(stage.recompute for stage in Piper().run(replace(given, recompute="full")).stages)


def test_inference_and_optimizer_state_are_counted() -> None:
    graph = perceptron([64] * 9)
    assert Piper().run(problem(graph, cluster(2), mode=Mode.INFER)).stages
    tight = problem(graph, cluster(1, memory=300_000))
    assert Piper().run(tight).stages
    with pytest.raises(InfeasibleError, match="no chain of stages fits into the memory"):
        Piper().run(replace(tight, optimizer=Optimizer("adamw")))


def test_the_micro_batch_with_the_shortest_step_is_chosen() -> None:
    """Launches are what small micro-batches lose, filling the pipeline what large ones do."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    given = replace(
        problem(perceptron([63] * 9, batch=64), cluster(4, flops=1e10), 1), micro_batch_sizes=sizes
    )
    piper = Piper(objective="slowest_stage")
    chosen = piper.run(given).stages[0].micro_batch_size
    assert 1 < chosen < 64
    slow = replace(given, cluster=cluster(4, flops=1e10, latency=1e-3))
    assert piper.run(slow).stages[0].micro_batch_size > chosen


def test_layers_are_shared_where_a_pipeline_does_not_help() -> None:
    """One micro-batch of one sample: nothing to run at the same time but parts of layers."""
    builder = Builder(1, 64)
    data = "x"
    for _ in range(40):
        inner = builder.linear(builder.relu(builder.linear(data, 4096)), 64)
        data = builder.add(inner, data)
    given = problem(builder.finish(data), cluster(2, flops=1e9, latency=1e-7), 1)
    answer = Piper().run(given)
    answer.verify(given.graph)
    (stage,) = answer.stages
    products = [node for node in stage.nodes if given.graph.nodes[node].op == "MatMul"]
    assert [str(stage.splits_of(node)[0]) for node in products] == ["n:2", "k:2"] * 40


def test_a_model_of_one_node_is_one_stage() -> None:
    """Nothing passes between blocks."""
    builder = Builder(4, 8)
    graph = builder.finish(builder.matmul("x", builder.parameter("w", (8, 8))))
    for mode in Mode:
        placed = Piper().run(problem(graph, cluster(2), mode=mode))
        assert [stage.nodes for stage in placed.stages] == [(0,)]
