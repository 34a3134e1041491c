"""Changes to a traced program before its export, for information that torch's ONNX exporter would
lose: stopped gradients, batch statistics, label smoothing, and the dropout of attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.export.graph_signature import InputKind
from torch.overrides import TorchFunctionMode

from autopipe.backends.torch import torch_interfaces

_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
_ATTENTION_AXES = 4
"""Number of dimensions of a query for which the exporter supports attention."""
_SOURCE_METADATA = ("nn_module_stack", "source_fn_stack", "stack_trace")
"""Keys of a traced call's metadata that identify the source of the call: its modules and its line
of code.
"""


class DecomposeUnsupported(TorchFunctionMode):
    """While active, replaces torch functions that the exporter would export incorrectly with
    combinations of functions that it exports correctly.

    The exporter drops label smoothing of a cross-entropy, treats class probabilities as integer
    labels, does not export in-place dropout, and exports channel dropout as an operator other than
    Dropout.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy and (
            kwargs.get("label_smoothing") or _has_probabilities(*args, **kwargs)
        ):
            return _smoothed_cross_entropy(*args, **kwargs)
        if function is F.dropout and _is_in_place(*args, **kwargs):
            return args[0].copy_(F.dropout(*args[:3], **{**kwargs, "inplace": False}))
        if function in _CHANNEL_DROPOUTS and args[0].dim() == _CHANNEL_DROPOUTS[function]:
            return _drop_channels(*args, **kwargs)
        return function(*args, **kwargs)


_CHANNEL_DROPOUTS = {F.dropout1d: 3, F.dropout2d: 4, F.dropout3d: 5}
"""Dropout functions that drop full channels, and the number of dimensions of an input that has a
batch dimension.
"""


def _drop_channels(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """Return the result of the dropout function for channels (`dropout1d`, `dropout2d` or
    `dropout3d`) with the same arguments. It is computed as a product with one factor per sample and
    channel, to which ordinary dropout is applied.
    """
    factors = x.new_ones([*x.shape[:2], *([1] * (x.dim() - 2))])
    found = x * F.dropout(factors, p, training)
    return x.copy_(found) if inplace else found


def _is_in_place(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> bool:
    """Return True if a call of `F.dropout` with these arguments modifies its operand."""
    return inplace and training


def _has_probabilities(logits: torch.Tensor, target: torch.Tensor, *_: Any, **__: Any) -> bool:
    """Return True if the labels of a call of `F.cross_entropy` are class probabilities, not class
    indices.
    """
    return target.is_floating_point()


def _smoothed_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Return `F.cross_entropy` of the same arguments, computed from log-probabilities.

    With smoothing s, K classes, class weights w and probabilities p, the loss of label y is (1 - s)
    l_y + s / K Σ_k l_k, with l_k = -w_k log p_k. This equals the negative log-likelihood loss of
    label y for the scores (1 - s) log p_y + s / (K w_y) Σ_k w_k log p_k, which are computed for
    each class y.
    """
    # The deprecated arguments `reduce` and `size_average` override `reduction`.
    if reduce is False:
        reduction = "none"
    elif size_average is False:
        reduction = "sum"
    axis = 1 if logits.dim() > 1 else 0
    classes = logits.shape[axis]
    likelihoods = torch.log_softmax(logits, axis)
    # Labels of a floating-point type are class probabilities instead of class indices.
    if target.is_floating_point():
        smoothed = (
            target * (1 - label_smoothing) + label_smoothing / classes
            if label_smoothing
            else target
        )
        if weight is not None:
            smoothed = smoothed * weight.reshape(
                [-1 if each == axis else 1 for each in range(logits.dim())]
            )
        losses = -(smoothed * likelihoods).sum(axis)
        # For class probabilities, torch's mean divides by the number of labels, independently of
        # the class weights.
        if reduction == "mean":
            return losses.mean()
        return losses.sum() if reduction == "sum" else losses
    if weight is None:
        spread = likelihoods.mean(axis, keepdim=True)
    else:
        broadcast = weight.reshape([-1 if each == axis else 1 for each in range(logits.dim())])
        spread = (likelihoods * broadcast).sum(axis, keepdim=True) / (classes * broadcast)
    scores = (1 - label_smoothing) * likelihoods + label_smoothing * spread
    return F.nll_loss(scores, target, weight, ignore_index=ignore_index, reduction=reduction)


def prepare_for_onnx(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return the traced program with changes that the exporter requires, partly made in place.

    A `detach` is inserted at each point where the module stops gradients: at the results of regions
    under `no_grad`, and at the padding row of an embedding. The exporter keeps a `detach`, but not
    these regions, and it records `padding_idx` in metadata only. Attention with dropout is
    decomposed into other operators, because the exporter drops its dropout probability.
    """
    _remove_unread_buffers(program)
    for node in list(program.graph.nodes):
        if node.op != "call_function":
            continue
        if (
            node.target is torch.ops.higher_order.wrap_with_set_grad_enabled
            and node.args[0] is False
        ):
            _detach_results(program.graph, node)
        elif node.target is _ATEN.detach_.default:
            # The conversion of the trace to functional form would remove an in-place `detach_`, so
            # `detach` replaces it.
            node.target = _ATEN.detach.default
        elif node.target is _ATEN.embedding.default and _padding_index(node) >= 0:
            _detach_padding(program.graph, node, _padding_index(node))
    program.graph.lint()
    program.graph_module.recompile()
    if any(_needs_decomposition(node) for node in program.graph.nodes):
        program = program.run_decompositions({_ATTENTION: _attention_from_matmuls})
    return program


def _remove_unread_buffers(program: torch.export.ExportedProgram) -> None:
    """Remove each unread buffer argument from a traced program, in place, if it is an alias of a
    buffer that the program reads. Torch cannot convert a program to functional form if it changes a
    buffer that is an argument twice.
    """
    signature = program.graph_signature
    by_name = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    tensors = {**program.state_dict, **program.constants}
    read = {
        id(tensors[target])
        for argument, target in signature.inputs_to_buffers.items()
        if by_name[argument].users
    }
    for spec in list(signature.input_specs):
        node = by_name.get(getattr(spec.arg, "name", ""))
        if (
            spec.kind is not InputKind.BUFFER
            or node is None
            or node.users
            or id(tensors[str(spec.target)]) not in read
        ):
            continue
        program.graph.erase_node(node)
        signature.input_specs.remove(spec)


def _needs_decomposition(node: torch.fx.Node) -> bool:
    """Return True if a node of the traced program is an attention that the exporter would export
    incorrectly.
    """
    if node.target is not _ATTENTION:
        return False
    query = node.args[0]
    assert isinstance(query, torch.fx.Node)
    drops = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return bool(drops) or query.meta["val"].dim() != _ATTENTION_AXES


def _attention_from_matmuls(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Return `scaled_dot_product_attention` of the same arguments, computed by matmuls and a
    softmax. Return NotImplemented if the exporter supports the call; torch then keeps it unchanged.
    """
    if not dropout_p and query.dim() == _ATTENTION_AXES:
        return NotImplemented
    if enable_gqa:
        key, value = (
            each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value)
        )
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ key.transpose(-2, -1)) * factor
    if is_causal:
        attn_mask = query.new_ones([query.shape[-2], key.shape[-2]], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(torch.softmax(scores, -1), dropout_p, dropout_p > 0) @ value


def _detach_results(graph: torch.fx.Graph, region: torch.fx.Node) -> None:
    """Insert a `detach` after each result of `region`, a call of a subgraph under `no_grad`."""
    for result in list(region.users):
        with graph.inserting_after(result):
            stopped = _insert_call(graph, result, _ATEN.detach.default, result)
        result.replace_all_uses_with(stopped, delete_user_cb=partial(operator.is_not, stopped))


def _padding_index(node: torch.fx.Node) -> int:
    """Return the index of the table row of an embedding that gets no gradient, or -1 if there is no
    such row.
    """
    given = node.args[2] if len(node.args) > 2 else node.kwargs.get("padding_idx", -1)
    return given if isinstance(given, int) else -1


def _detach_padding(graph: torch.fx.Graph, lookup: torch.fx.Node, padding: int) -> None:
    """Insert nodes that stop the gradient of the rows that the embedding `lookup` reads at the
    index `padding`.
    """
    indices = lookup.args[1]
    assert isinstance(indices, torch.fx.Node)
    with graph.inserting_after(lookup):
        stopped = _insert_call(graph, lookup, _ATEN.detach.default, lookup)
    with graph.inserting_after(stopped):
        is_padding = _insert_call(graph, indices, _ATEN.eq.Scalar, indices, padding)
    with graph.inserting_after(is_padding):
        per_row = _insert_call(graph, indices, _ATEN.unsqueeze.default, is_padding, -1)
    with graph.inserting_after(per_row):
        chosen = _insert_call(graph, lookup, _ATEN.where.self, per_row, stopped, lookup)
    made = (stopped, chosen)
    lookup.replace_all_uses_with(chosen, delete_user_cb=lambda user: user not in made)


def _insert_call(
    graph: torch.fx.Graph, like: torch.fx.Node, target: Any, *arguments: Any
) -> torch.fx.Node:
    """Insert a call of `target` at the insertion point of the graph and return it. The call gets
    the source metadata of the node `like`, and an example value that is computed from the example
    values of its arguments.
    """
    node = graph.call_function(target, arguments)
    node.meta = {key: like.meta[key] for key in _SOURCE_METADATA if key in like.meta}
    node.meta["val"] = target(
        *(each.meta["val"] if isinstance(each, torch.fx.Node) else each for each in arguments)
    )
    return node


def onnx_translations() -> dict[Any, Callable[..., Any]]:
    """Return ONNX functions for some traced operators, which replace the exporter's translations.
    Raise ModuleNotFoundError if `onnxscript` is not installed.
    """
    from onnxscript import opset18

    op: Any = opset18

    def batch_norm(
        x: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        training: bool,
        momentum: float,
        eps: float,
    ) -> tuple[Any, ...]:
        """Translate `aten._native_batch_norm_legit_functional`. The exporter's translation uses
        running statistics in training, too.
        """
        channels = op.Shape(x, start=1, end=2)
        if weight is None:
            weight = op.Expand(op.CastLike(op.Constant(value_floats=[1.0]), x), channels)
        if bias is None:
            bias = op.Expand(op.CastLike(op.Constant(value_floats=[0.0]), x), channels)
        if not training:
            normalised = op.BatchNormalization(
                x, weight, bias, running_mean, running_var, epsilon=eps
            )
            return normalised, running_mean, running_var, running_mean, running_var
        normalised, mean, variance = op.BatchNormalization(
            x,
            weight,
            bias,
            running_mean,
            running_var,
            epsilon=eps,
            momentum=1.0 - momentum,
            training_mode=1,
        )
        return normalised, mean, variance, mean, variance

    def batch_norm_without_statistics(
        x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
    ) -> tuple[Any, ...]:
        """Translate `aten._native_batch_norm_legit.no_stats`, a batch normalization with the
        statistics of the batch and without running statistics.
        """
        rank = len(x.shape)
        axes = op.Constant(value_ints=[axis for axis in range(rank) if axis != 1])
        mean = op.ReduceMean(x, axes, keepdims=1)
        centred = op.Sub(x, mean)
        variance = op.ReduceMean(op.Mul(centred, centred), axes, keepdims=1)
        offset = op.CastLike(op.Constant(value_float=eps), x)
        normalised = op.Div(centred, op.Sqrt(op.Add(variance, offset)))
        shape = op.Constant(value_ints=[1, -1, *([1] * (rank - 2))])
        if weight is not None:
            normalised = op.Mul(normalised, op.Reshape(weight, shape))
        if bias is not None:
            normalised = op.Add(normalised, op.Reshape(bias, shape))
        return normalised, mean, variance

    return {
        torch_interfaces.batch_norm: batch_norm,
        torch_interfaces.batch_norm_without_statistics: batch_norm_without_statistics,
    }
