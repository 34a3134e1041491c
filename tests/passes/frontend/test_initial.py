"""How parameters without numbers start, by what reads them."""

from __future__ import annotations

import math

import pytest
from onnx.helper import make_node

from autopipe.ir.graph import Initializer
from autopipe.passes.frontend.uses import Uses
from autopipe.passes.frontend.weights import default_initializer

ZEROS = Initializer("zeros")
ONES = Initializer("ones")
QUARTER = Initializer("uniform", 0.25)


@pytest.mark.parametrize(
    ("operator", "operands", "shape", "expected"),
    [
        ("Conv", "x w", (8, 2, 3, 3), Initializer("normal", math.sqrt(2 / 18))),
        ("ConvTranspose", "x w", (8, 2, 3, 3), Initializer("normal", math.sqrt(2 / 18))),
        ("Gemm", "x w", (30, 20), Initializer("normal", 0.2)),
        ("MatMul", "x w", (7, 30, 20), Initializer("normal", 0.2)),
        ("Gather", "w x", (30, 20), Initializer("normal", 0.02)),
        ("Add", "x w", (30, 20), Initializer("normal", 0.02)),
        ("Conv", "x v w", (8,), ZEROS),
        ("BatchNormalization", "x w b m v", (8,), ONES),
        ("BatchNormalization", "x s w m v", (8,), ZEROS),
        ("BatchNormalization", "x s b w v", (8,), ZEROS),
        ("BatchNormalization", "x s b m w", (8,), ONES),
        ("LSTM", "x w r b", (1, 64, 5), QUARTER),
        ("LSTM", "x v w b", (2, 64, 16), QUARTER),
        ("LSTM", "x v r w", (1, 128), QUARTER),
        ("LSTM", "x v r b l w c", (1, 3, 16), ZEROS),
        ("GRU", "x w r b", (1, 48, 5), QUARTER),
        ("RNN", "x v r w", (1, 32), QUARTER),
    ],
)
def test_schemes(
    operator: str, operands: str, shape: tuple[int, ...], expected: Initializer
) -> None:
    uses = Uses([make_node(operator, operands.split(), ["y"])])
    found = default_initializer("w", shape, uses)
    assert found.scheme == expected.scheme
    assert found.scale == pytest.approx(expected.scale)


def test_a_table_that_is_also_the_head_starts_as_a_table() -> None:
    uses = Uses([make_node("Gather", ["w", "x"], ["e"]), make_node("MatMul", ["e", "w"], ["y"])])
    assert default_initializer("w", (30, 20), uses) == Initializer("normal", 0.02)
