"""Emission of attention: torch's fused kernel wherever it computes what ONNX asks."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter
from autopipe.ir.graph import DType
from autopipe.ir.ops.attention import is_positional

_PRECISION = {1: DType.FLOAT32, 10: DType.FLOAT16, 16: DType.BFLOAT16, 11: DType.FLOAT64}
"""Element types by ONNX's TensorProto.DataType."""


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
    operands = [_by_head(call, 0, query_heads), _by_head(call, 1, groups), _by_head(call, 2, groups)]
    if not _is_fused(call):
        return _general(call, operands)
    words = list(operands)
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
    found = _PRECISION.get(call.node.integer("softmax_precision"))
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
        words.append(f"precision=torch.{precision.value}")
    if len(outputs) > 3 and outputs[3]:
        words.append(f"capture={node.integer('qk_matmul_output_mode')}")
    if len(call.operand(0).shape) == 3:
        words.append("merge=True")
    if call.is_split("q") and is_positional(call.signature):
        words.append(f"group={call.group('q')}")
    code = f"operators.attention({', '.join(words)})"
    return f"{code}[0]" if len(outputs) == 1 else f"{code}[:{len(outputs)}]"


def _rotary_embedding(call: Call) -> str:
    x, shape = call.arg(0), call.operand(0).shape
    words = [call.arg(1), call.arg(2), call.optional(3)]
    if call.node.integer("interleaved"):
        words.append("interleaved=True")
    if call.node.integer("rotary_embedding_dim"):
        words.append(f"width={call.node.integer('rotary_embedding_dim')}")
    if len(shape) == 4:
        return f"operators.rotary_embedding({', '.join([x, *words])})"
    heads = call.share(call.node.integer("num_heads"), "h")
    split = f"{x}.unflatten(2, ({heads}, {shape[2] // heads}))"
    return f"operators.rotary_embedding({', '.join([split, *words])}, head_axis=2).flatten(2)"


ATTENTION: dict[str, Emitter] = {"Attention": _attention, "RotaryEmbedding": _rotary_embedding}
