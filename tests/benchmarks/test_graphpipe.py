"""`python -m benchmarks graphpipe`: figures beside the paper's, no sequential pipeline faster than
GraphPipe's.
"""

from __future__ import annotations

import json

import pytest

from benchmarks.graphpipe import (
    DEVICES,
    MODELS,
    Step,
    cases,
    graph_step,
    problem_of,
    search_result,
    sequential_step,
    step_of,
)
from tests.cli.command_line import CommandLine

SMALL = {
    "mmt": (("branches", 2), ("layers", 1)),
    "dlrm": (),
    "candle-uno": (("branches", 3),),
    "two-branch": (("repeats", 2),),
}


def test_samples_in_flight_are_those_of_figure_5(command_line: CommandLine) -> None:
    rows = json.loads(command_line.done("graphpipe", "--only", "three-stages", "--json").out)[
        "rows"
    ]
    assert [(row["theirs"], row["ours"]) for row in rows] == [(10, 10), (12, 12)]


def test_the_case_study_draws_both_timelines(command_line: CommandLine) -> None:
    told = command_line.done("graphpipe", "--only", "two-branch").out
    assert (
        "chain, micro-batches of 2, depth 8" in told
        and "graph, micro-batches of 4, depth 5" in told
    )
    rows = json.loads(command_line.done("graphpipe", "--only", "two-branch", "--json").out)["rows"]
    fits = {row["variant"]: row["ours"] for row in rows if row["metric"] == "micro_batch_size"}
    assert list(fits.values()) == [2, 4]
    gains = {row["variant"]: row["ours"] for row in rows if row["metric"] == "speedup"}
    assert gains["from depth"] > 1.04
    assert (
        gains["from depth, slow launches"] > 1.05
        and gains["from micro_batch_size, slow launches"] > 1.05
    )
    assert gains["from both, slow launches"] == pytest.approx(1.2, abs=0.05)


def test_every_model_and_number_of_devices_has_cases() -> None:
    parts = {(case.name, case.part) for case in cases()}
    both = {
        (f"{model}/p={devices}", part)
        for model in MODELS
        for devices in DEVICES
        for part in ("Table 1", "Figure 6")
    }
    assert (
        both
        | {
            ("mmt/p=256", "Table 1"),
            ("mmt/p=1024", "Table 1"),
            ("two-branch/p=8", "Figures 8 and 10"),
        }
        <= parts
    )
    assert {part for _, part in parts} >= {"Figure 5", "Figure 7", "Figure 9", "A.3"}


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize("rival", ["pipedream", "pipedream, slowest stage"])
def test_no_sequential_pipeline_is_faster(model: str, rival: str) -> None:
    ours = step_of("graphpipe", model, 4, 16, SMALL[model])
    theirs = step_of(rival, model, 4, 16, SMALL[model])
    assert isinstance(ours, Step)
    assert isinstance(theirs, Step)
    assert ours.timeline.end <= theirs.timeline.end * 1.001


def test_piper_is_compared_where_downsets_are_few() -> None:
    ours, theirs = (
        step_of(name, "candle-uno", 2, 16, SMALL["candle-uno"]) for name in ("graphpipe", "piper")
    )
    assert isinstance(ours, Step) and isinstance(theirs, Step)
    assert ours.timeline.end <= theirs.timeline.end * 1.001
    refused = search_result("piper", "candle-uno", 4, 4096)
    assert refused.placement is None and "78130 downsets" in refused.refusal


def test_a_chain_waits_where_a_graph_does_not() -> None:
    """On a chain of stages both are the same; beside one another stages of two branches take less
    time.
    """
    settings = (("repeats", 2),)
    problem = problem_of("two-branch", 4, 16, settings)
    placement = search_result("pipedream, slowest stage", "two-branch", 4, 16, settings).placement
    assert placement is not None
    chain = sequential_step(problem, placement)
    graph = graph_step(problem, placement)
    assert chain.depth == len(placement.stages) >= graph.depth
    assert graph.timeline.end <= chain.timeline.end
    assert max(graph.timeline.peak_memory) <= max(chain.timeline.peak_memory)
