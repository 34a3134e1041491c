"""Definitions of mixture-of-experts operators (Shazeer et al., "Outrageously Large Neural
Networks", 2017): MoE and QMoE of ONNX Runtime, and two operators of autopipe. The router scores of
a token select k experts. Each of them computes the token, and the results are added with weights.

`autopipe.Experts` does not include the router: its operands are the selected experts and their
weights, of shape [tokens, k] each, instead of the scores. `autopipe.ListedExperts` has three
matrices per expert as separate operands, instead of matrices that are stacked over the experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopipe.ir.errors import ModelError
from autopipe.ir.ops.operator import (
    DimensionWords,
    Operator,
    Signature,
    space_from_words,
    unindexed_words,
)
from autopipe.ir.ops.quantized import MICROSOFT_DOMAIN
from autopipe.ir.space import Space

EXPERTS = "autopipe.Experts"
LISTED_EXPERTS = "autopipe.ListedExperts"
ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "identity")


@dataclass(frozen=True, slots=True)
class LayerOperands:
    """Operand indices of one layer of the experts. `scales` and `points` are the indices of the
    scales and zero points of quantized weights; None if the operator has no such operands.
    """

    weight: int
    bias: int
    scales: int | None = None
    points: int | None = None


def layer_operands_of(signature: Signature) -> tuple[LayerOperands, LayerOperands, LayerOperands]:
    """Return the operand indices of three layers: the first layer, the second layer, and the gate
    that multiplies the result of the first layer. A node may lack the operands of the gate.
    """
    if signature.node.op == "MoE":
        return LayerOperands(2, 3), LayerOperands(4, 5), LayerOperands(6, 7)
    if signature.node.op == "Experts":
        return LayerOperands(3, 4), LayerOperands(5, 6), LayerOperands(7, 8)
    return LayerOperands(2, 4, 3, 11), LayerOperands(5, 7, 6, 12), LayerOperands(8, 10, 9, 13)


def experts_per_token(signature: Signature) -> int:
    """Return the number of experts that compute each token."""
    return (
        signature.operand(1).shape[1]
        if signature.node.op == "Experts"
        else signature.node.integer("k", 1)
    )


def bits_of_experts(signature: Signature) -> int:
    """Return the number of bits per weight of a QMoE, or 8 for other operators. Raise ValueError if
    the number is not 2, 4 or 8, or if the node states a number per layer.
    """
    bits = signature.node.integer("expert_weight_bits", 4) if signature.node.op == "QMoE" else 8
    if bits not in (2, 4, 8) or any(
        signature.node.has(f"fc{layer}_expert_weight_bits") for layer in (1, 2, 3)
    ):
        raise ValueError(f"expert_weight_bits is {bits}, expected 2, 4 or 8 and no value per layer")
    return bits


def activation_of(signature: Signature) -> str:
    """Return the name of the activation of the experts, an element of `ACTIVATIONS`. Raise
    ModelError if the activation, or the value of another attribute, is not supported.
    """
    node = signature.node
    unread = [name for name in ("use_sparse_mixer", "weights_prepacked") if node.integer(name) > 0]
    name = node.text("activation_type", "relu")
    if node.text("quant_type", "int") != "int" or unread or name not in ACTIVATIONS:
        what = unread[0] if unread else "quant_type" if name in ACTIVATIONS else "activation_type"
        raise ModelError(
            f"the value of attribute {what} of {node.op} is not supported", where=repr(node.name)
        )
    return name


def has_interleaved_gate_rows(signature: Signature) -> bool:
    """Return True if the rows of the first layer's matrix alternate between a row of the gate and
    the row that is multiplied by it.
    """
    return activation_of(signature) == "swiglu" and signature.node.integer("swiglu_fusion") == 1


def mixture_space(signature: Signature) -> Space:
    """Return the iteration space `*m 1, t 1, e& i& 1, e i, e 1 i, e 1 -> *m 1` (notation:
    `autopipe.ir.space`) of MoE and QMoE: tokens, scores, and weight and bias of two layers. For
    `autopipe.Experts`, two operands `t 1` take the place of the scores.

    *m or t: tokens, e: experts, i: hidden units. No axis indexes the features and the scores.

    A split along e or i gives partial sums, because each device adds up its own experts, or its own
    hidden units of each expert. Under a split along i, one device adds the bias of the second
    layer. QMoE, and a gate that is fused with the first layer without interleaved rows, can be
    split along e but not along i.
    """
    _check_shapes(signature)
    lead = ["b", "s"][: signature.rank - 1] if signature.rank > 2 else ["t"]
    tokens = "t" if signature.rank == 2 else f"({' '.join(lead)})"
    first, second, gate = layer_operands_of(signature)
    fused = activation_of(signature) == "swiglu" and not signature.present(gate.weight)
    packed = signature.node.op == "QMoE"
    whole = packed or (fused and not has_interleaved_gate_rows(signature))
    inner = "(i p!)" if fused and not whole else "i"
    words: list[DimensionWords] = []
    for index, value in enumerate(signature.operands):
        shape = value.shape if value else ()
        words.append(
            ["e", *unindexed_words(shape[1:])] if index >= first.weight else unindexed_words(shape)
        )
        if value is None or whole:
            continue
        if index in (first.weight, first.bias, gate.weight, gate.bias):
            words[-1] = ["e", inner.replace("i", "i&"), *unindexed_words(shape[2:])]
        elif index == second.weight:
            words[-1] = ["e", "1", "i"]
    words[: first.weight] = [*lead, "1"], *([tokens, "1"] for _ in range(1, first.weight))
    if packed and signature.present(14):
        words[14] = [tokens, "1"]
    words[first.weight] = [word.replace("e", "e&") for word in words[first.weight]]
    return space_from_words(signature, words, [[*lead, "1"]], **({"p": 2} if inner != "i" else {}))


def _check_shapes(signature: Signature) -> None:
    """Raise ValueError if the shapes of the layers, the scores and the tokens do not match one
    another.
    """
    (tokens, experts) = signature.operand(1).shape
    hidden = signature.operand(0).shape[-1]
    per = 8 // bits_of_experts(signature)
    first, second, gate = layer_operands_of(signature)
    if signature.node.op == "Experts":
        experts = signature.operand(first.weight).shape[0]
    rows = signature.operand(second.weight).shape[2] * per
    fused = 1 + (activation_of(signature) == "swiglu" and not signature.present(gate.weight))
    expected = {
        first.weight: (experts, fused * rows, hidden // per),
        second.weight: (experts, hidden, rows // per),
    }
    expected[gate.weight] = (experts, rows, hidden // per)
    if (
        tokens * hidden != signature.operand(0).elements
        or any(
            signature.operand(at).shape != shape
            for at, shape in expected.items()
            if signature.present(at)
        )
        or any(
            signature.operand(at).shape != signature.operand(1).shape
            for at in range(1, first.weight)
        )
        or not 0 < experts_per_token(signature) <= experts
    ):
        raise ValueError("the shapes of expert weights, router scores and tokens do not match")


def _mixture_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of a mixture of experts: the matmuls of each token with the layers of its k
    experts.
    """
    layers = [
        signature.operand(each.weight)
        for each in layer_operands_of(signature)
        if signature.present(each.weight)
    ]
    per = 8 // bits_of_experts(signature)
    weights = sum(value.shape[1] * value.shape[2] * per for value in layers)
    tokens = signature.operand(1).shape[0]
    return 2.0 * tokens * experts_per_token(signature) * weights


def _listed_experts_space(signature: Signature) -> Space:
    """Return the iteration space `t 1, t 1, t 1, 1 i&, 1 i, i 1, … -> t 1` (notation:
    `autopipe.ir.space`) of `autopipe.ListedExperts`: tokens t and hidden units i, with three
    matrices per expert. A split along i gives each device a shard of the hidden units of every
    expert, and partial sums.
    """
    if (len(signature.operands) - 3) % 3 or len(signature.operands) < 6:
        raise ValueError("the number of expert weights is not a multiple of three")
    matrices = [["1", "i&"], ["1", "i"], ["i", "1"]]
    matrices += [["1", "i"], ["1", "i"], ["i", "1"]] * (len(signature.operands) // 3 - 2)
    return space_from_words(signature, [["t", "1"]] * 3 + matrices, [["t", "1"]])


def _listed_flops(signature: Signature, space: Space) -> float:
    """Return the FLOPs of `autopipe.ListedExperts`: three matmuls of each token per selected
    expert.
    """
    tokens, k = signature.operand(1).shape
    return 2.0 * tokens * k * sum(signature.operand(place).elements for place in (3, 4, 5))


OPERATOR_DEFINITIONS = (
    *(
        Operator(
            f"{MICROSOFT_DOMAIN}{name}",
            mixture_space,
            "matmul",
            _mixture_flops,
            3.0,
            keeps=("0", "1"),
            recomputes=1.0,
        )
        for name in ("MoE", "QMoE")
    ),
    Operator(
        EXPERTS, mixture_space, "matmul", _mixture_flops, 3.0, keeps=("0", "1", "2"), recomputes=1.0
    ),
    Operator(
        LISTED_EXPERTS,
        _listed_experts_space,
        "matmul",
        _listed_flops,
        3.0,
        keeps=("0", "1", "2"),
        recomputes=1.0,
    ),
)
