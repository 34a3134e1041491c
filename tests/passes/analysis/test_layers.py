"""Layer classes of models: those that a person would name, with their names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.configs.zoo import build, configure
from autopipe.ir.graph import DType, Graph
from autopipe.ir.layer_names import distinct_names, layer_name
from autopipe.passes.analysis.layers import LayerClass, find_layers, name_layers
from autopipe.passes.frontend import read_model
from tests.distributed.support.builder import Builder, mlp
from tests.distributed.support.zoo import small_graph


def summary(graph: Graph) -> dict[str, int]:
    """Return the number of instances by name of the class."""
    classes = find_layers(graph)
    names = name_layers(graph, classes)
    return {name: each.count for name, each in zip(names, classes, strict=True)}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("gpt", {"layer": 2}),
        ("llama", {"layer": 2}),
        ("bert", {}),  # one layer, whose three projections are no layers
        ("transformer", {}),  # one encoder layer and one decoder layer
        ("alexnet", {}),
    ],
)
def test_layers_of_the_zoo(model: str, expected: dict[str, int]) -> None:
    assert summary(small_graph(model)[0]) == expected


def test_encoder_and_decoder_layers_are_two_classes(tmp_path: Path) -> None:
    settings = {"layers": "2", "hidden": "32", "heads": "4", "vocabulary": "64", "weights": "none"}
    build(configure("transformer", settings)).save(tmp_path / "model.onnx")
    graph = read_model(tmp_path / "model.onnx").graph
    assert summary(graph) == {"encoder layer": 2, "decoder layer": 2}


@pytest.mark.parametrize("layers", [2, 3, 8])
def test_every_layer_is_an_instance(layers: int) -> None:
    graph, _ = mlp(layers)
    (found,) = find_layers(graph)
    assert found.instances == tuple((2 * index, 2 * index + 1) for index in range(layers))


def test_a_mask_inside_of_the_first_layer_is_no_part_of_it() -> None:
    """Two layers read a mask, which the file computes between the nodes of the first layer."""
    builder = Builder()
    hidden = builder.input((4, 4))
    positions = builder.input((4, 4))
    mask = ""
    for _ in range(3):
        product = builder.node("MatMul", hidden, builder.parameter((4, 4)))
        if not mask:
            mask = builder.node("Neg", builder.node("Sigmoid", positions))
        hidden = builder.node("Tanh", builder.node("Add", product, mask))
    graph = builder.graph(builder.mean_square(hidden))
    (found,) = find_layers(graph)
    assert found.instances == ((0, 3, 4), (5, 6, 7), (8, 9, 10))


def test_the_result_does_not_depend_on_names() -> None:
    plain, _ = mlp(4)
    renamed, _ = mlp(4, rename=lambda name: f"z{hash(name) % 97}/{name[::-1]}")
    assert find_layers(plain) == find_layers(renamed)


@given(st.lists(st.text(max_size=12), min_size=1, max_size=4), st.text(max_size=8))
def test_names_of_any_text_give_plain_words(words: list[str], end: str) -> None:
    def rename(name: str) -> str:
        number = re.sub(r"\D", "", name) or "0"
        return "/".join([*words, f"layers.{number}", end, name])

    graph, _ = mlp(3, rename=rename)
    (name,) = name_layers(graph, find_layers(graph))
    assert re.fullmatch(r"[A-Za-z0-9]+( [A-Za-z0-9]+)*", name)
    assert len(name) <= 44


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.layers.{}.mlp.up.weight", "layer"),
        ("model.decoder.layers.{}.fc1.weight", "decoder layer"),
        ("encoder.layer.2.transformer.layer.{}.output.weight", "encoder layer"),
        ("towers.{}.linear.weight", "tower"),
        ("h.{}.attn.weight", "layer"),
        ("onnx::MatMul_{}", ""),
        ("cross.{}.weight", "cross layer"),
    ],
)
def test_names_of_modules_name_the_class(path: str, expected: str) -> None:
    assert layer_name([[path.format(number) for number in range(3)]]) == expected


def test_classes_can_have_one_name() -> None:
    builder = Builder()
    hidden = builder.input((4, 4))
    for op in ("Tanh", "Tanh", "Sigmoid", "Sigmoid"):
        hidden = builder.node(op, builder.node("MatMul", hidden, builder.parameter((4, 4))))
    graph = builder.graph(builder.mean_square(hidden))
    classes = find_layers(graph)
    assert classes == (LayerClass(((0, 1), (2, 3))), LayerClass(((4, 5), (6, 7))))
    assert name_layers(graph, classes) == ("layer", "layer")


def test_absent_results_and_operands_are_no_values() -> None:
    """Nodes without their first result, before nodes without an optional operand."""
    graph, _ = mlp(3)
    nodes = tuple(
        replace(node, outputs=(*node.outputs, ""))
        if index == 0
        else replace(node, inputs=(*node.inputs, ""))
        for index, node in enumerate(graph.nodes)
    )
    (found,) = find_layers(replace(graph, nodes=nodes))
    assert found.instances == ((2, 3), (4, 5))


def test_the_last_layer_may_lack_an_optional_result() -> None:
    """A normalization with a skip connection returns the sum only if a next layer reads it."""
    graph, _ = mlp(3)
    nodes = tuple(
        replace(node, outputs=(*node.outputs, "")) if index in (1, 3) else node
        for index, node in enumerate(graph.nodes)
    )
    (found,) = find_layers(replace(graph, nodes=nodes))
    assert found.instances == ((0, 1), (2, 3), (4, 5))


@pytest.mark.parametrize(("dtype", "count"), [(DType.FLOAT64, 3), (DType.INT64, 0)])
def test_constants_must_be_equal_if_they_are_whole_numbers(dtype: DType, count: int) -> None:
    """Layers can have different scales, but not different shapes or axes."""
    builder = Builder()
    hidden = builder.input((4, 4))
    for number in range(3):
        product = builder.node("MatMul", hidden, builder.parameter((4, 4)))
        constant = builder.constant(1 + number, dtype)
        if dtype is DType.INT64:
            constant = builder.node("Cast", constant, to=11)
        hidden = builder.node("Mul", product, constant)
    classes = find_layers(builder.graph(builder.mean_square(hidden)))
    assert sum(each.count for each in classes) == count


def test_layers_of_quantized_weights_are_found() -> None:
    """Quantized weights are constants, which a node converts to real numbers."""
    builder = Builder()
    hidden = builder.input((4, 4))
    for number in range(3):
        weight = builder.constant(np.full((4, 4), number), DType.INT8)
        real = builder.node("Cast", weight, to=11)
        hidden = builder.node("Tanh", builder.node("MatMul", hidden, real))
    (found,) = find_layers(builder.graph(builder.mean_square(hidden)))
    assert found.instances == ((0, 1, 2), (3, 4, 5), (6, 7, 8))


def test_nodes_of_two_branches_can_be_mixed() -> None:
    """Files of optimizers can contain the nodes of an encoder between the nodes of a decoder."""
    builder = Builder()
    towers = {"E": builder.input((4, 4)), "D": builder.input((4, 4))}
    counts = dict.fromkeys(towers, 0)
    for tower in "EDEEEDDEDEDDEEDD":
        op = ("MatMul", "Tanh" if tower == "E" else "Sigmoid")[counts[tower] % 2]
        weight = (builder.parameter((4, 4)),) if op == "MatMul" else ()
        towers[tower] = builder.node(op, towers[tower], *weight)
        counts[tower] += 1
    graph = builder.graph(builder.mean_square(builder.node("Mul", *towers.values())))
    first, second = find_layers(graph)
    assert (first.count, first.length, second.count, second.length) == (4, 2, 4, 2)
    for each, op in ((first, "Tanh"), (second, "Sigmoid")):
        assert all(graph.nodes[nodes[1]].op == op for nodes in each.instances)


def test_projections_of_one_value_are_no_layers() -> None:
    builder = Builder()
    hidden = builder.input((4, 4))
    values = []
    for _ in range(3):
        value = builder.node("MatMul", hidden, builder.parameter((4, 4)))
        for op in ("Tanh", "Sigmoid", "Neg"):
            value = builder.node(op, value)
        values.append(value)
    joined = builder.node("Add", builder.node("Mul", values[0], values[1]), values[2])
    assert find_layers(builder.graph(builder.mean_square(joined))) == ()


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (
            ("vision_model.encoder.layers", "text_model.encoder.layers"),
            ("vision encoder layer", "text encoder layer"),
        ),
        (("encoder.layer", "decoder.layer"), ("encoder layer", "decoder layer")),
        (("stages.0.layers", "stages.1.layers"), ("stage layer", "stage layer")),
        (("n",), ("",)),
        ((), ()),
    ],
)
def test_equal_names_get_the_module_in_which_they_differ(
    paths: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert distinct_names([tuple(path.split(".")) for path in paths]) == expected
