"""Emission of normalisations."""

from __future__ import annotations

from autopipe.backends.torch.emission.call import Call, Emitter, called, shared
from autopipe.ir.ops.normalization import normalized_axes, softmax_axes, trains, variance_axes
from autopipe.ir.ops.operator import positive


def _batch_norm(call: Call) -> str:
    x, scale, bias, mean, variance = (call.arg(index) for index in range(5))
    epsilon = call.stated("epsilon", 1e-5)
    if not trains(call.signature):
        return f"F.batch_norm({x}, {mean}, {variance}, {scale}, {bias}, eps={epsilon})"
    group = shared(call, ("n", *_spatial(call)))
    if group:
        operands = f"{x}, {scale}, {bias}, {mean}, {variance}, {call.stated('momentum', 0.9)}, {epsilon}, {group}"
        return called("operators.batch_norm_part", operands, call)
    if len(call.node.outputs) == 1:
        return f"F.batch_norm({x}, None, None, {scale}, {bias}, training=True, eps={epsilon})"
    settings = f"{call.stated('momentum', 0.9)}, {epsilon}"
    return called("operators.batch_norm", f"{x}, {scale}, {bias}, {mean}, {variance}, {settings}", call)


def _spatial(call: Call) -> list[str]:
    return [f"i{axis}" for axis in range(len(call.operand(0).shape) - 2)]


def _normalized(call: Call) -> tuple[int, ...]:
    axes = normalized_axes(call.signature)
    return call.operand(0).shape[axes.start :]


def _layer_norm(call: Call) -> str:
    shape, epsilon = _normalized(call), call.stated("epsilon", 1e-5)
    scales = [call.operand(index).shape for index in (1, 2) if call.present(index)]
    several = len(call.node.outputs) > 1
    axes = tuple(normalized_axes(call.signature))
    group = shared(call, (f"d{axis}" for axis in axes))
    if group:
        operands = f"{call.arg(0)}, {axes}, {call.arg(1)}, {call.optional(2)}, {epsilon}, {group}"
        return called("operators.layer_norm_part", operands, call)
    if any(scale != shape for scale in scales):
        operands = f"{call.arg(0)}, {shape}, {call.arg(1)}, {call.optional(2)}, {epsilon}"
        return called("operators.layer_norm", operands, call)
    weight, bias = call.arg(1), call.optional(2)
    if several:
        return (
            f"torch.native_layer_norm({call.arg(0)}, {shape}, {weight}, {bias}, {epsilon})[:{len(call.node.outputs)}]"
        )
    return f"F.layer_norm({call.arg(0)}, {shape}, {weight}, {bias}, {epsilon})"


def rms_norm(call: Call) -> str:
    """`F.rms_norm`, with a scale of another shape multiplied behind it."""
    shape, epsilon = _normalized(call), call.stated("epsilon", 1e-5)
    axes = tuple(normalized_axes(call.signature))
    group = shared(call, (f"d{axis}" for axis in axes))
    if group:
        return f"operators.rms_norm_part({call.arg(0)}, {axes}, {call.arg(1)}, {epsilon}, {group})"
    if call.operand(1).shape == shape:
        return f"F.rms_norm({call.arg(0)}, {shape}, {call.arg(1)}, {epsilon})"
    return f"F.rms_norm({call.arg(0)}, {shape}, eps={epsilon}) * {call.arg(1)}"


def _group_norm(call: Call) -> str:
    groups = call.share(call.node.integer("num_groups"), "g")
    channels = call.operand(0).shape[1]
    scale, bias = call.arg(1), call.arg(2)
    if call.operand(1).shape != (channels,):
        scale, bias = (f"{code}.repeat_interleave({channels // groups})" for code in (scale, bias))
    operands = f"{call.arg(0)}, {groups}, {scale}, {bias}, {call.stated('epsilon', 1e-5)}"
    group = shared(call, ("c", *_spatial(call)))
    return f"operators.group_norm_part({operands}, {group})" if group else f"F.group_norm({operands})"


def _instance_norm(call: Call) -> str:
    epsilon = call.stated("epsilon", 1e-5)
    group = shared(call, _spatial(call))
    if group:
        return f"operators.instance_norm_part({call.arg(0)}, {call.arg(1)}, {call.arg(2)}, {epsilon}, {group})"
    return f"F.instance_norm({call.arg(0)}, weight={call.arg(1)}, bias={call.arg(2)}, eps={epsilon})"


def _variance(call: Call) -> str:
    axes = variance_axes(call.signature)
    group = shared(call, (f"d{axis}" for axis in axes))
    if group:
        return f"operators.mean_variance_norm_part({call.arg(0)}, {axes}, {group})"
    return f"operators.mean_variance_norm({call.arg(0)}, {axes})"


def _norm(call: Call) -> str:
    p, axis = call.node.integer("p", 2), call.node.integer("axis", -1)
    group = shared(call, [f"d{positive(axis, len(call.operand(0).shape))}"])
    if group:
        return f"operators.normalize_part({call.arg(0)}, {p}, {axis}, {group})"
    return f"F.normalize({call.arg(0)}, p={p}, dim={axis})"


def _response(call: Call) -> str:
    size = call.node.integer("size")
    settings = ", ".join([str(size), call.stated("alpha", 1e-4), call.stated("beta", 0.75), call.stated("bias", 1.0)])
    library = "F.local_response_norm" if size % 2 else "operators.local_response_norm"
    return f"{library}({call.arg(0)}, {settings})"


def _softmax(function: str) -> Emitter:
    def emit(call: Call) -> str:
        axes = softmax_axes(call.signature)
        shape = call.operand(0).shape
        group = shared(call, (f"d{axis}" for axis in axes))
        if group:
            name = function.removeprefix("F.")
            if len(axes) == 1:
                return f"operators.{name}_part({call.arg(0)}, {axes.start}, {group})"
            flat = f"{call.arg(0)}.flatten({axes.start})"
            return f"operators.{name}_part({flat}, {axes.start}, {group}).reshape({shape})"
        if all(extent == 1 for extent in shape[axes.start + 1 : axes.stop]):
            axis = -1 if axes.start == len(shape) - 1 else axes.start
            return f"{function}({call.arg(0)}, {axis})"
        return f"{function}({call.arg(0)}.flatten({axes.start}), -1).reshape({shape})"

    return emit


NORMALIZATION: dict[str, Emitter] = {
    "BatchNormalization": _batch_norm,
    "LayerNormalization": _layer_norm,
    "RMSNormalization": rms_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "MeanVarianceNormalization": _variance,
    "LpNormalization": _norm,
    "LRN": _response,
    "Softmax": _softmax("F.softmax"),
    "LogSoftmax": _softmax("F.log_softmax"),
}
