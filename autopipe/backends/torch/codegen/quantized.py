"""Emitters (functions that return the Python code of one use of an operator) for matmuls and
lookups with packed weights, and for mixtures of experts.
"""

from __future__ import annotations

from autopipe.backends.torch.codegen.call import Call, CodeEmitter, call_code
from autopipe.ir.ops.experts import (
    EXPERTS,
    LISTED_EXPERTS,
    LayerOperands,
    activation_of,
    bits_of_experts,
    has_interleaved_gate_rows,
    layer_operands_of,
)
from autopipe.ir.ops.quantized import MICROSOFT_DOMAIN, bits_per_weight


def _emit_matmul_nbits(call: Call) -> str:
    optional = [call.optional(index) if index < len(call.codes) else "None" for index in (3, 4)]
    while optional and optional[-1] == "None":
        optional.pop()
    return call_code("operators.matmul_nbits", call.args(3), *optional, bits=bits_per_weight(call))


def _emit_gather_block_quantized(call: Call) -> str:
    return call_code(
        "operators.gather_blocks",
        call.args(3),
        call.optional(3),
        call.group("v"),
        bits=bits_per_weight(call),
    )


_ACTIVATIONS = {
    "relu": "F.relu",
    "gelu": "operators.gelu_by_tanh",
    "silu": "F.silu",
    "identity": "torch.positive",
}


def _activation_code(call: Call, gated: bool) -> str:
    """Return the code of a function that computes the activation of the experts. For the activation
    `swiglu`, it is `F.silu` if the experts have a separate gate matrix (`gated`), otherwise a
    function that also applies the gate.
    """
    name = activation_of(call)
    if name != "swiglu":
        return _ACTIVATIONS[name]
    if gated:
        return "F.silu"
    attributes = {"alpha": "activation_alpha", "beta": "activation_beta", "limit": "swiglu_limit"}
    settings = {
        word: call.float_attribute(own, 0.0)
        for word, own in attributes.items()
        if call.node.has(own)
    }
    return call_code(
        "operators.swiglu", **settings, turns=None if has_interleaved_gate_rows(call) else False
    )


def _emit_mixture_of_experts(call: Call) -> str:
    """Return the call of the runtime's mixture of experts."""
    first, second, gate = layer_operands_of(call)

    def layer_operands(each: LayerOperands) -> str | None:
        """Return the code of a tuple with the operands of one layer, or None if the node lacks the
        layer.
        """
        if not call.present(each.weight):
            return None
        bias = call.bias(each.bias, "i") if each is second else call.optional(each.bias)
        packed = (
            []
            if each.scales is None or each.points is None
            else [call.arg(each.scales), call.optional(each.points)]
        )
        return f"({', '.join([call.arg(each.weight), bias, *packed])})"

    gated = layer_operands(gate)
    if call.node.op == "Experts":
        settings = {
            "activation": _activation_code(call, gated is not None),
            "group": call.group("e"),
        }
        return call_code(
            "operators.experts",
            call.args(3),
            layer_operands(first),
            layer_operands(second),
            gated,
            **settings,
        )
    weights = call.optional(14) if call.node.op == "QMoE" and call.present(14) else None
    return call_code(
        "operators.mixture",
        call.args(2),
        layer_operands(first),
        layer_operands(second),
        gated,
        k=call.node.integer("k", 1),
        weights=weights,
        activation=_activation_code(call, gated is not None),
        normalize=call.flag("normalize_routing_weights"),
        bits=bits_of_experts(call) if call.node.op == "QMoE" else None,
        group=call.group("e"),
    )


QUANTIZED: dict[str, CodeEmitter] = {
    LISTED_EXPERTS: lambda call: call_code("operators.listed_experts", call.args()),
    f"{MICROSOFT_DOMAIN}MatMulNBits": _emit_matmul_nbits,
    f"{MICROSOFT_DOMAIN}GatherBlockQuantized": _emit_gather_block_quantized,
    **dict.fromkeys(
        (f"{MICROSOFT_DOMAIN}MoE", f"{MICROSOFT_DOMAIN}QMoE", EXPERTS), _emit_mixture_of_experts
    ),
}
