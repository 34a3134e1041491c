"""Rows of layers: convolution, pooling, normalisation, attention, losses, resizing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.ir.errors import ModelError
from autopipe.ir.ops import OPERATORS, signature_of
from autopipe.ir.space import AxisKind
from tests.ir.ops.splitting import check, check_pairs, divisible_axes
from tests.ir.ops.uses import use_of

SEEDS = st.integers(0, 2**32 - 1)
FEW = st.sampled_from((1, 2, 3, 4))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def labels(seed: int, classes: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, shape)


def line(op: str, arrays: list[np.ndarray | None], **attributes: Any) -> str:
    return str(use_of(op, arrays, **attributes).space)


@given(FEW, FEW, FEW, FEW, st.booleans(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_grouped_convolution(
    batch: int, groups: int, inner: int, outer: int, biased: bool, seed: int
) -> None:
    bias = [normal(seed + 2, groups * outer)] if biased else []
    arrays = [
        normal(seed, batch, groups * inner, 6),
        normal(seed + 1, groups * outer, inner, 3),
        *bias,
    ]
    use = use_of("Conv", arrays, group=groups, auto_pad="SAME_LOWER", strides=[2])
    split = {axis.name for axis in divisible_axes(use.space)}
    extents = {"n": batch, "g": groups, "m": outer, "c": inner, "o0": 3}
    assert split == {name for name, extent in extents.items() if extent > 1}
    check(use)


@given(FEW, FEW, FEW, FEW, st.booleans(), SEEDS)
@settings(max_examples=30, deadline=None)
def test_grouped_transposed_convolution(
    batch: int, groups: int, inner: int, outer: int, biased: bool, seed: int
) -> None:
    bias = [normal(seed + 2, groups * outer)] if biased else []
    arrays = [
        normal(seed, batch, groups * inner, 5),
        normal(seed + 1, groups * inner, outer, 3),
        *bias,
    ]
    check(use_of("ConvTranspose", arrays, group=groups, strides=[2], pads=[2, 0]))


@given(
    FEW,
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 3)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    SEEDS,
)
@settings(max_examples=40, deadline=None)
def test_attention(
    batch: int, groups: int, repeats: int, flat: bool, causal: bool, masked: bool, seed: int
) -> None:
    heads = groups * repeats
    queries = 4
    keys = 6
    depth = 2
    shapes = [
        (batch, heads, queries, depth),
        (batch, groups, keys, depth),
        (batch, groups, keys, 4),
    ]
    if flat:
        shapes = [(b, s, h * d) for b, h, s, d in shapes]
    arrays: list[np.ndarray | None] = [
        normal(seed + place, *shape) for place, shape in enumerate(shapes)
    ]
    if masked:
        arrays.append(normal(seed + 9, batch, 1, queries, keys))
    attributes = {"q_num_heads": heads, "kv_num_heads": groups} if flat else {}
    use = use_of("Attention", arrays, is_causal=int(causal), **attributes)
    split = {axis.name for axis in divisible_axes(use.space)}
    extents = {"b": batch, "h": groups, "r": repeats, "q": queries, "v": 4}
    assert split == {name for name, extent in extents.items() if extent > 1}
    check(use)


def test_attention_with_a_cache_splits_by_sample_head_and_query() -> None:
    arrays = [
        normal(0, 2, 3, 8),
        normal(1, 2, 3, 8),
        normal(2, 2, 3, 8),
        None,
        normal(3, 2, 4, 5, 2),
        normal(4, 2, 4, 5, 2),
    ]
    use = use_of(
        "Attention",
        arrays,
        results=4,
        q_num_heads=4,
        kv_num_heads=4,
        is_causal=1,
        qk_matmul_output_mode=3,
    )
    assert {axis.name for axis in divisible_axes(use.space)} == {"b", "h", "q"}
    check(use)
    check_pairs(use)


@pytest.mark.parametrize("window", [(-1, -1), (1, 0), (2, -1), (-1, 1)])
def test_queries_know_their_places(window: tuple[int, int]) -> None:
    arrays: list[np.ndarray | None] = [
        normal(place, 2, 2, extent, 4) for place, extent in enumerate((4, 6, 6))
    ]
    settings = {"is_causal": 1, "left_window_size": window[0], "right_window_size": window[1]}
    settings = {name: value for name, value in settings.items() if value >= 0}
    lengths = np.array([6, 5])
    for use in (
        use_of("Attention", arrays, opset=26, **settings),
        use_of("Attention", [*arrays, None, None, None, lengths], opset=26, **settings),
        use_of("Attention", [*arrays, normal(9, 4, 6), None, None, lengths], opset=26, **settings),
    ):
        assert use.space.axis("q").kind is AxisKind.AGREED
        check(use)


@given(FEW, st.sampled_from((2, 3, 4)), FEW, SEEDS)
@settings(max_examples=20, deadline=None)
def test_groups_of_channels(batch: int, groups: int, channels: int, seed: int) -> None:
    size = groups * channels
    use = use_of(
        "GroupNormalization",
        [normal(seed, batch, size, 3), normal(seed, size), normal(seed + 1, size)],
        num_groups=groups,
    )
    extents = {"n": batch, "g": groups, "c": channels, "i0": 3}
    assert {axis.name for axis in divisible_axes(use.space)} == {
        name for name, extent in extents.items() if extent > 1
    }
    check(use)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("op", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_losses_add_up_or_average_over_labels_and_are_shared_out_by_class(
    op: str, reduction: str
) -> None:
    use = use_of(op, [normal(0, 4, 5, 6), labels(1, 5, 4, 6)], reduction=reduction)
    assert check(use) == 3
    assert check_pairs(use) == 6
    assert not OPERATORS[op].mixes_samples(signature_of(use.graph, use.node))


def test_a_mean_that_ignores_labels_adds_up_their_weights_and_mixes_samples() -> None:
    for extra, attributes in (([], {"ignore_index": 2}), ([np.abs(normal(2, 5))], {})):
        use = use_of(
            "SoftmaxCrossEntropyLoss", [normal(0, 4, 5), labels(1, 5, 4), *extra], **attributes
        )
        assert str(use.space).startswith("n& c&, n&")
        assert check(use) == 2
        assert check_pairs(use) == 2
        assert OPERATORS["SoftmaxCrossEntropyLoss"].mixes_samples(signature_of(use.graph, use.node))


def test_batch_statistics_mix_samples() -> None:
    arrays = [normal(0, 4, 6, 5), *(np.abs(normal(place, 6)) for place in range(1, 5))]
    row = OPERATORS["BatchNormalization"]
    inference = use_of("BatchNormalization", arrays)
    training = use_of("BatchNormalization", arrays, results=3, training_mode=1)
    assert check(inference) == 3
    assert not row.mixes_samples(signature_of(inference.graph, inference.node))
    assert row.mixes_samples(signature_of(training.graph, training.node))


def test_einsum_sums_over_letters_that_the_result_lacks() -> None:
    use = use_of("Einsum", [normal(0, 4, 2, 6, 3), normal(1, 6, 9)], equation="...ji, jk -> ...ik")
    assert str(use.space) == "e0 e1 j+ i, j+ k -> e0 e1 i k"
    assert check(use) == 5
    assert line("Einsum", [normal(0, 4, 4)], equation="ii->i") == "i! i! -> i!"
    with pytest.raises(ModelError, match="equation"):
        signature = signature_of(use.graph, use.node)
        OPERATORS["Einsum"].space(
            type(signature)(use.node, signature.operands[:1], signature.results, (None,), 23)
        )


@pytest.mark.parametrize(
    ("op", "arrays", "attributes", "wanted"),
    [
        (
            "Gemm",
            [normal(0, 2, 3), normal(1, 4, 3), normal(2, 4)],
            {"transB": 1},
            "m k&, n k&, n -> m n",
        ),
        ("Gemm", [normal(0, 2, 3), normal(1, 3, 4)], {}, "m k+, k+ n -> m n"),
        (
            "LayerNormalization",
            [normal(0, 2, 3, 4), normal(1, 4)],
            {},
            "d0 d1 d2=, d2= -> d0 d1 d2=",
        ),
        ("GlobalAveragePool", [normal(0, 2, 3, 4, 5)], {}, "n c i0~ i1~ -> n c 1 1"),
        ("MaxPool", [normal(0, 2, 3, 8)], {"kernel_shape": [2]}, "n c [o0 1 0 2] -> n c o0"),
        (
            "Conv",
            [normal(0, 2, 3, 8, 8, 8), normal(1, 4, 3, 3, 1, 2)],
            {"pads": [1, 0, 0, 1, 0, 1], "strides": [2, 1, 1], "dilations": [1, 1, 2]},
            "n (g c+) [o0 2 -1 3] o1 [o2 1 0 3], (g m) c+ k0! k1! k2! -> n (g m) o0 o1 o2",
        ),
        (
            "AveragePool",
            [normal(0, 2, 3, 8, 8)],
            {"kernel_shape": [3, 3], "pads": [0, 1, 0, 1]},
            "n c [o0 1 0 3] i1! -> n c o0 o1!",
        ),
        (
            "AveragePool",
            [normal(0, 2, 3, 8, 8)],
            {"kernel_shape": [3, 3], "pads": [0, 1, 0, 1], "count_include_pad": 1},
            "n c [o0 1 0 3] [o1 1 -1 3] -> n c o0 o1",
        ),
        (
            "MaxPool",
            [normal(0, 2, 3, 8)],
            {"kernel_shape": [2], "results": 2},
            "n! c! i0! -> n! c! o0!, n! c! o0!",
        ),
        ("Softmax", [normal(0, 2, 3, 4)], {"axis": 1}, "d0 d1& d2 -> d0 d1& d2"),
        ("Softmax", [normal(0, 2, 3, 4)], {"opset": 11}, "d0 d1& d2& -> d0 d1& d2&"),
        ("LRN", [normal(0, 2, 3, 4, 4)], {"size": 3}, "d0 d1! d2 d3 -> d0 d1! d2 d3"),
    ],
)
def test_lines_of_notation(
    op: str, arrays: list[np.ndarray], attributes: dict[str, Any], wanted: str
) -> None:
    assert line(op, arrays, **attributes) == wanted


def test_resizing_leaves_other_axes_free() -> None:
    scales = np.array([1, 1, 2, 1.5], np.float32)
    use = use_of("Resize", [normal(0, 2, 3, 4, 4).astype(np.float32), None, scales], mode="linear")
    assert {axis.name for axis in divisible_axes(use.space)} == {"d0", "d1"}
    check(use)
