"""Tied weights that an exporter untied: an embedding, and its transposed copy as the last product's factor.

torch's exporters fold the transposition of a tied embedding into a copy, under a name of their own. Trained apart the
two would drift; so a copy that is provably one becomes a Transpose of the embedding again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autopipe.ir.dtype import DType
from autopipe.ir.graph import FileSlice, Graph, Node, Parameter
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
    gathered = {node.inputs[0] for node in graph.nodes if node.op == "Gather"}
    factors = {node.inputs[1] for node in graph.nodes if node.op == "MatMul"}
    tables = [each for each in graph.parameters if each.value.name in gathered]
    copies = copies_of_tables(tables, [each for each in graph.parameters if each.value.name in factors], path)
    nodes = [
        Node(f"{name}/tied", "Transpose", (table.value.name,), (name,), (("perm", (1, 0)),))
        for name, table in copies.items()
    ]
    if not copies:
        return graph
    return dataclasses.replace(
        graph,
        parameters=tuple(each for each in graph.parameters if each.value.name not in copies),
        nodes=(*nodes, *graph.nodes),
        values=(*map(graph.type_of, copies), *graph.values),
    )


def copies_of_tables(tables: Sequence[Parameter], others: Sequence[Parameter], path: Path) -> dict[str, Parameter]:
    """Those of `others`, by name, that an exporter made of one of `tables` by transposing it, and of which.

    Both are compared in the file `path`.
    """
    found = {}
    for other in filter(_is_stored_matrix, others):
        if LIFTED.fullmatch(other.value.name):
            table = next(
                (each for each in tables if _is_stored_matrix(each) and _is_transposed(each, other, path)), None
            )
            if table is not None:
                found[other.value.name] = table
    return found


def _is_stored_matrix(parameter: Parameter) -> bool:
    return len(parameter.value.shape) == 2 and isinstance(parameter.storage, FileSlice)


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
