"""From layouts of a node's tensors to cuts of the axes of its iteration space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Graph
from autopipe.ir.space import Dimension, Space
from autopipe.passes.annotations.mesh import AxisSplit, Cuts
from autopipe.passes.annotations.sharding import Sharding

Places = Mapping[int, int]
"""By device, which part of an axis it has."""


def cuts_of(graph: Graph, node: int, space: Space, shardings: Mapping[str, Sharding]) -> Cuts:
    """The cuts of a node, some of whose tensors have these layouts; axes that none of them tells of are whole.

    Raises ModelError, naming the node and the tensor, for dimensions that do not exist or cannot be cut so, and for
    layouts that contradict one another.
    """
    own = graph.nodes[node]
    where = f"{own.op} {own.name!r}"
    groups = {name: sharding.group() for name, sharding in shardings.items()}
    first = next(iter(groups))
    other = next((name for name in groups if groups[name] != groups[first]), None)
    if other is not None:
        raise ModelError(f"its tensors {first!r} and {other!r} are annotated for different devices", where=where)
    devices = sorted(groups[first])
    found: dict[str, AxisSplit] = {}
    told: dict[str, str] = {}
    tensors = zip((*own.inputs, *own.outputs), (*space.operands, *space.results), strict=True)
    for place, (name, dimensions) in enumerate(tensors):
        if name not in shardings or dimensions is None:
            continue
        windows = {each.dimension: each.axis for each in space.windows_of(place)}
        dimensions = tuple((windows[at],) if at in windows else each for at, each in enumerate(dimensions))
        shape = graph.type_of(name).shape
        axes = _axes_of(shape, dimensions, space.extents(), shardings[name], f"{where}: tensor {name!r}")
        for axis, degree, places in axes:
            if degree == 1 and axis in windows.values():
                continue  # each device may hold more than what its windows read
            cut = AxisSplit(axis, degree, tuple(places[device] for device in devices))
            if found.setdefault(axis, cut) != cut:
                raise ModelError(
                    f"the annotations of its tensors {told[axis]!r} and {name!r} contradict each other:"
                    f" they cut its axis {axis!r} into {found[axis].degree} and {degree} parts, or in another order",
                    hint="autopipe finds itself what must be exchanged before and after a node",
                    where=where,
                )
            told.setdefault(axis, name)
    return tuple(cut for cut in found.values() if cut.degree > 1)


def _axes_of(
    shape: tuple[int, ...],
    dimensions: tuple[Dimension, ...],
    extents: Mapping[str, int],
    sharding: Sharding,
    where: str,
) -> Iterator[tuple[str, int, Places]]:
    """For each axis that indexes a tensor the number of its parts and which one each device has."""
    for dimension, _ in sharding.cuts:
        if not -len(shape) <= dimension < len(shape):
            raise ModelError(f"it has no dimension {dimension}", f"its shape is {shape}", where)
    cut = [dimension % len(shape) for dimension, _ in sharding.cuts]
    if len(set(cut)) < len(cut):
        raise ModelError("one of its dimensions is sharded twice", where=where)
    for index, (blocks, places) in enumerate(sharding.places(len(shape))):
        here = f"{where}, dimension {index}"
        if shape[index] % blocks:
            raise ModelError(f"{blocks} shards do not divide its extent {shape[index]}", where=here)
        yield from _apart(dimensions[index], extents, blocks, places, here)


def _apart(
    dimension: Dimension, extents: Mapping[str, int], blocks: int, places: Places, where: str
) -> Iterator[tuple[str, int, Places]]:
    """The cut of a dimension as cuts of its axes, of which an inner one is cut where the outer are in parts of one."""
    degrees = []
    rest = blocks
    for axis in dimension:
        degree = max(1, min(rest, extents[axis]))
        if rest % degree or extents[axis] % degree:
            raise ModelError(f"{blocks} shards do not divide its axis {axis!r} of extent {extents[axis]}", where=where)
        degrees.append(degree)
        rest //= degree
    if rest > 1:
        raise ModelError(f"the operator has no axis there that {blocks} shards could be cut along", where=where)
    after = blocks
    for axis, degree in zip(dimension, degrees, strict=True):
        after //= degree
        yield axis, degree, {device: place // after % degree for device, place in places.items()}
