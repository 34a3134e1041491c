"""Detection of inputs without a batch dimension. Axis 0 of each input is followed through the
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
"""Size that unbound symbolic dimensions have in the graph in which the batch dimension is traced
from node to node. It is prime, so that it is not a product of smaller sizes.
"""


def infer_batch_axes(
    inputs: tuple[onnx.ValueInfoProto, ...],
    dims: Mapping[str, int],
    declared: Mapping[str, int | None],
    read: Callable[[Inputs], Graph],
) -> Mapping[str, int | None]:
    """Return batch axes by input name: the entries of `declared`, plus None for each other input
    whose axis 0 does not count samples. Examples are the edge list of a graph network, regions of
    images, and tables of positions.

    `dims` has the sizes of symbolic dimensions that are known, and `read` returns the graph for
    inputs with static shapes.

    Inputs in `declared` and inputs without dimensions are not examined. The other inputs form
    groups that have an equal size, or an equal symbol, on axis 0. A single group adds no entry.
    Otherwise `read` returns a graph in which unbound symbols have trial sizes, and axis 0 of each
    group is traced through the nodes of that graph; a group of size 1 is omitted. Axis 0 of a group
    does not count samples in these cases:

    - No output depends on it.
    - A node looks up elements along it, as Gather does, or a node cannot be split along it.
    - Fewer nodes combine elements along axis 0 of another group.
    - Equally many nodes do, but axis 0 of the other group becomes an earlier dimension of an
      output.

    If the graph cannot be read with the trial sizes, `read` is tried with all unbound symbols set
    to 1. If that succeeds, the entry of each examined input whose axis 0 is fixed to a size above 1
    is None, unless these are all inputs. Otherwise no entry is added. Raises an AutopipeError if
    reading fails although `dims` binds all symbols.
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
        mixing = {size: _measure_mixing(graph, names) for size, names in inputs_of_size.items()}
    except AutopipeError:
        if trial.keys() <= dims.keys():
            raise
        of_one = {**dict.fromkeys(symbols, 1), **dims}
        if len(fixed_names) < len(inputs) and _is_readable(inputs, of_one, read):
            # The model can be read with all symbols set to 1. This shows that symbolic sizes of
            # axis 0 are batch sizes, and that inputs with a fixed size of axis 0 lack a batch
            # dimension.
            return {**declared, **dict.fromkeys(fixed_names)}
        # A failed trial does not count: the model may be readable with the sizes that the user
        # sets.
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
    """True if the model can be read with the sizes in `dims` for its symbolic dimensions."""
    try:
        read(bind_inputs(inputs, dims, None, {info.name: None for info in inputs}))
    except AutopipeError:
        return False
    return True


def _measure_mixing(graph: Graph, names: Iterable[str]) -> tuple[int, int] | None:
    """Return (nodes, dimension) for axis 0 of the inputs `names`: the number of nodes that combine
    elements along this axis, and the smallest index of an output dimension that the axis becomes.

    Returns None if the axis cannot count samples: if no output depends on it, if a node looks up
    elements along it (as Gather does), or if a node cannot be split along it.
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
        if operator is None or (not kinds and not _has_batch_value(axes, graph, index)):
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


def _has_batch_value(axes: BatchAxes, graph: Graph, index: int) -> bool:
    """True if node `index` reads or writes a value that has a batch dimension in `axes`."""
    node = graph.nodes[index]
    return any(name in axes.values for name in (*node.inputs, *node.outputs))
