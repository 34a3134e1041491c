"""Inference of the inputs without a batch dimension, by following axis 0 of each input through the
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autopipe.ir.batch import BatchAxes, batch_axes_of
from autopipe.ir.errors import AutopipeError
from autopipe.ir.graph import Graph
from autopipe.ir.ops import operator_of, spaces_of
from autopipe.ir.space import AxisKind
from autopipe.passes.frontend.input_shapes import Inputs, bind_inputs, dimensions_of
from autopipe.passes.frontend.size_expressions import symbols_of

if TYPE_CHECKING:
    import onnx

_TRIAL_SIZE = 5
"""Size of unbound symbols while axes are followed. It is a prime, so that products of symbols are
distinguished.
"""


def infer_batch_axes(
    inputs: tuple[onnx.ValueInfoProto, ...],
    dims: Mapping[str, int],
    declared: Mapping[str, int | None],
    read: Callable[[Inputs], Graph],
) -> Mapping[str, int | None]:
    """Return `declared`, plus None for each input without a batch dimension, such as the edges of a
    graph, regions of images, and tables of positions.

    If axis 0 of all inputs has one size, apart from inputs of size 1, it counts samples. Otherwise
    each size of axis 0 is followed through the graph that `read` returns for bound inputs. It
    counts no samples if a node uses it for a lookup or divides it into parts. Of the remaining
    sizes, those count samples that the fewest nodes combine, and that are the first dimension of
    the outputs.
    """
    inputs_of_size: dict[int | str, list[str]] = {}
    for info in inputs:
        shape = dimensions_of(info)
        if info.name not in declared and shape:
            size = shape[0] if isinstance(shape[0], int) else dims.get(shape[0], shape[0])
            inputs_of_size.setdefault(size, []).append(info.name)
    if len(inputs_of_size) < 2:
        return declared
    inputs_of_size.pop(1, None)
    fixed_sizes = [size for size in inputs_of_size if isinstance(size, int)]
    fixed_names = [name for size in fixed_sizes for name in inputs_of_size[size]]
    batch_size = fixed_sizes[0] if len(fixed_sizes) == 1 else _TRIAL_SIZE
    without_axes = {info.name: None for info in inputs}
    named = {each for info in inputs for each in dimensions_of(info) if isinstance(each, str)}
    symbols = {symbol for each in named for symbol in symbols_of(each)}
    trial = {name: batch_size if name in inputs_of_size else _TRIAL_SIZE for name in symbols}
    try:
        graph = read(bind_inputs(inputs, {**trial, **dims}, None, without_axes))
        mixing = {size: _mixing(graph, names) for size, names in inputs_of_size.items()}
    except AutopipeError:
        if trial.keys() <= dims.keys():
            raise
        of_one = {**dict.fromkeys(symbols, 1), **dims}
        if len(fixed_names) < len(inputs) and _is_readable(inputs, of_one, read):
            # The sizes that the file fixes are no batch sizes: the batch is another size.
            return {**declared, **dict.fromkeys(fixed_names)}
        # The model may be readable with the user's sizes although it is not with the trial sizes.
        return declared
    minimum = min(filter(None, mixing.values()), default=None)
    without_samples = [
        name
        for size, found in mixing.items()
        if found is None or found != minimum
        for name in inputs_of_size[size]
    ]
    return {**declared, **dict.fromkeys(without_samples)}


def _is_readable(
    inputs: tuple[onnx.ValueInfoProto, ...],
    dims: Mapping[str, int],
    read: Callable[[Inputs], Graph],
) -> bool:
    """True if the model can be read with these sizes."""
    try:
        read(bind_inputs(inputs, dims, None, {info.name: None for info in inputs}))
    except AutopipeError:
        return False
    return True


def _mixing(graph: Graph, names: Iterable[str]) -> tuple[int, int] | None:
    """Return (nodes, dimension): the number of nodes that combine elements along axis 0 of these
    inputs, and the smallest dimension of an output that this axis becomes.

    Returns None if the axis counts no samples: if no output depends on it, or a node uses it for a
    lookup or divides it into parts.
    """
    axes = batch_axes_of(replace(graph, batch_axes=tuple((name, 0) for name in names)))
    producers = (graph.producer(name) for name in graph.outputs)
    if not any(axes.nodes[index] for index in producers if index is not None):
        return None
    spaces = spaces_of(graph)
    count = 0
    for index, node in enumerate(graph.nodes):
        operator = operator_of(node)
        kinds = {each.kind for each in axes.nodes[index]} - {AxisKind.PARALLEL}
        if operator is None or (not kinds and not _carries(axes, graph, index)):
            continue
        is_lookup = bool(kinds) and operator.kind == "memory"
        if (
            AxisKind.UNSPLITTABLE in kinds
            or is_lookup
            or axes.value_without_batch_axis(graph, spaces(index), index)
        ):
            return None
        count += bool(kinds)
    dimensions = (axes.values[name][0].dimension for name in graph.outputs if name in axes.values)
    return count, min(dimensions, default=0)


def _carries(axes: BatchAxes, graph: Graph, index: int) -> bool:
    """True if a value that the node reads or writes has the axis."""
    node = graph.nodes[index]
    return any(name in axes.values for name in (*node.inputs, *node.outputs))
