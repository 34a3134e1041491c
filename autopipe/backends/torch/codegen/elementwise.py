"""Emitters (functions that return the Python code of one use of an operator) for elementwise
operators, and for operators that create tensors, generate random numbers, cast, quantize, transform
or sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from autopipe.backends.torch.codegen.call import (
    Call,
    CodeEmitter,
    call_code,
    common_type_emitter,
    float_literal,
    python_literal,
    template_emitter,
    torch_dtype,
)
from autopipe.ir.graph import DType
from autopipe.ir.ops.attention import DTYPE_BY_ONNX_CODE
from autopipe.ir.ops.elementwise import dft_axis, may_drop_elements


def emit_cast(call: Call) -> str:
    """Return the code of a Cast or CastLike between any two types."""
    node = call.node
    source = call.operand(0).dtype
    code = f"operators.from_float4({call.arg(0)})" if source is DType.FLOAT4E2M1 else call.arg(0)
    saturates = bool(node.integer("saturate", 1))
    return cast_code(
        code,
        call.result().dtype,
        saturates,
        call.text_attribute("round_mode", "up", ("up", "down", "nearest")),
    )


def cast_code(code: str, dtype: DType, saturate: bool = True, rounding: str = "up") -> str:
    """Return code that casts `code` to the type `dtype`. `saturate` and `rounding` are the
    attributes `saturate` and `round_mode` of Cast, which affect 8-bit floating-point types only.
    """
    kept = None if saturate else False
    if dtype is DType.FLOAT4E2M1:
        return f"operators.to_float4({code})"
    if dtype is DType.FLOAT8E8M0:
        return call_code(
            "operators.to_exponent",
            code,
            None if rounding == "up" else repr(rounding),
            saturate=kept,
        )
    if dtype.is_float8:
        return call_code("operators.to_float8", code, torch_dtype(dtype), saturate=kept)
    if dtype.packed_bits:
        return call_code("operators.wrapped", code, dtype.packed_bits, dtype.torch_name == "int8")
    return f"{code}.to({torch_dtype(dtype)})"


def emit_quantize_linear(call: Call) -> str:
    """Return the code of a QuantizeLinear."""
    target = call.result().dtype
    if target is DType.FLOAT4E2M1 or target.is_float8:
        ratio = _linear_quantization_code("scaled_down", call, call.args(2))
        return cast_code(ratio, target, bool(call.node.integer("saturate", 1)))
    limits = None
    if target.packed_bits:
        lowest = -(1 << target.packed_bits - 1) if target.torch_name == "int8" else 0
        limits = lowest, lowest + (1 << target.packed_bits) - 1
    return _linear_quantization_code(
        "quantize_linear", call, call.args(2), call.optional(2), call.dtype, limits=limits
    )


def emit_dequantize_linear(call: Call) -> str:
    """Return the code of a DequantizeLinear."""
    wide: Callable[[str], str] = "operators.from_float4({})".format
    plain = call.operand(0).dtype is not DType.FLOAT4E2M1
    point = call.optional(2) if plain or not call.present(2) else wide(call.arg(2))
    return _linear_quantization_code(
        "dequantize_linear",
        call,
        call.arg(0) if plain else wide(call.arg(0)),
        call.arg(1),
        point,
        call.dtype,
    )


def _linear_quantization_code(
    function: str, call: Call, *operands: object, **settings: object
) -> str:
    """Return the call of the runtime's function `function` with `operands` and `settings`, and with
    the axis, the block size and the precision of the scales from the node's attributes.
    """
    node = call.node
    precision = call.node.integer("precision")
    return call_code(
        f"operators.{function}",
        *operands,
        axis=node.integer("axis", 1) if call.operand(1).elements > 1 else None,
        block_size=node.integer("block_size") or None,
        precision=torch_dtype(DTYPE_BY_ONNX_CODE[precision]) if precision else None,
        **settings,
    )


def emit_unpack(call: Call) -> str:
    """Return the code of an Unpack, which splits the bytes of an operand into elements of less than
    a byte.
    """
    dtype = call.result().dtype
    settings = dtype.packed_bits, dtype.torch_name == "int8", call.result().shape
    return call_code("operators.unpack", call.arg(0), *settings)


def scalar_or_operand_code(call: Call, index: int) -> str:
    """Return the code of operand `index`. A constant with one element becomes a literal, unless it
    is Boolean. This requires another operand of the result's shape that does not become a literal,
    so that the code still gives a tensor of that shape.
    """
    value = call.scalar(index)
    if value is None or call.operand(index).dtype is DType.BOOL:
        return call.arg(index)
    shape = call.result().shape
    shaped = any(
        place != index and each is not None and each.shape == shape and call.scalar(place) is None
        for place, each in enumerate(call.operands)
    )
    return value if shaped else call.arg(index)


_MAX_NESTED_OPERANDS = 32
"""Maximum number of operands in one nested expression, because Python's parser limits the depth of
an expression.
"""


def infix_emitter(symbol: str) -> CodeEmitter:
    """Return an emitter that writes the infix operator `symbol` between all operands, such as `a +
    b + c`.
    """
    return lambda call: f" {symbol} ".join(
        scalar_or_operand_code(call, index) for index in range(len(call.codes))
    )


def _emit_div(call: Call) -> str:
    if call.result().dtype.is_integer:
        return f'torch.div({call.arg(0)}, {scalar_or_operand_code(call, 1)}, rounding_mode="trunc")'
    return infix_emitter("/")(call)


def _emit_pow(call: Call) -> str:
    base = call.operand(0).dtype
    exponent = call.operand(1).dtype
    code = f"torch.pow({call.arg(0)}, {scalar_or_operand_code(call, 1)})"
    return (
        code
        if base is exponent or (scalar_or_operand_code(call, 1) != call.arg(1) and base.is_floating)
        else _conversion_code(code, base)
    )


def _conversion_code(code: str, dtype: DType) -> str:
    """Return code that converts the tensor `code` to the type `dtype` by torch's rules."""
    return f"{code}.to({torch_dtype(dtype)})"


def _emit_sum(call: Call) -> str:
    """Return the code of a Sum: `a + b`, or `sum((a, b, …))` for more than `_MAX_NESTED_OPERANDS`
    operands.
    """
    if len(call.codes) <= _MAX_NESTED_OPERANDS:
        return infix_emitter("+")(call)
    return _sum_of_many_code(call)


def _sum_of_many_code(call: Call) -> str:
    """Return the code of the sum of all operands, without a nested expression."""
    return f"sum(({', '.join(map(call.arg, range(len(call.codes))))}))"


def _emit_mean(call: Call) -> str:
    if len(call.codes) > _MAX_NESTED_OPERANDS:
        return f"{_sum_of_many_code(call)} / {len(call.codes)}"
    total = " + ".join(map(call.arg, range(len(call.codes))))
    return f"({total}) / {len(call.codes)}" if len(call.codes) > 1 else total


def _emit_maximum_or_minimum(function: str, bound: str, call: Call) -> str:
    """Return the code of a Max or Min: nested calls such as `torch.maximum(torch.maximum(a, b),
    c)`. With two operands of which one is a constant scalar, return `torch.clamp(a, min=0.0)` (for
    Max); `bound` is the name of the argument.
    """
    if len(call.codes) == 2:
        for place in (0, 1):
            value = scalar_or_operand_code(call, place)
            if value != call.arg(place):
                return f"torch.clamp({call.arg(1 - place)}, {bound}={value})"
    codes = [call.arg(index) for index in range(len(call.codes))]
    # More than `_MAX_NESTED_OPERANDS` operands are first combined by a balanced tree of calls,
    # because Python's parser limits the depth of an expression.
    while len(codes) > _MAX_NESTED_OPERANDS:
        pairs = [codes[index : index + 2] for index in range(0, len(codes), 2)]
        codes = [
            f"{function}({pair[0]}, {pair[1]})" if len(pair) == 2 else pair[0] for pair in pairs
        ]
    return functools.reduce(lambda left, right: f"{function}({left}, {right})", codes)


def _emit_where(call: Call) -> str:
    """Return the call of `torch.where`. At most one of the two alternatives becomes a literal; the
    other one is a tensor and determines the type of the result.
    """
    codes = [call.arg(1), call.arg(2)]
    for side, other in ((2, 1), (1, 2)):
        value = call.scalar(side)
        shape = np.broadcast_shapes(call.operand(0).shape, call.operand(other).shape)
        if (
            value is not None
            and shape == call.result().shape
            and call.operand(side).dtype is not DType.BOOL
        ):
            codes[side - 1] = value
            break
    return call_code("torch.where", call.arg(0), *codes)


def _emit_clip(call: Call) -> str:
    if call.opset < 11:
        bounds = {
            name: call.float_attribute(name, 0.0) for name in ("min", "max") if call.node.has(name)
        }
    else:
        given = {name: index for name, index in (("min", 1), ("max", 2)) if call.present(index)}
        known = all(call.scalar(index) is not None for index in given.values())
        bounds = {
            name: str(call.scalar(index)) if known else call.arg(index)
            for name, index in given.items()
        }
    return call_code("torch.clamp", call.arg(0), **bounds) if bounds else call.arg(0)


def _emit_is_inf(call: Call) -> str:
    signs = (
        bool(call.node.integer("detect_negative", 1)),
        bool(call.node.integer("detect_positive", 1)),
    )
    if not any(signs):
        return f"torch.zeros_like({call.arg(0)}, dtype=torch.bool)"
    function = {(True, True): "isinf", (False, True): "isposinf", (True, False): "isneginf"}[signs]
    return f"torch.{function}({call.arg(0)})"


def _emit_bit_shift(call: Call) -> str:
    direction = call.text_attribute("direction", "", ("LEFT", "RIGHT")).lower()
    return f"torch.bitwise_{direction}_shift({call.args(2)})"


_WIDER_TYPE = {DType.UINT16: DType.INT32, DType.UINT32: DType.INT64, DType.UINT64: DType.INT64}
"""Wider substitute for each unsigned type for which torch lacks arithmetic. int64 replaces uint64,
whose values from 2^63 on wrap around.
"""


def emit_in_wider_type(emit: CodeEmitter, call: Call) -> str:
    """Return the code of the emitter `emit`, with operands of the types in `_WIDER_TYPE` cast to
    their substitutes, because torch lacks most arithmetic on unsigned integers. A result of such a
    type is cast back.
    """
    wider = [None if value is None else _WIDER_TYPE.get(value.dtype) for value in call.operands]
    if not any(wider):
        return emit(call)
    pairs = zip(call.codes, wider, strict=True)
    codes = tuple(
        _conversion_code(code, dtype) if code is not None and dtype else code
        for code, dtype in pairs
    )
    code = emit(replace(call, codes=codes))
    result = call.result().dtype
    return _conversion_code(f"({code})", result) if result in _WIDER_TYPE else code


_NUMERIC_EMITTERS: dict[str, CodeEmitter] = {
    "Add": infix_emitter("+"),
    "Sub": infix_emitter("-"),
    "Mul": infix_emitter("*"),
    "Div": _emit_div,
    "Mod": lambda call: call_code(
        "torch.fmod" if call.node.integer("fmod") else "torch.remainder",
        call.arg(0),
        scalar_or_operand_code(call, 1),
    ),
    "Pow": _emit_pow,
    "Sum": _emit_sum,
    "Mean": _emit_mean,
    "Max": partial(_emit_maximum_or_minimum, "torch.maximum", "min"),
    "Min": partial(_emit_maximum_or_minimum, "torch.minimum", "max"),
    "Equal": infix_emitter("=="),
    "Greater": infix_emitter(">"),
    "GreaterOrEqual": infix_emitter(">="),
    "Less": infix_emitter("<"),
    "LessOrEqual": infix_emitter("<="),
    "BitShift": _emit_bit_shift,
    "BitwiseAnd": template_emitter("torch.bitwise_and({0}, {1})"),
    "BitwiseOr": template_emitter("torch.bitwise_or({0}, {1})"),
    "BitwiseXor": template_emitter("torch.bitwise_xor({0}, {1})"),
    "BitwiseNot": template_emitter("torch.bitwise_not({0})"),
}


def _emit_gelu(call: Call) -> str:
    approximate = call.text_attribute("approximate", "none", ("none", "tanh"))
    return call_code("F.gelu", call.arg(0), approximate='"tanh"' if approximate == "tanh" else None)


def _emit_hard_sigmoid(call: Call) -> str:
    alpha = call.float_attribute("alpha", 0.2)
    beta = call.float_attribute("beta", 0.5)
    if (alpha, beta) == (float_literal(1 / 6), "0.5"):
        return f"F.hardsigmoid({call.arg(0)})"
    return f"torch.clamp({alpha} * {call.arg(0)} + {beta}, 0.0, 1.0)"


def _emit_prelu(call: Call) -> str:
    shape = call.operand(0).shape
    slope = call.operand(1)
    spread = shape[1:2] + (1,) * (len(shape) - 2)
    if call.opset < 7 or (shape[1:] and (slope.elements == 1 or slope.shape == spread)):
        return f"F.prelu({call.arg(0)}, {call.arg(1)}.reshape(-1))"
    return template_emitter("torch.where({0} < 0, {0} * {1}, {0})")(call)


_SCALED_ELU = template_emitter("{gamma} * F.elu({0}, {alpha})", alpha=1.6732632, gamma=1.050701)


def _emit_swish(call: Call) -> str:
    return (
        f"F.silu({call.arg(0)})"
        if (alpha := _swish_alpha_literal(call)) == "1.0"
        else f"F.silu({alpha} * {call.arg(0)}) / {alpha}"
    )


def _swish_alpha_literal(call: Call) -> str:
    """Return the literal of α for the form silu(α x) / α of x · sigmoid(α x), for which autograd
    saves only one tensor. An α of 0 is replaced by 1e-6, because the form divides by α.
    """
    return call.float_attribute("alpha", 1.0) if call.node.number("alpha", 1.0) else "1e-6"


def _emit_swiglu(call: Call) -> str:
    alpha = _swish_alpha_literal(call)
    return call_code(
        "operators.gated", call.args(2), '"silu"', alpha=None if alpha == "1.0" else alpha
    )


_SAME_NAME_IN_TORCH = (
    "Abs",
    "Reciprocal",
    "Sqrt",
    "Exp",
    "Log",
    "Sin",
    "Cos",
    "Tan",
    "Asin",
    "Acos",
    "Atan",
    "Sinh",
    "Cosh",
    "Asinh",
    "Acosh",
    "Atanh",
    "Erf",
    "Ceil",
    "Floor",
    "Round",
    "Sign",
    "Relu",
    "Sigmoid",
    "Tanh",
    "IsNaN",
)
"""Operators whose function in `torch` has the operator's name in lower case."""


def _new_tensor_arguments(call: Call) -> str:
    """Return the keyword arguments for the creation of the result: `dtype=torch.float32,
    device=p.device`.
    """
    return f"dtype={call.dtype}, device=p.device"


def _number_literal(call: Call, value: float) -> str:
    """Return the literal of `value` in the element type of the result."""
    dtype = call.result().dtype
    if dtype is DType.BOOL:
        return repr(bool(value))
    if dtype.is_integer:
        return repr(int(value))
    return float_literal(value) if dtype is DType.FLOAT32 else python_literal(value)


def _emit_constant_of_shape(call: Call) -> str:
    """Return the code of a ConstantOfShape. The frontend has stored the only element of its tensor
    attribute `value` as a number.
    """
    value = call.node.number("value")
    shape = call.result().shape
    if value in (0.0, 1.0):
        return f"torch.{'ones' if value else 'zeros'}({shape}, {_new_tensor_arguments(call)})"
    return f"torch.full({shape}, {_number_literal(call, value)}, {_new_tensor_arguments(call)})"


def _emit_constant(call: Call) -> str:
    """Return the code of a Constant node that remains in the graph: a scalar or a list of numbers
    from its attributes.
    """
    for name in ("value_float", "value_int"):
        if call.node.has(name):
            number = _number_literal(call, call.node.number(name))
            return f"torch.full((), {number}, {_new_tensor_arguments(call)})"
    values = call.node.numbers("value_floats") or call.node.numbers("value_ints")
    return _number_list_code(call, values)


def _emit_range(call: Call) -> str:
    start, limit, step = (call.scalar(index) for index in range(3))
    if call.result().dtype.is_integer:
        ends = limit if (start, step) == ("0", "1") else f"{start}, {limit}, {step}"
        return f"torch.arange({ends}, {_new_tensor_arguments(call)})"
    # The code computes each element as ONNX does: first the number of elements, then start + index
    # · step. `torch.arange` with a step could return one element more or less.
    return (
        f"{start} + torch.arange({call.result().elements}, {_new_tensor_arguments(call)}) * {step}"
    )


def _emit_eye_like(call: Call) -> str:
    (rows, columns) = call.result().shape
    offset = call.node.integer("k")
    if not offset:
        return f"torch.eye({rows}, {columns}, {_new_tensor_arguments(call)})"
    ones = f"torch.ones({rows}, {columns}, {_new_tensor_arguments(call)})"
    return f"{ones}.triu({offset}).tril({offset})"


def _emit_shape(call: Call) -> str:
    extents = call.operand(0).shape[
        call.node.integer("start") : call.node.integer("end", call.rank)
    ]
    return _number_list_code(call, extents)


def _number_list_code(call: Call, values: Sequence[float]) -> str:
    """Return the code of a one-dimensional tensor with the elements `values`."""
    numbers = ", ".join(_number_literal(call, value) for value in values)
    return f"operators.listed([{numbers}], {_new_tensor_arguments(call)})"


def _emit_window_function(function: str, call: Call) -> str:
    return call_code(
        function,
        call.scalar(0),
        f"periodic={bool(call.node.integer('periodic', 1))}",
        _new_tensor_arguments(call),
    )


_INTERPOLATION_MODES = {
    "linear": "bilinear",
    "bilinear": "bilinear",
    "nearest": "nearest",
    "cubic": "bicubic",
    "bicubic": "bicubic",
}
"""torch's interpolation mode by ONNX's name. ONNX has renamed the modes, so both names occur in
files.
"""


def _emit_grid_sample(call: Call) -> str:
    mode = _INTERPOLATION_MODES[call.text_attribute("mode", "linear", _INTERPOLATION_MODES)]
    padding = call.text_attribute("padding_mode", "zeros", ("zeros", "border", "reflection"))
    corners = bool(call.node.integer("align_corners"))
    return call_code(
        "F.grid_sample",
        call.args(2),
        mode=repr(mode),
        padding_mode=repr(padding),
        align_corners=corners,
    )


def _emit_affine_grid(call: Call) -> str:
    size = (call.operand(0).shape[0], *call.integers(1)[1:])
    return call_code(
        "F.affine_grid", call.arg(0), size, align_corners=bool(call.node.integer("align_corners"))
    )


def _emit_dft(call: Call) -> str:
    length = call.scalar(1) if call.present(1) else None
    flags = {name: call.flag(name) for name in ("inverse", "onesided")}
    return call_code("operators.dft", call.arg(0), dft_axis(call), length=length, **flags)


def _emit_stft(call: Call) -> str:
    length = call.scalar(3) if call.present(3) else str(call.operand(2).shape[0])
    onesided = bool(call.node.integer("onesided", 1))
    return call_code(
        "operators.stft", call.arg(0), call.scalar(1), call.optional(2), length, onesided=onesided
    )


def _emit_roi_align(call: Call) -> str:
    node = call.node
    half_pixel = node.text(
        "coordinate_transformation_mode", "half_pixel" if call.opset >= 16 else "output_half_pixel"
    )
    return call_code(
        "operators.roi_align",
        call.args(3),
        size=call.result().shape[2:],
        samples=node.integer("sampling_ratio"),
        scale=call.float_attribute("spatial_scale", 1.0),
        half_pixel=half_pixel == "half_pixel",
        largest=node.text("mode", "avg") == "max",
    )


def _emit_max_roi_pool(call: Call) -> str:
    size = call.result().shape[2:]
    scale = call.float_attribute("spatial_scale", 1.0)
    return call_code("operators.max_roi_pool", call.args(2), size=size, scale=scale)


def _non_max_suppression_code(call: Call, most: int, slot: int) -> str:
    """Return the call of the runtime's non-maximum suppression, which selects at most `most` boxes
    per image and class. The operand with index `slot` is the maximum overlap, and the next operand
    is the minimum score.
    """
    overlap, least = (
        (call.scalar(at) or call.arg(at)) if call.present(at) else None for at in (slot, slot + 1)
    )
    corners = None if call.node.integer("center_point_box") else True
    return call_code(
        "operators.suppressed", call.args(2), most, overlap or "0.0", least, corners=corners
    )


def _emit_non_max_suppression(call: Call) -> str:
    """Return the code of a NonMaxSuppression: the rows [image, class, box] of the selected boxes.
    Their number is the size of the result's first dimension.
    """
    most = min(max(call.integers(2), default=0), call.operand(1).shape[-1])
    return call_code(
        "operators.rows_kept", _non_max_suppression_code(call, most, 3), call.result().shape[0]
    )


def _emit_dropout(call: Call) -> str:
    data = call.arg(0)
    both = len(call.results) > 1
    mask = call.results[1] if both else None
    # The ratio of Dropout is an attribute before opset 12, and an operand from opset 12 on.
    stated = call.opset < 12 or not call.present(1)
    ratio = call.float_attribute("ratio", 0.5) if stated else call.scalar(1) or call.arg(1)
    if not may_drop_elements(call) or ratio == "0.0":
        kind = torch_dtype(DType.BOOL if mask is None else mask.dtype)
        return f"({data}, torch.ones_like({data}, dtype={kind}))" if both else data
    return call_code(
        "operators.dropout_and_mask" if both else "operators.dropout",
        data,
        ratio,
        call.stream(),
        training=call.arg(2) if call.present(2) and call.constant(2) is None else "p.training",
        mask=torch_dtype(mask.dtype) if mask is not None and mask.dtype is not DType.BOOL else None,
    )


def _emit_random_draw(function: str, call: Call, **defaults: float) -> str:
    """Return the call of the runtime's function `function`, which draws random numbers. `defaults`
    has the float attributes that are its parameters, with their default values.
    """
    parameters = (call.float_attribute(*each) for each in defaults.items())
    return call_code(
        f"operators.{function}", call.result().shape, *parameters, call.stream(), call.dtype
    )


_emit_uniform = partial(_emit_random_draw, "uniform", low=0.0, high=1.0)
_emit_normal = partial(_emit_random_draw, "normal", mean=0.0, scale=1.0)


ELEMENTWISE: dict[str, CodeEmitter] = {
    **{name: partial(emit_in_wider_type, emit) for name, emit in _NUMERIC_EMITTERS.items()},
    **{name: template_emitter(f"torch.{name.lower()}({{0}})") for name in _SAME_NAME_IN_TORCH},
    "And": infix_emitter("&"),
    "Or": infix_emitter("|"),
    "Xor": infix_emitter("^"),
    "Not": template_emitter("torch.logical_not({0})"),
    "IsInf": _emit_is_inf,
    "Where": _emit_where,
    "Clip": _emit_clip,
    **dict.fromkeys(("Cast", "CastLike"), emit_cast),
    "BitCast": lambda call: f"{call.arg(0)}.view({call.dtype})",
    "Neg": template_emitter("-{0}"),
    "Gelu": _emit_gelu,
    "HardSigmoid": _emit_hard_sigmoid,
    "HardSwish": template_emitter("F.hardswish({0})"),
    "LeakyRelu": template_emitter("F.leaky_relu({0}, {alpha})", alpha=0.01),
    "PRelu": _emit_prelu,
    "Elu": template_emitter("F.elu({0}, {alpha})", alpha=1.0),
    "Celu": template_emitter("F.celu({0}, {alpha})", alpha=1.0),
    "Selu": lambda call: (
        _SCALED_ELU(call)
        if call.node.has("alpha") or call.node.has("gamma")
        else f"F.selu({call.arg(0)})"
    ),
    "ThresholdedRelu": template_emitter("F.threshold({0}, {alpha}, 0.0)", alpha=1.0),
    "Shrink": template_emitter("operators.shrink({0}, {lambd}, {bias})", lambd=0.5, bias=0.0),
    "Softplus": template_emitter("F.softplus({0})"),
    "Softsign": template_emitter("F.softsign({0})"),
    "Mish": template_emitter("F.mish({0})"),
    "Swish": _emit_swish,
    "SwiGLU": _emit_swiglu,
    "autopipe.GatedUnit": lambda call: call_code(
        "operators.gated", call.args(2), repr(call.node.text("activation"))
    ),
    "ConstantOfShape": _emit_constant_of_shape,
    "Constant": _emit_constant,
    "Range": _emit_range,
    "autopipe.StopGradient": template_emitter("{0}.detach()"),
    "autopipe.Bounded": lambda call: call_code(
        "operators.bounded",
        call.arg(0),
        str(call.node.integer("most")),
        repr(call.node.text("title")),
    ),
    "EyeLike": _emit_eye_like,
    "Shape": _emit_shape,
    "Size": lambda call: (
        f"torch.full((), {call.operand(0).elements}, {_new_tensor_arguments(call)})"
    ),
    "HannWindow": partial(_emit_window_function, "torch.hann_window"),
    "HammingWindow": partial(_emit_window_function, "operators.hamming_window"),
    "BlackmanWindow": partial(_emit_window_function, "torch.blackman_window"),
    "MelWeightMatrix": lambda call: call_code(
        "operators.mel_weights", *map(call.scalar, range(5)), _new_tensor_arguments(call)
    ),
    "GridSample": common_type_emitter(_emit_grid_sample),
    "AffineGrid": _emit_affine_grid,
    "QuantizeLinear": emit_quantize_linear,
    "DequantizeLinear": emit_dequantize_linear,
    "autopipe.Unpack": emit_unpack,
    "DynamicQuantizeLinear": template_emitter("operators.dynamic_quantize_linear({0})"),
    "DFT": _emit_dft,
    "STFT": _emit_stft,
    "Det": template_emitter("torch.linalg.det({0})"),
    "RoiAlign": _emit_roi_align,
    "MaxRoiPool": _emit_max_roi_pool,
    "NonMaxSuppression": _emit_non_max_suppression,
    "autopipe.NonMaxSuppression": lambda call: _non_max_suppression_code(
        call, call.result().shape[-1], 2
    ),
    "Dropout": _emit_dropout,
    "Bernoulli": lambda call: call_code(
        "operators.bernoulli", call.arg(0), call.stream(), call.dtype
    ),
    **dict.fromkeys(("RandomUniform", "RandomUniformLike"), _emit_uniform),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike"), _emit_normal),
    "Multinomial": lambda call: call_code(
        "operators.multinomial", call.arg(0), call.result().shape[1], call.stream(), call.dtype
    ),
}
