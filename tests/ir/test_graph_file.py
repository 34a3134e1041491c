"""The graph in a plan folder: written, read back, and rejected if it was tampered with."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import (
    Constant,
    DType,
    FileSlice,
    Fill,
    FoldedSlice,
    Graph,
    Initializer,
    Node,
    Parameter,
    Value,
    VarintSlice,
)
from autopipe.ir.graph_file import GRAPH_FILE, PlannedGraph, read_graph, write_graph
from autopipe.ir.problem import Constraint

X = Value("x", DType.FLOAT32, (2, 6))
W = Value("w", DType.FLOAT32, (6, 4))
B = Value("b", DType.FLOAT32, (4,))
Y = Value("y", DType.FLOAT32, (2, 4))
Z = Value("z", DType.FLOAT32, (2, 4))
C = Constant(Value("c", DType.FLOAT32, (4,)), np.arange(4, dtype=np.float32))
HALF = Constant(Value("h", DType.BFLOAT16, ()), np.asarray(0.5, ml_dtypes.bfloat16))
NONE = Constant(Value("none", DType.INT64, (0,)), np.zeros(0, np.int64))
NODES = (
    Node("product", "MatMul", ("x", "w"), ("y",)),
    Node("sum", "Add", ("y", "c"), ("z",)),
)


def graph(**changes: Any) -> Graph:
    facts: dict[str, Any] = {
        "name": "g",
        "opset": 20,
        "inputs": (X,),
        "parameters": (Parameter(W, FileSlice("weights/w.bin", 8, 96)),),
        "constants": (C, HALF, NONE),
        "nodes": NODES,
        "outputs": ("z",),
        "values": (Y, Z),
        "batch_axes": (("x", 0),),
    }
    return Graph(**(facts | changes))


def written(folder: Path, planned: PlannedGraph) -> Path:
    write_graph(folder, planned)
    return folder / GRAPH_FILE


def test_a_graph_is_read_as_it_was_written(tmp_path: Path) -> None:
    constraint = Constraint("the annotation", 1, (0, 1), (("batch", 2),), nodes=("sum",))
    planned = PlannedGraph(graph(), "d" * 64, "z", "recompute", (constraint,))
    found = read_graph(written(tmp_path, planned))
    assert found == planned
    assert found.graph.digest() == planned.graph.digest()
    assert found.graph.constants[1].array.dtype == ml_dtypes.bfloat16
    lines = (tmp_path / GRAPH_FILE).read_text().splitlines()
    assert sum('"op": ' in line for line in lines) == len(NODES)


@pytest.mark.parametrize(
    "storage",
    [
        FileSlice("", 0, 96),
        FoldedSlice("w.bin", 0, 96, (0, 4), 2, "log"),
        VarintSlice(3, 40),
        Fill(0.5),
        Fill(float("-inf")),
        Initializer("normal", 0.02),
    ],
)
def test_every_storage_of_a_parameter(tmp_path: Path, storage: Any) -> None:
    planned = PlannedGraph(graph(parameters=(Parameter(W, storage, False),)), "d", "")
    assert read_graph(written(tmp_path, planned)) == planned


def test_attributes_keep_their_types(tmp_path: Path) -> None:
    attributes = (
        ("a", 1),
        ("b", 1.0),
        ("c", "text"),
        ("d", (1, 2)),
        ("e", (1.0, float("-inf"))),
        ("f", ("one", "two")),
        ("g", ()),
        ("h", float("inf")),
    )
    node = Node("product", "MatMul", ("x", "w"), ("y",), attributes)
    planned = PlannedGraph(graph(nodes=(node, NODES[1])), "d", "")
    found = read_graph(written(tmp_path, planned)).graph.nodes[0].attributes
    assert [type(value) for _, value in found] == [type(value) for _, value in attributes]
    assert found == attributes


def _outside(document: Any) -> None:
    document["parameters"][0]["storage"]["file"] = "../secret"


def _filled(document: Any) -> None:
    document["parameters"][0]["storage"] = {"kind": "fill", "value": [1]}


def _filled_by_a_huge_integer(document: Any) -> None:
    document["parameters"][0]["storage"] = {"kind": "fill", "value": 10**400}


def _large(document: Any) -> None:
    document["constants"][0]["value"][2] = [1 << 40]


def _mismatched(document: Any) -> None:
    document["parameters"][0]["shape"] = [5, 4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda document: document.pop("nodes"), "nodes is missing"),
        (lambda document: document.update(format="autopipe.graph/9"), "format"),
        (lambda document: document["nodes"][0].update(op="Pickle"), "operator 'Pickle' is unknown"),
        (lambda document: document["nodes"][0].update(inputs=["x", 1]), r"nodes\[0\].inputs"),
        (lambda document: document["nodes"][0].update(inputs=["x"]), "MatMul"),
        (
            lambda document: document["nodes"][0].update(inputs=["x", "z"]),
            "before a node writes it",
        ),
        (lambda document: document["nodes"][0].update(attributes={"a": True}), "attributes.a"),
        (lambda document: document["nodes"][0].update(attributes={"a": [1, "b"]}), "of one type"),
        (lambda document: document["values"].append(["y", "float32", [1]]), "defined twice"),
        (lambda document: document["values"][0].__setitem__(1, "float31"), r"values\[0\]"),
        (lambda document: document["values"][0].__setitem__(2, [-1]), r"values\[0\]"),
        (lambda document: document.update(batch_axes={"x": 2}), "batch_axes.x"),
        (lambda document: document.update(batch_axes={"w": 0}), "batch_axes.w"),
        (lambda document: document.update(outputs=["q"]), "no node writes the output"),
        (lambda document: document.update(loss="q"), "loss"),
        (lambda document: document["constants"][0].update(data="?"), r"constants\[0\].data"),
        (lambda document: document["constants"][0].update(data="eJwDAAAAAAE="), "16 bytes"),
        (lambda document: document["constants"][0].update(type="dtype"), "type"),
        (_large, "constants of up to"),
        (_outside, "inside the model's folder"),
        (_mismatched, "MatMul"),
        (_filled, r"storage\.value"),
        (_filled_by_a_huge_integer, r"storage\.value"),
    ],
)
def test_a_file_that_is_no_sound_graph_is_rejected(
    tmp_path: Path, change: Callable[[Any], object], says: str
) -> None:
    path = written(tmp_path, PlannedGraph(graph(), "d", "z"))
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigurationError, match=says) as caught:
        read_graph(path)
    assert "\n" not in str(caught.value)
    assert GRAPH_FILE in str(caught.value)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) in a document of mappings and lists."""
    found = []
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found += [(value, key), *_places(value[key])]
    return found


def test_random_changes_end_in_one_line_or_in_a_graph(tmp_path: Path) -> None:
    path = written(tmp_path, PlannedGraph(graph(), "d", "z"))
    document = json.loads(path.read_text())
    source = random.Random(7)
    odd: tuple[Any, ...] = (
        None,
        True,
        -1,
        1 << 70,
        10**400,
        0.5,
        "",
        "x",
        [],
        {},
        [[]],
        {"float": "inf"},
    )
    for _ in range(400):
        changed = copy.deepcopy(document)
        container, key = source.choice(_places(changed))
        container[key] = source.choice(odd)
        path.write_text(json.dumps(changed))
        try:
            read_graph(path)
        except ConfigurationError as error:
            assert "\n" not in str(error)
