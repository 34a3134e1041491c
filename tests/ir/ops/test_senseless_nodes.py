"""Nodes whose attributes make no sense, as an untrusted file may state them, end in one clear
error.
"""

from __future__ import annotations

import pytest

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Attribute, DType, Node, Value
from autopipe.ir.ops import OPERATORS
from autopipe.ir.ops.operator import Signature


@pytest.mark.parametrize(
    ("op", "shapes", "attributes"),
    [
        ("GroupNormalization", [(2, 4, 3), (4,), (4,)], {"num_groups": 0}),
        ("Attention", [(2, 3, 8)] * 3, {"q_num_heads": 0, "kv_num_heads": 0}),
        ("Attention", [(2, 3, 8)] * 3, {}),
        ("RotaryEmbedding", [(2, 3, 8), (2, 3, 4), (2, 3, 4)], {}),
        ("Conv", [(2, 3, 8, 8)], {}),
        ("Conv", [(2, 3, 8, 8), (4, 0, 3, 3)], {}),
        ("Einsum", [(2, 3)], {"equation": "ij->__import__"}),
        ("Einsum", [(2, 3)], {"equation": ""}),
        ("SoftmaxCrossEntropyLoss", [(2, 3), (2,)], {"reduction": "')"}),
        ("Resize", [(2, 3)], {}),
        ("Resize", [(2, 3)], {"mode": "nearest') + open('x"}),
        ("LSTM", [(4, 2, 3), (1, 8, 3), (1, 8, 2)], {"activations": ("__import__",)}),
        ("GRU", [(4, 2, 3), (1, 6, 3), (1, 6, 2)], {"direction": "sideways"}),
    ],
)
def test_one_clear_error(
    op: str, shapes: list[tuple[int, ...]], attributes: dict[str, Attribute]
) -> None:
    values = tuple(Value(f"i{index}", DType.FLOAT32, shape) for index, shape in enumerate(shapes))
    node = Node(
        "node", op, tuple(value.name for value in values), ("o",), tuple(sorted(attributes.items()))
    )
    signature = Signature(
        node, values, (Value("o", DType.FLOAT32, shapes[0]),), (None,) * len(values), 23
    )
    with pytest.raises(ModelError, match=op):
        OPERATORS[op].space(signature)


def test_tensors_that_do_not_fit_an_operator_are_the_models_fault() -> None:
    """The node is named."""
    values = (Value("a", DType.FLOAT32, (2, 3)), Value("b", DType.FLOAT32, (4, 5)))
    node = Node("/mlp/up", "MatMul", ("a", "b"), ("o",))
    signature = Signature(node, values, (Value("o", DType.FLOAT32, (2, 5)),), (None, None), 23)
    with pytest.raises(
        ModelError,
        match=r"fit operator MatMul: axis .* is of size 3 in one dimension and of size 4 in another",
    ) as caught:
        OPERATORS["MatMul"].space(signature)
    assert caught.value.where == "'/mlp/up'"
