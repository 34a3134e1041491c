"""Inputs that count samples told from those that do not, by following their first axes through the
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
from autopipe.passes.frontend.dimensions import Inputs, bind_inputs, dimensions_of, symbols_of

if TYPE_CHECKING:
    import onnx

_TRIED = 5
"""Extent of symbols that nothing binds, while axes are followed: a prime, so that products of it
are told apart.
"""


def told_apart(
    inputs: tuple[onnx.ValueInfoProto, ...],
    dims: Mapping[str, int],
    stated: Mapping[str, int | None],
    read: Callable[[Inputs], Graph],
) -> Mapping[str, int | None]:
    """`stated` axes of inputs, and None for further inputs whose first axis counts no samples:
    nodes of a graph and its edges, regions of images, tables of positions.

    Where all first axes have one extent (or one), they are samples. Others are followed through the
    graph that `read` makes of bound inputs. Samples are kept apart by every node, or added,
    averaged and normalised together; an axis by which a node looks something up, or which it takes
    apart, counts none. Of the others those count samples that fewest nodes mix, and that are the
    outputs' first dimension.
    """
    classes: dict[int | str, list[str]] = {}
    for info in inputs:
        shape = dimensions_of(info)
        if info.name not in stated and shape:
            extent = shape[0] if isinstance(shape[0], int) else dims.get(shape[0], shape[0])
            classes.setdefault(extent, []).append(info.name)
    if len(classes) < 2:
        return stated
    classes.pop(1, None)
    fixed = {extent for extent in classes if isinstance(extent, int)}
    fixed_names = [name for extent in fixed for name in classes[extent]]
    first = fixed.pop() if len(fixed) == 1 else _TRIED
    none = {info.name: None for info in inputs}
    named = {each for info in inputs for each in dimensions_of(info) if isinstance(each, str)}
    symbols = {symbol for each in named for symbol in symbols_of(each)}
    tried = {name: first if name in classes else _TRIED for name in symbols}
    try:
        graph = read(bind_inputs(inputs, {**tried, **dims}, None, none))
        mixing = {extent: _mixing(graph, names) for extent, names in classes.items()}
    except AutopipeError:
        if tried.keys() <= dims.keys():
            raise
        single = {**dict.fromkeys(symbols, 1), **dims}
        if len(fixed_names) < len(inputs) and _is_readable(inputs, single, read):
            # The extents that the file fixes are not of samples, of which there may be another
            # number.
            return {**stated, **dict.fromkeys(fixed_names)}
        # What is wrong with the extents that were tried need not be wrong with the user's.
        return stated
    least = min(filter(None, mixing.values()), default=None)
    apart = [
        name
        for extent, found in mixing.items()
        if found is None or found != least
        for name in classes[extent]
    ]
    return {**stated, **dict.fromkeys(apart)}


def _is_readable(
    inputs: tuple[onnx.ValueInfoProto, ...],
    dims: Mapping[str, int],
    read: Callable[[Inputs], Graph],
) -> bool:
    """True if the model can be read with these extents."""
    try:
        read(bind_inputs(inputs, dims, None, {info.name: None for info in inputs}))
    except AutopipeError:
        return False
    return True


def _mixing(graph: Graph, names: Iterable[str]) -> tuple[int, int] | None:
    """How many nodes mix what the first axes of these inputs count, and the dimension of the
    outputs that counts it; None where it is no samples.
    """
    axes = batch_axes_of(replace(graph, batch_axes=tuple((name, 0) for name in names)))
    written = (graph.producer(name) for name in graph.outputs)
    if not any(axes.nodes[index] for index in written if index is not None):
        return None
    spaces = spaces_of(graph)
    mixing = 0
    for index, node in enumerate(graph.nodes):
        row = operator_of(node)
        kinds = {each.kind for each in axes.nodes[index]} - {AxisKind.PARALLEL}
        if row is None or (not kinds and not _carries(axes, graph, index)):
            continue
        if (
            AxisKind.UNSPLITTABLE in kinds
            or (kinds and row.kind == "memory")
            or axes.lost(graph, spaces(index), index)
        ):
            return None
        mixing += bool(kinds)
    return mixing, min(
        (axes.values[name][0].dimension for name in graph.outputs if name in axes.values), default=0
    )


def _carries(axes: BatchAxes, graph: Graph, index: int) -> bool:
    node = graph.nodes[index]
    return any(name in axes.values for name in (*node.inputs, *node.outputs))
