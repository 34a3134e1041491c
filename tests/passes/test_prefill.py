"""A decoder's plan is carried over to steps that feed more tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.api.request import make_request
from autopipe.configs.configuration import load_configuration
from autopipe.ir.errors import InfeasibleError
from autopipe.passes.pipeline import PlanResult, make_plan
from autopipe.passes.prefill import with_step_length
from tests.exports.decoders import decoder_file


@pytest.fixture(scope="module")
def planned() -> PlanResult:
    settings = {
        "model.dims": "{sequence_length: 1, past_sequence_length: 20}",
        "mode": "infer",
        "cluster.preset": "cpu-local",
        "gpus": "4",
        "batch_size": "8",
        "micro_batches": "4",
        "strategy": "{name: grid, pipeline: 2, tensor: 2}",
    }
    configuration = load_configuration(
        assignments=[f"{key}={value}" for key, value in settings.items()]
    )
    return make_plan(make_request(configuration, decoder_file("gpt2")))


def test_every_node_stays_where_it_was(planned: PlanResult) -> None:
    """On 64 tokens the causal mask is computed, not a constant: its nodes are in no stage yet."""
    wider = with_step_length(planned, 64)
    assert wider is not None
    few = planned.problem.graph
    many = wider.problem.graph
    assert many.type_of("input_ids").shape == (2, 64)
    assert len(many.nodes) > len(few.nodes)
    wider.plan.placement.verify(many)
    for before, after in zip(
        planned.plan.placement.stages, wider.plan.placement.stages, strict=True
    ):
        names = {few.nodes[node].outputs: before.splits_of(node) for node in before.nodes}
        carried = {many.nodes[node].outputs: after.splits_of(node) for node in after.nodes}
        assert names.items() <= carried.items()
        assert after.devices == before.devices


def test_a_plan_of_such_steps_needs_no_other(planned: PlanResult) -> None:
    assert with_step_length(planned, 1) is None


def test_another_graph_is_refused(planned: PlanResult) -> None:
    graph = planned.problem.graph
    renamed = replace(graph.nodes[-1], op="Tanh")
    other = replace(graph, nodes=(*graph.nodes[:-1], renamed))
    with pytest.raises(InfeasibleError, match="operators of the graph differ"):
        with_step_length(replace(planned, problem=replace(planned.problem, graph=other)), 2)
