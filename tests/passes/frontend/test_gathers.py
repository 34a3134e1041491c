"""Gathers that only broadcast: the pass finds by arithmetic what an enumeration of all elements
finds.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.graph import Constant, DType, Graph, Node, Value
from autopipe.ir.problem import Mode
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.cleanup import replace_broadcast_gathers
from tests.passes.frontend.building import INT64, floats, integers, model, node, saved
from tests.passes.frontend.evaluated import emitted
from tests.passes.frontend.reference import run

EXTENTS = st.integers(0, 4)


@st.composite
def gathers(draw: st.DrawFn) -> Graph:
    """Strategy for one gather from small data by known indices, either random or in an order that
    may be a broadcast.
    """
    shape = tuple(draw(st.lists(EXTENTS, min_size=1, max_size=4)))
    by_rows = draw(st.booleans())
    depth = draw(st.integers(1, len(shape))) if by_rows else 1
    axis = 0 if by_rows else draw(st.integers(0, len(shape) - 1))
    limits = shape[axis : axis + depth]
    rows = math.prod(limits)
    outer = tuple(draw(st.lists(EXTENTS, max_size=3)))
    spelling = draw(st.sampled_from(["in order", "expanded", "any"]))
    if spelling == "in order":
        moving = draw(st.sampled_from([limits, (rows,), (1, *limits), (*limits, 1)]))
        places = np.arange(rows).reshape(moving)
        if draw(st.booleans()):
            places = np.broadcast_to(places, (*outer, *moving))
    elif spelling == "expanded":
        wide = tuple(draw(st.integers(1, 3)) if extent == 1 else extent for extent in limits)
        places = np.broadcast_to(np.arange(rows).reshape(limits), wide)
    else:
        count = math.prod(outer)
        drawn = st.lists(st.integers(-1, max(rows, 1)), min_size=count, max_size=count)
        places = np.asarray(draw(drawn), dtype=np.int64).reshape(outer)
    if by_rows:
        parts = np.unravel_index(places % rows, limits) if rows else [places] * depth
        indices = np.stack([np.asarray(part) for part in parts], axis=-1).reshape(
            *places.shape, depth
        )
        result = (*places.shape, *shape[depth:])
    else:
        indices = np.asarray(places)
        result = (*shape[:axis], *places.shape, *shape[axis + 1 :])
    shift = draw(st.sampled_from([0, 0, -1]))  # Negative indices count from the end.
    indices = (indices + shift * np.asarray(limits if by_rows else limits[0])).astype(np.int64)
    return gather(
        "GatherND" if by_rows else "Gather",
        shape,
        indices,
        result,
        () if by_rows else (("axis", axis),),
    )


def gather(
    op: str,
    shape: tuple[int, ...],
    indices: np.ndarray,
    result: tuple[int, ...],
    attributes: tuple[tuple[str, int], ...],
) -> Graph:
    """Return the graph of one gather."""
    held = Constant(Value("indices", DType.INT64, indices.shape), indices)
    node = Node("gather", op, ("data", "indices"), ("y",), attributes)
    inputs = (Value("data", DType.FLOAT32, shape),)
    values = (Value("y", DType.FLOAT32, result),)
    return Graph("test", 20, inputs, (), (held,), (node,), ("y",), values)


def expected_shape(graph: Graph) -> tuple[int, ...] | None:
    """Return the shape in which the data expand to the result, by enumeration of the element that
    each result reads; None if there is none.
    """
    (node,) = graph.nodes
    shape = graph.type_of("data").shape
    result = graph.type_of("y").shape
    constant = graph.constant("indices")
    assert constant is not None
    indices = constant.array
    elements = math.prod(shape)
    depth = indices.shape[-1] if node.op == "GatherND" else 1
    limits = np.asarray(shape[:depth] if node.op == "GatherND" else shape[node.integer("axis")])
    if not elements or (node.op == "GatherND" and not indices.size):
        return None
    if (indices < -limits).any() or (indices >= limits).any():
        return None
    data = np.arange(elements).reshape(shape)
    if node.op == "Gather":
        places = np.take(data, indices, axis=node.integer("axis"))
    else:
        places = data[tuple(np.moveaxis(indices, -1, 0))]
    moving = tuple(
        extent if extent > 1 and (places.take(0, axis) != places.take(1, axis)).any() else 1
        for axis, extent in enumerate(result)
    )
    if math.prod(moving) != elements:
        return None
    return (
        moving
        if np.array_equal(places, np.broadcast_to(np.arange(elements).reshape(moving), result))
        else None
    )


def found_shape(graph: Graph) -> tuple[int, ...] | None:
    """Return the shape in which the pass expands the data; None if it keeps the gather."""
    found = replace_broadcast_gathers(graph)
    if found.nodes == graph.nodes:
        return None
    assert [node.op for node in found.nodes] in (["Reshape"], ["Reshape", "Expand"])
    shape = found.constant(found.nodes[0].inputs[1])
    assert shape is not None
    return tuple(int(extent) for extent in shape.array)


@settings(max_examples=150, deadline=None)
@given(gathers())
def test_random_gathers_against_enumeration(graph: Graph) -> None:
    assert found_shape(graph) == expected_shape(graph)


def test_every_gather_of_few_elements() -> None:
    """All indices into up to six rows, in all arrangements of at most three of them."""
    broadcasts = 0
    for rows, node_layouts in itertools.product(
        range(1, 4), [(), (1,), (2,), (3,), (1, 2), (2, 1), (1, 3)]
    ):
        for numbers in itertools.product(range(rows), repeat=math.prod(node_layouts)):
            indices = np.asarray(numbers, dtype=np.int64).reshape(node_layouts)
            graph = gather("Gather", (2, rows, 2), indices, (2, *node_layouts, 2), (("axis", 1),))
            assert found_shape(graph) == expected_shape(graph)
            broadcasts += found_shape(graph) is not None
    assert broadcasts


def test_a_gather_from_a_huge_value_needs_little_memory() -> None:
    """The data have 2⁴⁰ elements."""
    shape = (1 << 20, 1 << 10, 1 << 10)
    last = gather("Gather", shape, np.asarray(0), (shape[0], shape[2]), (("axis", 1),))
    assert found_shape(last) is None
    rows = np.broadcast_to(np.arange(1 << 10), (2, 1 << 10))
    spread = gather("Gather", shape, rows, (shape[0], 2, *shape[1:]), (("axis", 1),))
    assert found_shape(spread) == (shape[0], 1, *shape[1:])


def test_negative_differences_count_from_the_end(tmp_path: Path) -> None:
    nodes = [
        node("Sub", "one two", "width"),
        node("Unsqueeze", "width axes", "u"),
        node("Gather", "table u", "y"),
    ]
    held = {"table": floats(5, 3), "axes": integers(1)}
    path = saved(model(nodes, {"one": (INT64, [4]), "two": (INT64, [4])}, "y", held), tmp_path)
    feeds = {"one": np.array([0, 4, 2, 1]), "two": np.array([4, 0, 3, 1])}
    found = emitted(read_model(path, mode=Mode.INFER), feeds)
    expected = run(path, feeds)
    np.testing.assert_array_equal(found["y"], expected["y"])
