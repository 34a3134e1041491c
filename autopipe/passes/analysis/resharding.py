"""Changes of layout inside a stage: the fewest collectives between two layouts of a value, and a
stage's exchanges.

No step brings a device more than it lacks, and what runs is what costs are told of. Partial sums
are added up at once: scattered where all readers want the same blocks, else to copies. After that a
value is brought to each layout that is asked for from the form of it that lacks least.
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
    replicated,
    result_layout,
    sliced,
)
from autopipe.ir.placement import Split, Stage
from autopipe.ir.space import Space


@lru_cache(maxsize=1 << 16)
def steps_between(source: Layout, target: Layout) -> tuple[Redistribution, ...]:
    """Steps that bring a value from `source`, whose blocks are even and no partial sums, to
    `target`. Cut first, so that less is gathered. Where the axes of one dimension go to another one
    as they are, and none else leave, that is an all-to-all; what is neither goes from device to
    device.
    """
    assert not source.is_partial and not source.windows, source
    if source == target:
        return ()
    if target.windows:
        both = (axis for layout in (source, target) for cut in layout.shard_axes for axis in cut)
        group = math.lcm(
            *(axis.stride * axis.degree for axis in both)
        )  # Places repeat from there on.
        return (
            Redistribution(
                "redistribute" if missing_elements(source, target, group).any() else "slice",
                source,
                target,
            ),
        )
    bounds = _chain(
        axis for layout in (source, target) for axes in layout.shard_axes for axis in axes
    )
    if bounds is None:
        return (Redistribution("redistribute", source, target),)
    coming: dict[int, MeshAxes] = {}
    leaving: dict[int, MeshAxes] = {}
    for place, cuts in enumerate(zip(source.shard_axes, target.shard_axes, strict=True)):
        have, want = (_split(axes, bounds) for axes in cuts)
        same = sum(
            1
            for _ in itertools.takewhile(
                lambda pair: pair[0] == pair[1], zip(have, want, strict=False)
            )
        )
        if want[same:]:
            coming[place] = want[same:]
        if have[same:]:
            leaving[place] = have[same:]
    wanted = {axis for axes in target.shard_axes for axis in _split(axes, bounds)}
    found: list[Redistribution] = []
    held = source

    def cut(kind: str, place: int, axes: MeshAxes, *origin: int) -> None:
        nonlocal held
        cuts = (
            merge_axes(target.shard_axes[each]) if each in (place, *origin) else own
            for each, own in enumerate(held.shard_axes)
        )
        result = replace(held, shard_axes=tuple(cuts))
        found.append(Redistribution(kind, held, result, merge_axes(axes), place, *origin))
        held = result

    if all(place not in coming and wanted.isdisjoint(axes) for place, axes in leaving.items()):
        for place, axes in coming.items():
            cut("slice", place, axes)
        for place, axes in leaving.items():
            cut("all_gather", place, axes)
        return tuple(found)
    (origin, moving), *others = leaving.items()
    if others or origin in coming or moving not in coming.values():
        return (Redistribution("redistribute", source, target),)
    into = next(place for place, axes in coming.items() if axes == moving)
    for place, axes in coming.items():
        if place != into:
            cut("slice", place, axes)
    cut("all_to_all", into, moving, origin)
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def reductions(source: Layout, target: Layout) -> tuple[Redistribution, ...]:
    """Steps that add up the partial sums of `source`, on the way to `target`: scattered where that
    cuts further. The last step's result has no partial sums left; the axes that cut one dimension
    of `target` inside of those that cut it now are scattered along it, all others reduced to
    copies. The blocks of both are even.
    """
    cuts = list(source.shard_axes)
    left = source.partial_over
    found = []
    held = source
    for inside, dimension, rest in scattered(source.shard_axes, left, target.shard_axes):
        cuts[dimension], left = merge_axes(cuts[dimension] + inside), rest
        sums = merge_axes(without(held.sums, inside))
        means = merge_axes(without(held.means, inside))
        result = Layout(source.shape, tuple(cuts), sums, means)
        found.append(Redistribution("reduce_scatter", held, result, inside, dimension))
        held = result
    if left:
        result = Layout(source.shape, tuple(cuts))
        found.append(Redistribution("all_reduce", held, result, merge_axes(left)))
    return tuple(found)


def scattered(
    cuts: tuple[MeshAxes, ...], shares: MeshAxes, target: tuple[MeshAxes, ...]
) -> Iterator[tuple[MeshAxes, int, MeshAxes]]:
    """How shares over the axes `shares` are scattered from `cuts` on the way to those of `target`.
    The axes along which they are, of which dimension, and the axes over which shares are left then;
    outer to inner.
    """
    for dimension, (now, wanted) in enumerate(zip(cuts, target, strict=True)):
        inside = scattered_along(now, wanted, shares)
        if inside:
            shares = without(shares, inside)
            yield inside, dimension, shares


@lru_cache(maxsize=1 << 16)
def scattered_along(now: MeshAxes, wanted: MeshAxes, shares: MeshAxes) -> MeshAxes:
    """The axes that cut a dimension in `wanted` inside of `now`, if the value is shared out over
    exactly these.
    """
    if now == wanted or not shares or not is_cut_further(now, wanted):
        return ()
    atoms = _chain([*now, *wanted, *shares])
    if atoms is None:
        return ()
    have = _split(now, atoms)
    want = _split(wanted, atoms)
    if len(want) <= len(have) or want[: len(have)] != have:
        return ()
    free = set(_split(shares, atoms))
    inside = list(itertools.takewhile(free.__contains__, want[len(have) :]))
    return merge_axes(inside)


def is_cut_further(now: MeshAxes, wanted: MeshAxes) -> bool:
    """True if `wanted` cuts a dimension along the axes of `now`, outer to inner, and maybe others
    inside of these.
    """
    if not now:
        return True
    if len(now) > len(wanted) or now[:-1] != wanted[: len(now) - 1]:
        return False
    inner = now[-1]
    other = wanted[len(now) - 1]
    return (
        inner.stride * inner.degree == other.stride * other.degree
        and inner.stride % other.stride == 0
    )


@lru_cache(maxsize=1 << 16)
def without(axes: MeshAxes, taken: MeshAxes) -> MeshAxes:
    """`axes` but for those in `taken`."""
    atoms = _chain([*axes, *taken])
    assert atoms is not None, (axes, taken)
    gone = set(_split(taken, atoms))
    return tuple(axis for axis in _split(axes, atoms) if axis not in gone)


def _chain(axes: Iterable[MeshAxis]) -> list[int] | None:
    """The strides at which axes begin and end, ascending; None where one does not divide the
    next.
    """
    found = sorted({bound for axis in axes for bound in (axis.stride, axis.stride * axis.degree)})
    return found if is_chain(found) else None


def is_chain(bounds: Sequence[int]) -> bool:
    """True if each of ascending strides divides the next: axes that begin and end there nest."""
    return all(large % small == 0 for small, large in itertools.pairwise(bounds))


def _split(axes: MeshAxes, bounds: list[int]) -> MeshAxes:
    """`axes` cut at `bounds`, outer to inner."""
    found = []
    for axis in axes:
        inner = [bound for bound in bounds if axis.stride <= bound <= axis.stride * axis.degree]
        found += [MeshAxis(large // small, small) for small, large in itertools.pairwise(inner)][
            ::-1
        ]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class NodeLayouts:
    """One node with the layouts in which its group reads its operands and leaves its results; None
    where absent.
    """

    index: int
    node: Node
    operands: tuple[Layout | None, ...]
    results: tuple[Layout | None, ...]


def node_layouts(
    graph: Graph, index: int, space: Space, splits: tuple[Split, ...], group: int
) -> NodeLayouts:
    """The graph's node at `index`, of iteration space `space`, under its splits over `group`
    devices.
    """
    node = graph.nodes[index]
    axes = mesh_axis_by_name(splits, group)
    operands = (
        operand_layout(words or (), graph.type_of(name).shape, axes, space.windows_of(place))
        if name
        else None
        for place, (name, words) in enumerate(zip(node.inputs, space.operands, strict=True))
    )
    results = (
        result_layout(space, words or (), graph.type_of(name).shape, axes) if name else None
        for name, words in zip(node.outputs, space.results, strict=True)
    )
    return NodeLayouts(index, node, tuple(operands), tuple(results))


def taken_layouts(
    graph: Graph, nodes: Sequence[NodeLayouts], stage: Stage, whole: Set[str] = frozenset()
) -> dict[str, Layout]:
    """For each value a stage does not compute, the layout to take it in: the one all its nodes
    need, else whole. Blocks that are read through windows are taken as even ones where there are
    such. Constants and the values in `whole` are whole; what the stage gathers comes in slices.
    """
    written = frozenset(name for each in nodes for name in each.node.outputs)
    fixed = whole | {each.value.name for each in graph.constants}
    found = {
        name: next(iter(needs))
        if len(needs) == 1 and name not in fixed
        else replicated(graph.type_of(name).shape)
        for name, needs in _wanted(nodes, written).items()
    }
    for name in stage.gathers:
        if name in found and graph.producer(name) is not None:
            found[name] = sliced(found[name], len(stage.devices))
    return found


@dataclass(frozen=True, slots=True)
class Exchange:
    value: str
    step: Redistribution


def with_exchanges(
    nodes: Sequence[NodeLayouts],
    taken: dict[str, Layout],
    given: Set[str],
    shares: Set[str],
    group: int,
) -> Iterator[NodeLayouts | Exchange]:
    """The nodes of a stage in order, with the exchanges between them. `taken` are the layouts of
    the values it does not compute, `given` the values that others want whole or in shards of one's
    own choice, and `shares` the scalars that may stay partial.
    """
    wanted = _wanted(nodes)
    forms = {name: [layout] for name, layout in taken.items()}
    """The forms in which the group has each value so far, the one it is known by first."""

    def made(name: str, need: Layout) -> Iterator[Exchange]:
        """The steps to a form from the one that lacks least of it."""
        even = (have for have in forms[name] if not have.windows)
        nearest = min(even, key=lambda have: int(missing_elements(have, need, group).max()))
        for step in steps_between(nearest, need):
            if step.result not in forms[name]:
                yield Exchange(name, step)
                forms[name].append(step.result)

    for each in nodes:
        for name, need in zip(each.node.inputs, each.operands, strict=True):
            if need is None or need in forms[name]:
                continue
            # Where a later node wants a form that this one is but a cut of, that one is made first.
            further = (
                form for form in wanted.get(name, ()) if form not in forms[name] and form != need
            )
            within = [form for form in further if not missing_elements(form, need, group).any()]
            if within:
                yield from made(name, max(within, key=lambda form: math.prod(form.local_shape())))
            if need not in forms[name]:
                yield from made(name, need)
        yield each
        for name, layout in zip(each.node.outputs, each.results, strict=True):
            if layout is None:
                continue
            held = layout
            if layout.is_partial and not (name in shares and not layout.shape):
                needs = wanted.get(name, {})
                alone = len(needs) == 1 and name not in given
                for step in reductions(layout, next(iter(needs)) if alone else layout.reduced()):
                    yield Exchange(name, step)
                    held = step.result
            forms[name] = [held]


def _wanted(
    nodes: Sequence[NodeLayouts], left_out: Set[str] = frozenset()
) -> dict[str, dict[Layout, None]]:
    """The layouts in which nodes read each value, in order, but for the windows they read it
    through.
    """
    wanted: dict[str, dict[Layout, None]] = {}
    for each in nodes:
        for name, need in zip(each.node.inputs, each.operands, strict=True):
            if need is not None and name not in left_out:
                wanted.setdefault(name, {})[need.even()] = None
    return wanted


def torn_parameters(
    stages: Sequence[tuple[tuple[int, ...], Mapping[str, Layout]]],
) -> frozenset[str]:
    """Parameters of which a rank would hold two blocks, or whose blocks overlap without being
    equal.

    `stages` are each stage's devices and how they hold its parameters. Those that are torn are to
    be held whole: a gradient is a sum over equal blocks.
    """
    holdings: defaultdict[str, list[tuple[tuple[int, ...], Layout]]] = defaultdict(list)
    for devices, parameters in stages:
        for name, layout in parameters.items():
            holdings[name].append((devices, layout))
    is_torn = cache(_is_torn)
    shared = {name: each for name, each in holdings.items() if len(each) > 1 or each[0][1].windows}
    return frozenset(name for name, each in shared.items() if is_torn(tuple(each)))


def _is_torn(holdings: tuple[tuple[tuple[int, ...], Layout], ...]) -> bool:
    held: dict[int, TensorSlice] = {}
    for devices, layout in holdings:
        for box, places in holders_by_shard(layout, len(devices)):
            if any(held.setdefault(devices[place], box) != box for place in places):
                return True
    if (
        len({(len(devices), layout) for devices, layout in holdings}) == 1
        and not holdings[0][1].windows
    ):
        return False  # Blocks of one layout are apart.
    return any(
        one.intersect(other) is not None
        for one, other in itertools.combinations(set(held.values()), 2)
    )
