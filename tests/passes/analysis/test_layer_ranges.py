"""Parts of a model by layers: labels of stages, and selections of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.configs.zoo import MODELS
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.model_parts import LayerSelection, ModelPart, parts_text
from autopipe.passes.analysis.layer_ranges import (
    layer_label,
    layer_selection,
    layer_series,
    model_parts,
    nodes_of_layers,
    selected_layers,
)
from tests.distributed.support.builder import Builder
from tests.distributed.support.zoo import small_graph
from tests.passes.cost.graphs import perceptron


def model(*classes: tuple[str, str, int], embedding: str = "", head: str = "") -> Graph:
    """A chain of layers of two nodes, a matmul and an activation. Each class has a path of modules,
    an activation and a number of layers. `embedding` and `head` are names of weights of matmuls
    before and after them.
    """
    builder = Builder()
    hidden = builder.input((4, 4))
    names: dict[str, str] = {}

    def linear(name: str) -> str:
        weight = builder.parameter((4, 4))
        names[weight] = name
        return builder.node("MatMul", hidden, weight)

    if embedding:
        hidden = linear(embedding)
    begun: Counter[str] = Counter()
    for path, op, count in classes:
        for number in range(begun[path], begun[path] + count):
            hidden = builder.node(op, linear(f"{path}.{number}.weight"))
        begun[path] += count
    if head:
        hidden = linear(head)
    graph = builder.graph(builder.mean_square(hidden))
    return _renamed(graph, names)


def _renamed(graph: Graph, names: dict[str, str]) -> Graph:
    """Return the graph with other names of its parameters."""
    parameters = tuple(
        replace(each, value=replace(each.value, name=names.get(each.value.name, each.value.name)))
        for each in graph.parameters
    )
    nodes = tuple(
        replace(node, inputs=tuple(names.get(name, name) for name in node.inputs))
        for node in graph.nodes
    )
    return replace(graph, parameters=parameters, nodes=nodes)


ONE = model(
    ("layers", "Tanh", 4), embedding="model.embed_tokens.weight", head="model.lm_head.weight"
)
"""embedding 0, layers 1-2, 3-4, 5-6, 7-8, head 9, loss 10, …"""
TWO = model(("encoder.layers", "Tanh", 3), ("decoder.layers", "Sigmoid", 2))
"""encoder layers 0-1, 2-3, 4-5, decoder layers 6-7, 8-9, loss 10, …"""


@pytest.mark.parametrize(
    ("graph", "nodes", "label"),
    [
        (ONE, range(20), "embedding, layers 0–3, head"),
        (ONE, range(3), "embedding, layer 0"),
        (ONE, range(2), "embedding, part of layer 0"),
        (ONE, (1, 2, 5, 6, 7, 8), "layers 0, 2–3"),
        (ONE, range(2, 7), "part of layer 0, layers 1–2"),
        (ONE, range(9, 20), "head"),
        (ONE, range(10, 20), ""),
        (ONE, (), ""),
        (TWO, range(8), "encoder layers 0–2, decoder layer 0"),
        (TWO, range(5, 9), "part of encoder layer 2, decoder layer 0, part of decoder layer 1"),
    ],
)
def test_the_label_of_nodes(graph: Graph, nodes: Sequence[int], label: str) -> None:
    assert layer_label(graph, nodes) == label


def test_classes_of_one_name_are_numbered_together() -> None:
    """Layers with two kinds of activations alternate: a person numbers all of them."""
    graph = model(("layers", "Tanh", 2), ("layers", "Sigmoid", 3))
    (series,) = layer_series(graph)
    assert series.layers == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    assert layer_label(graph, range(2, 6)) == "layers 1–2"


def test_a_model_without_layers_has_no_parts() -> None:
    assert model_parts(small_graph("alexnet")[0], range(10)) == ()


def test_a_long_label_is_cut() -> None:
    parts = [ModelPart("layer", 2 * index, 2 * index, incomplete=True) for index in range(9)]
    assert parts_text(parts) == (
        "part of layer 0, part of layer 2, part of layer 4, ..., part of layer 16"
    )


def test_hostile_names_are_escaped() -> None:
    assert parts_text([ModelPart("a\x1b[31m\n")]) == "a\\x1b[31m\\n"


@pytest.mark.parametrize(
    ("graph", "selection", "label"),
    [
        (ONE, (0, 3), "layers 0–3"),
        (ONE, (2, 2), "layer 2"),
        (ONE, "layers[1:3]", "layers 1–2"),
        (ONE, "layer[1:]", "layers 1–3"),
        (ONE, " Layers [ : 2 ] ", "layers 0–1"),
        (ONE, "layers[3]", "layer 3"),
        (ONE, "layers", "layers 0–3"),
        (ONE, ("layers[0]", "layers[2:4]"), "layers 0, 2–3"),
        (TWO, "encoder[0:2]", "encoder layers 0–1"),
        (TWO, "decoder layers[0:2]", "decoder layers 0–1"),
        (TWO, ("encoder[2]", "decoder[0]"), "encoder layer 2, decoder layer 0"),
    ],
)
def test_what_a_selection_selects(graph: Graph, selection: LayerSelection, label: str) -> None:
    nodes = nodes_of_layers(graph, selected_layers(graph, selection))
    assert layer_label(graph, nodes) == label


@pytest.mark.parametrize(
    ("graph", "selection", "message"),
    [
        (ONE, (0, 4), "layers [0, 4] selects layer 4, but the model has 4 layers"),
        (ONE, (2, 1), "layers [2, 1] has its last layer before its first layer"),
        (ONE, "layers[0:9]", "'layers[0:9]' selects layer 8, but the model has 4 layers"),
        (ONE, "layers[2:2]", "'layers[2:2]' selects no layers"),
        (ONE, "layers[]", "'layers[]' selects no layers"),
        (ONE, "layers[:", "'layers[:' selects no layers"),
        (ONE, "tower[0:2]", "'tower[0:2]' names no layers of the model, which has 4 layers"),
        (ONE, ("layers[0]", "layers[0:2]"), "selects layer 0 twice"),
        (ONE, (), "layers [] selects no layer"),
        (
            TWO,
            (0, 1),
            "layers [0, 1] does not say which layers: the model has 3 encoder layers, 2 decoder "
            "layers",
        ),
        (perceptron([4, 8, 2]), (0, 1), "layers [0, 1] selects layers, but the model has no"),
        (perceptron([4, 8, 2]), "layer[0]", "'layer[0]' selects layers, but the model has no"),
    ],
)
def test_what_selects_no_layers_is_told(
    graph: Graph, selection: LayerSelection, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        selected_layers(graph, selection)
    assert message in caught.value.message


@given(st.text(max_size=20) | st.lists(st.text(max_size=9), max_size=3).map(tuple))
def test_any_text_selects_layers_or_is_refused(selection: LayerSelection) -> None:
    try:
        assert selected_layers(TWO, selection)
    except ConfigurationError as error:
        assert error.message and error.hint


@given(st.sampled_from(sorted(MODELS)), st.data())
def test_a_written_selection_selects_the_complete_layers(name: str, data: st.DataObject) -> None:
    graph, _ = small_graph(name)
    ends = st.integers(0, len(graph.nodes))
    first, last = sorted((data.draw(ends), data.draw(ends)))
    selection, nodes = layer_selection(graph, range(first, last))
    complete = {
        node
        for series in layer_series(graph)
        for layer in series.layers
        if set(layer) <= set(range(first, last))
        for node in layer
    }
    assert set(nodes) == complete
    if selection is not None:
        assert nodes_of_layers(graph, selected_layers(graph, selection)) == nodes
