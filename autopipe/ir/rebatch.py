"""The graph of a smaller micro-batch: where an exporter baked the batch into its shapes, or stages differ in theirs."""

from __future__ import annotations

import dataclasses

import numpy as np

from autopipe.ir.batch import BatchAxes, Samples, batch_axes_of
from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import Constant, Graph, Node, Value
from autopipe.ir.ops import operator_of
from autopipe.ir.ops.spaces import Spaces
from autopipe.ir.remembered import GRAPHS, remembered
from autopipe.ir.space import NotationError

TARGETS = frozenset({"Reshape", "Expand"})
"""Operators whose second operand is the result's shape."""


@remembered(GRAPHS)
def rebatched(graph: Graph, size: int) -> Graph:
    """The graph of one evaluation on `size` samples, made from that on a multiple of it; nodes keep their indices.

    Every dimension that counts samples shrinks in proportion, merged ones included. Raises ConfigurationError where
    `size` does not divide the graph's batch, ModelError where a constant differs from sample to sample or a parameter
    counts samples: then micro-batches are not alike.
    """
    axes = batch_axes_of(graph)
    if axes.batch == size:
        return graph
    if not graph.batch_axes or size <= 0 or axes.batch % size:
        raise ConfigurationError(
            f"micro-batches of {size} cannot be made of the {axes.batch} samples that the model's shapes are fixed to",
            hint=f"choose a divisor of {axes.batch}, or export with a symbolic batch dimension",
        )
    for parameter in graph.parameters:
        if parameter.value.name in axes.values:
            raise ModelError(
                f"parameter {parameter.value.name!r} has an entry for each of the {axes.batch} samples",
                hint="export with a batch of one micro-batch",
            )
    spaces = Spaces(graph)
    for index, node in enumerate(graph.nodes):
        if operator_of(node) is not None and (lost := axes.lost(graph, spaces[index], index)) is not None:
            raise ModelError(
                f"{node.op} does not keep the samples of {lost!r} apart, so the batch cannot shrink",
                hint="export with a symbolic batch dimension, or with a batch of one micro-batch",
                where=repr(node.name),
            )
    shrunk = {name: _shrunk(graph.type_of(name), places, axes.batch, size) for name, places in axes.values.items()}

    def resized(value: Value) -> Value:
        return shrunk.get(value.name, value)

    constants, nodes = _targets(graph, shrunk)
    result = dataclasses.replace(
        graph,
        inputs=tuple(map(resized, graph.inputs)),
        constants=tuple(_sliced(constant, axes, size) for constant in constants),
        nodes=nodes,
        values=tuple(map(resized, graph.values)),
    )
    _check(result)
    return result


def _shrunk(value: Value, places: tuple[Samples, ...], batch: int, size: int) -> Value:
    shape = list(value.shape)
    for place in places:
        shape[place.dimension] = shape[place.dimension] // batch * size
    return Value(value.name, value.dtype, tuple(shape))


def _targets(graph: Graph, shrunk: dict[str, Value]) -> tuple[list[Constant], tuple[Node, ...]]:
    """Constants and nodes, with new constants for the shapes that nodes give their results."""
    constants = list(graph.constants)
    taken = {constant.value.name for constant in constants} | {value.name for value in graph.values}
    taken |= {value.name for value in graph.inputs} | {parameter.value.name for parameter in graph.parameters}
    nodes = []
    for node in graph.nodes:
        result = shrunk.get(node.outputs[0])
        if node.op not in TARGETS or node.domain or result is None:
            nodes.append(node)
            continue
        name = f"{node.outputs[0]}_shape"
        while name in taken:
            name += "_"
        taken.add(name)
        array = np.asarray(result.shape, dtype=np.int64)
        constants.append(Constant(Value(name, graph.type_of(node.inputs[1]).dtype, array.shape), array))
        nodes.append(dataclasses.replace(node, inputs=(node.inputs[0], name)))
    read = {name for node in nodes for name in node.inputs} | set(graph.outputs)
    return [constant for constant in constants if constant.value.name in read], tuple(nodes)


def _sliced(constant: Constant, axes: BatchAxes, size: int) -> Constant:
    """A constant with the rows of the first `size` samples, which must be those of all others too."""
    array = constant.array
    for place in axes.values.get(constant.value.name, ()):
        extents = array.shape
        before, after = extents[: place.dimension], extents[place.dimension + 1 :]
        apart = array.reshape(*before, place.outer, axes.batch, place.inner, *after)
        samples = np.moveaxis(apart, len(before) + 1, 0)
        if any(each.tobytes() != samples[0].tobytes() for each in samples[1:]):
            raise ModelError(
                f"constant {constant.value.name!r} differs from sample to sample: micro-batches would not be alike",
                hint="export with a symbolic batch dimension, or with a batch of one micro-batch",
            )
        kept = np.moveaxis(samples[:size], 0, len(before) + 1)
        array = np.ascontiguousarray(kept.reshape(*before, place.outer * size * place.inner, *after))
    if array is constant.array:
        return constant
    return Constant(Value(constant.value.name, constant.value.dtype, array.shape), array)


def _check(graph: Graph) -> None:
    """Raise ModelError where a node does not fit the smaller shapes."""
    spaces = Spaces(graph)
    for index, node in enumerate(graph.nodes):
        if operator_of(node) is None:
            raise ModelError(f"{node.op} is not supported, so the batch cannot shrink", where=repr(node.name))
        try:
            spaces[index]
        except NotationError as error:
            raise ModelError(
                f"{node.op} cannot run on a smaller batch than it was exported with",
                hint="export with a symbolic batch dimension",
                where=repr(node.name),
            ) from error
