"""Emission of attention, by torch's fused kernel where it computes what ONNX asks, and of ONNX Runtime's operators."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import PRECISIONS, Call, Emitter, called, shared, torch_dtype
from autopipe.backends.torch.emission.normalization import rms_norm
from autopipe.backends.torch.emission.products import multiply
from autopipe.ir.graph import DType
from autopipe.ir.ops.attention import is_positional


def _local_heads(call: Call) -> tuple[int, int]:
    """Query heads and key-value heads on this rank."""
    if len(call.operand(0).shape) == 4:
        return call.operand(0).shape[1], call.operand(1).shape[1]
    groups = call.share(call.node.integer("kv_num_heads"), "h")
    return call.share(call.share(call.node.integer("q_num_heads"), "h"), "r"), groups


def _by_head(call: Call, index: int, heads: int) -> str:
    """An operand as [b, h, s, d]."""
    shape = call.operand(index).shape
    if len(shape) == 4:
        return call.arg(index)
    return f"{call.arg(index)}.unflatten(2, ({heads}, {shape[2] // heads})).transpose(1, 2)"


def _attention(call: Call) -> str:
    query_heads, groups = _local_heads(call)
    words = [_by_head(call, 0, query_heads), _by_head(call, 1, groups), _by_head(call, 2, groups)]
    if not _is_fused(call):
        return _general(call, words)
    if call.present(3):
        words.append(f"attn_mask={call.arg(3)}")
    if call.node.integer("is_causal"):
        words.append("is_causal=True")
    if call.node.number("scale"):
        words.append(f"scale={call.stated('scale', 0.0)}")
    if query_heads != groups:
        words.append("enable_gqa=True")
    fused = f"F.scaled_dot_product_attention({', '.join(words)})"
    return fused if len(call.operand(0).shape) == 4 else f"{fused}.transpose(1, 2).flatten(2)"


def _is_fused(call: Call) -> bool:
    """True if one call of torch's kernel gives the only result."""
    node = call.node
    if any(node.outputs[1:]) or any(call.present(index) for index in (4, 5, 6)) or node.number("softcap"):
        return False
    if max(node.integer("left_window_size", -1), node.integer("right_window_size", -1)) >= 0:
        return False
    if _precision(call) is not None or (call.is_split("q") and is_positional(call.signature)):
        return False
    if not call.present(3):
        return True
    rank = len(call.operand(0).shape)
    keys = call.operand(1).shape[rank - 2]
    mask = call.operand(3).shape
    return not node.integer("is_causal") and len(mask) > 1 and mask[-1] == keys


def _precision(call: Call) -> DType | None:
    """Type of the softmax, where it is not that of the operands."""
    found = PRECISIONS.get(call.node.integer("softmax_precision"))
    return None if found is call.operand(0).dtype else found


def _general(call: Call, operands: list[str]) -> str:
    node, outputs = call.node, call.node.outputs
    words = [*operands, *(call.optional(index) for index in range(3, 7))]
    while words[-1] == "None":
        words.pop()
    if node.number("scale"):
        words.append(f"scale={call.stated('scale', 0.0)}")
    if node.integer("is_causal"):
        words.append("causal=True")
    if node.number("softcap"):
        words.append(f"softcap={call.stated('softcap', 0.0)}")
    window = (node.integer("left_window_size", -1), node.integer("right_window_size", -1))
    if window != (-1, -1):
        words.append(f"window={window}")
    precision = _precision(call)
    if precision is not None:
        words.append(f"precision={torch_dtype(precision)}")
    if len(outputs) > 3 and outputs[3]:
        words.append(f"capture={node.integer('qk_matmul_output_mode')}")
    if len(call.operand(0).shape) == 3:
        words.append("merge=True")
    if call.is_split("q") and is_positional(call.signature):
        words.append(f"group={call.group('q')}")
    return called("operators.attention", ", ".join(words), call)


def _rotary_embedding(call: Call) -> str:
    heads = call.share(call.node.integer("num_heads"), "h")
    return _rotary(call, [call.arg(1), call.arg(2), call.optional(3)], heads)


def _contrib_rotary_embedding(call: Call) -> str:
    shape, positions = call.operand(0).shape, call.arg(1)
    seq = shape[2] if len(shape) == 4 else shape[1]
    if call.operand(1).elements == 1:
        start = f"{positions}.reshape(())"
        if call.is_split("s"):
            start += f" + {call.group('s')}.position * {seq}"
        positions = f"({start} + torch.arange({seq}, device=p.device)).expand({shape[0]}, {seq})"
    stated = call.node.integer("num_heads")
    heads = call.share(stated, "h") if stated else shape[-1] // (2 * call.operand(2).shape[1])
    return _rotary(call, [call.arg(2), call.arg(3), positions], heads)


def _rotary(call: Call, words: list[str], heads: int) -> str:
    """Operand 0 turned by cosines, sines and positions, whose code are `words`; of three dimensions it has `heads`."""
    x, shape = call.arg(0), call.operand(0).shape
    if call.node.integer("interleaved"):
        words.append("interleaved=True")
    if call.node.integer("rotary_embedding_dim"):
        words.append(f"width={call.node.integer('rotary_embedding_dim')}")
    if len(shape) == 4:
        return f"operators.rotary_embedding({', '.join([x, *words])})"
    split = f"{x}.unflatten(2, ({heads}, {shape[2] // heads}))"
    return f"operators.rotary_embedding({', '.join([split, *words])}, head_axis=2).flatten(2)"


def _gelu(approximate: str) -> Emitter:
    def emit(call: Call) -> str:
        x = f"{call.arg(0)} + {call.arg(1)}" if call.present(1) else call.arg(0)
        return f"F.gelu({x}{approximate})"

    return emit


def _fused_matmul(call: Call) -> str:
    left = f"{call.arg(0)}.mT" if call.node.integer("transA") else call.arg(0)
    right = f"{call.arg(1)}.mT" if call.node.integer("transB") else call.arg(1)
    product = multiply(call, left, right)
    return product if call.node.number("alpha", 1.0) == 1.0 else f"{call.stated('alpha', 1.0)} * {product}"


def _skip(function: str, last: int) -> Emitter:
    """The norm of a sum; operands from 2 to `last` are gamma, for the layer norm beta, and the bias of the sum."""

    def emit(call: Call) -> str:
        vectors = (call.optional(index) for index in range(3, last + 1))
        operands = ", ".join([call.args(3), *vectors, call.stated("epsilon", 1e-12)])
        group = shared(call, [f"d{len(call.operand(0).shape) - 1}"])
        if group:
            return called(f"operators.{function}_part", f"{operands}, {group}", call)
        return called(f"operators.{function}", operands, call)

    return emit


ATTENTION: dict[str, Emitter] = {
    "Attention": _attention,
    "RotaryEmbedding": _rotary_embedding,
    "com.microsoft.Gelu": _gelu(""),
    "com.microsoft.QuickGelu": lambda call: (
        f"{call.arg(0)} * torch.sigmoid({call.stated('alpha', 1.702)} * {call.arg(0)})"
    ),
    "com.microsoft.FastGelu": _gelu(', approximate="tanh"'),
    "com.microsoft.BiasGelu": _gelu(""),
    "com.microsoft.FusedMatMul": _fused_matmul,
    "com.microsoft.SkipLayerNormalization": _skip("skip_layer_norm", 4),
    "com.microsoft.SkipSimplifiedLayerNormalization": _skip("skip_rms_norm", 3),
    "com.microsoft.RotaryEmbedding": _contrib_rotary_embedding,
    "SimplifiedLayerNormalization": rms_norm,
}
