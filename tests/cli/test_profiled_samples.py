"""Which samples of a model are measured, and in which laps."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autopipe.api import profile_samples
from autopipe.api.profile_samples import groups_of, parsed_sizes
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import Model
from tests.passes.cost.graphs import perceptron


def model(graph: Graph) -> Model:
    """What a file would be read as."""
    return Model(graph, Path(), "", 8, "", Mode.TRAIN, len(graph.nodes), (), (), ())


def test_a_lap_has_nodes_as_often_and_in_the_order_of_the_model() -> None:
    (group,) = groups_of([(8, model(perceptron([16, 16, 16, 16])))], "fp32", ())
    assert [each.operation.operator for each in group.lap] == ["MatMul", "Relu"] * 3
    assert len({each.operation for each in group.lap}) == 3, (
        "the first product gives its input no gradient"
    )


def test_what_one_size_has_measured_is_not_measured_for_another() -> None:
    groups = list(groups_of([(8, model(perceptron([16, 12])))] * 2, "fp32", (2, 2)))
    assert [group.note for group in groups] == ["micro-batch 8", "micro-batch 8, split 2 ways"]
    operations = [sample.operation for group in groups for sample in group.lap]
    assert len(operations) == len(set(operations))


def test_both_forms_of_a_loss_are_measured() -> None:
    own = dataclasses.replace(model(perceptron([16, 12])), other=perceptron([16, 20]))
    laps = [each for group in groups_of([(8, own)], "fp32", ()) for each in group.lap]
    products = [each.operation.operands[1] for each in laps if each.operation.operator == "MatMul"]
    assert products == ["float32[16,12]", "float32[16,20]"]


@pytest.mark.parametrize(("places", "held"), [(4, 2**30), (400, 5000)])
def test_long_and_large_laps_are_parted_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch, places: int, held: int
) -> None:
    graph = perceptron([16, 12, 16, 12, 16, 12, 16])
    (whole,) = groups_of([(8, model(graph))], "fp32", ())
    monkeypatch.setattr(profile_samples, "_MAX_LAP_SAMPLES", places)
    monkeypatch.setattr(profile_samples, "_MAX_LAP_BYTES", held)
    parts = list(groups_of([(8, model(graph))], "fp32", ()))
    assert len(parts) > 1
    assert all(len(part.lap) <= places for part in parts)
    assert {each.operation for part in parts for each in part.lap} == {
        each.operation for each in whole.lap
    }


def test_sizes_are_numbers_between_commas() -> None:
    assert parsed_sizes("1, 2,4", "--degrees") == (1, 2, 4)
    assert parsed_sizes("", "--degrees") == ()
    for text in ("0", "-1", "1.5", "two", "²"):
        with pytest.raises(ConfigurationError):
            parsed_sizes(text, "--degrees")
