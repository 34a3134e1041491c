"""Operands known while compiling are written as numbers; results are those of onnx's reference all
the same.
"""

from __future__ import annotations

import numpy as np
import pytest

from autopipe.ir.ops import signature_of
from tests.conformance.adapter import to_array, to_tensor
from tests.ir.ops.splitting import computed
from tests.ir.ops.uses import expected, use_of

TYPES = (np.float32, np.float64, np.float16, np.int32, np.int64, np.uint8)
NUMERIC = (
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Max",
    "Min",
    "Mod",
    "Pow",
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("op", NUMERIC)
def test_scalars_on_either_side(op: str, dtype: type[np.generic]) -> None:
    if op == "Pow" and dtype is np.uint8:
        pytest.skip("not a type of Pow")
    table = np.arange(1, 7).reshape(2, 3).astype(dtype)
    integral = np.issubdtype(dtype, np.integer)
    settings = {"fmod": 1} if op == "Mod" and not integral else {}
    for scalar in (
        np.array(2, dtype),
        np.array([3], dtype),
        np.array([[[2]]], dtype),
        np.ones((2, 1), dtype),
    ):
        for operands, known in (
            ((table, scalar), {1}),
            ((scalar, table), {0}),
            ((scalar, scalar), {0, 1}),
            ((scalar, scalar), {1}),
        ):
            use = use_of(op, operands, known=known, **settings)
            [wanted] = expected(use)
            [found] = computed(signature_of(use.graph, use.node), _tensors(use.arrays))
            assert to_array(found).dtype == wanted.dtype
            assert found.shape == wanted.shape
            np.testing.assert_allclose(
                to_array(found), wanted, rtol=1e-3 if dtype == np.float16 else 1e-6
            )


@pytest.mark.parametrize("dtype", TYPES)
def test_choices_and_bounds(dtype: type[np.generic]) -> None:
    table = np.arange(6).reshape(2, 3).astype(dtype)
    low = np.array(2, dtype)
    high = np.array(4, dtype)
    condition = table > 2
    uses = [use_of("Clip", [table, low, high], known=known) for known in ((), (1,), (2,), (1, 2))]
    uses += [
        use_of("Clip", [table, None, high], known=(2,)),
        use_of("Clip", [table, low], known=(1,)),
    ]
    uses += [use_of("Where", [condition, table, low], known=known) for known in ((), (2,))]
    uses += [use_of("Where", [condition, low, high], known=known) for known in ((), (1,), (1, 2))]
    uses += [
        use_of("Where", [condition[:1], table, low], known=(2,)),
        use_of("Where", [condition, table[:1], low], known=(2,)),
    ]
    for use in uses:
        [wanted] = expected(use)
        [found] = computed(signature_of(use.graph, use.node), _tensors(use.arrays))
        assert to_array(found).dtype == wanted.dtype
        np.testing.assert_array_equal(to_array(found), wanted)


def _tensors(arrays: dict[str, np.ndarray]) -> dict[str, object]:
    return {name: to_tensor(array) for name, array in arrays.items()}
