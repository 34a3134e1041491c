"""Operators that devices compute together, each with a part of an axis or of two: results,
gradients, what is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopipe.backends.torch.runtime import operators
from autopipe.ir.space import AxisKind
from tests.ir.ops.meeting import Member, together
from tests.ir.ops.splitting import Use, check, check_pairs
from tests.ir.ops.uses import use_of


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def joint_axes(use: Use) -> set[str]:
    return {axis.name for axis in use.space.axes if axis.kind.is_joint and axis.size > 1}


NORMS: list[tuple[str, list[np.ndarray], dict[str, Any], set[str]]] = [
    ("LayerNormalization", [normal(0, 4, 3, 6), normal(1, 6), normal(2, 6)], {}, {"d2"}),
    (
        "LayerNormalization",
        [normal(0, 4, 3, 6), normal(1, 3, 1)],
        {"axis": 1, "results": 3},
        {"d1", "d2"},
    ),
    ("RMSNormalization", [normal(0, 4, 3, 6), normal(1, 6)], {"epsilon": 0.1}, {"d2"}),
    ("RMSNormalization", [normal(0, 4, 3, 6), normal(1, 1)], {"axis": 1}, {"d1", "d2"}),
    (
        "GroupNormalization",
        [normal(0, 2, 6, 4, 2), normal(1, 6), normal(2, 6)],
        {"num_groups": 3},
        {"c", "i0", "i1"},
    ),
    (
        "InstanceNormalization",
        [normal(0, 2, 3, 4, 6), normal(1, 3), normal(2, 3)],
        {},
        {"i0", "i1"},
    ),
    (
        "MeanVarianceNormalization",
        [normal(0, 2, 3, 4, 6).astype(np.float32)],
        {},
        {"d0", "d2", "d3"},
    ),
    ("LpNormalization", [normal(0, 3, 4)], {"p": 2}, {"d1"}),
    ("LpNormalization", [normal(0, 3, 4)], {"p": 1, "axis": 0}, {"d0"}),
]


@pytest.mark.parametrize(("op", "arrays", "attributes", "axes"), NORMS)
def test_statistics_are_taken_together(
    op: str, arrays: list[np.ndarray], attributes: dict[str, Any], axes: set[str]
) -> None:
    use = use_of(op, arrays, **attributes)
    assert joint_axes(use) == axes
    assert {use.space.axis(name).kind for name in axes} == {AxisKind.AGREED}
    assert check(use) >= len(axes)
    check_pairs(use)


def test_statistics_of_a_batch_count_the_samples_of_all() -> None:
    arrays = [normal(0, 4, 6, 3, 2), *(np.abs(normal(place, 6)) + 0.1 for place in range(1, 5))]
    use = use_of(
        "BatchNormalization", arrays, results=3, training_mode=1, momentum=0.8, epsilon=1e-3
    )
    assert joint_axes(use) == {"n", "i0", "i1"}
    assert check(use) == 4
    assert check_pairs(use) == 12


Norm = Callable[[Tensor, Member], Tensor]


@pytest.mark.parametrize(
    ("part", "whole"),
    [
        (
            lambda x, member: operators.sharded_layer_norm(
                x, (1,), torch.ones(1), None, 1e-5, member
            )[0],
            lambda x: F.layer_norm(x, x.shape[1:]),
        ),
        (
            lambda x, member: operators.sharded_instance_norm(
                x[None], torch.ones(64), torch.zeros(64), 1e-5, member
            )[0],
            lambda x: F.instance_norm(x[None])[0],
        ),
    ],
)
@pytest.mark.parametrize("far", [1.0, 100.0, 10000.0])
def test_a_mean_far_from_zero_costs_no_more_digits_than_on_one_device(
    far: float, part: Norm, whole: Callable[[Tensor], Tensor]
) -> None:
    """Moments about zero in single precision would leave nothing of a variance of 1 beside a mean
    of 10^4.
    """
    # Whole multiples of 1/64, so that single precision holds the numbers themselves.
    noise = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = far + (noise * 64).round() / 64
    weights = torch.linspace(-1, 1, exact.numel(), dtype=torch.float64).reshape(exact.shape)

    def run(member: Member) -> tuple[Tensor, Tensor]:
        return ran(
            lambda x: part(x, member),
            exact.float().chunk(3, 1)[member.position],
            weights.chunk(3, 1)[member.position],
        )

    def ran(norm: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        y = norm(x)
        return y.detach(), torch.autograd.grad((y * weights.to(y.dtype)).sum(), x)[0]

    parts = together([run] * 3)
    for index, expected in enumerate(ran(whole, exact, weights)):
        size = torch.linalg.vector_norm(expected)
        alone = (
            torch.linalg.vector_norm(ran(whole, exact.float(), weights)[index] - expected) / size
        )
        joined = torch.cat([each[index] for each in parts], 1)
        assert torch.linalg.vector_norm(joined - expected) / size < max(1e-6, 2 * alone)


def test_rows_of_nothing_but_zeros_have_finite_gradients() -> None:
    def run(member: Member) -> Tensor:
        x = torch.zeros(2, 3, requires_grad=True)
        results = [operators.sharded_normalize(x, p, 1, member) for p in (1, 2)]
        results.append(operators.sharded_rms_norm(x, (1,), torch.ones(3), 1e-5, member))
        return torch.autograd.grad(sum(each.sum() for each in results), x)[0]

    assert all(bool(torch.isfinite(gradient).all()) for gradient in together([run] * 2))


def test_half_precision_is_normalised_in_single() -> None:
    whole = torch.tensor(normal(0, 3, 8)).half()

    def run(member: Member) -> Tensor:
        return operators.sharded_layer_norm(
            whole.chunk(2, 1)[member.position], (1,), torch.ones(4).half(), None, 1e-5, member
        )[0]

    joined = torch.cat(together([run] * 2), 1)
    assert joined.dtype is torch.float16
    torch.testing.assert_close(
        joined, F.layer_norm(whole.float(), (8,)).half(), rtol=2e-3, atol=2e-3
    )


REDUCTIONS = ("ReduceL2", "ReduceMax", "ReduceMin", "ReduceLogSum", "ReduceLogSumExp")


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("op", REDUCTIONS)
def test_reductions_that_do_not_add_up(op: str, keepdims: int) -> None:
    values = np.abs(normal(0, 4, 3, 6)) + 0.1 if op == "ReduceLogSum" else normal(0, 4, 3, 6)
    use = use_of(op, [values, np.array([0, 2])], keepdims=keepdims)
    assert joint_axes(use) == {"d0", "d2"}
    assert check(use) == 3
    assert check_pairs(use) == 6


def test_the_equal_share_the_gradient_wherever_they_lie() -> None:
    values = np.array([[3.0, 1.0, 3.0, 3.0], [0.0, 2.0, 1.0, -1.0], [5.0, 5.0, 5.0, 5.0]])
    for op in ("ReduceMax", "ReduceMin"):
        assert check(use_of(op, [values, np.array([1])])) == 2


def test_whole_numbers_are_not_agreed_on() -> None:
    assert joint_axes(use_of("ReduceMax", [np.arange(6).reshape(2, 3), np.array([1])])) == set()
    assert joint_axes(use_of("ArgMin", [np.arange(6).reshape(2, 3)], axis=1)) == set()


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_places_of_equals(op: str, last: int) -> None:
    values = np.array([[3.0, 1.0, 3.0, 1.0], [0.0, 2.0, 0.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    for keepdims in (0, 1):
        assert check(use_of(op, [values], axis=1, select_last_index=last, keepdims=keepdims)) == 2


@pytest.mark.parametrize("values", [np.zeros((2, 4)), np.full((2, 4), -np.inf)])
def test_rows_without_a_norm(values: np.ndarray) -> None:
    if np.isfinite(values).all():
        assert check(use_of("ReduceL2", [values, np.array([1])])) == 2

    def run(member: Member) -> Tensor:
        return operators.sharded_log_sum_exp(
            torch.tensor(values).chunk(2, 1)[member.position], (1,), False, member
        )

    for found in together([run] * 2):
        torch.testing.assert_close(found, torch.logsumexp(torch.tensor(values), 1))


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("diagonal", [-2, 0, 1])
def test_triangles_know_where_they_are(upper: int, diagonal: int) -> None:
    use = use_of("Trilu", [normal(0, 2, 4, 6), np.array(diagonal)], upper=upper)
    assert joint_axes(use) == {"d1", "d2"}
    assert check(use) == 3
    assert check_pairs(use) == 6


def test_softmaxes_over_several_axes() -> None:
    for op in ("Softmax", "LogSoftmax"):
        use = use_of(op, [normal(0, 2, 4, 6)], opset=11)
        assert joint_axes(use) == {"d1", "d2"}
        assert check(use) == 3
        assert check_pairs(use) == 6


def test_the_largest_of_an_image() -> None:
    use = use_of("GlobalMaxPool", [normal(0, 2, 3, 4, 6)])
    assert joint_axes(use) == {"i0", "i1"}
    assert check(use) == 4


def test_means_of_whole_numbers_stay_whole() -> None:
    use = use_of("ReduceMean", [np.arange(6).reshape(2, 3), np.array([1])])
    assert use.space.axis("d1").kind is AxisKind.UNSPLITTABLE
