"""The messages of the simulation are the messages that the generated programs send."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from autopipe.configs.configuration import load_configuration, resolve_cluster
from autopipe.configs.zoo import build, configure
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.schedule import StageGraph
from autopipe.passes.analysis.operators import sample_axes
from autopipe.passes.lower.lower import lower
from autopipe.passes.pipeline import Request, make_plan
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.schedule.predict import predict, stage_messages
from autopipe.passes.schedule.published.one_f_one_b import (
    KForwardsKBackwards,
    OneForwardOneBackward,
)
from autopipe.passes.schedule.simulate import simulate

GROUPS = [
    ((0,), (1,)),
    ((0, 1), (2, 3)),
    ((0,), (1, 2, 3, 4)),
    ((0, 1, 2, 3), (4, 5)),
    ((0, 1, 2, 3), (4,)),
    ((0, 1), (0, 1)),
    ((0, 1, 2, 3), (2, 3)),
    ((3,), (0,), (2, 1), (0,)),
]
PIPELINES = [[((0,), (1,), (2,)), ((2,), (1,), (0,))], [((0, 1), (2, 3)), ((4,), (5, 3), (0,))]]
"""Device groups of each of two pipelines."""


@pytest.fixture(scope="module", params=["gpt", "two-branch"])
def planned(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "model.onnx"
    build(configure(request.param, {"loss": "true"})).save(path)
    cluster = resolve_cluster(load_configuration(words={"--gpus": "6", "--cluster": "a100-80gb"}))
    return make_plan(
        Request(path, cluster, PipeDream(), OneForwardOneBackward(), batch_size=8, micro_batches=2)
    )


def cut(graph, groups, samples, pipeline=0):
    """Return stages with equal numbers of nodes, each sharded by samples."""
    count = len(graph.nodes)
    ends = [count * place // len(groups) for place in range(len(groups) + 1)]
    stages = []
    for first, last, group in zip(ends, ends[1:], groups, strict=False):
        nodes = tuple(range(first, last))
        stages.append(
            Stage(
                nodes, group, samples, sample_axes(graph).splits(nodes, len(group)), False, pipeline
            )
        )
    return Placement(tuple(stages))


UNEQUAL = [
    (((0,), (1,), (2,)), (1, 2, 4)),
    (((0,), (1,), (2,)), (4, 1, 2)),
    (((0, 1), (2, 3)), (2, 4)),
    (((0,), (1, 2, 3, 4)), (1, 4)),
    (((0, 1, 2, 3), (4, 5), (2,)), (4, 2, 1)),
    (((0, 1), (0, 1)), (4, 2)),
]
"""Device groups, and the samples of their micro-batches."""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pipelines", [*([groups] for groups in GROUPS), *PIPELINES])
def test_bytes_per_link_equal_those_of_the_program(planned, pipelines, precision):
    problem = dataclasses.replace(planned.problem, precision=precision)
    cuts = (
        cut(problem.graph, groups, problem.micro_batch_size, index)
        for index, groups in enumerate(pipelines)
    )
    placement = Placement(tuple(stage for each in cuts for stage in each.stages))
    compare(problem, placement, OneForwardOneBackward().run(problem, placement))


@pytest.mark.parametrize(
    "groups", [((0, 1), (2, 3)), ((0,), (1, 2, 3, 4)), ((0, 1, 2, 3), (4, 5)), ((0, 1), (1, 2))]
)
def test_gathered_slices_equal_those_of_the_program(planned, groups):
    """Each rank of the second stage receives a slice of each value, of which all its devices need a
    copy.
    """
    problem = planned.problem
    graph = planned.problem.graph
    whole = cut(graph, groups, problem.micro_batch_size)
    read = tuple({name for node in graph.nodes for name in node.inputs if name})
    stages = (dataclasses.replace(stage, splits=(), gathers=read) for stage in whole.stages)
    placement = Placement(tuple(stages))
    compare(problem, placement, OneForwardOneBackward().run(problem, placement))
    plain = Placement(tuple(dataclasses.replace(stage, gathers=()) for stage in placement.stages))
    sliced, direct = (
        Counter({each.target: each.forward_bytes for each in stage_messages(problem, each)})
        for each in (placement, plain)
    )
    assert all(
        sliced[rank] * len(groups[1]) == direct[rank] for rank in groups[1] if rank not in groups[0]
    )


@pytest.mark.parametrize(("groups", "sizes"), UNEQUAL)
def test_bytes_with_different_micro_batch_sizes_equal_those_of_the_program(planned, groups, sizes):
    problem = dataclasses.replace(planned.problem, precision="fp16")
    whole = cut(problem.graph, groups, problem.micro_batch_size)
    pairs = zip(whole.stages, sizes, strict=True)
    placement = Placement(
        tuple(dataclasses.replace(stage, micro_batch_size=size) for stage, size in pairs)
    )
    schedule = KForwardsKBackwards().run(problem, placement)
    compare(problem, placement, schedule)
    simulated = simulate(
        schedule, StageGraph.of(problem, placement).stage_devices, predict(problem, placement)
    )
    assert len(simulated.spans) == sum(map(len, schedule.tasks))


def compare(problem, placement, schedule):
    """Compare bytes and seconds of each pair of ranks and micro-batch slices with the program's
    messages.
    """
    graph = problem.graph
    placement.verify(graph)
    schedule.verify(StageGraph.of(problem, placement), train=True)
    program = lower(graph, placement, schedule, problem.loss, precision=problem.precision)
    forward = Counter()
    backward = Counter()
    seconds = Counter()
    for rank in program.ranks:
        for stage in rank.stages:
            for piece in stage.sends:
                turns = piece.source_slice, piece.target_slice
                link = (
                    piece.source_stage,
                    piece.target_stage,
                    piece.source_rank,
                    piece.target_rank,
                    *turns,
                )
                forward[link] += piece.bytes
                backward[link] += piece.bytes * piece.needs_gradient
                if piece.source_rank != piece.target_rank:
                    # Each piece is a separate message with its own latency.
                    way = problem.cluster.link(piece.source_rank, piece.target_rank)
                    seconds[link] += way.latency_s + piece.bytes / way.bandwidth_bytes_per_s
    messages = stage_messages(problem, placement)
    links = [
        (
            each.source_stage,
            each.target_stage,
            each.source,
            each.target,
            each.source_slice,
            each.target_slice,
        )
        for each in messages
    ]
    assert {link: each.forward_bytes for link, each in zip(links, messages, strict=True)} == forward
    assert {
        link: each.backward_bytes for link, each in zip(links, messages, strict=True)
    } == backward
    for link, each in zip(links, messages, strict=True):
        assert each.forward_s == pytest.approx(seconds[link])
