"""Samples are followed through spaces: merged dimensions, reductions, masks expanded to the
batch.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autopipe.ir.batch import BatchAxes, BatchDimension, batch_axes_of
from autopipe.ir.graph import Constant, DType, Graph, Initializer, Node, Parameter, Value

F32 = DType.FLOAT32


def graph_of(
    nodes: tuple[Node, ...],
    shapes: dict[str, tuple[int, ...]],
    inputs: dict[str, int],
    constants: dict[str, np.ndarray] | None = None,
    parameters: tuple[str, ...] = (),
) -> Graph:
    constants = constants or {}
    values = {name: Value(name, F32, shape) for name, shape in shapes.items()}
    return Graph(
        name="test",
        opset=20,
        inputs=tuple(values[name] for name in inputs),
        parameters=tuple(Parameter(values[name], Initializer("zeros")) for name in parameters),
        constants=tuple(
            Constant(Value(name, DType(array.dtype.name), array.shape), array)
            for name, array in constants.items()
        ),
        nodes=nodes,
        outputs=nodes[-1].outputs,
        values=tuple(values[name] for node in nodes for name in node.outputs),
        batch_axes=tuple(inputs.items()),
    )


def reshape_graph(source: tuple[int, ...], target: tuple[int, ...], axis: int) -> Graph:
    node = Node("reshape", "Reshape", ("x", "shape"), ("y",))
    return graph_of(
        (node,),
        {"x": source, "y": target},
        {"x": axis},
        {"shape": np.array(target, dtype=np.int64)},
    )


def test_a_product_splits_by_its_rows_and_its_weight_carries_no_samples() -> None:
    node = Node("product", "MatMul", ("x", "w"), ("y",))
    graph = graph_of(
        (node,), {"x": (4, 3, 8), "w": (8, 5), "y": (4, 3, 5)}, {"x": 0}, parameters=("w",)
    )
    found = batch_axes_of(graph)
    assert found.batch == 4
    assert found.axis(0) == "b0"
    assert found.of("y") == BatchDimension(0)
    assert found.of("w") is None


def test_merged_dimensions_keep_the_samples_outermost() -> None:
    nodes = (
        Node("merge", "Reshape", ("x", "flat"), ("rows",)),
        Node("product", "MatMul", ("rows", "w"), ("result",)),
        Node("part", "Reshape", ("result", "parted"), ("y",)),
    )
    shapes = {"x": (4, 3, 8), "rows": (12, 8), "w": (8, 5), "result": (12, 5), "y": (4, 3, 5)}
    constants = {"flat": np.array([12, 8]), "parted": np.array([4, 3, 5])}
    found = batch_axes_of(graph_of(nodes, shapes, {"x": 0}, constants, ("w",)))
    assert found.of("rows") == BatchDimension(0, outer=1, inner=3)
    assert found.axis(1) == "m"
    assert found.of("y") == BatchDimension(0)


def test_samples_inside_a_merged_dimension_cannot_be_split_by_contiguous_shares() -> None:
    node = Node("sum", "Add", ("rows", "rows"), ("y",))
    merge = Node("merge", "Reshape", ("x", "flat"), ("rows",))
    graph = graph_of(
        (merge, node), {"x": (3, 4), "rows": (12,), "y": (12,)}, {"x": 1}, {"flat": np.array([12])}
    )
    found = batch_axes_of(graph)
    assert found.of("y") == BatchDimension(0, outer=3, inner=1)
    assert found.axis(1) is None


def test_a_constant_that_meets_the_samples_carries_them_and_so_does_what_made_it() -> None:
    nodes = (
        Node("double", "Add", ("mask", "mask"), ("twice",)),
        Node("masked", "Add", ("x", "twice"), ("y",)),
    )
    shapes = {"x": (4, 3), "twice": (4, 3), "y": (4, 3)}
    mask = np.zeros((4, 3), dtype=np.float32)
    found = batch_axes_of(graph_of(nodes, shapes, {"x": 0}, {"mask": mask}))
    assert found.of("mask") == BatchDimension(0)
    assert found.axis(0) == "x0"


def test_broadcast_operands_carry_no_samples() -> None:
    node = Node("masked", "Add", ("x", "mask"), ("y",))
    found = batch_axes_of(
        graph_of(
            (node,),
            {"x": (4, 3), "y": (4, 3)},
            {"x": 0},
            {"mask": np.zeros((1, 3), dtype=np.float32)},
        )
    )
    assert found.of("mask") is None


def test_a_product_of_two_batches_is_split_by_the_first() -> None:
    node = Node("similar", "MatMul", ("image", "text"), ("scores",))
    graph = graph_of(
        (node,), {"image": (4, 8), "text": (8, 4), "scores": (4, 4)}, {"image": 0, "text": 1}
    )
    found = batch_axes_of(graph)
    assert [each.axis for each in found.nodes[0]] == ["m", "n"]
    assert found.axis(0) == "m"
    assert found.values["scores"] == (BatchDimension(0), BatchDimension(1))


def test_one_sample_cannot_be_told_from_a_broadcast_dimension() -> None:
    found = batch_axes_of(reshape_graph((1, 6), (6,), 0))
    assert found == BatchAxes(1, ((),), {"x": (BatchDimension(0),)})


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A shape, the axis of its samples, and another grouping of the same factors."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=5))
    axis = draw(st.integers(0, len(factors) - 1))
    factors[axis] = draw(st.sampled_from([2, 3, 4]))
    cuts = sorted(draw(st.sets(st.integers(1, len(factors) - 1), max_size=3)))
    bounds = [0, *cuts, len(factors)]
    return (
        tuple(factors),
        tuple(math.prod(factors[a:b]) for a, b in itertools.pairwise(bounds)),
        axis,
    )


@given(reshapes())
def test_samples_of_a_reshape_are_where_numpy_puts_them(
    case: tuple[tuple[int, ...], tuple[int, ...], int],
) -> None:
    source, target, axis = case
    found = batch_axes_of(reshape_graph(source, target, axis)).of("y")
    assert found is not None
    batch = source[axis]
    sample = np.broadcast_to(
        np.arange(batch).reshape([-1 if i == axis else 1 for i in range(len(source))]), source
    )
    moved = np.moveaxis(sample.reshape(target), found.dimension, -1)
    expected = np.broadcast_to(
        np.arange(batch)[:, None], (found.outer, batch, found.inner)
    ).reshape(-1)
    assert np.array_equal(moved, np.broadcast_to(expected, moved.shape))
