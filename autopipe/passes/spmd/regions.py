"""Where a cut leads: the nodes that stay cut when one of them is, until partial sums end it.

A product cut by its columns leaves its result cut; what follows stays cut (an activation, the heads of an attention,
the classes of a loss) until a product sums over the cut axis or a loss over its classes. That is how transformers are
split over devices by hand (Shoeybi et al., "Megatron-LM", 2019, section 3), found from iteration spaces alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from autopipe.ir.placement import Split
from autopipe.ir.space import AxisKind, Space
from autopipe.passes.spmd.network import Network

_PRODUCTS = ("matmul", "convolution")


@dataclass(slots=True)
class Region:
    """Nodes with the axis each is cut along, and the kinds of axes whose partial sums end it.

    It is `open` where some node needs a cut value whole; `leaves` are cut values that others read, or the model gives.
    """

    axes: dict[int, str]
    ends: set[AxisKind] = field(default_factory=set)
    open: bool = False
    leaves: set[str] = field(default_factory=set)


def seed_axis(network: Network, node: int, degree: int, tables: Set[str]) -> str | None:
    """The axis to begin a region with: rows of a lookup's table that is in `tables`, columns of a product's weight."""
    use, inputs = network.uses[node], network.graph.nodes[node].inputs
    for axis in use.space.axes:
        if not network.splits_on(node, axis.name, degree):
            continue
        if axis.kind is AxisKind.JOINT and use.row.kind == "memory" and inputs[0] in tables:
            return axis.name
        if use.row.kind in _PRODUCTS and axis.kind is AxisKind.PARALLEL and _is_column(network, node, axis.name):
            return axis.name
    return None


def _is_column(network: Network, node: int, axis: str) -> bool:
    """True if an axis indexes a product's weight and none of the values it is applied to."""
    use, inputs = network.uses[node], network.graph.nodes[node].inputs
    indexed = [
        name for name, words in zip(inputs, use.space.operands, strict=True) if name and _place(words, axis) >= 0
    ]
    return any(network.weights.get(name) for name in indexed) and all(name in network.weights for name in indexed)


def grow(network: Network, seed: int, axis: str, degree: int, members: Set[int], fixed: dict[int, str]) -> Region:
    """The region that begins with a node cut along an axis, among `members`.

    Nodes of `fixed` are cut already: a region may end there, where it fits.
    """
    growing = _Growing(network, degree, members, fixed, Region({seed: axis}), [seed])
    while growing.waiting:
        growing.follow(heapq.heappop(growing.waiting))
    return growing.region


@dataclass(slots=True)
class _Growing:
    """A region, its nodes whose results are still to be followed, and the dimension in which each value is cut."""

    network: Network
    degree: int
    members: Set[int]
    fixed: dict[int, str]
    region: Region
    waiting: list[int]
    cut: dict[str, int] = field(default_factory=dict)

    def follow(self, node: int) -> None:
        """Cut what reads the node's results."""
        network, axis = self.network, self.region.axes[node]
        space = network.uses[node].space
        for name, words in zip(network.graph.nodes[node].outputs, space.results, strict=True):
            if not name:
                continue
            place = _place(words, axis)
            if place < 0:
                self.region.ends.add(self._end(node, axis))
                continue
            self.cut[name] = place
            readers = network.readers.get(name, ())
            if name in network.graph.outputs or not self.members >= set(readers):
                self.region.leaves.add(name)
            for reader in readers:
                if reader in self.members:
                    self._carry(reader)

    def _carry(self, reader: int) -> None:
        """Cut a reader of cut values along the axis that they have in common, where there is one."""
        region, fixed = self.region, self.fixed
        axis = self._common_axis(reader)
        if axis is None or self._is_agreed(reader, axis) or not self.network.splits_on(reader, axis, self.degree):
            region.open = True
        elif reader in fixed:
            region.open |= fixed[reader] != axis
        elif reader not in region.axes:
            region.axes[reader] = axis
            heapq.heappush(self.waiting, reader)
        elif region.axes[reader] != axis:
            region.open = True

    def _end(self, node: int, axis: str) -> AxisKind:
        """How a node that its result does not show cut ends the region: products add up, with a bias or without."""
        use = self.network.uses[node]
        return AxisKind.SUM if use.row.kind in _PRODUCTS else use.space.axis(axis).kind

    def _is_agreed(self, node: int, axis: str) -> bool:
        """True if a node would tell statistics of its part: normalisations are left whole."""
        return self.network.uses[node].space.axis(axis).kind is AxisKind.AGREED

    def _common_axis(self, reader: int) -> str | None:
        space, inputs = self.network.uses[reader].space, self.network.graph.nodes[reader].inputs
        pairs = zip(inputs, space.operands, strict=True)
        axes = {_outer(space, words, self.cut[name]) for name, words in pairs if name in self.cut}
        return axes.pop() if len(axes) == 1 else None


def _outer(space: Space, words: tuple[tuple[str, ...], ...] | None, place: int) -> str | None:
    """The axis along which a cut dimension is cut: its outermost."""
    extents = space.extents()
    return next((name for name in (words or ())[place] if extents[name] > 1), None)


def _place(words: tuple[tuple[str, ...], ...] | None, axis: str) -> int:
    """The dimension that an axis indexes; -1 for none."""
    return next((place for place, dimension in enumerate(words or ()) if axis in dimension), -1)


def tensor_splits(
    network: Network,
    nodes: Iterable[int],
    degree: int,
    tables: Set[str],
    pays: Callable[[int], bool],
) -> tuple[tuple[int, tuple[Split, ...]], ...]:
    """Splits that share the tables and products of a stage among `degree` devices.

    A region whose end no gathering follows is split as it is. Of others the product alone is, where that `pays`: its
    result is gathered.
    """
    members = frozenset(nodes)
    axes: dict[int, str] = {}
    for node in sorted(members):
        axis = None if node in axes or network.is_weight(node) else seed_axis(network, node, degree, tables)
        if axis is None:
            continue
        region = grow(network, node, axis, degree, members, axes)
        if not region.open:
            axes |= region.axes
        elif pays(node):
            axes[node] = axis
    for node in sorted(axes, reverse=True):
        _cut_weights(network, node, degree, members, axes)
    return tuple((node, (Split(axes[node], degree),)) for node in sorted(axes))


def _cut_weights(network: Network, node: int, degree: int, members: Set[int], axes: dict[int, str]) -> None:
    """Cut the nodes that compute a cut node's weights, so that each device computes its part from its part."""
    waiting = [node]
    while waiting:
        reader = waiting.pop()
        for name, words in zip(network.graph.nodes[reader].inputs, network.uses[reader].space.operands, strict=True):
            producer = network.graph.producer(name) if name in network.weights else None
            place = _place(words, axes[reader])
            if producer is None or producer not in members or producer in axes or place < 0:
                continue
            space = network.uses[producer].space
            result = space.results[network.graph.nodes[producer].outputs.index(name)]
            axis = _outer(space, result, place)
            if axis is not None and network.splits_on(producer, axis, degree):
                axes[producer] = axis
                waiting.append(producer)
