"""Rows of all families on random shapes: what each split of an axis computes makes up the whole."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.ops import OPERATORS
from autopipe.ir.ops.operator import space_from_notation
from autopipe.ir.space import AxisKind
from tests.ir.ops.splitting import Use, check
from tests.ir.ops.uses import use_of

EXTENTS = st.sampled_from((1, 2, 3, 4, 6))
SHAPES = st.lists(EXTENTS, min_size=1, max_size=4).map(tuple)
SEEDS = st.integers(0, 2**32 - 1)


def normal(seed: int, *shape: int) -> np.ndarray:
    """Numbers whose type leaves no doubt about rounding."""
    return np.random.default_rng(seed).standard_normal(shape)


def integers(values: tuple[int, ...] | list[int]) -> np.ndarray:
    """A list of settings as ONNX takes it."""
    return np.array(values, np.int64)


def parallel_axes(use: Use) -> set[str]:
    """Names of the axes whose parts are independent."""
    return {axis.name for axis in use.space.axes if axis.kind is AxisKind.PARALLEL}


@st.composite
def broadcast_pairs(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(SHAPES)
    sides = []
    for _ in range(2):
        kept = tuple(extent if draw(st.booleans()) else 1 for extent in shape)
        sides.append(kept[draw(st.integers(0, len(shape))) :])
    return sides[0], sides[1]


@given(broadcast_pairs(), SEEDS, st.sampled_from(("Add", "Sub", "Mul", "Div", "Max", "Less")))
@settings(max_examples=40, deadline=None)
def test_broadcasting(shapes: tuple[tuple[int, ...], tuple[int, ...]], seed: int, op: str) -> None:
    use = use_of(op, [normal(seed, *shapes[0]), normal(seed + 1, *shapes[1])])
    assert len(parallel_axes(use)) == len(np.broadcast_shapes(*shapes))
    check(use)


@given(SHAPES, SEEDS, st.data())
@settings(max_examples=60, deadline=None)
def test_reshape_splits_along_every_factor_of_the_common_refinement(
    shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    factors = [
        prime
        for extent in shape
        for prime in ((2, 2) if extent == 4 else (2, 3) if extent == 6 else (extent,))
    ]
    target = []
    while factors:
        taken = data.draw(st.integers(1, len(factors)))
        target.append(math.prod(factors[:taken]))
        factors = factors[taken:]
    use = use_of("Reshape", [normal(seed, *shape), integers(target)])
    # Both shapes group one list of factors, so they have a common refinement: it has an axis for
    # each product > 1.
    assert math.prod(axis.size for axis in use.space.axes) == math.prod(shape)
    assert parallel_axes(use) == {axis.name for axis in use.space.axes}
    check(use)


def test_shapes_without_common_refinement_share_no_axis() -> None:
    use = use_of("Reshape", [normal(0, 5, 4, 3), integers([5, 6, 2])])
    assert str(use.space) == "a0 1 1, 1 -> a0 1 1"
    assert check(use) == 1


@given(SHAPES, SEEDS, st.data())
@settings(max_examples=40, deadline=None)
def test_movement(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    array = normal(seed, *shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    order = data.draw(st.permutations(range(len(shape))))
    stop = data.draw(st.integers(0, shape[axis]))
    pads = [0] * (2 * len(shape))
    pads[axis] = 2
    repeats = [1] * len(shape)
    repeats[axis] = 3
    rest = [each for each in range(len(shape)) if each != axis and shape[each] > 1]
    uses = [
        use_of("Transpose", [array], perm=tuple(order)),
        use_of("Unsqueeze", [array, integers([axis])]),
        use_of("Flatten", [array], axis=axis),
        use_of("Concat", [array, array], axis=axis),
        use_of("Slice", [array, integers([0]), integers([stop]), integers([axis])]),
        use_of(
            "Slice",
            [array, integers([-1]), integers([-1 - shape[axis]]), integers([axis]), integers([-1])],
        ),
        use_of("Pad", [array, integers(pads)]),
        use_of("Pad", [array, integers(pads)], mode="edge"),
        use_of("Tile", [array, integers(repeats)]),
        use_of("Expand", [array, integers([2, *shape])]),
    ]
    assert check(uses[0]) == sum(extent > 1 for extent in shape)
    for use in uses[1:]:
        assert check(use) >= (len(rest) if stop else 0) * (use.node.op != "Flatten")


@given(SHAPES, SEEDS, st.data())
@settings(max_examples=30, deadline=None)
def test_splitting_a_dimension_leaves_the_others_free(
    shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    sizes = [shape[axis], 2 * shape[axis]]
    array = normal(seed, *shape[:axis], sum(sizes), *shape[axis + 1 :])
    use = use_of("Split", [array, integers(sizes)], results=2, axis=axis)
    assert check(use) == sum(extent > 1 for place, extent in enumerate(shape) if place != axis)


@given(SHAPES, SEEDS, st.data())
@settings(max_examples=40, deadline=None)
def test_indexing(shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    array = normal(seed, *shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    draw = np.random.default_rng(seed)
    rows = draw.integers(-shape[axis] if len(shape) != 2 or axis else 0, shape[axis], (3, 2))
    places = draw.integers(-shape[axis], shape[axis], shape)
    tuples = np.stack([draw.integers(0, extent, (4, 2)) for extent in shape[: axis + 1]], axis=-1)
    unique = np.broadcast_to(
        np.arange(shape[axis]).reshape([-1] + [1] * (len(shape) - axis - 1)), shape
    ).copy()
    free = sum(extent > 1 for place, extent in enumerate(shape) if place != axis)
    assert check(use_of("Gather", [array, rows], axis=axis)) == free + 2 + (shape[axis] > 1)
    assert check(use_of("GatherElements", [array, places], axis=axis)) == free + 2 * (
        shape[axis] > 1
    )
    assert check(use_of("ScatterElements", [array, unique, array + 1], axis=axis)) == free
    check(use_of("GatherND", [array, tuples]))
    check(
        use_of(
            "ScatterND", [array, tuples, normal(seed, 4, 2, *shape[axis + 1 :])], reduction="add"
        )
    )
    classes = use_of("OneHot", [places, integers([6]), np.array([0.0, 1.0])], axis=axis)
    assert check(classes) == sum(extent > 1 for extent in shape) + 1


@given(
    SHAPES,
    SEEDS,
    st.data(),
    st.sampled_from(
        (
            "ReduceSum",
            "ReduceMean",
            "ReduceL1",
            "ReduceSumSquare",
            "ReduceMax",
            "ReduceL2",
            "ReduceLogSumExp",
        )
    ),
)
@settings(max_examples=60, deadline=None)
def test_reductions_add_up_or_average(
    shape: tuple[int, ...], seed: int, data: st.DataObject, op: str
) -> None:
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1).map(sorted))
    use = use_of(
        op, [normal(seed, *shape), integers(axes)], keepdims=data.draw(st.sampled_from((0, 1)))
    )
    kinds = {use.space.operands[0][axis][0]: shape[axis] for axis in axes}
    wanted = {
        "ReduceMean": AxisKind.MEAN,
        "ReduceMax": AxisKind.AGREED,
        "ReduceL2": AxisKind.AGREED,
        "ReduceLogSumExp": AxisKind.AGREED,
    }.get(op, AxisKind.SUM)
    assert {use.space.axis(name).kind for name in kinds} == {wanted}
    check(use)


@given(SHAPES, SEEDS, st.data())
@settings(max_examples=30, deadline=None)
def test_orders_and_running_sums_keep_their_axis_whole(
    shape: tuple[int, ...], seed: int, data: st.DataObject
) -> None:
    array = normal(seed, *shape)
    axis = data.draw(st.integers(0, len(shape) - 1))
    free = sum(extent > 1 for place, extent in enumerate(shape) if place != axis)
    for use in (
        use_of("CumSum", [array, np.array(axis)], exclusive=1),
        use_of("TopK", [array, integers([1])], axis=axis, results=2),
    ):
        assert check(use) == free
    for op in (
        "Softmax",
        "LogSoftmax",
        "ArgMax",
    ):
        # The parts tell one another their largest scores.
        assert check(use_of(op, [array], axis=axis)) == free + (shape[axis] > 1)


@given(st.lists(EXTENTS, min_size=0, max_size=2), EXTENTS, EXTENTS, EXTENTS, SEEDS)
@settings(max_examples=40, deadline=None)
def test_products_add_up_over_what_they_sum(
    lead: list[int], rows: int, inner: int, columns: int, seed: int
) -> None:
    use = use_of("MatMul", [normal(seed, *lead, rows, inner), normal(seed + 1, inner, columns)])
    assert [axis.name for axis in use.space.axes if axis.kind is AxisKind.SUM] == ["k"]
    assert check(use) == sum(extent > 1 for extent in (*lead, rows, inner, columns))


@given(EXTENTS, st.sampled_from((2, 4)), st.sampled_from((2, 4)), SEEDS)
@settings(max_examples=20, deadline=None)
def test_convolution(batch: int, channels: int, filters: int, seed: int) -> None:
    use = use_of(
        "Conv",
        [normal(seed, batch, channels, 7, 6), normal(seed + 1, filters, channels, 3, 2)],
        pads=(1, 1, 1, 1),
    )
    assert check(use) >= 2 + (batch > 1)


@given(EXTENTS, SEEDS, st.sampled_from(("DCR", "CRD")))
@settings(max_examples=20, deadline=None)
def test_blocks_of_space(batch: int, seed: int, mode: str) -> None:
    assert check(
        use_of("DepthToSpace", [normal(seed, batch, 12, 2, 3)], blocksize=2, mode=mode)
    ) == 3 + (batch > 1)
    assert check(use_of("SpaceToDepth", [normal(seed, batch, 3, 4, 6)], blocksize=2)) == 3 + (
        batch > 1
    )


@pytest.mark.parametrize(
    ("op", "arrays", "attributes", "line"),
    [
        ("Reshape", [normal(0, 6, 4), integers([2, 3, 4])], {}, "(a0 a1) a2, 1 -> a0 a1 a2"),
        ("Reshape", [normal(0, 8, 6), integers([16, 3])], {}, "a0 (a1 a2), 1 -> (a0 a1) a2"),
        ("Transpose", [normal(0, 2, 3, 4)], {"perm": (0, 2, 1)}, "d0 d1 d2 -> d0 d2 d1"),
        ("Gather", [normal(0, 9, 4), integers([[1, 2]])], {}, "d0& d1, i0 i1 -> i0 i1 d1"),
        ("ReduceSum", [normal(0, 2, 3), integers([1])], {}, "d0 d1+, 1 -> d0 1"),
        ("ReduceMean", [normal(0, 2, 3), integers([0])], {"keepdims": 0}, "d0~ d1, 1 -> d1"),
        (
            "Where",
            [np.ones((3, 1), bool), normal(0, 4), normal(0, 3, 4)],
            {},
            "x0 1, x1, x0 x1 -> x0 x1",
        ),
        (
            "Slice",
            [normal(0, 4, 4), integers([1]), integers([3]), integers([1])],
            {},
            "d0 1, 1, 1, 1 -> d0 1",
        ),
        ("Shape", [normal(0, 4, 4)], {}, "1 1 -> 1"),
    ],
)
def test_lines_of_notation(
    op: str, arrays: list[np.ndarray], attributes: dict[str, object], line: str
) -> None:
    assert str(use_of(op, arrays, **attributes).space) == line


@pytest.mark.parametrize(
    ("op", "arrays", "line"),
    [
        ("Softmax", [normal(0, 2, 4)], "a b -> a b"),
        ("ReduceMean", [normal(0, 2, 4), integers([1])], "a b+, 1 -> a 1"),
        ("ReduceSum", [normal(0, 2, 4), integers([1])], "a b~, 1 -> a 1"),
        ("Transpose", [normal(0, 4, 4)], "a b -> a b"),
        ("Reshape", [normal(0, 2, 3), integers([6])], "a b, 1 -> (b a)"),
    ],
)
def test_a_false_line_is_found_out(
    op: str, arrays: list[np.ndarray], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPERATORS, op, replace(OPERATORS[op], notation=space_from_notation(line)))
    with pytest.raises(AssertionError):
        check(use_of(op, arrays))


@given(SHAPES, SEEDS)
@settings(max_examples=15, deadline=None)
def test_random_numbers(shape: tuple[int, ...], seed: int) -> None:
    """Each split draws what the whole does at its place."""
    data = normal(seed, *shape)
    check(use_of("Dropout", [data, np.array(0.5), np.array(True)], results=2))
    check(use_of("RandomNormalLike", [data]))
    check(use_of("RandomUniform", [], shape=shape, dtype=1))
    check(use_of("Bernoulli", [1 / (1 + np.exp(-data))]))
    check(use_of("Multinomial", [normal(seed, shape[0], 5)], sample_size=3))
