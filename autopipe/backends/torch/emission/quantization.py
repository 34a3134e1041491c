"""Emission of quantisation."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, torch_dtype

_PRECISION = {1: "torch.float32", 10: "torch.float16", 16: "torch.bfloat16", 11: "torch.float64"}
"""torch's types by ONNX's TensorProto.DataType."""


def _linear(function: str) -> Emitter:
    def emit(call: Call) -> str:
        operands = f"{call.arg(0)}, {call.arg(1)}, {call.optional(2)}"
        words = [operands, torch_dtype(call.result().dtype)]
        if call.operand(1).elements > 1:
            words.append(f"axis={call.node.integer('axis', 1)}")
        if call.node.integer("block_size"):
            words.append(f"block_size={call.node.integer('block_size')}")
        if call.node.integer("precision"):
            words.append(f"precision={_PRECISION[call.node.integer('precision')]}")
        return f"operators.{function}({', '.join(words)})"

    return emit


QUANTIZATION: dict[str, Emitter] = {
    "QuantizeLinear": _linear("quantize_linear"),
    "DequantizeLinear": _linear("dequantize_linear"),
    "DynamicQuantizeLinear": lambda call: f"operators.dynamic_quantize_linear({call.arg(0)})",
}
