"""ONNX's multi-device annotations: read as constraints on nodes, and written for a plan into a copy of its file.

All other bytes of the serialised model are copied unread, weights included.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from autopipe.ir.atomic_file import replacing
from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import Graph, Node
from autopipe.ir.layout import Layout, MeshAxes, degree_of, mesh_of, operand_layout, result_layout
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Constraint
from autopipe.ir.space import Dimension, Space
from autopipe.passes.analysis.constraints import BATCH_AXIS
from autopipe.passes.analysis.operators import SampleAxes, sample_axes, uses_of
from autopipe.passes.frontend.device_annotations import (
    Annotation,
    Configuration,
    Sharding,
    annotation_proto,
    configuration_proto,
)
from autopipe.passes.frontend.load import inlined, load, located, opened
from autopipe.passes.frontend.model import Model, Origin, Provenance
from autopipe.passes.frontend.protobuf_scan import (
    GRAPH_NODE,
    LENGTH,
    MODEL_CONFIGURATION,
    MODEL_GRAPH,
    MODEL_IR_VERSION,
    NODE_CONFIGURATION,
    VARINT,
    Field,
    encoded,
    fields_of,
    framed,
    header,
    varint,
)


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """An axis of a node's iteration space in `degree` parts; `places` says which one each device has.

    Devices are in ascending order.
    """

    axis: str
    degree: int
    places: tuple[int, ...]


Cuts = tuple[AxisSplit, ...]
"""All cuts of a node, in any order; () where each device computes it whole."""


def splits_over(order: Sequence[int], cuts: Cuts) -> tuple[Split, ...] | None:
    """The splits, outer to inner over the devices in this order, that make `cuts`; None where none do.

    Devices that the splits leave over are innermost, as in a stage.
    """
    ascending = sorted(order)
    rank = {device: index for index, device in enumerate(ascending)}
    places = {cut.axis: tuple(cut.places[rank[device]] for device in order) for cut in cuts}
    # The further out a split is, the later comes the first device that is not in its first part.
    outer = sorted(cuts, key=lambda cut: -next((at for at, place in enumerate(places[cut.axis]) if place), 0))
    splits = tuple(Split(cut.axis, cut.degree) for cut in outer)
    rest = len(order)
    for split in splits:
        if rest % split.degree:
            return None
        rest //= split.degree
    for split, axis in zip(splits, mesh_of(splits, len(order)), strict=True):
        if places[split.axis] != tuple(axis.place(position) for position in range(len(order))):
            return None
    return splits


def order_of(shardings: Iterable[Sharding], cuts: Iterable[Cuts]) -> tuple[int, ...] | None:
    """An order of a group's devices over which splits make all of `cuts`; None where none of those tried does.

    Tried are the orders in which `shardings`, all of this group, list its devices, first of values that each device
    holds whole, and the ascending one. Those that keep the order in which copies of a block are listed go before.
    """
    distinct = tuple(dict.fromkeys(sharding.devices for sharding in shardings))
    wanted = tuple(dict.fromkeys(cuts))
    candidates = tuple(dict.fromkeys(_candidates(distinct)))
    for order in sorted(candidates, key=lambda order: not _keeps(order, distinct)):
        if all(splits_over(order, each) is not None for each in wanted):
            return order
    return None


def _candidates(listings: Sequence[tuple[tuple[int, ...], ...]]) -> Iterator[tuple[int, ...]]:
    for groups in listings:
        if len(groups) == 1:
            yield groups[0]
    for groups in listings:
        listed = tuple(device for group in groups for device in group)
        yield tuple(sorted(listed))
        yield listed


def _keeps(order: Sequence[int], listings: Sequence[tuple[tuple[int, ...], ...]]) -> bool:
    """True if copies of each block are listed in this order."""
    position = {device: index for index, device in enumerate(order)}
    return all(
        position[first] < position[second]
        for groups in listings
        for group in groups
        for first, second in itertools.pairwise(group)
    )


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


@dataclass(frozen=True, slots=True)
class _Wish:
    """Constraints of the annotations on a node of the graph; without `shardings` none on its tensors."""

    node: int
    stage: int | None
    shardings: tuple[Sharding, ...]
    cuts: Cuts

    @property
    def group(self) -> frozenset[int]:
        """The node's devices, none where they are left open."""
        return self.shardings[0].group() if self.shardings else frozenset()


def annotated_constraints(model: Model, devices: int) -> tuple[Constraint, ...]:
    """Constraints that the annotations of `model` are for `devices` devices; () where it has none.

    Raises ConfigurationError where no configuration, or more than one, is for that number, and ModelError, naming the
    node, for annotations that do not fit its operator or its tensors' shapes, or contradict one another.
    """
    configuration = _chosen(model.configurations, devices)
    if configuration is None:
        return ()
    try:
        return tuple(_constraints(model, configuration))
    except ModelError as error:
        raise located(error, model.path) from error


def _chosen(configurations: tuple[Configuration, ...], devices: int) -> Configuration | None:
    """The configuration for `devices` devices."""
    annotated = [each for each in configurations if each.annotations]
    fitting = [each for each in annotated if each.devices == devices]
    if len(fitting) == 1 or not annotated:
        return fitting[0] if fitting else None
    if fitting:
        names = " and ".join(repr(each.name) for each in fitting)
        raise ConfigurationError(
            f"the model's device configurations {names} are all for {devices} devices",
            hint="leave one of them in the file",
        )
    known = ", ".join(f"{each.name!r} for {each.devices}" for each in annotated)
    raise ConfigurationError(
        f"the model is annotated, but not for {devices} devices: {known}",
        hint="plan for as many devices, or the model without its annotations",
    )


def _constraints(model: Model, configuration: Configuration) -> Iterator[Constraint]:
    """One for stage and devices of the nodes that share them, and one for each split of some of these."""
    samples = sample_axes(model.graph)
    resolved = _node_constraints(model, configuration, samples)
    stages = sorted({wish.stage for wish in resolved if wish.stage is not None})
    teams: dict[object, list[_Wish]] = {}
    for wish in resolved:
        teams.setdefault(wish.group if wish.stage is None else wish.stage, []).append(wish)
    for members in teams.values():
        stage = None if members[0].stage is None else stages.index(members[0].stage)
        source = "the model's annotation" + ("" if stage is None else f" of stage {stage}")
        order = _order(model.graph, [wish for wish in members if wish.shardings])
        yield Constraint(source, stage, order, nodes=tuple(model.graph.nodes[wish.node].name for wish in members))
        by_split: dict[tuple[tuple[str, int], ...], list[str]] = {}
        for wish in members:
            splits = splits_over(order, wish.cuts) if order and wish.shardings else None
            if splits is not None:
                own = samples.axes[wish.node]
                split = tuple((BATCH_AXIS if each.axis == own else each.axis, each.degree) for each in splits)
                by_split.setdefault(split, []).append(model.graph.nodes[wish.node].name)
        for split, names in by_split.items():
            yield Constraint(source, split=split, nodes=tuple(names))


def _node_constraints(model: Model, configuration: Configuration, samples: SampleAxes) -> list[_Wish]:
    """Constraints on each annotated node of the graph, in its order.

    A node of the file that writes what the graph's node does says most. Of others that became part of the same operator
    (its scores, its softmax) only layouts of tensors are taken that the first says nothing of.
    """
    annotations = {each.node: each for each in configuration.annotations}
    stages: dict[int, int | None] = {}
    layouts: dict[int, dict[str, Sharding]] = {}
    parts = zip(model.origins.nodes, model.origins.owners(), strict=True)
    for origin, owner in sorted(parts, key=lambda part: part[0].writes is None):
        annotation = annotations.get(origin.position)
        if annotation is None or owner is None:
            continue
        known = layouts.setdefault(owner, {})
        if origin.writes is not None:
            stages[owner] = annotation.stage
            known.update(_own(model.graph, owner, origin, annotation))
        else:
            known.update({**_own(model.graph, owner, origin, annotation), **known})
    return [
        _Wish(
            node,
            stages.get(node),
            tuple(layouts[node].values()),
            cuts_of(model.graph, node, samples.uses[node].space, layouts[node]) if layouts[node] else (),
        )
        for node in sorted(layouts)
        if layouts[node] or stages.get(node) is not None
    ]


def _own(graph: Graph, node: int, origin: Origin, annotation: Annotation) -> dict[str, Sharding]:
    """The annotation's layouts of what `node` reads and writes, by the graph's names."""
    tensors = {*graph.nodes[node].inputs, *graph.nodes[node].outputs}
    names = dict(origin.values)
    found: dict[str, Sharding] = {}
    for sharding in annotation.shardings:
        name = names.get(sharding.tensor)
        if name not in tensors or name is None:
            continue
        other = found.setdefault(name, sharding)
        if (other.cuts, other.devices) != (sharding.cuts, sharding.devices):
            raise ModelError(
                f"its annotations of {other.tensor!r} and {sharding.tensor!r}, which are one value, differ",
                where=origin.title,
            )
    return found


def _order(graph: Graph, members: Sequence[_Wish]) -> tuple[int, ...] | None:
    """The devices of a stage in the order over which its nodes are split; None where no layout tells them."""
    if not members:
        return None
    first = members[0]
    other = next((wish for wish in members if wish.group != first.group), None)
    if other is not None:
        raise ModelError(
            f"it is annotated for devices {_listed(other)}, but {graph.nodes[first.node].name!r} of its stage for"
            f" {_listed(first)}",
            hint="all nodes of a stage are on the same devices",
            where=repr(graph.nodes[other.node].name),
        )
    order = order_of((sharding for wish in members for sharding in wish.shardings), (wish.cuts for wish in members))
    if order is None:
        raise ModelError(
            f"its stage's nodes are annotated for blocks that no splits over devices {_listed(first)} make",
            hint="equal parts, outer to inner over the devices in one order, copies innermost, can be followed",
            where=repr(graph.nodes[first.node].name),
        )
    return order


def _listed(wish: _Wish) -> str:
    return ", ".join(map(str, sorted(wish.group)))


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


IR_VERSION: Final = 11
"""The first version of the format that has the annotations."""

Piece = bytes | memoryview


def spliced(data: memoryview, configuration: Configuration) -> Iterator[Piece]:
    """The serialised model `data` with the annotations of `configuration`, piece by piece.

    They take the place of those for as many devices, and of those of the same name.
    """
    fields = list(fields_of(data, 0, len(data)))
    declared = {field.start: _declared(data, field) for field in fields if _is(field, MODEL_CONFIGURATION)}
    replaced = {
        name for name, devices in declared.values() if name == configuration.name or devices == configuration.devices
    }
    versions = [varint(data, field.payload, field.end)[0] for field in fields if field.number == MODEL_IR_VERSION]
    annotations = {
        each.node: framed(NODE_CONFIGURATION, annotation_proto(each, configuration.name).SerializeToString())
        for each in configuration.annotations
    }
    yield encoded(MODEL_IR_VERSION << 3 | VARINT) + encoded(max(IR_VERSION, *versions))
    before = 0
    for field in fields:
        if _is(field, MODEL_GRAPH):
            pieces = list(_graph(data, field, replaced, annotations, before))
            before += sum(_is(part, GRAPH_NODE) for part in fields_of(data, field.payload, field.end))
            yield header(MODEL_GRAPH, sum(map(len, pieces)))
            yield from pieces
        elif field.number != MODEL_IR_VERSION and declared.get(field.start, ("", 0))[0] not in replaced:
            yield data[field.start : field.end]
    yield framed(MODEL_CONFIGURATION, configuration_proto(configuration).SerializeToString())


def _graph(
    data: memoryview, graph: Field, replaced: set[str], annotations: Mapping[int, bytes], before: int
) -> Iterator[Piece]:
    """Contents of the graph's field; `before` nodes stand before its own."""
    position = before
    for part in fields_of(data, graph.payload, graph.end):
        if not _is(part, GRAPH_NODE):
            yield data[part.start : part.end]
            continue
        pieces = [*_node(data, part, replaced), annotations.get(position, b"")]
        position += 1
        yield header(GRAPH_NODE, sum(map(len, pieces)))
        yield from pieces


def _node(data: memoryview, node: Field, replaced: set[str]) -> Iterator[Piece]:
    """Contents of the node's field, without annotations for the configurations `replaced`."""
    for field in fields_of(data, node.payload, node.end):
        if not (_is(field, NODE_CONFIGURATION) and _configuration_id(data, field) in replaced):
            yield data[field.start : field.end]


def _is(field: Field, number: int) -> bool:
    return field.number == number and field.wire == LENGTH


def _declared(data: memoryview, field: Field) -> tuple[str, int]:
    """Name and number of devices of a configuration."""
    import onnx

    found = onnx.DeviceConfigurationProto.FromString(bytes(data[field.payload : field.end]))
    return found.name, found.num_devices


def _configuration_id(data: memoryview, field: Field) -> str:
    import onnx

    message = onnx.NodeDeviceConfigurationProto.FromString(bytes(data[field.payload : field.end]))
    return str(message.configuration_id)


MODEL_FUNCTION = 25


def write_annotated(model: Path, target: Path, configuration: Configuration) -> None:
    """Write the file `model` with the annotations of `configuration` to `target`, whole or not at all.

    Weights stay where they are: in the copy, or in files beside it. Functions of the file's own are inlined. Raises
    ConfigurationError where `target` cannot be written, is `model`, or is not beside the files with its weights.
    """
    _check_place(model, target)
    data = opened(model)
    if any(field.number == MODEL_FUNCTION for field in fields_of(data, 0, len(data))):
        data = _without_functions(data)
    try:
        with replacing(target) as file:
            for piece in spliced(data, configuration):
                file.write(piece)
    except OSError as error:
        raise ConfigurationError(f"cannot write {target}: {error.strerror}", hint="choose another place") from error


def _check_place(model: Path, target: Path) -> None:
    if target.exists() and target.samefile(model):
        raise ConfigurationError(f"{target} is the model itself", hint="name another file")
    graph = load(model).graph
    constants = (attribute.t for node in graph.node for attribute in node.attribute)
    if not any(tensor.external_data for tensors in (graph.initializer, constants) for tensor in tensors):
        return
    folder = model.absolute().parent
    if target.absolute().parent.resolve() != folder.resolve():
        raise ConfigurationError(
            f"{target} is not in the folder of the model, whose weights lie in files beside it",
            hint=f"name a file in {folder}",
        )


def _without_functions(data: memoryview) -> memoryview:
    import onnx

    return memoryview(inlined(onnx.ModelProto.FromString(bytes(data))).SerializeToString())
