"""A placement as annotations of the nodes of the file that its graph was read from."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, MeshAxes, degree_of, operand_layout, result_layout
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.space import Space
from autopipe.passes.annotations.sharding import Annotation, Configuration, Sharding
from autopipe.passes.cost.uses import uses_of
from autopipe.passes.frontend.origins import Origin, Provenance


@dataclass(frozen=True, slots=True)
class Annotated:
    """Annotations, and what of a graph they leave out."""

    configuration: Configuration
    left_out: tuple[str, ...]
    """Names of the graph's nodes that the annotations do not tell all of: no node of the file is theirs, as with an
    added loss, or an axis that is split indexes but tensors that have no annotation."""


def annotated(graph: Graph, placement: Placement, origins: Provenance, device_names: tuple[str, ...]) -> Annotated:
    """The annotations that say for the file's nodes what `placement` says for the graph's.

    A result of which devices hold shares of a sum is annotated as it is once they are added up. A node of the file
    that reading took out has the stage in which its result is read. Raises ConfigurationError for a placement of
    several pipelines, where each node is in several stages.
    """
    if placement.pipelines > 1:
        raise ConfigurationError(
            f"each node is in {placement.pipelines} pipelines, and ONNX's annotations have room for one stage a node",
            hint="annotate a plan with one pipeline",
        )
    stage_of = placement.stage_of()
    group_of = {node: placement.stages[stage] for node, stage in stage_of.items()}
    spaces = [use.space for use in uses_of(graph)]
    layouts = [_layouts(graph, node, space, group_of[node]) for node, space in enumerate(spaces)]
    owners = origins.owners()
    stages = _stages(origins, [None if owner is None else stage_of[owner] for owner in owners])
    annotations = tuple(
        Annotation(
            origin.position,
            stage,
            () if owner is None else tuple(_shardings(origin, layouts[owner], group_of[owner].devices)),
        )
        for origin, owner, stage in zip(origins.nodes, owners, stages, strict=True)
        if stage is not None
    )
    told: dict[int, set[str]] = {}
    for origin, owner in zip(origins.nodes, owners, strict=True):
        if owner is not None:
            told.setdefault(owner, set()).update(own for _, own in origin.values if own in layouts[owner])
    written = {origin.writes for origin in origins.nodes}
    left_out = tuple(
        node.name
        for index, node in enumerate(graph.nodes)
        if index not in written
        or not {split.axis for split in group_of[index].splits_of(index)} <= _axes(node, spaces[index], told[index])
    )
    size = len(device_names)
    return Annotated(Configuration(f"autopipe-{size}", size, device_names, annotations), left_out)


def _stages(origins: Provenance, own: list[int | None]) -> list[int | None]:
    """The stage of each origin: its own, else that of the first stage that reads it; None where none does."""
    stages = list(own)
    for index in range(len(stages) - 1, -1, -1):
        if stages[index] is None:
            found = [stage for reader in origins.nodes[index].readers if (stage := stages[reader]) is not None]
            stages[index] = min(found, default=None)
    return stages


def _layouts(graph: Graph, node: int, space: Space, stage: Stage) -> dict[str, Layout]:
    """How the stage's devices hold what a node reads and writes.

    Without values that it reads in several layouts, or through windows that equal blocks do not stand for.
    """
    own, splits, group = graph.nodes[node], stage.splits_of(node), len(stage.devices)
    found: dict[str, set[Layout]] = {}
    for place, (name, dimensions) in enumerate(zip(own.inputs, space.operands, strict=True)):
        if name and dimensions is not None:
            shape, windows = graph.type_of(name).shape, space.windows_of(place)
            layout = operand_layout(dimensions, shape, splits, group, windows)
            found.setdefault(name, set()).add(layout.even() if layout.even().cuts == layout.cuts else layout)
    for name, dimensions in zip(own.outputs, space.results, strict=True):
        if name and dimensions is not None:
            layout = result_layout(space, dimensions, graph.type_of(name).shape, splits, group)
            found.setdefault(name, set()).add(layout.reduced())
    single = {name: layouts.pop() for name, layouts in found.items() if len(layouts) == 1}
    return {name: layout for name, layout in single.items() if not layout.windows}


def _shardings(origin: Origin, layouts: dict[str, Layout], devices: tuple[int, ...]) -> Iterator[Sharding]:
    for name, own in origin.values:
        if own in layouts:
            yield Sharding(name, *_blocks(layouts[own].cuts, devices))


def _axes(node: Node, space: Space, tensors: set[str]) -> set[str]:
    """The axes that index any of these tensors."""
    dimensions = zip((*node.inputs, *node.outputs), (*space.operands, *space.results), strict=True)
    return {axis for name, own in dimensions if name in tensors for dimension in own or () for axis in dimension}


@functools.lru_cache(maxsize=4096)
def _blocks(
    cuts: tuple[MeshAxes, ...], devices: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]]:
    """`Sharding`'s cuts and devices for a layout cut so: a model of equal layers has few."""
    cut = [(dimension, axes) for dimension, axes in enumerate(cuts) if degree_of(axes) > 1]
    blocks: dict[tuple[int, ...], list[int]] = {
        block: [] for block in itertools.product(*(range(degree_of(axes)) for _, axes in cut))
    }
    for position, device in enumerate(devices):
        blocks[tuple(_place(axes, position) for _, axes in cut)].append(device)
    return tuple((dimension, degree_of(axes)) for dimension, axes in cut), tuple(map(tuple, blocks.values()))


def _place(axes: MeshAxes, position: int) -> int:
    """Which of a dimension's blocks the device at `position` holds."""
    place = 0
    for axis in axes:
        place = place * axis.degree + axis.place(position)
    return place
