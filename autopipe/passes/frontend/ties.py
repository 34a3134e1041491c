"""Tied weights that an exporter untied: an embedding, and its transposed copy as the last product's factor.

torch's exporters fold the transposition of a tied embedding into a copy, under a name of their own. Trained apart the
two would drift; so a copy that is provably one becomes a Transpose of the embedding again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from autopipe.ir.dtype import DType
from autopipe.ir.graph import FileSlice, Graph, Node, Parameter, Value
from autopipe.passes.frontend.parameters import LIFTED

LARGEST = 1 << 30
"""Bytes beyond which a copy is not compared."""
BLOCK = 1 << 10
"""Rows of the embedding compared at a time: most pairs differ in the first."""
STORED: dict[DType, str] = {
    DType.FLOAT32: "<u4", DType.FLOAT64: "<u8", DType.FLOAT16: "<u2", DType.BFLOAT16: "<u2",
}  # fmt: skip
"""Types of the same width, compared bit by bit."""


def retied(graph: Graph, path: Path) -> Graph:
    """The graph with transposed copies of embeddings, compared in the file `path`, put back as transpositions."""
    matrices = [each for each in graph.parameters if len(each.value.shape) == 2 and isinstance(each.storage, FileSlice)]
    gathered = {node.inputs[0] for node in graph.nodes if node.op == "Gather"}
    factors = {node.inputs[1] for node in graph.nodes if node.op == "MatMul"}
    tables = [each for each in matrices if each.value.name in gathered]
    nodes: list[Node] = []
    values: list[Value] = []
    copies: set[str] = set()
    for parameter in matrices:
        if parameter.value.name not in factors or not LIFTED.fullmatch(parameter.value.name):
            continue
        table = next((each for each in tables if _is_transposed(each, parameter, path)), None)
        if table is not None:
            name = parameter.value.name
            copies.add(name)
            values.append(parameter.value)
            nodes.append(Node(f"{name}/tied", "Transpose", (table.value.name,), (name,), (("perm", (1, 0)),)))
    if not copies:
        return graph
    return dataclasses.replace(
        graph,
        parameters=tuple(each for each in graph.parameters if each.value.name not in copies),
        nodes=(*nodes, *graph.nodes),
        values=(*values, *graph.values),
    )


def _is_transposed(table: Parameter, copy: Parameter, path: Path) -> bool:
    rows, columns = table.value.shape
    same = table.value.dtype == copy.value.dtype and table.trainable == copy.trainable
    if not same or copy.value.shape != (columns, rows) or table.value.bytes > LARGEST:
        return False
    first, second = _mapped(table, path), _mapped(copy, path)
    return all(
        np.array_equal(first[start : start + BLOCK].T, second[:, start : start + BLOCK])
        for start in range(0, rows, BLOCK)
    )


def _mapped(parameter: Parameter, path: Path) -> np.ndarray:
    place = parameter.storage
    assert isinstance(place, FileSlice), f"{parameter.value.name} has no numbers"
    file = path.parent / place.file if place.file else path
    value = parameter.value
    return np.memmap(file, STORED[value.dtype], mode="r", offset=place.offset, shape=value.shape)
