"""Emission of ONNX Runtime's own operators."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, called, shared
from autopipe.backends.torch.emission.normalization import rms_norm
from autopipe.backends.torch.emission.products import multiply


def _gelu(approximate: str) -> Emitter:
    def emit(call: Call) -> str:
        x = f"{call.arg(0)} + {call.arg(1)}" if call.present(1) else call.arg(0)
        return f"F.gelu({x}{approximate})"

    return emit


def _quick_gelu(call: Call) -> str:
    return f"{call.arg(0)} * torch.sigmoid({call.stated('alpha', 1.702)} * {call.arg(0)})"


def _fused_matmul(call: Call) -> str:
    left = f"{call.arg(0)}.mT" if call.node.integer("transA") else call.arg(0)
    right = f"{call.arg(1)}.mT" if call.node.integer("transB") else call.arg(1)
    product = multiply(call, left, right)
    return product if call.node.number("alpha", 1.0) == 1.0 else f"{call.stated('alpha', 1.0)} * {product}"


def _skip_layer_norm(call: Call) -> str:
    """gamma and beta are operands 2 and 3, the bias of the sum is operand 4."""
    return _skip(call, "skip_layer_norm", [call.arg(2), call.optional(3), call.optional(4)])


def _skip_rms_norm(call: Call) -> str:
    """gamma is operand 2, the bias of the sum operand 3."""
    return _skip(call, "skip_rms_norm", [call.arg(2), call.optional(3)])


def _skip(call: Call, function: str, vectors: list[str]) -> str:
    operands = ", ".join([call.arg(0), call.arg(1), *vectors, call.stated("epsilon", 1e-12)])
    group = shared(call, [f"d{len(call.operand(0).shape) - 1}"])
    if group:
        return called(f"operators.{function}_part", f"{operands}, {group}", call)
    return called(f"operators.{function}", operands, call)


def _rotary_embedding(call: Call) -> str:
    shape, positions = call.operand(0).shape, call.arg(1)
    seq = shape[2] if len(shape) == 4 else shape[1]
    if call.operand(1).elements == 1:
        start = f"{positions}.reshape(())"
        if call.is_split("s"):
            start += f" + {call.group('s')}.position * {seq}"
        positions = f"({start} + torch.arange({seq}, device=p.device)).expand({shape[0]}, {seq})"
    words = [call.arg(2), call.arg(3), positions]
    if call.node.integer("interleaved"):
        words.append("interleaved=True")
    if call.node.integer("rotary_embedding_dim"):
        words.append(f"width={call.node.integer('rotary_embedding_dim')}")
    if len(shape) == 4:
        return f"operators.rotary_embedding({call.arg(0)}, {', '.join(words)})"
    stated = call.node.integer("num_heads")
    heads = call.share(stated, "h") if stated else shape[2] // (2 * call.operand(2).shape[1])
    split = f"{call.arg(0)}.unflatten(2, ({heads}, {shape[2] // heads}))"
    return f"operators.rotary_embedding({split}, {', '.join(words)}, head_axis=2).flatten(2)"


CONTRIB: dict[str, Emitter] = {
    "com.microsoft.Gelu": _gelu(""),
    "com.microsoft.QuickGelu": _quick_gelu,
    "com.microsoft.FastGelu": _gelu(', approximate="tanh"'),
    "com.microsoft.BiasGelu": _gelu(""),
    "com.microsoft.FusedMatMul": _fused_matmul,
    "com.microsoft.SkipLayerNormalization": _skip_layer_norm,
    "com.microsoft.SkipSimplifiedLayerNormalization": _skip_rms_norm,
    "com.microsoft.RotaryEmbedding": _rotary_embedding,
    "SimplifiedLayerNormalization": rms_norm,
}
