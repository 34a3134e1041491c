"""Schedules that require a placement pattern reject other placements with one line that states the
requirement.
"""

from __future__ import annotations

import pytest

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.schedule import StageGraph
from autopipe.passes.registry import SCHEDULERS, scheduler_class
from autopipe.passes.schedule.published.one_f_one_b import OneForwardOneBackwardPlus
from tests.passes.cost.graphs import cluster, perceptron, problem
from tests.passes.schedule.published.layouts import chain_on, down, waves

CHAIN, LOOPS, VALLEY, TWO_WAVES = (
    chain_on(path) for path in (down(4), down(4, 2), waves(4), waves(4, 2))
)
OPPOSITE = chain_on(waves(4), 2)
ODD = chain_on(waves(3), 2)
OVERLAPPING = StageGraph(3, ((0, 1), (1, 2)), ((0, 1),))
SAME_DIRECTION = chain_on((*down(4), *down(4)), 2)


@pytest.mark.parametrize(
    ("name", "graph", "micro_batches", "reason"),
    [
        (
            "interleaved_1f1b",
            CHAIN,
            8,
            r"but the placement assigns one \(use schedule 1f1b\)",
        ),
        (
            "interleaved_1f1b",
            LOOPS,
            9,
            r"requires a multiple of 4 micro-batches .*, but the step has 9",
        ),
        (
            "interleaved_1f1b",
            VALLEY,
            8,
            r"such as 0 1 2 0 1 2, "
            r"but they are on pipeline ranks 0 1 2 3 3 2 1 0 \(.*stages_per_rank: 2 or more",
        ),
        ("looped_bfs", VALLEY, 8, r"but they are on pipeline ranks 0 1 2 3 3 2 1 0"),
        ("chimera", CHAIN, 8, r"requires 2 pipelines, but the placement has 1 \(.*shape: x"),
        (
            "chimera",
            SAME_DIRECTION,
            8,
            r"visit the pipeline ranks in opposite directions, "
            r"but they are on pipeline ranks 0 1 2 3 0 1 2 3",
        ),
        (
            "chimera",
            ODD,
            8,
            r"requires an even number of devices per pipeline, but the placement has 3",
        ),
        ("hanayo", OPPOSITE, 8, r"requires 1 pipeline, but the placement has 2 \("),
        (
            "hanayo",
            LOOPS,
            8,
            r"such as 0 1 2 2 1 0, but they are on pipeline ranks 0 1 2 3 0 1 2 3 \(.*style: v",
        ),
        (
            "zb_h1",
            LOOPS,
            8,
            r"are on one pipeline rank each, such as 0 1 2, "
            r"but they are on pipeline ranks 0 1 2 3 0 1 2 3",
        ),
        (
            "zb_h2",
            OVERLAPPING,
            8,
            r"two stages are on devices 0, 1 and on 1, 2 \(use schedule 1f1b_plus",
        ),
        (
            "zb_v",
            CHAIN,
            8,
            r"visit all pipeline ranks in ascending and then in descending order, such as "
            r"0 1 2 2 1 0, but they are on pipeline ranks 0 1 2 3",
        ),
        ("v_half", TWO_WAVES, 8, r"requires 2 stages per device, but the placement has 4"),
        (
            "v_min",
            chain_on(waves(20)[1:]),
            8,
            r"but they are on pipeline ranks 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 \.\.\. \(",
        ),
        (
            "dualpipe",
            OPPOSITE,
            9,
            r"on 4 devices requires an even number of micro-batches, 8 or more, but the step has 9",
        ),
        (
            "dualpipe",
            OPPOSITE,
            6,
            r"8 or more, but the step has 6 \(use schedule chimera, or raise --micro-batches\)",
        ),
        (
            "dualpipe_v",
            VALLEY,
            7,
            r"on 4 devices requires 8 micro-batches or more, but the step has 7",
        ),
    ],
)
def test_other_patterns_are_rejected(name, graph, micro_batches, reason):
    with pytest.raises(InfeasibleError, match=f"^schedule {name} .*{reason}") as caught:
        scheduler_class(name)().order(graph, micro_batches)
    assert "\n" not in str(caught.value)


def test_1f1b_plus_rejects_stages_that_share_a_device():
    with pytest.raises(
        InfeasibleError, match=r"stages 3 and 4 are both on device 3 \(use schedule 1f1b"
    ):
        OneForwardOneBackwardPlus().order(VALLEY, 4)
    with pytest.raises(InfeasibleError, match="requires one pipeline, but the placement uses 2"):
        OneForwardOneBackwardPlus().order(OPPOSITE, 4)


def chain_of(devices):
    """Return a model with two layers per device, and its placement as a chain."""
    graph = perceptron([4] * (devices + 1))
    return graph, Placement(
        tuple(Stage((2 * place, 2 * place + 1), (place,), 8) for place in range(devices))
    )


@pytest.mark.parametrize(
    "name", sorted(set(SCHEDULERS) - {"gpipe", "1f1b", "1f1b_plus", "kfkb", "tessel", "csv"})
)
def test_requires_rejects_what_run_cannot_schedule(name):
    graph, placement = chain_of(4)
    given = problem(graph, cluster(4), micro_batches=8)
    scheduler = scheduler_class(name)()
    if name in {"looped_bfs", "zb_h1", "zb_h2"}:
        scheduler.requires(given, placement)
        assert scheduler.run(given, placement).micro_batches == 8
    else:
        with pytest.raises(InfeasibleError, match=f"schedule {name} "):
            scheduler.requires(given, placement)


@pytest.mark.parametrize("name", sorted(set(SCHEDULERS) - {"kfkb", "tessel", "csv"}))
def test_different_micro_batch_sizes_are_rejected(name):
    graph, placement = chain_of(2)
    wide = Placement((placement.stages[0], Stage(placement.stages[1].nodes, (1,), 16)))
    with pytest.raises(InfeasibleError, match=f"schedule {name} requires one micro-batch size"):
        scheduler_class(name)().requires(problem(graph, cluster(2)), wide)
