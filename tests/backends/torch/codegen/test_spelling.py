"""What operators look like in generated code: one idiomatic expression, made from local shapes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from autopipe.backends.torch.codegen.call import Call, float_literal
from autopipe.backends.torch.codegen.stage import EMITTERS
from autopipe.ir.errors import ModelError
from autopipe.ir.ops import OPERATORS, signature_of
from autopipe.ir.ops.loop import LOOP
from tests.ir.ops.uses import use_of

NAMES = ("a", "b", "c", "d", "e")


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def integers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def spelled(op: str, arrays: list[np.ndarray | None], **settings: Any) -> str:
    """The expression for one use, with operands called a, b, c …"""
    use = use_of(op, arrays, **settings)
    signature = signature_of(use.graph, use.node)
    codes = tuple(
        None if array is None else name for array, name in zip(arrays, NAMES, strict=False)
    )
    return EMITTERS[op](Call.of(signature, codes))


def test_every_row_has_an_emitter_and_every_emitter_of_onnx_a_row() -> None:
    ours = {name for name in EMITTERS if name.startswith("autopipe.")}
    assert OPERATORS.keys() | ours == EMITTERS.keys() | {LOOP}  # Whose emission is a function.


def test_unknown_words_are_refused() -> None:
    for op, arrays, settings in (
        ("Gelu", [floats(3)], {"approximate": "erf'"}),
        ("DepthToSpace", [floats(1, 4, 2, 2)], {"blocksize": 2, "mode": "\n"}),
    ):
        with pytest.raises(ModelError, match="attribute"):
            spelled(op, arrays, **settings)


@pytest.mark.parametrize(
    ("op", "arrays", "settings", "code"),
    [
        ("Add", [floats(2, 3), floats(2, 3)], {}, "a + b"),
        ("Mul", [floats(2, 3), np.float32(0.1) * floats()], {"known": [1]}, "a * 0.1"),
        ("Sub", [np.float32(1) * floats(), floats(2, 3)], {"known": [0]}, "1.0 - b"),
        ("Add", [floats(3), floats(1, 1)], {"known": [1]}, "a + b"),
        (
            "Div",
            [integers(7, 8), integers(2)],
            {"known": [1]},
            'torch.div(a, 2, rounding_mode="trunc")',
        ),
        ("Max", [floats(3), np.float32(0) * floats()], {"known": [1]}, "torch.clamp(a, min=0.0)"),
        ("Max", [floats(3), floats(3), floats(3)], {}, "torch.maximum(torch.maximum(a, b), c)"),
        ("Pow", [floats(3), np.float32(2) * floats()], {"known": [1]}, "torch.pow(a, 2.0)"),
        (
            "Where",
            [np.ones((2, 3), bool), floats(2, 3), np.float32("-inf") * floats()],
            {"known": [2]},
            'torch.where(a, b, float("-inf"))',
        ),
        (
            "Clip",
            [floats(3), np.float32(0) * floats(), np.float32(6) * floats()],
            {"known": [1, 2]},
            "torch.clamp(a, min=0.0, max=6.0)",
        ),
        ("LeakyRelu", [floats(3)], {"alpha": 0.1}, "F.leaky_relu(a, 0.1)"),
        ("Gelu", [floats(3)], {"approximate": "tanh"}, 'F.gelu(a, approximate="tanh")'),
        ("Cast", [floats(3)], {"to": 7}, "a.to(torch.int64)"),
        ("Reshape", [floats(4, 6), integers(0, 2, -1)], {}, "a.reshape(4, 2, 3)"),
        ("Reshape", [floats(1), np.zeros(0, np.int64)], {}, "a.reshape(())"),
        ("Flatten", [floats(2, 3, 4)], {}, "a.reshape(2, 12)"),
        ("Unsqueeze", [floats(2, 3), integers(1)], {}, "a.unsqueeze(1)"),
        ("Squeeze", [floats(2, 1, 1), integers(1, 2)], {}, "a.reshape(2)"),
        ("Transpose", [floats(2, 3, 4)], {"perm": [0, 2, 1]}, "a.transpose(1, 2)"),
        ("Transpose", [floats(2, 3, 4)], {"perm": [2, 0, 1]}, "a.permute(2, 0, 1)"),
        ("Concat", [floats(2, 3), floats(2, 4)], {"axis": -1}, "torch.cat([a, b], dim=1)"),
        (
            "Split",
            [floats(2, 6)],
            {"axis": 1, "num_outputs": 3, "results": 3},
            "torch.split(a, 2, dim=1)",
        ),
        (
            "Split",
            [floats(2, 6), integers(1, 5)],
            {"axis": 1, "results": 2},
            "torch.split(a, [1, 5], dim=1)",
        ),
        ("Slice", [floats(2, 6), integers(0), integers(1), integers(1)], {}, "a[:, :1]"),
        ("Slice", [floats(2, 6), integers(1), integers(2**63 - 1), integers(0)], {}, "a[1:]"),
        (
            "Slice",
            [floats(8), integers(-1), integers(-9), integers(0), integers(-2)],
            {},
            "a.flip(0)[::2]",
        ),
        ("Expand", [floats(1, 3), integers(4, 3)], {}, "a.expand(4, 3)"),
        (
            "Pad",
            [floats(1, 1, 3, 3), integers(0, 0, 1, 2, 0, 0, 3, 4)],
            {},
            "F.pad(a, (2, 4, 1, 3))",
        ),
        ("Gather", [floats(9, 4), integers(1, 2)], {}, "F.embedding(b, a)"),
        ("Gather", [floats(9, 4), np.array(-1)], {"axis": 1, "known": [1]}, "a[:, 3]"),
        ("Gather", [floats(9, 4), integers(1, 2)], {"axis": 1}, "a[:, b]"),
        ("Gather", [floats(9, 4), integers(-2, -1)], {"axis": 1, "known": [1]}, "a[:, 2:4]"),
        ("Gather", [floats(9, 4), integers(-1, 0)], {"known": [1]}, "a[b]"),
        ("ReduceMean", [floats(2, 3), integers(-1)], {}, "a.mean(dim=1, keepdim=True)"),
        (
            "ReduceSum",
            [integers(1, 2), integers(0)],
            {"keepdims": 0},
            "a.sum(dim=0, dtype=torch.int64)",
        ),
        ("ArgMax", [floats(2, 3)], {"axis": 1, "keepdims": 0}, "torch.argmax(a, dim=1)"),
        (
            "ConstantOfShape",
            [integers(2, 3)],
            {},
            "torch.zeros((2, 3), dtype=torch.float32, device=p.device)",
        ),
        (
            "Range",
            [np.array(0), np.array(5), np.array(1)],
            {},
            "torch.arange(5, dtype=torch.int64, device=p.device)",
        ),
        ("Dropout", [floats(3)], {}, "a"),
        ("Dropout", [floats(3), floats(), np.array(False)], {}, "a"),
        ("Dropout", [floats(3), np.float32(0), np.array(True)], {}, "a"),
        (
            "Dropout",
            [floats(3), np.float32(0.3), np.array(True)],
            {},
            "operators.dropout(a, 0.3, p.random(N), training=p.training)",
        ),
        (
            "Dropout",
            [floats(3), None, np.array(True)],
            {},
            "operators.dropout(a, 0.5, p.random(N), training=p.training)",
        ),
        (
            "Dropout",
            [floats(3)],
            {"ratio": 0.3, "opset": 6},
            "operators.dropout(a, 0.3, p.random(N), training=p.training)",
        ),
        ("Dropout", [floats(3)], {"ratio": 0.3, "is_test": 1, "opset": 6}, "a"),
        ("Dropout", [floats(3)], {"ratio": 0.3, "opset": 10}, "a"),
        (
            "RandomNormal",
            [],
            {"shape": (2, 3), "scale": 2.0},
            "operators.normal((2, 3), 0.0, 2.0, p.random(N), torch.float32)",
        ),
    ],
)
def test_spelling(op: str, arrays: list[np.ndarray], settings: dict[str, Any], code: str) -> None:
    node = int.from_bytes(hashlib.sha256(b"o0").digest()[:8])
    assert spelled(op, arrays, **settings) == code.replace("(N)", f"({node:#018x})")


@pytest.mark.parametrize(
    "value", [0.1, 1e-5, 1e-12, 3.4e38, -3.4028234663852886e38, float("inf"), float("nan"), -0.0]
)
def test_short_numbers_round_to_the_same_single(value: float) -> None:
    written = eval(float_literal(float(np.float32(value))))
    assert np.float32(written).tobytes() == np.float32(value).tobytes()
    assert not abs(written) > np.finfo(np.float32).max or np.isinf(value)
