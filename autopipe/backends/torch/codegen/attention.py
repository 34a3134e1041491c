"""Emitters (functions that return the Python code of one use of an operator) for attention, rotary
embeddings, and operators of ONNX Runtime. Attention uses torch's fused kernel if this kernel
computes the semantics of the node.
"""

from __future__ import annotations

from functools import partial

from autopipe.backends.torch.codegen.call import (
    Call,
    CodeEmitter,
    call_code,
    common_type_emitter,
    template_emitter,
    torch_dtype,
)
from autopipe.backends.torch.codegen.matmul_conv import matmul_code
from autopipe.backends.torch.codegen.normalization import emit_rms_norm
from autopipe.ir.errors import ModelError
from autopipe.ir.ops.attention import is_positional, needs_stepwise_softmax, softmax_type


def _emit_attention(call: Call) -> str:
    node = call.node
    by_head = call.rank == 4
    if by_head:
        query_heads = call.operand(0).shape[1]
        groups = call.operand(1).shape[1]
    else:
        groups = call.local_count(node.integer("kv_num_heads"), "h")
        query_heads = call.local_count(call.local_count(node.integer("q_num_heads"), "h"), "r")
    # The generated code reshapes the operands to [batch, heads, sequence, features].
    words = [call.arg(index) for index in range(3)]
    if not by_head:
        words = [
            (
                f"{code}.unflatten(2, ({heads}, "
                f"{call.operand(index).shape[2] // heads})).transpose(1, 2)"
            )
            for index, (code, heads) in enumerate(
                zip(words, (query_heads, groups, groups), strict=True)
            )
        ]
    if not _is_fused_attention(call):
        return _emit_general_attention(call, words)
    fused = call_code(
        "operators.fused_attention",
        *words,
        mask=call.arg(3) if call.present(3) else None,
        causal=call.flag("is_causal"),
        scale=call.float_attribute("scale", 0.0) if node.number("scale") else None,
    )
    return fused if by_head else f"{fused}.transpose(1, 2).flatten(2)"


def _is_fused_attention(call: Call) -> bool:
    """Return True if a single call of torch's attention kernel computes the node; the node then has
    one result.
    """
    node = call.node
    if (
        needs_stepwise_softmax(node, call.operand(0).dtype)
        or any(node.outputs[1:])
        or any(node.inputs[4:])
    ):
        return False
    if max(node.integer("left_window_size", -1), node.integer("right_window_size", -1)) >= 0:
        return False
    if call.is_split("q") and is_positional(call):
        return False
    mask = call.operand(3).shape if call.present(3) else None
    keys = call.operand(1).shape[call.rank - 2]
    return mask is None or (not node.integer("is_causal") and len(mask) > 1 and mask[-1] == keys)


def _emit_general_attention(call: Call, operands: list[str]) -> str:
    """Return the call of the runtime's attention, which supports all attributes and results of the
    operator. `operands` has the code of queries, keys and values.
    """
    node = call.node
    outputs = call.node.outputs
    words = [*operands, *(call.optional(index) for index in range(3, 8))]
    while words[-1] == "None":
        words.pop()
    window = (node.integer("left_window_size", -1), node.integer("right_window_size", -1))
    precision = softmax_type(node, call.operand(0).dtype)
    code = call_code(
        "operators.attention",
        *words,
        scale=call.float_attribute("scale", 0.0) if node.number("scale") else None,
        causal=call.flag("is_causal"),
        softcap=call.float_attribute("softcap", 0.0) if node.number("softcap") else None,
        window=window if window != (-1, -1) else None,
        precision=None if precision is None else torch_dtype(precision),
        capture=node.integer("qk_matmul_output_mode") if len(outputs) > 3 and outputs[3] else None,
        merge=True if call.rank == 3 else None,
        group=call.group("q") if is_positional(call) else None,
    )
    return call.outputs(code)


def _emit_linear_attention(call: Call) -> str:
    """Return the call of a linear attention. The attribute `update_rule` determines which operands
    the node must have. Raise ModelError if one of them is missing or an additional one is present.
    """
    node = call.node
    rule = call.text_attribute(
        "update_rule", "gated_delta", ("linear", "gated", "delta", "gated_delta")
    )
    needed = {4: "gated" in rule, 5: "delta" in rule}
    if any(call.present(index) != takes for index, takes in needed.items()):
        message = f"the operands of LinearAttention do not match its update rule {rule!r}"
        raise ModelError(
            message,
            hint="use a decay operand for a gated rule only, and a beta operand for a delta "
            "rule only",
            where=repr(node.name),
        )
    words = [call.arg(0), call.arg(1), call.arg(2), *map(call.optional, range(3, 6))]
    while words[-1] == "None":
        words.pop()
    groups = call.local_count(node.integer("kv_num_heads"), "h")
    heads = call.local_count(call.local_count(node.integer("q_num_heads"), "h"), "r")
    scale = call.float_attribute("scale", 0.0) if node.number("scale") else None
    return call.outputs(
        call_code("operators.linear_attention", *words, heads=heads, groups=groups, scale=scale)
    )


def _emit_causal_convolution(call: Call) -> str:
    active = call.text_attribute("activation", "none", ("none", "silu", "swish")) != "none"
    words = [call.arg(0), call.arg(1), call.optional(2), call.optional(3)]
    while words[-1] == "None":
        words.pop()
    return call.outputs(call_code("operators.causal_convolution", *words, silu=active or None))


def _emit_contrib_rotary_embedding(call: Call) -> str:
    shape = call.operand(0).shape
    positions = call.arg(1)
    seq = shape[2] if len(shape) == 4 else shape[1]
    if call.operand(1).elements == 1:
        start = f"{positions}.reshape(())"
        if group := call.group("s"):
            start += f" + {group}.position * {seq}"
        positions = f"({start} + torch.arange({seq}, device=p.device)).expand({shape[0]}, {seq})"
    stated = call.node.integer("num_heads")
    heads = call.local_count(stated, "h") if stated else shape[-1] // (2 * call.operand(2).shape[1])
    return _rotary_embedding_code(call, [call.arg(2), call.arg(3), positions], heads)


def _rotary_embedding_code(call: Call, words: list[str], heads: int) -> str:
    """Return the code that applies a rotary embedding to operand 0. `words` has the code of the
    cosines, sines and positions. `heads` is the number of heads in the last dimension of an operand
    with three dimensions.
    """
    x = call.arg(0)
    shape = call.operand(0).shape
    split = len(shape) != 4
    if split:
        x = f"{x}.unflatten(2, ({heads}, {shape[2] // heads}))"
    turned = call_code(
        "operators.rotary_embedding",
        x,
        *words,
        interleaved=call.flag("interleaved"),
        width=call.node.integer("rotary_embedding_dim") or None,
        head_axis=2 if split else None,
    )
    return f"{turned}.flatten(2)" if split else turned


def _emit_fused_rotary_embedding(call: Call) -> str:
    flags = {name: call.flag(name) for name in ("interleaved", "apart")}
    return call_code(
        "operators.rotary",
        call.args(3),
        width=call.node.integer("rotary_embedding_dim") or None,
        **flags,
    )


def _emit_gelu(approximate: str, call: Call) -> str:
    x = f"{call.arg(0)} + {call.arg(1)}" if call.present(1) else call.arg(0)
    return f"F.gelu({x}{approximate})"


def _emit_fused_matmul(call: Call) -> str:
    left = f"{call.arg(0)}.mT" if call.node.integer("transA") else call.arg(0)
    right = f"{call.arg(1)}.mT" if call.node.integer("transB") else call.arg(1)
    product = matmul_code(call, left, right)
    return (
        product
        if call.node.number("alpha", 1.0) == 1.0
        else f"{call.float_attribute('alpha', 1.0)} * {product}"
    )


def _emit_skip_norm(function: str, last: int, call: Call) -> str:
    """Return the call of the runtime's function `function`, which normalizes the sum of operands 0
    and 1. Operand 2 is gamma. Operands 3 to `last` are beta (layer norm only) and then the bias of
    the sum.
    """
    vectors = map(call.optional, range(3, last + 1))
    group = call.group(f"d{call.rank - 1}")
    name = f"operators.{'sharded_' if group else ''}{function}"
    return call.outputs(
        call_code(name, call.args(3), *vectors, call.float_attribute("epsilon", 1e-12), group)
    )


ATTENTION: dict[str, CodeEmitter] = {
    "Attention": common_type_emitter(_emit_attention),
    "LinearAttention": _emit_linear_attention,
    "CausalConvWithState": _emit_causal_convolution,
    "RotaryEmbedding": lambda call: _rotary_embedding_code(
        call,
        [call.arg(1), call.arg(2), call.optional(3)],
        call.local_count(call.node.integer("num_heads"), "h"),
    ),
    "autopipe.Rotary": _emit_fused_rotary_embedding,
    **dict.fromkeys(("com.microsoft.Gelu", "com.microsoft.BiasGelu"), partial(_emit_gelu, "")),
    "com.microsoft.QuickGelu": template_emitter("{0} * torch.sigmoid({alpha} * {0})", alpha=1.702),
    "com.microsoft.FastGelu": partial(_emit_gelu, ', approximate="tanh"'),
    "com.microsoft.FusedMatMul": _emit_fused_matmul,
    "com.microsoft.SkipLayerNormalization": common_type_emitter(
        partial(_emit_skip_norm, "skip_layer_norm", 4)
    ),
    "com.microsoft.SkipSimplifiedLayerNormalization": common_type_emitter(
        partial(_emit_skip_norm, "skip_rms_norm", 3)
    ),
    "com.microsoft.RotaryEmbedding": _emit_contrib_rotary_embedding,
    "SimplifiedLayerNormalization": common_type_emitter(emit_rms_norm),
}
