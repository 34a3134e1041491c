"""Emitters (functions that return the Python code of one use of an operator) for normalizations,
reductions, sorting along axes, and losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from autopipe.backends.torch.codegen.call import Call, CodeEmitter, call_code, common_type_emitter
from autopipe.ir.graph import DType
from autopipe.ir.ops.linear_cross_entropy import (
    BIAS_OPERAND,
    LINEAR_CROSS_ENTROPY,
    MAX_CLASSES_PER_BLOCK,
    WEIGHT_OPERAND,
    classes_of,
)
from autopipe.ir.ops.normalization import (
    cumulative_axis,
    label_axes,
    loss_reduction,
    may_weight_labels,
    mean_variance_axes,
    normalized_axes,
    reduced_axes,
    softmax_axes,
    uses_batch_statistics,
)


def _emit_batch_norm(call: Call) -> str:
    x, scale, bias, mean, variance = (call.arg(index) for index in range(5))
    momentum = call.float_attribute("momentum", 0.9)
    epsilon = call.float_attribute("epsilon", 1e-5)
    if not uses_batch_statistics(call):
        if mean.startswith("p.") and variance.startswith("p."):
            return f"F.batch_norm({x}, {mean}, {variance}, {scale}, {bias}, eps={epsilon})"
        return call_code("operators.batch_norm_by", x, mean, variance, scale, bias, epsilon)
    group = call.group("n", *_spatial_axis_names(call))
    unbiased = True if call.node.integer("unbiased") else None
    running = "p.running" if mean.startswith("p.w") and variance.startswith("p.w") else None
    if not group and not any(call.results[1:]):
        if running is not None:
            return call_code(
                "p.running.batch_norm", call.args(5), momentum, epsilon, unbiased=unbiased
            )
        return f"F.batch_norm({x}, None, None, {scale}, {bias}, training=True, eps={epsilon})"
    function = f"operators.{'sharded_' if group else ''}batch_norm"
    return call.outputs(
        call_code(
            function, call.args(5), momentum, epsilon, group, running=running, unbiased=unbiased
        )
    )


def _spatial_axis_names(call: Call) -> list[str]:
    """Return the names of the spatial axes in the iteration space of a normalization: i0, i1 and so
    on.
    """
    return [f"i{axis}" for axis in range(call.rank - 2)]


def _group_code_of_dimensions(call: Call, axes: Iterable[int]) -> str | None:
    """Return the code of the process group over which the dimensions `axes` of operand 0 are split,
    or None if none of them is split.
    """
    return call.group(*(f"d{axis}" for axis in axes))


def _emit_layer_norm(call: Call) -> str:
    axes = tuple(normalized_axes(call))
    epsilon = call.float_attribute("epsilon", 1e-5)
    shape = call.operand(0).shape[axes[0] :]
    x = call.arg(0)
    vectors = f"{call.arg(1)}, {call.optional(2)}"
    if group := _group_code_of_dimensions(call, axes):
        return call.outputs(
            call_code("operators.sharded_layer_norm", x, axes, vectors, epsilon, group)
        )
    own_shape = all(call.operand(index).shape == shape for index in (1, 2) if call.present(index))
    if own_shape and len(call.node.outputs) == 1:
        return call_code("F.layer_norm", x, shape, vectors, epsilon)
    function = "torch.native_layer_norm" if own_shape else "operators.layer_norm"
    return call.outputs(call_code(function, x, shape, vectors, epsilon))


def emit_rms_norm(call: Call) -> str:
    """Return the code of an RMS norm, such as `F.rms_norm(x, shape, scale, epsilon)`. If the shape
    of the scale differs from that of the normalized dimensions, the code multiplies the normalized
    tensor by the scale.
    """
    axes = tuple(normalized_axes(call))
    epsilon = call.float_attribute("epsilon", 1e-5)
    shape = call.operand(0).shape[axes[0] :]
    if group := _group_code_of_dimensions(call, axes):
        return (
            f"operators.sharded_rms_norm({call.arg(0)}, {axes}, {call.arg(1)}, {epsilon}, {group})"
        )
    if call.operand(1).shape == shape:
        return f"F.rms_norm({call.arg(0)}, {shape}, {call.arg(1)}, {epsilon})"
    return f"F.rms_norm({call.arg(0)}, {shape}, eps={epsilon}) * {call.arg(1)}"


def _emit_group_norm(call: Call) -> str:
    groups = call.local_count(call.node.integer("num_groups"), "g")
    channels = call.operand(0).shape[1]
    vectors = [call.arg(1), call.arg(2)]
    if call.operand(1).shape != (channels,):
        vectors = [f"{code}.repeat_interleave({channels // groups})" for code in vectors]
    group = call.group("c", *_spatial_axis_names(call))
    function = "operators.sharded_group_norm" if group else "F.group_norm"
    return call_code(
        function, call.arg(0), groups, *vectors, call.float_attribute("epsilon", 1e-5), group
    )


def _emit_instance_norm(call: Call) -> str:
    epsilon = call.float_attribute("epsilon", 1e-5)
    if group := call.group(*_spatial_axis_names(call)):
        return f"operators.sharded_instance_norm({call.args(3)}, {epsilon}, {group})"
    return (
        f"F.instance_norm({call.arg(0)}, weight={call.arg(1)}, bias={call.arg(2)}, eps={epsilon})"
    )


def _emit_mean_variance_normalization(call: Call) -> str:
    axes = mean_variance_axes(call)
    group = _group_code_of_dimensions(call, axes)
    return call_code(
        f"operators.{'sharded_' if group else ''}mean_variance_norm", call.arg(0), axes, group
    )


def _emit_lp_normalization(call: Call) -> str:
    p = call.node.integer("p", 2)
    axis = call.node.integer("axis", -1)
    if group := _group_code_of_dimensions(call, [call.axis(-1)]):
        return f"operators.sharded_normalize({call.arg(0)}, {p}, {axis}, {group})"
    return f"F.normalize({call.arg(0)}, p={p}, dim={axis})"


def _emit_local_response_norm(call: Call) -> str:
    size = call.node.integer("size")
    settings = (
        call.float_attribute("alpha", 1e-4),
        call.float_attribute("beta", 0.75),
        call.float_attribute("bias", 1.0),
    )
    return call_code(
        f"{'F' if size % 2 else 'operators'}.local_response_norm", call.arg(0), size, *settings
    )


def _emit_softmax(function: str, call: Call) -> str:
    axes = softmax_axes(call)
    shape = call.operand(0).shape
    group = _group_code_of_dimensions(call, softmax_axes(call))
    name = f"operators.sharded_{function}" if group else f"F.{function}"
    if len(axes) == 1 or (
        not group and all(extent == 1 for extent in shape[axes.start + 1 : axes.stop])
    ):
        return call_code(
            name, call.arg(0), axes.start if group or axes.start < call.rank - 1 else -1, group
        )
    flat = call_code(
        name, f"{call.arg(0)}.flatten({axes.start})", axes.start if group else -1, group
    )
    return f"{flat}.reshape({shape})"


def _keepdim_argument(call: Call) -> str:
    """Return the code `, keepdim=True` if the node keeps reduced dimensions with size 1, otherwise
    "".
    """
    return ", keepdim=True" if call.node.integer("keepdims", 1) else ""


def _axes_arguments(call: Call) -> str:
    """Return the keyword arguments of a torch reduction, such as `dim=1, keepdim=True`."""
    axes = reduced_axes(call)
    return f"dim={axes[0] if len(axes) == 1 else axes}{_keepdim_argument(call)}"


def _integer_dtype_argument(call: Call) -> str:
    """Return the code `, dtype=TYPE` for a result of integers, otherwise "". torch's sums would
    convert integers to int64.
    """
    return f", dtype={call.dtype}" if call.result().dtype.is_integer else ""


def _sharded_reduction_code(call: Call, function: str, *settings: bool) -> str:
    """Return the call of the runtime's reduction `function` over a process group, or "" if no
    reduced axis is split. `settings` are its further arguments.
    """
    axes = reduced_axes(call)
    keep = bool(call.node.integer("keepdims", 1))
    group = _group_code_of_dimensions(call, axes)
    return (
        call_code(f"operators.{function}", call.arg(0), axes, keep, *settings, group)
        if group
        else ""
    )


def _sum_code(call: Call, code: str) -> str:
    """Return code that sums the tensor `code` along the reduced axes of the node."""
    return f"{code}.sum({_axes_arguments(call)}{_integer_dtype_argument(call)})"


def _emit_reduce_mean(call: Call) -> str:
    if call.result().dtype.is_integer:
        return f"{call.arg(0)}.mean({_axes_arguments(call)}, dtype=torch.float64).to({call.dtype})"
    return f"{call.arg(0)}.mean({_axes_arguments(call)})"


def _emit_reduce_l2(call: Call) -> str:
    if call.result().dtype.is_integer:
        return (
            f"{call.arg(0)}.double().square().sum({_axes_arguments(call)}).sqrt().to({call.dtype})"
        )
    return (
        _sharded_reduction_code(call, "sharded_norm")
        or f"torch.linalg.vector_norm({call.arg(0)}, {_axes_arguments(call)})"
    )


def _emit_reduce_product(call: Call) -> str:
    """Return the code of a ReduceProd: one call of `prod` per axis, because torch multiplies along
    one axis per call. The last axis is reduced first, so that the indices of the other axes remain
    valid.
    """
    calls = (
        f".prod(dim={axis}{_keepdim_argument(call)}{_integer_dtype_argument(call)})"
        for axis in reversed(reduced_axes(call))
    )
    return call.arg(0) + "".join(calls)


def _emit_reduce_extreme(method: str, call: Call) -> str:
    """Return the code of a ReduceMax or ReduceMin; `method` is `amax` or `amin`. For an operand
    without elements, for which torch raises an error, the result has the value that ONNX defines:
    the smallest value of the type for ReduceMax, the largest for ReduceMin.
    """
    if not call.operand(0).elements:
        limit = f'float("{"-inf" if method == "amax" else "inf"}")'
        if call.result().dtype is DType.BOOL:
            limit = str(method == "amin")
        elif not call.result().dtype.is_floating:
            limit = f"torch.iinfo({call.dtype}).{'min' if method == 'amax' else 'max'}"
        return f"torch.full({call.result().shape}, {limit}, dtype={call.dtype}, device=p.device)"
    return (
        _sharded_reduction_code(call, "sharded_extreme", method == "amax")
        or f"{call.arg(0)}.{method}({_axes_arguments(call)})"
    )


def _reduction_emitter(
    emit: CodeEmitter, alone: Callable[[str], str] = lambda code: code
) -> CodeEmitter:
    """Return an emitter that calls `emit` for a node with reduced axes. For a node without them,
    the code is `alone` applied to the code of the operand.
    """
    return lambda call: emit(call) if reduced_axes(call) else alone(call.arg(0))


def _emit_index_of_extreme(function: str, call: Call) -> str:
    axis = call.axis()
    keep = _keepdim_argument(call)
    last = bool(call.node.integer("select_last_index"))
    if group := _group_code_of_dimensions(call, [axis]):
        settings = bool(keep), function == "argmax", last
        return call_code("operators.sharded_index_of_extreme", call.arg(0), axis, *settings, group)
    if last:
        end = call.operand(0).shape[axis] - 1
        return f"{end} - torch.{function}({call.arg(0)}.flip({axis}), dim={axis}{keep})"
    return f"torch.{function}({call.arg(0)}, dim={axis}{keep})"


def _emit_cumulative(function: str, call: Call) -> str:
    axis = cumulative_axis(call)
    exclusive = bool(call.node.integer("exclusive"))
    backwards = bool(call.node.integer("reverse"))
    if exclusive or backwards:
        return (
            f"operators.{function}({call.arg(0)}, {axis}, exclusive={exclusive}, "
            f"reverse={backwards})"
        )
    return f"torch.{function}({call.arg(0)}, dim={axis}{_integer_dtype_argument(call)})"


def _emit_top_k(call: Call) -> str:
    count = call.scalar(1) if call.present(1) else call.node.integer("k")
    return call_code(
        "operators.top_k",
        call.arg(0),
        count,
        call.axis(-1),
        largest=bool(call.node.integer("largest", 1)),
    )


def _emit_class_loss(call: Call, name: str, alone: str) -> str:
    """Return the call of a loss over classes. The runtime's function for the loss `name` is called
    in two cases: if the classes are split, or if the labels are split and some of them may be
    weighted or ignored. Otherwise `alone`, a function for one rank, is called. Labels are converted
    to int64, because torch requires it.
    """
    labels = label_axes(call)
    classes = call.group("c")
    batch = call.group(*labels) if may_weight_labels(call) else None
    ignored = call.node.integer("ignore_index", -100)
    averaged = loss_reduction(call)
    function = alone
    if classes:
        function = f"operators.sharded_{name}"
    elif batch:
        function = f"operators.{name}_partial"
    return call_code(
        function,
        call.arg(0),
        call.arg(1) if call.operand(1).dtype is DType.INT64 else f"{call.arg(1)}.long()",
        call.arg(2) if call.present(2) else None,
        ignore_index=ignored if ignored != -100 else None,
        reduction=repr(averaged) if averaged != "mean" else None,
        group=classes,
        batch=batch,
    )


def _emit_linear_cross_entropy(call: Call) -> str:
    """Return the call of the runtime's cross-entropy that is fused with the matmul of the logits.
    The code passes the weight with shape [classes, features].
    """
    labels = label_axes(call)
    batch = call.group(*labels) if may_weight_labels(call) else None
    ignored = call.node.integer("ignore_index", -100)
    averaged = loss_reduction(call)
    code = call_code(
        "operators.linear_cross_entropy",
        call.arg(0),
        call.arg(1) if call.operand(1).dtype is DType.INT64 else f"{call.arg(1)}.long()",
        call.arg(WEIGHT_OPERAND)
        if call.node.integer("transB")
        else f"{call.arg(WEIGHT_OPERAND)}.t()",
        call.arg(BIAS_OPERAND) if call.present(BIAS_OPERAND) else None,
        step=min(classes_of(call), MAX_CLASSES_PER_BLOCK),
        class_weight=call.arg(2) if call.present(2) else None,
        softcap=call.float_attribute("softcap", 0.0) if call.node.has("softcap") else None,
        ignore_index=ignored if ignored != -100 else None,
        reduction=repr(averaged) if averaged != "mean" else None,
        group=call.group("c"),
        batch=batch,
    )
    narrow = call.result().dtype in (DType.BFLOAT16, DType.FLOAT16)
    return f"{code}.to({call.dtype})" if narrow else code


NORMALIZATION: dict[str, CodeEmitter] = {
    "BatchNormalization": lambda call: (
        _emit_batch_norm if uses_batch_statistics(call) else common_type_emitter(_emit_batch_norm)
    )(call),
    "LayerNormalization": common_type_emitter(_emit_layer_norm),
    "RMSNormalization": common_type_emitter(emit_rms_norm),
    "GroupNormalization": common_type_emitter(_emit_group_norm),
    "InstanceNormalization": common_type_emitter(_emit_instance_norm),
    "MeanVarianceNormalization": _emit_mean_variance_normalization,
    "LpNormalization": _emit_lp_normalization,
    "LRN": _emit_local_response_norm,
    "Softmax": partial(_emit_softmax, "softmax"),
    "LogSoftmax": partial(_emit_softmax, "log_softmax"),
    "ReduceSum": _reduction_emitter(lambda call: _sum_code(call, call.arg(0))),
    "ReduceMean": _reduction_emitter(_emit_reduce_mean),
    "ReduceL1": _reduction_emitter(
        lambda call: _sum_code(call, f"{call.arg(0)}.abs()"), lambda code: f"{code}.abs()"
    ),
    "ReduceL2": _reduction_emitter(_emit_reduce_l2, lambda code: f"{code}.abs()"),
    "ReduceSumSquare": _reduction_emitter(
        lambda call: _sum_code(call, f"{call.arg(0)}.square()"), lambda code: f"{code}.square()"
    ),
    "ReduceLogSum": _reduction_emitter(
        lambda call: (
            _sharded_reduction_code(call, "sharded_log_sum")
            or f"{_sum_code(call, call.arg(0))}.log()"
        ),
        lambda code: f"{code}.log()",
    ),
    "ReduceLogSumExp": _reduction_emitter(
        lambda call: (
            _sharded_reduction_code(call, "sharded_log_sum_exp")
            or f"torch.logsumexp({call.arg(0)}, {_axes_arguments(call)})"
        )
    ),
    "ReduceMax": _reduction_emitter(partial(_emit_reduce_extreme, "amax")),
    "ReduceMin": _reduction_emitter(partial(_emit_reduce_extreme, "amin")),
    "ReduceProd": _reduction_emitter(_emit_reduce_product),
    "ArgMax": partial(_emit_index_of_extreme, "argmax"),
    "ArgMin": partial(_emit_index_of_extreme, "argmin"),
    "CumSum": partial(_emit_cumulative, "cumsum"),
    "CumProd": partial(_emit_cumulative, "cumprod"),
    "TopK": _emit_top_k,
    "Hardmax": lambda call: f"operators.hardmax({call.arg(0)}, {tuple(softmax_axes(call))})",
    "SoftmaxCrossEntropyLoss": lambda call: (
        _emit_class_loss(call, "cross_entropy", "F.cross_entropy")
        if len(call.node.outputs) == 1
        else _emit_class_loss(call, "cross_entropy_and_logarithms", "operators.cross_entropy")
    ),
    LINEAR_CROSS_ENTROPY: _emit_linear_cross_entropy,
    "NegativeLogLikelihoodLoss": lambda call: _emit_class_loss(call, "nll", "F.nll_loss"),
}
