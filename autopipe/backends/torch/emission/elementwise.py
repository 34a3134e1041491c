"""Emission of operators that work element by element, make tensors, draw numbers, quantise, transform or sample."""

from __future__ import annotations

import functools

import numpy as np

from autopipe.backends.torch.emission.call import PRECISIONS, Call, Emitter, literal, number, torch_dtype
from autopipe.ir.graph import DType
from autopipe.ir.ops.elementwise import is_active, transformed_axis


def element(call: Call, index: int) -> str:
    """An operand's code, or a number where it is a known scalar and another tensor gives the result its shape."""
    value = call.scalar(index)
    if value is None or call.operand(index).dtype is DType.BOOL:
        return call.arg(index)
    shape = call.result().shape
    shaped = any(
        place != index and each is not None and each.shape == shape and call.scalar(place) is None
        for place, each in enumerate(call.signature.operands)
    )
    return value if shaped else call.arg(index)


def infix(symbol: str) -> Emitter:
    """`a + b + c`."""
    return lambda call: f" {symbol} ".join(element(call, index) for index in range(len(call.codes)))


def _function(name: str) -> Emitter:
    """`torch.relu(x)`, of all operands."""
    return lambda call: f"{name}({call.args()})"


def _div(call: Call) -> str:
    if call.result().dtype.is_integer:
        return f'torch.div({call.arg(0)}, {element(call, 1)}, rounding_mode="trunc")'
    return f"{element(call, 0)} / {element(call, 1)}"


def _mod(call: Call) -> str:
    function = "torch.fmod" if call.node.integer("fmod") else "torch.remainder"
    return f"{function}({call.arg(0)}, {element(call, 1)})"


def _pow(call: Call) -> str:
    base, exponent = call.operand(0).dtype, call.operand(1).dtype
    code = f"torch.pow({call.arg(0)}, {element(call, 1)})"
    return code if base is exponent or (element(call, 1) != call.arg(1) and base.is_floating) else _cast(code, base)


def _cast(code: str, dtype: DType) -> str:
    return f"{code}.to({torch_dtype(dtype)})"


def _mean(call: Call) -> str:
    total = " + ".join(map(call.arg, range(len(call.codes))))
    return f"({total}) / {len(call.codes)}" if len(call.codes) > 1 else total


def _extreme(function: str, bound: str) -> Emitter:
    """`torch.maximum(torch.maximum(a, b), c)`; against a known scalar `torch.clamp(a, min=0.0)`."""

    def emit(call: Call) -> str:
        if len(call.codes) == 2:
            for place in (0, 1):
                value = element(call, place)
                if value != call.arg(place):
                    return f"torch.clamp({call.arg(1 - place)}, {bound}={value})"
        codes = map(call.arg, range(len(call.codes)))
        return functools.reduce(lambda left, right: f"{function}({left}, {right})", codes)

    return emit


def _where(call: Call) -> str:
    """One side may be a number: the other is a tensor then, and gives the result its type."""
    codes = [call.arg(1), call.arg(2)]
    for side, other in ((2, 1), (1, 2)):
        value = call.scalar(side)
        shape = np.broadcast_shapes(call.operand(0).shape, call.operand(other).shape)
        if value is not None and shape == call.result().shape and call.operand(side).dtype is not DType.BOOL:
            codes[side - 1] = value
            break
    return f"torch.where({call.arg(0)}, {codes[0]}, {codes[1]})"


def _clip(call: Call) -> str:
    if call.opset < 11:
        bounds = [f"{name}={call.stated(name, 0.0)}" for name in ("min", "max") if call.node.has(name)]
    else:
        given = [(name, index) for name, index in (("min", 1), ("max", 2)) if call.present(index)]
        known = all(call.scalar(index) is not None for _, index in given)
        bounds = [f"{name}={call.scalar(index) if known else call.arg(index)}" for name, index in given]
    return f"torch.clamp({', '.join([call.arg(0), *bounds])})" if bounds else call.arg(0)


def _is_inf(call: Call) -> str:
    negative, positive = call.node.integer("detect_negative", 1), call.node.integer("detect_positive", 1)
    if negative and positive:
        return f"torch.isinf({call.arg(0)})"
    if positive:
        return f"torch.isposinf({call.arg(0)})"
    if negative:
        return f"torch.isneginf({call.arg(0)})"
    return f"torch.zeros_like({call.arg(0)}, dtype=torch.bool)"


def _shift(call: Call) -> str:
    direction = call.choice("direction", "", ("LEFT", "RIGHT")).lower()
    return f"torch.bitwise_{direction}_shift({call.arg(0)}, {call.arg(1)})"


def _convert(call: Call) -> str:
    return _cast(call.arg(0), call.result().dtype)


_WIDER = {DType.UINT16: DType.INT32, DType.UINT32: DType.INT64, DType.UINT64: DType.INT64}
"""Where torch lacks arithmetic for an unsigned type: one that has it and holds (of 64 bits: wraps) the same numbers."""


def widened(emit: Emitter) -> Emitter:
    """Computes on unsigned integers, for which torch has hardly any arithmetic, in a wider type."""

    def emit_widened(call: Call) -> str:
        wider = {
            index: _WIDER[value.dtype]
            for index, value in enumerate(call.signature.operands)
            if value is not None and value.dtype in _WIDER
        }
        if not wider:
            return emit(call)
        codes = tuple(
            _cast(code, wider[index]) if code is not None and index in wider else code
            for index, code in enumerate(call.codes)
        )
        code = emit(Call(call.signature, codes))
        result = call.result().dtype
        return _cast(f"({code})", result) if result in _WIDER else code

    return emit_widened


_NUMERIC: dict[str, Emitter] = {
    "Add": infix("+"),
    "Sub": infix("-"),
    "Mul": infix("*"),
    "Div": _div,
    "Mod": _mod,
    "Pow": _pow,
    "Sum": infix("+"),
    "Mean": _mean,
    "Max": _extreme("torch.maximum", "min"),
    "Min": _extreme("torch.minimum", "max"),
    "Equal": infix("=="),
    "Greater": infix(">"),
    "GreaterOrEqual": infix(">="),
    "Less": infix("<"),
    "LessOrEqual": infix("<="),
    "BitShift": _shift,
    "BitwiseAnd": _function("torch.bitwise_and"),
    "BitwiseOr": _function("torch.bitwise_or"),
    "BitwiseXor": _function("torch.bitwise_xor"),
    "BitwiseNot": _function("torch.bitwise_not"),
}


def _gelu(call: Call) -> str:
    approximate = call.choice("approximate", "none", ("none", "tanh"))
    return f'F.gelu({call.arg(0)}, approximate="tanh")' if approximate == "tanh" else f"F.gelu({call.arg(0)})"


def _hard_sigmoid(call: Call) -> str:
    if (call.stated("alpha", 0.2), call.stated("beta", 0.5)) == (number(1 / 6), "0.5"):
        return f"F.hardsigmoid({call.arg(0)})"
    return f"torch.clamp({call.stated('alpha', 0.2)} * {call.arg(0)} + {call.stated('beta', 0.5)}, 0.0, 1.0)"


def _prelu(call: Call) -> str:
    data, slope = call.arg(0), call.operand(1)
    channels = call.operand(0).shape[1:2]
    spread = channels + (1,) * (len(call.operand(0).shape) - 2)
    if call.opset < 7 or (channels and (slope.elements == 1 or slope.shape == spread)):
        return f"F.prelu({data}, {call.arg(1)}.reshape(-1))"
    return f"torch.where({data} < 0, {data} * {call.arg(1)}, {data})"


def _elu(function: str, default: float) -> Emitter:
    return lambda call: f"{function}({call.arg(0)}, {call.stated('alpha', default)})"


def _selu(call: Call) -> str:
    if call.node.has("alpha") or call.node.has("gamma"):
        alpha, gamma = call.stated("alpha", 1.6732632), call.stated("gamma", 1.050701)
        return f"{gamma} * F.elu({call.arg(0)}, {alpha})"
    return f"F.selu({call.arg(0)})"


def _shrink(call: Call) -> str:
    return f"operators.shrink({call.arg(0)}, {call.stated('lambd', 0.5)}, {call.stated('bias', 0.0)})"


def _swish(call: Call) -> str:
    alpha, data = call.stated("alpha", 1.0), call.arg(0)
    return f"F.silu({data})" if alpha == "1.0" else f"{data} * torch.sigmoid({alpha} * {data})"


_TORCH = {
    "Abs": "abs", "Reciprocal": "reciprocal", "Sqrt": "sqrt", "Exp": "exp", "Log": "log",
    "Sin": "sin", "Cos": "cos", "Tan": "tan", "Asin": "asin", "Acos": "acos", "Atan": "atan",
    "Sinh": "sinh", "Cosh": "cosh", "Asinh": "asinh", "Acosh": "acosh", "Atanh": "atanh", "Erf": "erf",
    "Ceil": "ceil", "Floor": "floor", "Round": "round", "Sign": "sign",
    "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh",
}  # fmt: skip


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


_MODES = {"linear": "bilinear", "bilinear": "bilinear", "nearest": "nearest", "cubic": "bicubic", "bicubic": "bicubic"}
"""ONNX's words, of both spellings it has had, and torch's."""


def _grid_sample(call: Call) -> str:
    mode = _MODES[call.choice("mode", "linear", _MODES)]
    padding = call.choice("padding_mode", "zeros", ("zeros", "border", "reflection"))
    corners = bool(call.node.integer("align_corners"))
    settings = f"mode={mode!r}, padding_mode={padding!r}, align_corners={corners}"
    return f"F.grid_sample({call.arg(0)}, {call.arg(1)}, {settings})"


def _affine_grid(call: Call) -> str:
    size = call.constant(1)
    assert size is not None, "AffineGrid needs a known size"
    local = (call.operand(0).shape[0], *(int(extent) for extent in size[1:]))
    return f"F.affine_grid({call.arg(0)}, {local}, align_corners={bool(call.node.integer('align_corners'))})"


def _linear(function: str) -> Emitter:
    def emit(call: Call) -> str:
        operands = f"{call.arg(0)}, {call.arg(1)}, {call.optional(2)}"
        words = [operands, torch_dtype(call.result().dtype)]
        if call.operand(1).elements > 1:
            words.append(f"axis={call.node.integer('axis', 1)}")
        if call.node.integer("block_size"):
            words.append(f"block_size={call.node.integer('block_size')}")
        if call.node.integer("precision"):
            words.append(f"precision={torch_dtype(PRECISIONS[call.node.integer('precision')])}")
        return f"operators.{function}({', '.join(words)})"

    return emit


def _dft(call: Call) -> str:
    axis = transformed_axis(call.signature)
    settings = [call.arg(0), str(axis)]
    if call.present(1):
        settings.append(f"length={call.scalar(1)}")
    settings += [f"{name}=True" for name in ("inverse", "onesided") if call.node.integer(name)]
    return f"operators.dft({', '.join(settings)})"


def _stft(call: Call) -> str:
    window = call.optional(2)
    length = call.scalar(3) if call.present(3) else str(call.operand(2).shape[0])
    onesided = bool(call.node.integer("onesided", 1))
    return f"operators.stft({call.arg(0)}, {call.scalar(1)}, {window}, {length}, onesided={onesided})"


def _roi_align(call: Call) -> str:
    node = call.node
    half_pixel = node.text("coordinate_transformation_mode", "half_pixel" if call.opset >= 16 else "output_half_pixel")
    words = [
        *(call.arg(index) for index in range(3)),
        f"size={call.result().shape[2:]}",
        f"samples={node.integer('sampling_ratio')}",
        f"scale={call.stated('spatial_scale', 1.0)}",
        f"half_pixel={half_pixel == 'half_pixel'}",
        f"largest={node.text('mode', 'avg') == 'max'}",
    ]
    return f"operators.roi_align({', '.join(words)})"


def _dropout(call: Call) -> str:
    data = call.arg(0)
    both = len(call.signature.results) > 1
    mask = call.signature.results[1] if both else None
    # A number where it is known: an attribute before opset 12, then an operand.
    stated = call.opset < 12 or not call.present(1)
    ratio = call.stated("ratio", 0.5) if stated else call.scalar(1) or call.arg(1)
    if not is_active(call.signature) or ratio == "0.0":
        kind = torch_dtype(DType.BOOL if mask is None else mask.dtype)
        return f"({data}, torch.ones_like({data}, dtype={kind}))" if both else data
    words = [data, ratio, call.stream()]
    if call.present(2) and call.constant(2) is None:
        words.append(f"training={call.arg(2)}")
    if not both:
        return f"operators.dropout({', '.join(words)})"
    if mask is not None and mask.dtype is not DType.BOOL:
        words.append(f"mask={torch_dtype(mask.dtype)}")
    return f"operators.dropout_and_mask({', '.join(words)})"


def _bernoulli(call: Call) -> str:
    return f"operators.bernoulli({call.arg(0)}, {call.stream()}, {torch_dtype(call.result().dtype)})"


def _drawn(function: str, first: tuple[str, float], second: tuple[str, float]) -> Emitter:
    """Numbers of a distribution with two parameters: attributes with their defaults."""

    def emit(call: Call) -> str:
        result = call.result()
        settings = f"{call.stated(*first)}, {call.stated(*second)}, {call.stream()}, {torch_dtype(result.dtype)}"
        return f"operators.{function}({result.shape}, {settings})"

    return emit


_UNIFORM = _drawn("uniform", ("low", 0.0), ("high", 1.0))
_NORMAL = _drawn("normal", ("mean", 0.0), ("scale", 1.0))


def _multinomial(call: Call) -> str:
    count, dtype = call.result().shape[1], torch_dtype(call.result().dtype)
    return f"operators.multinomial({call.arg(0)}, {count}, {call.stream()}, {dtype})"


ELEMENTWISE: dict[str, Emitter] = {
    **{name: widened(emit) for name, emit in _NUMERIC.items()},
    "And": infix("&"),
    "Or": infix("|"),
    "Xor": infix("^"),
    "Not": _function("torch.logical_not"),
    "IsNaN": _function("torch.isnan"),
    "IsInf": _is_inf,
    "Where": _where,
    "Clip": _clip,
    "Cast": _convert,
    "CastLike": _convert,
    "BitCast": lambda call: f"{call.arg(0)}.view({torch_dtype(call.result().dtype)})",
    **{name: _function(f"torch.{function}") for name, function in _TORCH.items()},
    "Neg": lambda call: f"-{call.arg(0)}",
    "Gelu": _gelu,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _function("F.hardswish"),
    "LeakyRelu": lambda call: f"F.leaky_relu({call.arg(0)}, {call.stated('alpha', 0.01)})",
    "PRelu": _prelu,
    "Elu": _elu("F.elu", 1.0),
    "Celu": _elu("F.celu", 1.0),
    "Selu": _selu,
    "ThresholdedRelu": lambda call: f"F.threshold({call.arg(0)}, {call.stated('alpha', 1.0)}, 0.0)",
    "Shrink": _shrink,
    "Softplus": _function("F.softplus"),
    "Softsign": _function("F.softsign"),
    "Mish": _function("F.mish"),
    "Swish": _swish,
    "SwiGLU": lambda call: f"{_swish(call)} * {call.arg(1)}",
    "ConstantOfShape": _filled,
    "Constant": _constant,
    "Range": _range,
    "EyeLike": _eye_like,
    "Shape": _shape,
    "Size": lambda call: f"torch.tensor({call.operand(0).elements}, {_made(call)})",
    "HannWindow": _window("torch.hann_window"),
    "HammingWindow": _window("operators.hamming_window"),
    "BlackmanWindow": _window("torch.blackman_window"),
    "MelWeightMatrix": lambda call: (
        f"operators.mel_weights({', '.join(str(call.scalar(index)) for index in range(5))}, {_made(call)})"
    ),
    "GridSample": _grid_sample,
    "AffineGrid": _affine_grid,
    "QuantizeLinear": _linear("quantize_linear"),
    "DequantizeLinear": _linear("dequantize_linear"),
    "DynamicQuantizeLinear": lambda call: f"operators.dynamic_quantize_linear({call.arg(0)})",
    "DFT": _dft,
    "STFT": _stft,
    "Det": lambda call: f"torch.linalg.det({call.arg(0)})",
    "RoiAlign": _roi_align,
    "Dropout": _dropout,
    "Bernoulli": _bernoulli,
    "RandomUniform": _UNIFORM,
    "RandomUniformLike": _UNIFORM,
    "RandomNormal": _NORMAL,
    "RandomNormalLike": _NORMAL,
    "Multinomial": _multinomial,
}
