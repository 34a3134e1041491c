"""Command `inspect`: read a model, and determine its work, its branches and the form of its
loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from autopipe.api.events import Events, SilentEvents
from autopipe.api.request import logits_handling, wanted_loss
from autopipe.configs.configuration import Configuration
from autopipe.ir.graph import FileSlice, Fill, Graph, Initializer, Storage, Value, VarintSlice
from autopipe.ir.model_parts import numbers_text
from autopipe.ir.problem import Mode, NodeCost
from autopipe.passes.analysis.batch_forms import LossForm
from autopipe.passes.analysis.layer_ranges import layer_series
from autopipe.passes.analysis.layers import LayerClass, find_layers, name_layers
from autopipe.passes.analysis.loss_division import form_of_loss
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.frontend import Model, read_model
from autopipe.passes.frontend.branches import Branch, find_branches


@dataclass(frozen=True, slots=True)
class LayerSummary:
    """A class of repeated layers of a model."""

    name: str
    count: int
    """Number of layers."""
    nodes: int
    """Number of nodes of a layer."""
    parameters: int
    """Number of elements of the trained parameters that a layer reads."""
    forward_flops: float | None
    """FLOPs of the forward pass of a layer, None if an operator of the model is not supported."""
    inner: tuple[LayerSummary, ...] = ()
    """Classes of layers inside the layer."""
    numbers: str = ""
    """Numbers of the layers among the layers of the same name, such as `0–3`; "" for layers inside
    a layer.
    """


@dataclass(frozen=True, slots=True)
class Inspection:
    """A model and the facts that follow from its graph."""

    model: Model
    work: tuple[NodeCost, ...]
    """The work of each node, () if an operator is not supported."""
    branches: tuple[Branch, ...]
    layers: tuple[LayerSummary, ...]
    """Classes of repeated layers, in the order of their first layers."""
    form: LossForm | None
    """How the loss of a batch follows from the losses of its parts. None if the model is not for
    training, has no loss or no batch dimension, or if an operator is not supported.
    """


def inspect(model: Path, configuration: Configuration, events: Events | None = None) -> Inspection:
    """Read the ONNX file `model`, report its warnings, and return the facts about it.

    Raises ModelError if the file cannot be read, and ConfigurationError for settings that do not
    fit the model.
    """
    asked = configuration.model
    reader = partial(
        read_model,
        dims=dict(asked.dims),
        batch_axes=dict(asked.batch_axes),
        fixed_inputs=dict(asked.inputs),
        loss=wanted_loss(configuration),
        scores=logits_handling(configuration),
        mode=None if configuration.mode is None else Mode(configuration.mode),
        training=asked.training,
        frozen=asked.frozen,
        trainable=asked.trainable,
    )
    read = reader(model, with_unsupported=True)
    events = events or SilentEvents()
    for warning in read.warnings:
        events.warn(warning)
    file = read.source or model
    if read.unsupported:
        return Inspection(read, (), (), summarize_layers(read.graph, ()), None)
    work = roofline_costs(read.graph)
    form = form_of_loss(read, lambda size: reader(file, batch=size, opened=True))
    branches = find_branches(read.graph, [each.forward_flops for each in work]) if work else ()
    return Inspection(read, work, branches, summarize_layers(read.graph, work), form)


def summarize_layers(graph: Graph, work: Sequence[NodeCost]) -> tuple[LayerSummary, ...]:
    """Return the classes of repeated layers of `graph`. `work` is the work of each node, () if it
    is unknown.
    """
    classes = find_layers(graph)
    numbers = {
        layer: number
        for series in layer_series(graph)
        for number, layer in enumerate(series.layers)
    }
    return tuple(
        replace(
            _summarize_layer(graph, work, layer, name, layer.instances[0]),
            numbers=numbers_text([numbers[tuple(sorted(each))] for each in layer.instances]),
        )
        for layer, name in zip(classes, name_layers(graph, classes), strict=True)
    )


def _summarize_layer(
    graph: Graph, work: Sequence[NodeCost], layer: LayerClass, name: str, nodes: Sequence[int]
) -> LayerSummary:
    """Return the summary of a class whose first layer consists of `nodes`."""
    read = dict.fromkeys(name for index in nodes for name in graph.nodes[index].inputs)
    parameters = [found for each in read if (found := graph.parameter(each)) is not None]
    inner = [[nodes[position] for position in each.instances[0]] for each in layer.inner]
    return LayerSummary(
        name,
        layer.count,
        len(nodes),
        sum(each.value.elements for each in parameters if each.trainable),
        sum(work[index].forward_flops for index in nodes) if work else None,
        tuple(
            _summarize_layer(graph, work, each, f"part of {name}", own)
            for each, own in zip(layer.inner, inner, strict=True)
        ),
    )


def inspection_data(found: Inspection) -> dict[str, object]:
    """Return an inspection as the data of `inspect --json`."""
    model = found.model
    work = found.work
    graph = model.graph
    trained, kept = (
        [each.value for each in graph.parameters if each.trainable is flag]
        for flag in (True, False)
    )
    flops = {
        f"{way}_flops": sum(getattr(each, f"{way}_flops") for each in work)
        for way in ("forward", "backward")
    }
    figures = {**flops, "activation_bytes": sum(each.kept_bytes for each in work)}
    return {
        "model": model.path,
        "digest": model.digest,
        "graph_digest": graph.digest(),
        "opset": graph.opset,
        "mode": model.mode,
        "loss": model.loss or None,
        **({"loss_choices": list(model.loss_choices)} if model.loss_choices else {}),
        "loss_form": found.form,
        "batch": model.batch,
        "inputs": [_typed(value) for value in graph.inputs],
        "outputs": [_typed(graph.type_of(name)) for name in graph.outputs],
        "batch_axes": dict(graph.batch_axes),
        "parameters": sum(value.elements for value in trained),
        "parameter_tensors": len(trained),
        "parameter_bytes": sum(value.bytes for value in trained),
        "initial_values": initial_values(graph),
        "buffer_tensors": len(kept),
        "buffer_bytes": sum(value.bytes for value in kept),
        "tensors": [
            {
                **{name: getattr(each.value, name) for name in ("name", "shape", "elements")},
                **{name: getattr(each, name) for name in ("trained", "why", "doubtful")},
            }
            for each in model.tensors
        ],
        "unrecorded": list(model.unrecorded),
        "nodes_before": model.nodes_before,
        "nodes": len(graph.nodes),
        "operators": operator_counts(graph),
        "fused": model.fused,
        "layers": found.layers,
        **(figures if work else dict.fromkeys(figures)),
        "branches": found.branches,
        "unsupported": [
            {
                "operator": each.operator,
                "count": each.count,
                "node": each.node,
                "reason": each.reason,
            }
            for each in model.unsupported
        ],
        "warnings": list(model.warnings),
    }


def _typed(value: Value) -> dict[str, object]:
    return {"name": value.name, "type": value.dtype, "shape": value.shape}


def operator_counts(graph: Graph) -> dict[str, int]:
    """Return the number of nodes per operator, the most frequent operator first."""
    names = (f"{node.domain}.{node.op}" if node.domain else node.op for node in graph.nodes)
    return dict(Counter(names).most_common())


def initial_values(graph: Graph) -> dict[str, int]:
    """Return the number of parameters per kind of initial value, the most frequent first. The kind
    is `stored` for values from the model's files, otherwise the distribution.
    """

    def text(storage: Storage) -> str:
        match storage:
            case FileSlice() | VarintSlice():
                return "stored"
            case Fill():
                return f"all {storage.value:g}"
            case Initializer("normal" | "uniform" as scheme, scale):
                return f"{scheme} {'±' if scheme == 'uniform' else ''}{scale:.3g}"
        return storage.scheme

    return dict(Counter(text(each.storage) for each in graph.parameters).most_common())
