"""The order of the frontend's steps.

The loss: an output of the model, or a cross-entropy put behind one of its values.

True if what a model computes depends on which samples are together in a micro-batch.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopipe.ir.batch import batch_axes_of, rebatched
from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import Attribute, Constant, DType, Graph, Node, Value
from autopipe.ir.ops import operator_of, signature_of
from autopipe.ir.problem import Mode
from autopipe.passes.frontend.cleanup import at_inference, cleaned, without_unread
from autopipe.passes.frontend.dimensions import bind_inputs
from autopipe.passes.frontend.fusion import fused
from autopipe.passes.frontend.load import Source, load, located
from autopipe.passes.frontend.model import (
    Model,
    only_reached,
    refusal,
    require_readable,
    tensors_of,
    trained_warnings,
    unsupported_operators,
)
from autopipe.passes.frontend.parameters import Chosen, roles_of
from autopipe.passes.frontend.shapes import interpret
from autopipe.passes.frontend.weights import Weights


def mixing_nodes(graph: Graph) -> tuple[Node, ...]:
    """The nodes that let a sample's result depend on other samples, so that micro-batches change what is computed.

    Operators that say so themselves (batch statistics, means over labels that may be ignored), and products of two
    batches, such as the scores of a contrastive loss.
    """
    axes = batch_axes_of(graph)
    found = []
    for node, samples in zip(graph.nodes, axes.nodes, strict=True):
        operator = operator_of(node)
        together = max((len(axes.values.get(name, ())) for name in node.inputs), default=0)
        meets = len({each.axis for each in samples}) > max(together, 1)
        if meets or (operator is not None and operator.mixes_samples(signature_of(graph, node))):
            found.append(node)
    return tuple(found)


LOSSES = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The mean cross-entropy between scores and labels.

    `logits` names a value of shape (samples, …, classes), `labels` the int64 input of that shape without the classes,
    which is added where the model has none of that name. The mean is over all positions. Axes of extent 1 behind the
    classes are not counted: convolutional networks may end in (samples, classes, 1, 1).
    """

    logits: str
    labels: str = "labels"


def own_loss(graph: Graph) -> str:
    """The output that is a loss by its name or its operator, "" where there is none."""
    scalars = [name for name in graph.outputs if _is_scalar(graph.type_of(name))]
    written = {name: graph.producer(name) for name in scalars}
    by_operator = [name for name, index in written.items() if index is not None and graph.nodes[index].op in LOSSES]
    return next((name for name in scalars if name == "loss"), "") or next(iter(by_operator), "")


def require_loss(graph: Graph, name: str) -> None:
    """Raise ConfigurationError unless `name` is an output that can be a loss."""
    if name not in graph.outputs:
        near = difflib.get_close_matches(name, graph.outputs, n=1) or list(graph.outputs)
        raise ConfigurationError(f"loss: the model has no output {name!r}", hint=f"it has {', '.join(map(repr, near))}")
    value = graph.type_of(name)
    if not _is_scalar(value):
        raise ConfigurationError(
            f"loss: output {name!r} is {value.dtype.value}{list(value.shape)}, not one floating-point number",
            hint="give cross_entropy: {logits: NAME, labels: NAME} to put a loss behind it",
        )


def with_cross_entropy(graph: Graph, choice: CrossEntropy) -> tuple[Graph, str]:
    """The graph with the loss behind its logits as a further output, and that output's name."""
    known = {value.name for value in graph.values}
    if choice.logits not in known:
        near = difflib.get_close_matches(choice.logits, [*graph.outputs, *known], n=1) or list(graph.outputs)
        raise ConfigurationError(
            f"loss: the model has no value {choice.logits!r}", hint=f"did you mean {', '.join(map(repr, near))}?"
        )
    logits = graph.type_of(choice.logits)
    if not logits.dtype.is_floating or len(logits.shape) < 2:
        raise ConfigurationError(
            f"loss: {choice.logits!r} is {logits.dtype.value}{list(logits.shape)}, no scores of classes",
            hint="logits have the shape (samples, classes) or (samples, positions, classes)",
        )
    counted = _without_ones(logits.shape)
    labels = Value(choice.labels, DType.INT64, counted[:-1])
    graph = _with_labels(graph, labels, choice.logits)
    taken = {*known, *(value.name for value in graph.inputs), *(held.value.name for held in graph.constants)}
    taken |= {parameter.value.name for parameter in graph.parameters}
    builder = _Appender(graph, taken)
    scores, targets = choice.logits, labels.name
    if len(logits.shape) > 2:  # ONNX's loss has the classes on axis 1
        scores = builder.reshape(logits, (math.prod(labels.shape), counted[-1]))
    if len(labels.shape) > 1:
        targets = builder.reshape(labels, (math.prod(labels.shape),))
    mean = (("reduction", "mean"),)
    loss = builder.append("SoftmaxCrossEntropyLoss", (scores, targets), "loss", logits.dtype, (), mean)
    return dataclasses.replace(builder.graph, outputs=(*graph.outputs, loss)), loss


def _is_scalar(value: Value) -> bool:
    return value.dtype.is_floating and value.elements == 1


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of logits without the axes of extent 1 behind the classes."""
    while len(shape) > 2 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _with_labels(graph: Graph, labels: Value, logits: str) -> Graph:
    for value in graph.inputs:
        if value.name == labels.name:
            if value.dtype not in (DType.INT64, DType.INT32) or value.shape != labels.shape:
                raise ConfigurationError(
                    f"loss: labels {value.name!r} are {value.dtype.value}{list(value.shape)}, "
                    f"{logits!r} needs int64{list(labels.shape)}"
                )
            return graph
    # Samples are counted by the logits' first axis, whatever the inputs do.
    axes = (*graph.batch_axes, (labels.name, 0)) if graph.batch_axes else ()
    return dataclasses.replace(graph, inputs=(*graph.inputs, labels), batch_axes=axes)


class _Appender:
    """Puts nodes behind a graph under names that are free."""

    def __init__(self, graph: Graph, taken: set[str]) -> None:
        self.graph = graph
        self._taken = taken

    def reshape(self, value: Value, shape: tuple[int, ...]) -> str:
        """Append a Reshape to `shape`."""
        name = self._free(f"{value.name}_shape")
        array = np.asarray(shape, dtype=np.int64)
        constant = Constant(Value(name, DType.INT64, array.shape), array)
        self.graph = dataclasses.replace(self.graph, constants=(*self.graph.constants, constant))
        return self.append("Reshape", (value.name, name), f"{value.name}_rows", value.dtype, shape, ())

    def append(
        self,
        op: str,
        inputs: tuple[str, ...],
        name: str,
        dtype: DType,
        shape: tuple[int, ...],
        attributes: tuple[tuple[str, Attribute], ...],
    ) -> str:
        """Append a node with one result, of this type; returns the result's name."""
        result = Value(self._free(name), dtype, shape)
        node = Node(f"autopipe/{op}/{result.name}", op, inputs, (result.name,), attributes)
        self.graph = dataclasses.replace(
            self.graph, nodes=(*self.graph.nodes, node), values=(*self.graph.values, result)
        )
        return result.name

    def _free(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def read_model(
    file: Path | Source,
    *,
    dims: Mapping[str, int] | None = None,
    batch: int | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
    loss: str | CrossEntropy | None = None,
    mode: Mode | None = None,
    frozen: tuple[str, ...] = (),
    trainable: tuple[str, ...] = (),
) -> Model:
    """The graph of one evaluation of the model in `file`, a path or the `Model.source` of one, on `batch` samples.

    Without `batch` there are as many samples as the file fixes, else one. `dims` binds symbolic dimensions by name.
    `batch_axes` says which axis of an input counts samples where it is not axis 0 (None: no axis does). `loss` is an
    output or a loss to add; without it the model's own is found, if it has one. `mode` defaults to training where
    there is a loss. Parameters whose names match `frozen` (globs, or regular expressions after `re:`) are not trained,
    tensors whose names match `trainable` are, whatever else speaks against it.
    Raises ModelError, naming file and node, for what cannot be read, and ConfigurationError for dimensions, batches
    and losses that do not fit.
    """
    model = survey_model(
        file, dims=dims, batch=batch, batch_axes=batch_axes, loss=loss, mode=mode, frozen=frozen, trainable=trainable
    )
    if model.unsupported:
        raise located(refusal(model.unsupported), model.path)
    return model


def survey_model(
    file: Path | Source,
    *,
    dims: Mapping[str, int] | None = None,
    batch: int | None = None,
    batch_axes: Mapping[str, int | None] | None = None,
    loss: str | CrossEntropy | None = None,
    mode: Mode | None = None,
    frozen: tuple[str, ...] = (),
    trainable: tuple[str, ...] = (),
) -> Model:
    """As `read_model`, but operators without a row are listed in the result rather than refused."""
    source = file if isinstance(file, Source) else load(Path(file))
    try:
        if source is not file:
            require_readable(source)
        return _survey(source, dims or {}, batch, batch_axes or {}, loss, mode, Chosen(trainable, frozen))
    except ModelError as error:
        raise located(error, source.path) from error


def _survey(
    source: Source,
    dims: Mapping[str, int],
    batch: int | None,
    batch_axes: Mapping[str, int | None],
    loss: str | CrossEntropy | None,
    mode: Mode | None,
    chosen: Chosen,
) -> Model:
    initializers = {tensor.name for tensor in source.graph.initializer}
    data = tuple(info for info in source.graph.input if info.name not in initializers)
    inputs = bind_inputs(data, dims, batch, batch_axes)
    roles = roles_of(source)
    weights = Weights.of(source, roles, chosen)
    interpreted, aliases = interpret(source, inputs, weights)
    chosen.require_matched()
    read = without_unread(interpreted)
    graph, scalar = _simplified(read, loss)
    mode = mode or (Mode.TRAIN if scalar else Mode.INFER)
    if mode is Mode.INFER and (inferring := at_inference(read)) is not read:
        graph, scalar = _simplified(inferring, loss)
    if batch is not None and inputs.batch is not None:
        graph = rebatched(graph, batch)
    if mode is Mode.TRAIN and scalar:
        graph = only_reached(graph, scalar)
    graph.verify()
    tensors = tensors_of(graph, weights.found)
    left_out = roles.signature.left_out(source.graph) if roles.signature and mode is Mode.TRAIN else []
    return Model(
        graph=graph,
        path=source.path,
        digest=source.digest,
        batch=inputs.batch if batch is None or inputs.batch is None else batch,
        loss=scalar,
        mode=mode,
        nodes_before=len(source.nodes),
        configurations=source.configurations,
        unsupported=unsupported_operators(graph),
        warnings=(
            *source.warnings,
            *weights.warnings(),
            *_mixing_warnings(graph, mode),
            *(trained_warnings(tensors, source.apart, left_out) if mode is Mode.TRAIN else ()),
        ),
        source=source,
        aliases=aliases,
        tensors=tensors,
    )


def _simplified(read: Graph, loss: str | CrossEntropy | None) -> tuple[Graph, str]:
    """The graph cleaned and fused, with its loss, and the loss's name, "" where there is none."""
    graph = fused(cleaned(read))
    require_same_parameters(read, graph)
    if isinstance(loss, CrossEntropy):
        return with_cross_entropy(graph, loss)
    scalar = own_loss(graph) if loss is None else loss
    if scalar:
        require_loss(graph, scalar)
    return graph, scalar


def require_same_parameters(before: Graph, after: Graph) -> None:
    """Raise ModelError where cleaning lost, merged or invented a parameter: a mistake of ours, not of the file."""
    lost = set(before.parameters) ^ set(after.parameters)
    if lost:
        raise ModelError(f"cleaning changed the parameters, among them {min(each.value.name for each in lost)!r}")


def _mixing_warnings(graph: Graph, mode: Mode) -> tuple[str, ...]:
    if mode is not Mode.TRAIN:
        return ()
    nodes = mixing_nodes(graph)
    if not nodes:
        return ()
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    only_labels = all(node.op in _MEANS_OVER_LABELS for node in nodes)
    when = " where they leave out different numbers of labels" if only_labels else ", as in every pipeline"
    return (
        f"{nodes[0].op} {nodes[0].name!r}{more} mixes the samples of a batch: "
        f"micro-batches change what is computed{when}",
    )


_MEANS_OVER_LABELS = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})
"""Losses that mix samples only by the number of labels that count."""
