"""Emission of operators that make tensors out of settings."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, literal, number, torch_dtype
from autopipe.ir.graph import DType


def _made(call: Call) -> str:
    """`dtype=torch.float32, device=p.device`."""
    return f"dtype={torch_dtype(call.result().dtype)}, device=p.device"


def _number(call: Call, value: float) -> str:
    dtype = call.result().dtype
    if dtype is DType.BOOL:
        return repr(bool(value))
    if dtype.is_integer:
        return repr(int(value))
    return number(value) if dtype is DType.FLOAT32 else literal(value)


def _filled(call: Call) -> str:
    """The frontend keeps the one element of the tensor attribute `value` as a number."""
    value = call.node.number("value")
    shape = call.result().shape
    if value in (0.0, 1.0):
        return f"torch.{'ones' if value else 'zeros'}({shape}, {_made(call)})"
    return f"torch.full({shape}, {_number(call, value)}, {_made(call)})"


def _constant(call: Call) -> str:
    """A Constant node that was not folded: a scalar or a list in its attributes."""
    for name in ("value_float", "value_int"):
        if call.node.has(name):
            return f"torch.tensor({_number(call, call.node.number(name))}, {_made(call)})"
    values = call.node.numbers("value_floats") or call.node.numbers("value_ints")
    return f"torch.tensor([{', '.join(_number(call, value) for value in values)}], {_made(call)})"


def _range(call: Call) -> str:
    start, limit, step = (call.scalar(index) for index in range(3))
    if call.result().dtype.is_integer:
        ends = limit if (start, step) == ("0", "1") else f"{start}, {limit}, {step}"
        return f"torch.arange({ends}, {_made(call)})"
    # ONNX fixes the number of elements beforehand and rounds each product, torch may count one more or less.
    return f"{start} + torch.arange({call.result().elements}, {_made(call)}) * {step}"


def _eye_like(call: Call) -> str:
    rows, columns = call.result().shape
    offset = call.node.integer("k")
    if not offset:
        return f"torch.eye({rows}, {columns}, {_made(call)})"
    return f"torch.ones({rows}, {columns}, {_made(call)}).triu({offset}).tril({offset})"


def _shape(call: Call) -> str:
    shape = call.operand(0).shape
    start, end = call.node.integer("start"), call.node.integer("end", len(shape))
    return f"torch.tensor({list(shape[start:end])}, {_made(call)})"


def _window(function: str) -> Emitter:
    def emit(call: Call) -> str:
        periodic = bool(call.node.integer("periodic", 1))
        return f"{function}({call.scalar(0)}, periodic={periodic}, {_made(call)})"

    return emit


def _mel_weights(call: Call) -> str:
    settings = ", ".join(str(call.scalar(index)) for index in range(5))
    return f"operators.mel_weights({settings}, {_made(call)})"


GENERATION: dict[str, Emitter] = {
    "ConstantOfShape": _filled,
    "Constant": _constant,
    "Range": _range,
    "EyeLike": _eye_like,
    "Shape": _shape,
    "Size": lambda call: f"torch.tensor({call.operand(0).elements}, {_made(call)})",
    "HannWindow": _window("torch.hann_window"),
    "HammingWindow": _window("operators.hamming_window"),
    "BlackmanWindow": _window("torch.blackman_window"),
    "MelWeightMatrix": _mel_weights,
}
