"""Changes of layout inside a stage: the collectives that convert a value from one layout to
another. A layout is the distribution of a tensor over the devices of a group; DTensor calls it
placements.

The cost model and lowering both use these steps. The rules:

- The partial sums of a value are reduced directly after the node that produces it: by
  reduce-scatters if all readers need one layout that is sharded further and the value is no output
  of the stage, and otherwise by an all-reduce. Scalars that may stay partial are an exception.
- Each further layout that a reader needs is made from the available layout of the value that lacks
  the fewest elements.
- A device receives only elements that it lacks.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import (
    Layout,
    MeshAxes,
    MeshAxis,
    Redistribution,
    TensorSlice,
    holders_by_shard,
    merge_axes,
    mesh_axis_by_name,
    missing_elements,
    operand_layout,
    replicated_layout,
    result_layout,
    shard_copies,
)
from autopipe.ir.placement import Split, Stage
from autopipe.ir.space import Space


@lru_cache(maxsize=1 << 16)
def redistribution_steps(source: Layout, target: Layout) -> tuple[Redistribution, ...]:
    """Return the steps that convert a value from layout `source` to layout `target`.

    `source` must have no partial sums and even shards, not windowed shards (shards of a dimension
    that an operator such as a convolution reads through sliding windows; they may overlap). The
    first rule that applies decides:

    1. If the layouts are equal: no steps.
    2. If `target` has windowed shards: one `slice` if no device lacks an element, otherwise one
       `redistribute`.
    3. If the mesh axes cannot be compared by the other rules, because their strides do not nest
       (each stride at which an axis begins or ends divides the next larger one): one
       `redistribute`.
    4. If each dimension is either sharded further or gathered, and no gathered mesh axis shards
       another dimension of `target`: one `slice` per dimension that is sharded further, then one
       `all_gather` per gathered dimension. Slicing first reduces the gathered volume.
    5. If only one dimension is gathered, and exactly its gathered mesh axes are added to one other
       dimension: one `slice` for each other dimension that is sharded further, then one
       `all_to_all`.
    6. Otherwise: one `redistribute`.
    """
    assert not source.is_partial and not source.windows, source
    if source == target:
        return ()
    if target.windows:
        both = (axis for layout in (source, target) for axes in layout.shard_axes for axis in axes)
        # The coordinates of devices along a mesh axis repeat after stride · degree devices. After
        # the least common multiple of these numbers, all coordinates repeat, so a larger group adds
        # no cases.
        group = math.lcm(*(axis.stride * axis.degree for axis in both))
        is_local = not missing_elements(source, target, group).any()
        return (Redistribution("slice" if is_local else "redistribute", source, target),)
    bounds = _nested_bounds(
        axis for layout in (source, target) for axes in layout.shard_axes for axis in axes
    )
    if bounds is None:
        return (Redistribution("redistribute", source, target),)
    added: dict[int, MeshAxes] = {}
    removed: dict[int, MeshAxes] = {}
    for dimension, pair_of_axes in enumerate(
        zip(source.shard_axes, target.shard_axes, strict=True)
    ):
        have, need = (_split_axes_at(axes, bounds) for axes in pair_of_axes)
        common = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(have, need, strict=False)
            )
        )
        if need[common:]:
            added[dimension] = need[common:]
        if have[common:]:
            removed[dimension] = have[common:]
    target_axes = {axis for axes in target.shard_axes for axis in _split_axes_at(axes, bounds)}
    found: list[Redistribution] = []
    current = source

    def append_step(kind: str, dimension: int, axes: MeshAxes, *origin: int) -> None:
        """Append a step of the kind `kind` over the mesh axes `axes`. It changes the current layout
        to the layout in which `dimension`, and the dimension `origin` if given, are sharded as in
        `target`.
        """
        nonlocal current
        shard_axes = (
            merge_axes(target.shard_axes[other]) if other in (dimension, *origin) else present
            for other, present in enumerate(current.shard_axes)
        )
        result = replace(current, shard_axes=tuple(shard_axes))
        found.append(Redistribution(kind, current, result, merge_axes(axes), dimension, *origin))
        current = result

    if all(
        dimension not in added and target_axes.isdisjoint(axes)
        for dimension, axes in removed.items()
    ):
        for dimension, axes in added.items():
            append_step("slice", dimension, axes)
        for dimension, axes in removed.items():
            append_step("all_gather", dimension, axes)
        return tuple(found)
    (origin, moved_axes), *other_dimensions = removed.items()
    if other_dimensions or origin in added or moved_axes not in added.values():
        return (Redistribution("redistribute", source, target),)
    to_dimension = next(dimension for dimension, axes in added.items() if axes == moved_axes)
    for dimension, axes in added.items():
        if dimension != to_dimension:
            append_step("slice", dimension, axes)
    append_step("all_to_all", to_dimension, moved_axes, origin)
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def reduction_steps(source: Layout, target: Layout) -> tuple[Redistribution, ...]:
    """Return the steps that reduce the partial sums and means of layout `source`, and thereby shard
    the value further towards layout `target` as far as reduce-scatters can.

    Partial axes, the mesh axes over which devices hold partial sums or means, are reduce-scattered
    along the dimensions that they shard further in `target`. The remaining partial axes are
    all-reduced. The result of the last step has no partial sums or means, but may differ from
    `target`. Both layouts must have even shards.
    """
    shard_axes = list(source.shard_axes)
    partial_axes = source.partial_over
    found = []
    current = source
    for scatter_axes, dimension, remaining in reduce_scatters(
        source.shard_axes, partial_axes, target.shard_axes
    ):
        shard_axes[dimension] = merge_axes(shard_axes[dimension] + scatter_axes)
        partial_axes = remaining
        sums = merge_axes(remove_axes(current.sums, scatter_axes))
        means = merge_axes(remove_axes(current.means, scatter_axes))
        result = Layout(source.shape, tuple(shard_axes), sums, means)
        found.append(Redistribution("reduce_scatter", current, result, scatter_axes, dimension))
        current = result
    if partial_axes:
        result = Layout(source.shape, tuple(shard_axes))
        found.append(Redistribution("all_reduce", current, result, merge_axes(partial_axes)))
    return tuple(found)


def reduce_scatters(
    shard_axes: tuple[MeshAxes, ...], partial_axes: MeshAxes, target: tuple[MeshAxes, ...]
) -> Iterator[tuple[MeshAxes, int, MeshAxes]]:
    """Yield (mesh axes, dimension, remaining partial axes) for each reduce-scatter on the way to
    `target`: the mesh axes that it communicates over, the dimension that it shards, and the partial
    axes that are left after it.

    `shard_axes` are the mesh axes that shard each dimension before, and `target` the mesh axes that
    are to shard it. `partial_axes` are the mesh axes over which the devices hold partial sums or
    means. All are ordered from outer to inner.
    """
    for dimension, (present, wanted) in enumerate(zip(shard_axes, target, strict=True)):
        scatter_axes = reduce_scatter_axes(present, wanted, partial_axes)
        if scatter_axes:
            partial_axes = remove_axes(partial_axes, scatter_axes)
            yield scatter_axes, dimension, partial_axes


@lru_cache(maxsize=1 << 16)
def reduce_scatter_axes(present: MeshAxes, wanted: MeshAxes, partial_axes: MeshAxes) -> MeshAxes:
    """Return the mesh axes over which one dimension can be reduce-scattered, () if there are none.

    `present` and `wanted` are the mesh axes that shard the dimension before and after the change of
    layout. The returned axes follow directly inside of `present` in `wanted`, and are partial axes
    (`partial_axes`), over which devices hold partial sums or means.
    """
    if present == wanted or not partial_axes or not is_sharded_further(present, wanted):
        return ()
    bounds = _nested_bounds([*present, *wanted, *partial_axes])
    if bounds is None:
        return ()
    present_atoms = _split_axes_at(present, bounds)
    wanted_atoms = _split_axes_at(wanted, bounds)
    if (
        len(wanted_atoms) <= len(present_atoms)
        or wanted_atoms[: len(present_atoms)] != present_atoms
    ):
        return ()
    partial_atoms = set(_split_axes_at(partial_axes, bounds))
    scatter_axes = list(
        itertools.takewhile(partial_atoms.__contains__, wanted_atoms[len(present_atoms) :])
    )
    return merge_axes(scatter_axes)


def is_sharded_further(present: MeshAxes, wanted: MeshAxes) -> bool:
    """True if the mesh axes `wanted` shard a dimension as `present` does, and each shard possibly
    further.

    In `present` and `wanted`, adjacent axes are merged (`merge_axes`), so the innermost axis of
    `present` may be the outer part of an axis of `wanted`.
    """
    if not present:
        return True
    if len(present) > len(wanted) or present[:-1] != wanted[: len(present) - 1]:
        return False
    innermost = present[-1]
    other = wanted[len(present) - 1]
    return (
        innermost.stride * innermost.degree == other.stride * other.degree
        and innermost.stride % other.stride == 0
    )


@lru_cache(maxsize=1 << 16)
def remove_axes(axes: MeshAxes, removed: MeshAxes) -> MeshAxes:
    """Return `axes` without the parts that are in `removed`. The strides of all axes must nest:
    each stride at which an axis begins or ends must divide the next larger one.
    """
    bounds = _nested_bounds([*axes, *removed])
    assert bounds is not None, (axes, removed)
    removed_atoms = set(_split_axes_at(removed, bounds))
    return tuple(axis for axis in _split_axes_at(axes, bounds) if axis not in removed_atoms)


def _nested_bounds(axes: Iterable[MeshAxis]) -> list[int] | None:
    """Return the strides at which the axes begin and end, in ascending order. Return None if they
    do not nest, that is, if a stride does not divide the next larger one.

    An axis (degree, stride) begins at `stride` and ends at `stride` · `degree`.
    """
    found = sorted({bound for axis in axes for bound in (axis.stride, axis.stride * axis.degree)})
    return found if are_nested(found) else None


def are_nested(bounds: Sequence[int]) -> bool:
    """True if each of the ascending strides `bounds` divides the next stride. Axes between such
    strides can be split at these strides.
    """
    return all(outer % inner == 0 for inner, outer in itertools.pairwise(bounds))


def _split_axes_at(axes: MeshAxes, bounds: list[int]) -> MeshAxes:
    """Return `axes`, each split at those strides of `bounds` that are inside of it, from outer to
    inner.
    """
    found = []
    for axis in axes:
        inner = [bound for bound in bounds if axis.stride <= bound <= axis.stride * axis.degree]
        found += [MeshAxis(large // small, small) for small, large in itertools.pairwise(inner)][
            ::-1
        ]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class NodeLayouts:
    """A node with the layouts in which it reads its operands and writes its results. The layout of
    an absent operand or result is None.
    """

    index: int
    node: Node
    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]


def node_layouts(
    graph: Graph, index: int, space: Space, splits: tuple[Split, ...], group: int
) -> NodeLayouts:
    """Return the layouts of the operands and results of the node `index`, if `splits` divide it
    over `group` devices. `space` is the iteration space of the node.
    """
    node = graph.nodes[index]
    axes = mesh_axis_by_name(splits, group)
    operands = (
        operand_layout(
            dimensions or (), graph.type_of(name).shape, axes, space.windows_of(position)
        )
        if name
        else None
        for position, (name, dimensions) in enumerate(zip(node.inputs, space.operands, strict=True))
    )
    results = (
        result_layout(space, dimensions or (), graph.type_of(name).shape, axes) if name else None
        for name, dimensions in zip(node.outputs, space.results, strict=True)
    )
    return NodeLayouts(index, node, tuple(operands), tuple(results))


def received_layouts(
    graph: Graph, nodes: Sequence[NodeLayouts], stage: Stage, whole: Set[str] = frozenset()
) -> dict[str, Layout]:
    """Return the layout in which a stage receives each value that its nodes read and do not
    compute.

    This is the layout that all nodes of the stage need, or replicated if they need different
    layouts. Windowed shards, which may overlap because an operator reads them through sliding
    windows, count as even shards of the same mesh axes (`Layout.with_even_shards`). Constants and
    the values in `whole` are replicated. The values of other stages that the stage gathers
    (`Stage.gathers`) are received in slices (`shard_copies`).
    """
    computed = frozenset(name for constant in nodes for name in constant.node.outputs)
    replicated_names = whole | {constant.value.name for constant in graph.constants}
    layouts = {
        name: next(iter(needs))
        if len(needs) == 1 and name not in replicated_names
        else replicated_layout(graph.type_of(name).shape)
        for name, needs in _needed_layouts(nodes, computed).items()
    }
    for name in stage.gathers:
        if name in layouts and graph.producer(name) is not None:
            layouts[name] = shard_copies(layouts[name], len(stage.devices))
    return layouts


@dataclass(frozen=True, slots=True)
class ValueRedistribution:
    """One step that changes the layout of the value named `value`."""

    value: str
    step: Redistribution


def with_redistributions(
    nodes: Sequence[NodeLayouts],
    received: dict[str, Layout],
    outputs: Set[str],
    may_stay_partial: Set[str],
    group: int,
) -> Iterator[NodeLayouts | ValueRedistribution]:
    """Yield the nodes of a stage in order, and between them the steps that change layouts.

    `received` contains the layouts of the values that the stage does not compute. `outputs` are the
    outputs of the stage. `may_stay_partial` are the values that stay partial sums if they are
    scalars. `group` is the number of devices.

    Other partial results are reduced directly after their node: to the layout of their readers if
    these need a single layout and the value is not in `outputs`, and otherwise to copies. Before a
    node reads an operand in a layout that does not exist yet, this layout is made from the
    available layout that lacks the fewest elements. If a later node needs a layout of which this
    layout is a part, the later node's layout is made first.
    """
    needed = _needed_layouts(nodes)
    available = {name: [layout] for name, layout in received.items()}
    """For each value, the layouts that exist so far; the first is the layout in which the value was
    received or produced.
    """

    def make_layout(name: str, need: Layout) -> Iterator[ValueRedistribution]:
        """Yield the steps that make the layout `need` of the value `name` from the available layout
        that lacks the fewest elements.
        """
        even = (have for have in available[name] if not have.windows)
        nearest = min(even, key=lambda have: int(missing_elements(have, need, group).max()))
        for step in redistribution_steps(nearest, need):
            if step.result not in available[name]:
                yield ValueRedistribution(name, step)
                available[name].append(step.result)

    for each in nodes:
        for name, need in zip(each.node.inputs, each.operands, strict=True):
            if need is None or need in available[name]:
                continue
            # Layouts that later nodes need and that contain all elements of `need`. If one of them
            # is produced now, a slice of it yields `need` without further communication.
            later = (
                layout_needed
                for layout_needed in needed.get(name, ())
                if layout_needed not in available[name] and layout_needed != need
            )
            larger = [
                layout_needed
                for layout_needed in later
                if not missing_elements(layout_needed, need, group).any()
            ]
            if larger:
                yield from make_layout(
                    name,
                    max(larger, key=lambda layout_needed: math.prod(layout_needed.local_shape())),
                )
            if need not in available[name]:
                yield from make_layout(name, need)
        yield each
        for name, layout in zip(each.node.outputs, each.results, strict=True):
            if layout is None:
                continue
            current = layout
            if layout.is_partial and not (name in may_stay_partial and not layout.shape):
                needs = needed.get(name, {})
                is_single = len(needs) == 1 and name not in outputs
                for step in reduction_steps(
                    layout, next(iter(needs)) if is_single else layout.after_all_reduce()
                ):
                    yield ValueRedistribution(name, step)
                    current = step.result
            available[name] = [current]


def _needed_layouts(
    nodes: Sequence[NodeLayouts], skipped: Set[str] = frozenset()
) -> dict[str, dict[Layout, None]]:
    """Return, for each value, the layouts in which the nodes read it, in order of first use.
    Windowed shards, which may overlap because an operator reads them through sliding windows, are
    replaced by even shards. Values in `skipped` are omitted.
    """
    needed: dict[str, dict[Layout, None]] = {}
    for each in nodes:
        for name, need in zip(each.node.inputs, each.operands, strict=True):
            if need is not None and name not in skipped:
                needed.setdefault(name, {})[need.with_even_shards()] = None
    return needed


def parameters_to_replicate(
    stages: Sequence[tuple[tuple[int, ...], Mapping[str, Layout]]],
) -> frozenset[str]:
    """Return the names of the parameters that each stage must hold in full, although it needs only
    shards of them.

    `stages` are pairs (devices, layout of each parameter). A parameter is replicated if a rank
    would hold two different shards of it, or if shards on different ranks overlap without being
    equal. In these cases gradients could not be summed, because they are summed over ranks that
    hold equal shards.
    """
    holdings: defaultdict[str, list[tuple[tuple[int, ...], Layout]]] = defaultdict(list)
    for devices, parameters in stages:
        for name, layout in parameters.items():
            holdings[name].append((devices, layout))
    must_replicate = cache(_has_unequal_shards)
    candidates = {
        name: each for name, each in holdings.items() if len(each) > 1 or each[0][1].windows
    }
    return frozenset(name for name, each in candidates.items() if must_replicate(tuple(each)))


def _has_unequal_shards(holdings: tuple[tuple[tuple[int, ...], Layout], ...]) -> bool:
    """True if a device would hold two different shards of a parameter, or if two different shards
    overlap. `holdings` contains the devices and the layout of the parameter for each stage that
    reads it.
    """
    shard_of_device: dict[int, TensorSlice] = {}
    for devices, layout in holdings:
        for shard, positions in holders_by_shard(layout, len(devices)):
            if any(
                shard_of_device.setdefault(devices[position], shard) != shard
                for position in positions
            ):
                return True
    if (
        len({(len(devices), layout) for devices, layout in holdings}) == 1
        and not holdings[0][1].windows
    ):
        # If all groups of devices are of one size and use one layout, its shards are of equal size.
        # Two of the shards are then equal or disjoint, so no partial overlap exists.
        return False
    return any(
        one.intersect(other) is not None
        for one, other in itertools.combinations(set(shard_of_device.values()), 2)
    )
