"""Derivations of a tensor from several parameters are found, and no other tensor is derived."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from autopipe.passes.frontend.derivations import apply_steps
from autopipe.passes.frontend.joint_derivations import find_joint_derivation, find_sum_of_squares
from tests.passes.frontend.building import floats

P = floats(6, 6)
Q = floats(6, 6, seed=1)
R = floats(6, 6, seed=2)
LOW = floats(6, 3, seed=3)
HIGH = floats(3, 6, seed=4)
VECTOR = floats(6, seed=5)
COLUMN = floats(6, 1, seed=6)
FUNCTIONS: dict[str, tuple[Callable[..., np.ndarray], tuple[np.ndarray, ...]]] = {
    "product": (lambda p, q: p * q, (P, Q)),
    "product with a transposed one": (lambda p, q: p * q.T, (P, Q)),
    "sum": (lambda p, q: p + q, (P, Q)),
    "difference": (lambda p, q: q - p, (P, Q)),
    "quotient": (lambda p, q: p / q, (P, Q)),
    "scaled rows": (lambda p, v: p * v[:, None], (P, VECTOR)),
    "scaled columns": (lambda p, v: p * v, (P, VECTOR)),
    "outer product": (lambda v, c: c * v, (VECTOR, COLUMN)),
    "matrix product": (lambda p, q: q @ p, (P, Q)),
    "matrix product with a transposed one": (lambda p, q: p @ q.T, (P, Q)),
    "scaled matrix product": (lambda a, b: np.float32(0.25) * (a @ b), (LOW, HIGH)),
    "low rank added": (lambda p, a, b: p + np.float32(0.5) * (a @ b), (P, LOW, HIGH)),
    "three joined": (lambda p, q, r: np.concatenate([q, r, p]), (P, Q, R)),
    "columns joined": (lambda p, a: np.concatenate([a, p], 1), (P, LOW)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_several_parameters_is_found(name: str) -> None:
    function, operands = FUNCTIONS[name]
    arrays = {f"p{at}": array for at, array in enumerate(operands)}
    found = find_joint_derivation(arrays, function(*operands))
    assert found is not None
    others = {at: array + 1 + floats(*array.shape, seed=9) for at, array in arrays.items()}
    computed = apply_steps(found[1], others[found[0]], others)
    np.testing.assert_allclose(computed, function(*others.values()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "result",
    [R, P * Q + np.float32(1e-4), np.maximum(P, Q), P @ Q + np.float32(1e-4) * R, np.ones_like(P)],
    ids=str,
)
def test_another_tensor_is_not(result: np.ndarray) -> None:
    assert find_joint_derivation({"p": P, "q": Q}, result) is None


def test_a_sum_of_squares_is_found() -> None:
    arrays = {"p": P, "v": VECTOR}
    steps = find_sum_of_squares(
        arrays, np.float32(0.01) * ((P**2).sum() + (VECTOR**2).sum()).reshape(1)
    )
    assert steps is not None
    others = {"p": Q, "v": VECTOR + 1}
    wanted = 0.01 * ((Q**2).sum() + ((VECTOR + 1) ** 2).sum())
    np.testing.assert_allclose(apply_steps(steps, Q, others), [wanted], rtol=1e-6)
    assert find_sum_of_squares(arrays, np.abs(P).sum().reshape(1)) is None
