"""Emission of operators that work element by element, make tensors, draw numbers, quantise, transform or sample."""

from __future__ import annotations

import functools
from functools import partial

import numpy as np

from autopipe.backends.torch.emission.call import PRECISIONS, Call, Emitter, called, literal, number, torch_dtype
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
        for place, each in enumerate(call.operands)
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


def _pow(call: Call) -> str:
    base, exponent = call.operand(0).dtype, call.operand(1).dtype
    code = f"torch.pow({call.arg(0)}, {element(call, 1)})"
    return code if base is exponent or (element(call, 1) != call.arg(1) and base.is_floating) else _cast(code, base)


def _cast(code: str, dtype: DType) -> str:
    return f"{code}.to({torch_dtype(dtype)})"


def _mean(call: Call) -> str:
    total = " + ".join(map(call.arg, range(len(call.codes))))
    return f"({total}) / {len(call.codes)}" if len(call.codes) > 1 else total


def _extreme(function: str, bound: str, call: Call) -> str:
    """`torch.maximum(torch.maximum(a, b), c)`; against a known scalar `torch.clamp(a, min=0.0)`."""
    if len(call.codes) == 2:
        for place in (0, 1):
            value = element(call, place)
            if value != call.arg(place):
                return f"torch.clamp({call.arg(1 - place)}, {bound}={value})"
    codes = map(call.arg, range(len(call.codes)))
    return functools.reduce(lambda left, right: f"{function}({left}, {right})", codes)


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
        bounds = {name: call.stated(name, 0.0) for name in ("min", "max") if call.node.has(name)}
    else:
        given = {name: index for name, index in (("min", 1), ("max", 2)) if call.present(index)}
        known = all(call.scalar(index) is not None for index in given.values())
        bounds = {name: str(call.scalar(index)) if known else call.arg(index) for name, index in given.items()}
    return called("torch.clamp", call.arg(0), **bounds) if bounds else call.arg(0)


def _is_inf(call: Call) -> str:
    signs = bool(call.node.integer("detect_negative", 1)), bool(call.node.integer("detect_positive", 1))
    if not any(signs):
        return f"torch.zeros_like({call.arg(0)}, dtype=torch.bool)"
    function = {(True, True): "isinf", (False, True): "isposinf", (True, False): "isneginf"}[signs]
    return f"torch.{function}({call.arg(0)})"


def _shift(call: Call) -> str:
    direction = call.choice("direction", "", ("LEFT", "RIGHT")).lower()
    return f"torch.bitwise_{direction}_shift({call.args(2)})"


def _convert(call: Call) -> str:
    return _cast(call.arg(0), call.result().dtype)


_WIDER = {DType.UINT16: DType.INT32, DType.UINT32: DType.INT64, DType.UINT64: DType.INT64}
"""Where torch lacks arithmetic for an unsigned type: one that has it and holds (of 64 bits: wraps) the same numbers."""


def widened(emit: Emitter, call: Call) -> str:
    """Computes on unsigned integers, for which torch has hardly any arithmetic, in a wider type."""
    wider = [None if value is None else _WIDER.get(value.dtype) for value in call.operands]
    if not any(wider):
        return emit(call)
    pairs = zip(call.codes, wider, strict=True)
    codes = tuple(_cast(code, dtype) if code is not None and dtype else code for code, dtype in pairs)
    code, result = emit(Call.of(call, codes)), call.result().dtype
    return _cast(f"({code})", result) if result in _WIDER else code


_NUMERIC: dict[str, Emitter] = {
    "Add": infix("+"),
    "Sub": infix("-"),
    "Mul": infix("*"),
    "Div": _div,
    "Mod": lambda call: called(
        "torch.fmod" if call.node.integer("fmod") else "torch.remainder", call.arg(0), element(call, 1)
    ),
    "Pow": _pow,
    "Sum": infix("+"),
    "Mean": _mean,
    "Max": partial(_extreme, "torch.maximum", "min"),
    "Min": partial(_extreme, "torch.minimum", "max"),
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
    return called("F.gelu", call.arg(0), approximate='"tanh"' if approximate == "tanh" else None)


def _hard_sigmoid(call: Call) -> str:
    alpha, beta = call.stated("alpha", 0.2), call.stated("beta", 0.5)
    if (alpha, beta) == (number(1 / 6), "0.5"):
        return f"F.hardsigmoid({call.arg(0)})"
    return f"torch.clamp({alpha} * {call.arg(0)} + {beta}, 0.0, 1.0)"


def _prelu(call: Call) -> str:
    data, slope = call.arg(0), call.operand(1)
    channels = call.operand(0).shape[1:2]
    spread = channels + (1,) * (len(call.operand(0).shape) - 2)
    if call.opset < 7 or (channels and (slope.elements == 1 or slope.shape == spread)):
        return f"F.prelu({data}, {call.arg(1)}.reshape(-1))"
    return f"torch.where({data} < 0, {data} * {call.arg(1)}, {data})"


def _stated(function: str, **defaults: float) -> Emitter:
    """`F.elu(x, 1.0)`: operand 0 and float attributes."""
    return lambda call: called(function, call.arg(0), *(call.stated(*each) for each in defaults.items()))


def _selu(call: Call) -> str:
    if call.node.has("alpha") or call.node.has("gamma"):
        alpha, gamma = call.stated("alpha", 1.6732632), call.stated("gamma", 1.050701)
        return f"{gamma} * F.elu({call.arg(0)}, {alpha})"
    return f"F.selu({call.arg(0)})"


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
    value, shape = call.node.number("value"), call.result().shape
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
    (rows, columns), offset = call.result().shape, call.node.integer("k")
    if not offset:
        return f"torch.eye({rows}, {columns}, {_made(call)})"
    return f"torch.ones({rows}, {columns}, {_made(call)}).triu({offset}).tril({offset})"


def _shape(call: Call) -> str:
    shape = call.operand(0).shape
    start, end = call.node.integer("start"), call.node.integer("end", len(shape))
    return f"torch.tensor({list(shape[start:end])}, {_made(call)})"


def _window(function: str) -> Emitter:
    return lambda call: called(
        function, call.scalar(0), f"periodic={bool(call.node.integer('periodic', 1))}", _made(call)
    )


_MODES = {"linear": "bilinear", "bilinear": "bilinear", "nearest": "nearest", "cubic": "bicubic", "bicubic": "bicubic"}
"""ONNX's words, of both spellings it has had, and torch's."""


def _grid_sample(call: Call) -> str:
    mode = _MODES[call.choice("mode", "linear", _MODES)]
    padding = call.choice("padding_mode", "zeros", ("zeros", "border", "reflection"))
    corners = bool(call.node.integer("align_corners"))
    return called("F.grid_sample", call.args(2), mode=repr(mode), padding_mode=repr(padding), align_corners=corners)


def _affine_grid(call: Call) -> str:
    size = call.constant(1)
    assert size is not None, "AffineGrid needs a known size"
    local = (call.operand(0).shape[0], *(int(extent) for extent in size[1:]))
    return called("F.affine_grid", call.arg(0), local, align_corners=bool(call.node.integer("align_corners")))


def _linear(function: str, call: Call) -> str:
    node, precision = call.node, call.node.integer("precision")
    return called(
        f"operators.{function}",
        call.args(2),
        call.optional(2),
        torch_dtype(call.result().dtype),
        axis=node.integer("axis", 1) if call.operand(1).elements > 1 else None,
        block_size=node.integer("block_size") or None,
        precision=torch_dtype(PRECISIONS[precision]) if precision else None,
    )


def _dft(call: Call) -> str:
    length = call.scalar(1) if call.present(1) else None
    flags = {name: call.flag(name) for name in ("inverse", "onesided")}
    return called("operators.dft", call.arg(0), transformed_axis(call), length=length, **flags)


def _stft(call: Call) -> str:
    length = call.scalar(3) if call.present(3) else str(call.operand(2).shape[0])
    onesided = bool(call.node.integer("onesided", 1))
    return called("operators.stft", call.arg(0), call.scalar(1), call.optional(2), length, onesided=onesided)


def _roi_align(call: Call) -> str:
    node = call.node
    half_pixel = node.text("coordinate_transformation_mode", "half_pixel" if call.opset >= 16 else "output_half_pixel")
    return called(
        "operators.roi_align",
        call.args(3),
        size=call.result().shape[2:],
        samples=node.integer("sampling_ratio"),
        scale=call.stated("spatial_scale", 1.0),
        half_pixel=half_pixel == "half_pixel",
        largest=node.text("mode", "avg") == "max",
    )


def _dropout(call: Call) -> str:
    data = call.arg(0)
    both = len(call.results) > 1
    mask = call.results[1] if both else None
    # A number where it is known: an attribute before opset 12, then an operand.
    stated = call.opset < 12 or not call.present(1)
    ratio = call.stated("ratio", 0.5) if stated else call.scalar(1) or call.arg(1)
    if not is_active(call) or ratio == "0.0":
        kind = torch_dtype(DType.BOOL if mask is None else mask.dtype)
        return f"({data}, torch.ones_like({data}, dtype={kind}))" if both else data
    return called(
        "operators.dropout_and_mask" if both else "operators.dropout",
        data,
        ratio,
        call.stream(),
        training=call.arg(2) if call.present(2) and call.constant(2) is None else None,
        mask=torch_dtype(mask.dtype) if mask is not None and mask.dtype is not DType.BOOL else None,
    )


def _drawn(function: str, call: Call, **defaults: float) -> str:
    """Numbers of a distribution whose parameters are float attributes."""
    parameters = (call.stated(*each) for each in defaults.items())
    dtype = torch_dtype(call.result().dtype)
    return called(f"operators.{function}", call.result().shape, *parameters, call.stream(), dtype)


_UNIFORM = partial(_drawn, "uniform", low=0.0, high=1.0)
_NORMAL = partial(_drawn, "normal", mean=0.0, scale=1.0)


ELEMENTWISE: dict[str, Emitter] = {
    **{name: partial(widened, emit) for name, emit in _NUMERIC.items()},
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
    "LeakyRelu": _stated("F.leaky_relu", alpha=0.01),
    "PRelu": _prelu,
    "Elu": _stated("F.elu", alpha=1.0),
    "Celu": _stated("F.celu", alpha=1.0),
    "Selu": _selu,
    "ThresholdedRelu": lambda call: f"F.threshold({call.arg(0)}, {call.stated('alpha', 1.0)}, 0.0)",
    "Shrink": _stated("operators.shrink", lambd=0.5, bias=0.0),
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
    "MelWeightMatrix": lambda call: called("operators.mel_weights", *map(call.scalar, range(5)), _made(call)),
    "GridSample": _grid_sample,
    "AffineGrid": _affine_grid,
    "QuantizeLinear": partial(_linear, "quantize_linear"),
    "DequantizeLinear": partial(_linear, "dequantize_linear"),
    "DynamicQuantizeLinear": lambda call: f"operators.dynamic_quantize_linear({call.arg(0)})",
    "DFT": _dft,
    "STFT": _stft,
    "Det": lambda call: f"torch.linalg.det({call.arg(0)})",
    "RoiAlign": _roi_align,
    "Dropout": _dropout,
    "Bernoulli": lambda call: called(
        "operators.bernoulli", call.arg(0), call.stream(), torch_dtype(call.result().dtype)
    ),
    "RandomUniform": _UNIFORM,
    "RandomUniformLike": _UNIFORM,
    "RandomNormal": _NORMAL,
    "RandomNormalLike": _NORMAL,
    "Multinomial": lambda call: called(
        "operators.multinomial",
        call.arg(0),
        call.result().shape[1],
        call.stream(),
        torch_dtype(call.result().dtype),
    ),
}
