"""Annotations on a small product: what strategies are asked for, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.placement import Split
from autopipe.ir.problem import Constraint
from autopipe.passes.annotations import annotated_constraints
from autopipe.passes.frontend import Model, read_model
from autopipe.passes.frontend.device_annotations import (
    Annotation,
    Configuration,
    Sharding,
    annotation_proto,
    configuration_proto,
)
from autopipe.passes.placement.manual import Manual
from tests.passes.cost.graphs import cluster, problem
from tests.passes.frontend.building import floats, model, node, saved

ROWS = (((0, 2),), ((0, 1), (2, 3)))
"""Two blocks of the first dimension, each on two of four devices."""
WHOLE = ((), ((0, 1, 2, 3),))


def configuration(name: str, devices: int, *annotations: Annotation) -> Configuration:
    return Configuration(name, devices, (), annotations)


def blocks(tensor: str, *cuts: tuple[int, int], inner: int = 1, count: int = 4) -> Sharding:
    """A tensor cut so over devices 0, 1, …, outer to inner, each block on `inner` neighbours."""
    return Sharding(
        tensor, cuts, tuple(tuple(range(at, at + inner)) for at in range(0, count, inner))
    )


def annotated(folder: Path, *configurations: Configuration) -> Model:
    """x [8, 4] · w [4, 6] + bias [6], and its Relu, with annotations."""
    nodes = [
        node("MatMul", "x w", "h"),
        node("Add", "h bias", "s"),
        node("Identity", "s", "t"),
        node("Relu", "t", "y"),
    ]
    held = {"w": floats(4, 6), "bias": floats(6)}
    proto = model(nodes, {"x": [8, 4]}, "y", held)
    for each in configurations:
        proto.configuration.append(configuration_proto(each))
        for annotation in each.annotations:
            stated = proto.graph.node[annotation.node].device_configurations
            stated.append(annotation_proto(annotation, each.name))
    return read_model(saved(proto, folder))


def asked(
    folder: Path, *shardings: Sharding, stage: int | None = None, at: int = 0
) -> tuple[Constraint, ...]:
    given = configuration("mine", 4, Annotation(at, stage, shardings))
    return annotated_constraints(annotated(folder, given), 4)


def test_a_model_without_annotations_asks_for_nothing(tmp_path: Path) -> None:
    assert annotated_constraints(annotated(tmp_path), 4) == ()
    assert annotated_constraints(annotated(tmp_path, configuration("unused", 2)), 4) == ()


def test_one_annotation_is_a_place_and_a_split(tmp_path: Path) -> None:
    found = asked(tmp_path, blocks("w", (1, 2), inner=2), stage=3)
    source = "the model's annotation of stage 0"
    name = ("matmul_h",)
    assert found == (
        Constraint(source, 0, (0, 1, 2, 3), nodes=name),
        Constraint(source, split=(("n", 2),), nodes=name),
    )


def test_splits_are_outer_to_inner_and_b_counts_samples(tmp_path: Path) -> None:
    *_, split = asked(tmp_path, blocks("h", (-2, 2), (1, 2)))
    assert split.split == (("b", 2), ("n", 2))
    *_, split = asked(tmp_path, Sharding("h", ((0, 2), (1, 2)), ((0,), (2,), (1,), (3,))))
    assert split.split == (("n", 2), ("b", 2))
    *_, split = asked(tmp_path, blocks("x", (1, 4)), Sharding("h", *WHOLE))
    assert split.split == (("k", 4),)
    *_, split = asked(tmp_path, Sharding("h", *WHOLE))
    assert split.split == (), "each device computes it whole"


def test_a_stage_alone_leaves_devices_and_splits_open(tmp_path: Path) -> None:
    assert asked(tmp_path, stage=0) == (
        Constraint("the model's annotation of stage 0", 0, nodes=("matmul_h",)),
    )


def test_an_annotated_name_of_a_value_stands_for_it(tmp_path: Path) -> None:
    *_, split = asked(tmp_path, blocks("t", (1, 2), inner=2), at=3)
    assert (split.nodes, split.split) == (("relu_y",), (("x1", 2),))


def test_a_strategy_follows_annotations_and_constraints_together(tmp_path: Path) -> None:
    given = configuration(
        "mine",
        4,
        Annotation(0, 1, (blocks("h", (1, 2), count=2),)),
        Annotation(1, 2, (Sharding("s", (), ((2, 3),)),)),
        Annotation(3, 2, ()),
    )
    read = annotated(tmp_path, given)
    resolved = annotated_constraints(read, 4)
    own = (Constraint("relu_y", split=(("b", 2),)), Constraint("matmul*", devices=(0, 1)))
    stages = Manual().run(problem(read.graph, cluster(4), constraints=(*own, *resolved))).stages
    assert [(stage.nodes, stage.devices) for stage in stages] == [((0,), (0, 1)), ((1, 2), (2, 3))]
    assert stages[0].splits == ((0, (Split("n", 2),)),)
    assert stages[1].splits == ((2, (Split("x0", 2),)),)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (
            Constraint("matmul_h", stage=1),
            "'matmul_h'.* and the model's annotation of stage 0 require different stages",
        ),
        (Constraint("matmul_h", devices=(1, 0)), "require different devices"),
        (Constraint("matmul_h", split=(("k", 2),)), "require different splits"),
        (Constraint("matmul_h", split=()), "require different splits"),
    ],
)
def test_constraints_that_contradict_annotations_are_refused(
    own: Constraint, message: str, tmp_path: Path
) -> None:
    given = configuration("mine", 2, Annotation(0, 0, (blocks("h", (1, 2), count=2),)))
    read = annotated(tmp_path, given)
    resolved = annotated_constraints(read, 2)
    with pytest.raises(ConfigurationError, match=message):
        Manual().run(problem(read.graph, cluster(2), constraints=(own, *resolved)))


def test_the_configuration_is_chosen_by_the_number_of_devices(tmp_path: Path) -> None:
    node = Annotation(0, 0, ())
    read = annotated(
        tmp_path,
        configuration("a", 2, node),
        configuration("b", 4, node),
        configuration("c", 4, node),
    )
    assert len(annotated_constraints(read, 2)) == 1
    with pytest.raises(
        ConfigurationError, match="configurations 'b' and 'c' are for the same number of devices, 4"
    ):
        annotated_constraints(read, 4)
    with pytest.raises(
        ConfigurationError, match="other numbers of devices than 3: 'a' for 2, 'b' for 4, 'c' for 4"
    ):
        annotated_constraints(read, 3)


X = "tensor 'x'"
W = "tensor 'w'"
H = "tensor 'h'"


@pytest.mark.parametrize(
    ("shardings", "message"),
    [
        (
            (blocks("h", (2, 2), inner=2),),
            f"{H}: the annotation shards dimension 2 of a tensor of shape (8, 6)",
        ),
        ((blocks("h", (-3, 2), inner=2),), f"{H}: the annotation shards dimension -3"),
        (
            (blocks("h", (0, 2), (-2, 2)),),
            f"{H}: the annotation shards a dimension of the tensor twice",
        ),
        ((blocks("h", (1, 4)),), f"{H}, dimension 1: 4 shards do not divide the size 6"),
        (
            (blocks("x", (1, 2), inner=2), blocks("w", (0, 4))),
            (
                "'x' and 'w' contradict each other: they split axis 'k' of the node into 2 "
                "and 4 parts"
            ),
        ),
        (
            (blocks("x", (0, 2), inner=2), Sharding("h", ((0, 2),), ((2, 3), (0, 1)))),
            "tensors 'x' and 'h' contradict each other",
        ),
        (
            (Sharding("x", *WHOLE), blocks("h", (0, 2), inner=2)),
            "axis 'm' of the node into 1 and 2 parts",
        ),
        (
            (blocks("x", (0, 2), inner=2), blocks("w", count=2, inner=2)),
            "'x' and 'w' of the node are annotated for different dev",
        ),
        (
            (Sharding("x", *ROWS), Sharding("w", ((1, 2),), ((0, 1), (2, 3)))),
            "no splits over",
        ),
        (
            (Sharding("x", ((0, 2),), ((0,), (1, 2, 3))),),
            "no splits over devices 0, 1, 2, 3 result",
        ),
    ],
)
def test_layouts_that_do_not_fit_the_node_are_refused(
    shardings: tuple[Sharding, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        asked(tmp_path, *shardings)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path}/model.onnx: ")
    assert "matmul_h" in text
    assert message in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("extent", "message"),
    [(1, "2 shards do not divide the size 1"), (0, "cannot be split into 2 shards along")],
)
def test_an_extent_of_one_or_none_has_no_blocks(extent: int, message: str, tmp_path: Path) -> None:
    proto = model([node("Add", "x one", "y")], {"x": [extent, 6]}, "y", {"one": floats(extent, 6)})
    given = configuration("mine", 2, Annotation(0, 0, (blocks("one", (0, 2), count=2),)))
    proto.configuration.append(configuration_proto(given))
    proto.graph.node[0].device_configurations.append(annotation_proto(given.annotations[0], "mine"))
    with pytest.raises(ModelError, match=f"'one', dimension 0: .*{message}"):
        annotated_constraints(read_model(saved(proto, tmp_path), batch_axes={"x": None}), 2)


def test_nodes_of_a_stage_are_on_the_same_devices(tmp_path: Path) -> None:
    first = Sharding("h", (), ((0, 1),))
    second = Sharding("y", (), ((2, 3),))
    read = annotated(
        tmp_path, configuration("mine", 4, Annotation(0, 0, (first,)), Annotation(3, 0, (second,)))
    )
    with pytest.raises(
        ModelError,
        match=r"'relu_y': .* for devices 2, 3, but node 'matmul_h' .* for devices 0, 1",
    ):
        annotated_constraints(read, 4)


def test_two_names_of_one_value_agree(tmp_path: Path) -> None:
    both = (Sharding("s", *ROWS), Sharding("t", *WHOLE))
    read = annotated(tmp_path, configuration("mine", 4, Annotation(2, 0, both)))
    with pytest.raises(
        ModelError,
        match="Identity 'identity_t': the annotations of 's' and 't', which are one value",
    ):
        annotated_constraints(read, 4)
