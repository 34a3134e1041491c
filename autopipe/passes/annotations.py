"""Read the multi-device annotations of an ONNX file as constraints on nodes, and write the
annotations of a plan into a copy of the file.

An annotation gives a node of the file a pipeline stage, and layouts of its tensors over devices.
When annotations are written, all other bytes of the serialized model, including the weights, are
copied unparsed. Only a file with local functions is parsed, because the functions are inlined
first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.graph import Graph
from autopipe.ir.layout import (
    Layout,
    MeshAxes,
    combined_coordinate,
    mesh_axes_of,
    mesh_axis_by_name,
    operand_layout,
    result_layout,
    total_degree,
)
from autopipe.ir.output_files import open_replacement_file
from autopipe.ir.placement import Placement, Split, Stage
from autopipe.ir.problem import Constraint
from autopipe.ir.space import Space
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import BATCH_AXIS
from autopipe.passes.analysis.operators import SampleAxes, op_instances, sample_axes
from autopipe.passes.frontend import protobuf_scan as wire
from autopipe.passes.frontend.device_annotations import (
    Annotation,
    Configuration,
    Sharding,
    annotation_proto,
    configuration_proto,
)
from autopipe.passes.frontend.load import add_path_to_error, inline_functions, load, map_file
from autopipe.passes.frontend.model import Model, Origin, owners_of


@dataclass(frozen=True, slots=True)
class AxisSplit:
    """Split of one axis of a node's iteration space into `degree` equal parts.

    places: for each device of the node in ascending order, the index of the part that it computes.
    """

    axis: str
    degree: int
    places: tuple[int, ...]


Cuts = tuple[AxisSplit, ...]
"""All splits of a node, in any order; () if each device computes the full node."""


def splits_over(order: Sequence[int], cuts: Cuts) -> tuple[Split, ...] | None:
    """Return the splits, outermost first, that give each device the parts in `cuts` if they are
    applied to the devices in the order `order`; None if there are no such splits.

    Devices with equal parts of all axes are replicas. They are innermost in the order, as in a
    stage.
    """
    rank = {device: index for index, device in enumerate(sorted(order))}
    places = {cut.axis: tuple(cut.places[rank[device]] for device in order) for cut in cuts}
    # An outer split changes its part later in the device order than an inner split. Sorting by the
    # first device that is outside of the first part therefore orders the splits from outermost to
    # innermost.
    outer = sorted(
        cuts, key=lambda cut: -next((at for at, place in enumerate(places[cut.axis]) if place), 0)
    )
    splits = tuple(Split(cut.axis, cut.degree) for cut in outer)
    if len(order) % math.prod(split.degree for split in splits):
        return None
    mesh = zip(splits, mesh_axes_of(splits, len(order)), strict=True)
    made = {split.axis: tuple(map(axis.coordinate, range(len(order)))) for split, axis in mesh}
    return splits if made == places else None


def consistent_device_order(
    shardings: Iterable[Sharding], cuts: Iterable[Cuts]
) -> tuple[int, ...] | None:
    """Return an order of the devices of a group for which `splits_over` finds splits for each entry
    of `cuts`, or None if no candidate is such an order.

    The candidates are the ascending order and the orders in which `shardings` list the devices. All
    `shardings` are layouts over this group. Candidates that list the replicas of each shard in the
    order in which `shardings` list them are tried before all other candidates. Within each of these
    two sets of candidates, the orders of replicated tensors come first.
    """
    listings = tuple(dict.fromkeys(sharding.devices for sharding in shardings))
    wanted = tuple(dict.fromkeys(cuts))
    candidates = [groups[0] for groups in listings if len(groups) == 1]
    for groups in listings:
        listed = tuple(itertools.chain(*groups))
        candidates += [tuple(sorted(listed)), listed]

    def reorders_replicas(order: tuple[int, ...]) -> bool:
        """True if `order` lists replicas of a shard in another order than `shardings`."""
        position = {device: index for index, device in enumerate(order)}
        copies = (
            pair for groups in listings for group in groups for pair in itertools.pairwise(group)
        )
        return any(position[first] >= position[second] for first, second in copies)

    for order in sorted(dict.fromkeys(candidates), key=reorders_replicas):
        if all(splits_over(order, each) is not None for each in wanted):
            return order
    return None


def _splits_from_layouts(
    graph: Graph, node: int, space: Space, shardings: Mapping[str, Sharding]
) -> Cuts:
    """Return the splits of a node that follow from the layouts of its tensors. An axis that indexes
    no annotated tensor is not split.

    `shardings` maps the names of annotated tensors to their layouts. Raise ModelError, naming the
    node and the tensor, if a sharded dimension does not exist or cannot be split into this number
    of shards, or if two layouts contradict each other.
    """
    own = graph.nodes[node]
    where = f"{own.op} {own.name!r}"
    groups = {name: sharding.all_devices() for name, sharding in shardings.items()}
    first = next(iter(groups))
    other = next((name for name in groups if groups[name] != groups[first]), None)
    if other is not None:
        raise ModelError(
            f"the tensors {first!r} and {other!r} of the node are annotated for different devices",
            where=where,
        )
    devices = sorted(groups[first])
    found: dict[str, tuple[AxisSplit, str]] = {}
    tensors = zip((*own.inputs, *own.outputs), (*space.operands, *space.results), strict=True)
    for place, (name, dimensions) in enumerate(tensors):
        if name not in shardings or dimensions is None:
            continue
        windows = {each.dimension: each.axis for each in space.windows_of(place)}
        axes = [(windows[at],) if at in windows else each for at, each in enumerate(dimensions)]
        blocks = _shards_by_dimension(
            graph.type_of(name).shape, shardings[name], f"{where}: tensor {name!r}"
        )
        for (count, held, here), own_axes in zip(blocks, axes, strict=True):
            for axis, degree, inner in _axis_parts(own_axes, space.axis_sizes(), count, here):
                if degree == 1 and axis in windows.values():
                    # The tensor is replicated along a dimension that the node reads through
                    # windows. The node's axis may still be split, because each device then stores
                    # more elements than its windows read.
                    continue
                cut = AxisSplit(
                    axis, degree, tuple(held[device] // inner % degree for device in devices)
                )
                known, source = found.setdefault(axis, (cut, name))
                if known != cut:
                    raise ModelError(
                        f"the annotations of tensors {source!r} and {name!r} contradict each "
                        f"other: they split axis {axis!r} of the node into {known.degree} and "
                        f"{degree} {plural(degree, 'part')}, or in different orders",
                        hint="annotate the tensors consistently; autopipe inserts the required "
                        "communication",
                        where=where,
                    )
    return tuple(cut for cut, _ in found.values() if cut.degree > 1)


def _shards_by_dimension(
    shape: tuple[int, ...], sharding: Sharding, where: str
) -> Iterator[tuple[int, dict[int, int], str]]:
    """Yield, for each dimension of a tensor of shape `shape`, (number of shards, index of the shard
    by device, location for error messages).

    Raise ModelError if a sharded dimension does not exist, is sharded twice, or has a size that the
    number of shards does not divide. `where` is the location of the tensor, for error messages.
    """
    for dimension, _ in sharding.cuts:
        if not -len(shape) <= dimension < len(shape):
            raise ModelError(
                f"the annotation shards dimension {dimension} of a tensor of shape {shape}",
                "use an existing dimension",
                where,
            )
    if len({dimension % len(shape) for dimension, _ in sharding.cuts}) < len(sharding.cuts):
        raise ModelError("the annotation shards a dimension of the tensor twice", where=where)
    for index, (blocks, held) in enumerate(sharding.shards_by_dimension(len(shape))):
        here = f"{where}, dimension {index}"
        if shape[index] % blocks:
            raise ModelError(
                (
                    f"{blocks} {plural(blocks, 'shard does', 'shards do')} not divide the size "
                    f"{shape[index]} of the dimension"
                ),
                where=here,
            )
        yield blocks, held, here


def _axis_parts(
    dimension: Sequence[str], extents: Mapping[str, int], blocks: int, where: str
) -> Iterator[tuple[str, int, int]]:
    """Yield the division of a tensor dimension into `blocks` shards as divisions of the axes that
    index it, outermost first: (axis, number of parts of the axis, number of shards per part).

    An inner axis is divided only if all outer axes are divided into parts of size 1. `extents` are
    the sizes of all axes. Raise ModelError if the axes cannot be divided like this.
    """
    found = []
    rest = blocks
    for axis in dimension:
        degree = max(1, min(rest, extents[axis]))
        if rest % degree or extents[axis] % degree:
            raise ModelError(
                f"{blocks} {plural(blocks, 'shard does', 'shards do')} not divide axis {axis!r} "
                f"of size {extents[axis]}",
                where=where,
            )
        rest //= degree
        found.append((axis, degree, rest))
    if rest > 1:
        raise ModelError(
            (
                f"the operator cannot be split into {blocks} {plural(blocks, 'shard')} along "
                "this dimension"
            ),
            where=where,
        )
    yield from found


@dataclass(frozen=True, slots=True)
class _Annotated:
    """A node of the graph with the content of its annotations.

    stage: its pipeline stage; None if the annotations do not state one.
    shardings: layouts of its tensors; () if the annotations contain none.
    cuts: splits of the node that follow from the layouts.
    """

    node: int
    stage: int | None
    shardings: tuple[Sharding, ...]
    cuts: Cuts

    @property
    def group(self) -> frozenset[int]:
        """Devices of the node; empty if the annotations do not state them."""
        return self.shardings[0].all_devices() if self.shardings else frozenset()


def annotated_constraints(model: Model, devices: int) -> tuple[Constraint, ...]:
    """Return the constraints that follow from the annotations of `model` for a cluster of `devices`
    devices; () if the model has no annotations.

    A file can have several device configurations, each with its own annotations. Raise
    ConfigurationError if none of them, or more than one, is for this number of devices. Raise
    ModelError, naming the node, for annotations that do not fit its operator or the shapes of its
    tensors, or that contradict each other.
    """
    known = [each for each in model.configurations if each.annotations]
    fitting = [each for each in known if each.devices == devices]
    if not known:
        return ()
    if not fitting:
        names = ", ".join(f"{each.name!r} for {each.devices}" for each in known)
        reason = f"the model is annotated for other numbers of devices than {devices}: {names}"
        raise ConfigurationError(
            reason, "plan for one of these numbers of devices, or use the model without annotations"
        )
    if len(fitting) > 1:
        names = " and ".join(repr(each.name) for each in fitting)
        reason = (
            f"the model's device configurations {names} are for the same number of devices, "
            f"{devices}"
        )
        raise ConfigurationError(reason, "remove all but one of the configurations from the model")
    try:
        return tuple(_constraints(model, fitting[0]))
    except ModelError as error:
        raise add_path_to_error(error, model.path) from error


def _constraints(model: Model, configuration: Configuration) -> Iterator[Constraint]:
    """Yield constraints that express the annotations of `configuration`: one per stage, with its
    nodes and devices, and one for each set of nodes of the stage with equal splits.

    Nodes without a stage form one constraint per group of devices.
    """
    samples = sample_axes(model.graph)
    annotated = _annotated_nodes(model, configuration, samples)
    stages = sorted({each.stage for each in annotated if each.stage is not None})
    teams: dict[object, list[_Annotated]] = {}
    for each in annotated:
        teams.setdefault(each.group if each.stage is None else each.stage, []).append(each)
    for members in teams.values():
        stage = None if members[0].stage is None else stages.index(members[0].stage)
        source = "the model's annotation" + ("" if stage is None else f" of stage {stage}")
        order = _stage_device_order(model.graph, [each for each in members if each.shardings])
        names = {each.node: model.graph.nodes[each.node].name for each in members}
        yield Constraint(source, stage, order, nodes=tuple(names.values()))
        by_split: dict[tuple[tuple[str, int], ...], list[str]] = {}
        for each in members:
            splits = splits_over(order, each.cuts) if order and each.shardings else None
            if splits is not None:
                own = samples.axes[each.node]
                split = tuple(
                    (BATCH_AXIS if cut.axis == own else cut.axis, cut.degree) for cut in splits
                )
                by_split.setdefault(split, []).append(names[each.node])
        for split, named in by_split.items():
            yield Constraint(source, split=split, nodes=tuple(named))


def _annotated_nodes(
    model: Model, configuration: Configuration, samples: SampleAxes
) -> list[_Annotated]:
    """Return the nodes of the graph that `configuration` annotates, in graph order.

    A node of the graph can result from several nodes of the file, for example the matmuls and the
    softmax of an attention. It gets the stage and the layouts from the file's node that writes its
    result. Annotations of the other nodes of the file only add layouts of tensors for which that
    node has none.
    """
    annotations = {each.node: each for each in configuration.annotations}
    stages: dict[int, int | None] = {}
    layouts: dict[int, dict[str, Sharding]] = {}
    parts = zip(model.origins, owners_of(model.origins), strict=True)
    for origin, owner in sorted(parts, key=lambda part: part[0].writes is None):
        annotation = annotations.get(origin.position)
        if annotation is None or owner is None:
            continue
        known = layouts.setdefault(owner, {})
        own = _own_shardings(model.graph, owner, origin, annotation)
        if origin.writes is not None:
            stages[owner] = annotation.stage
            known.update(own)
        else:
            layouts[owner] = {**own, **known}
    return [
        _Annotated(
            node,
            stages.get(node),
            tuple(own.values()),
            _splits_from_layouts(model.graph, node, samples.uses[node].space, own) if own else (),
        )
        for node, own in sorted(layouts.items())
        if own or stages.get(node) is not None
    ]


def _own_shardings(
    graph: Graph, node: int, origin: Origin, annotation: Annotation
) -> dict[str, Sharding]:
    """Return the layouts in `annotation` of the tensors that the graph's node `node` reads and
    writes, by their names in the graph.

    `origin` is the node of the file that is annotated. Raise ModelError if two annotated tensors of
    the file are one value of the graph and have different layouts.
    """
    tensors = {*graph.nodes[node].inputs, *graph.nodes[node].outputs}
    names = dict(origin.values)
    found: dict[str, Sharding] = {}
    for sharding in annotation.shardings:
        name = names.get(sharding.tensor)
        if name is None or name not in tensors:
            continue
        other = found.setdefault(name, sharding)
        if (other.cuts, other.devices) != (sharding.cuts, sharding.devices):
            raise ModelError(
                (
                    f"the annotations of {other.tensor!r} and {sharding.tensor!r}, which are one "
                    "value, differ"
                ),
                where=origin.title,
            )
    return found


def _stage_device_order(graph: Graph, members: Sequence[_Annotated]) -> tuple[int, ...] | None:
    """Return the devices of a stage in the order to which the splits of all its nodes apply; None
    if `members` is empty.

    `members` are the nodes of the stage whose annotations have layouts. Raise ModelError if they
    are annotated for different devices, or if no order gives the annotated shards.
    """
    if not members:
        return None
    first = members[0]
    name = graph.nodes[first.node].name
    listed = ", ".join(map(str, sorted(first.group)))
    other = next((each for each in members if each.group != first.group), None)
    if other is not None:
        raise ModelError(
            f"the node is annotated for devices {', '.join(map(str, sorted(other.group)))}, but "
            f"node {name!r} of the same stage is annotated for devices {listed}",
            hint="annotate all nodes of a stage for the same devices",
            where=repr(graph.nodes[other.node].name),
        )
    order = consistent_device_order(
        (sharding for each in members for sharding in each.shardings),
        (each.cuts for each in members),
    )
    if order is None:
        raise ModelError(
            f"no splits over devices {listed} result in the annotated shards of the stage's nodes",
            hint=(
                "use equal shards, numbered from outer to inner axis in one order of the "
                "devices, with replicas innermost"
            ),
            where=repr(name),
        )
    return order


def plan_annotations(
    graph: Graph, placement: Placement, origins: Sequence[Origin], device_names: tuple[str, ...]
) -> tuple[Configuration, tuple[str, ...]]:
    """Return (configuration, incomplete): the annotations of the file's nodes that express
    `placement`, and the names of the graph's nodes that annotations cannot express completely.

    A node of the graph is incomplete if no node of the file corresponds to it, for example an added
    loss, or if one of its split axes indexes no annotated tensor. A result that devices hold as
    partial sums is annotated with its layout after the all-reduce. A node of the file that was
    removed when the model was read gets the first stage that reads its result.

    `origins` are the nodes of the file, and `device_names` the names of the devices. Raise
    ConfigurationError for a placement with several pipelines, because each node is then in several
    stages.
    """
    if placement.pipelines > 1:
        raise ConfigurationError(
            f"the number of pipelines is {placement.pipelines}, but ONNX's annotations support one "
            "stage per node",
            hint="annotate a plan with one pipeline",
        )
    stage_of = placement.stage_of()
    group_of = {node: placement.stages[stage] for node, stage in stage_of.items()}
    spaces = [use.space for use in op_instances(graph)]
    layouts = [
        _tensor_layouts(graph, node, space, group_of[node]) for node, space in enumerate(spaces)
    ]
    stages: list[int | None] = [
        None if owner is None else stage_of[owner] for owner in owners_of(origins)
    ]
    for index in range(len(stages) - 1, -1, -1):
        # A node that was removed when the model was read lacks a stage. The loop visits nodes in
        # reverse order, so it has already determined the stages of the readers.
        if stages[index] is None:
            readers = [
                stage for reader in origins[index].readers if (stage := stages[reader]) is not None
            ]
            stages[index] = min(readers, default=None)
    annotations = []
    covered = dict[int, set[str]]()
    for origin, owner, stage in zip(origins, owners_of(origins), stages, strict=True):
        shardings: list[Sharding] = []
        if owner is not None:
            named = [(name, own) for name, own in origin.values if own in layouts[owner]]
            devices = group_of[owner].devices
            shardings = [
                Sharding(name, *_sharding_fields(layouts[owner][own].shard_axes, devices))
                for name, own in named
            ]
            covered.setdefault(owner, set()).update(own for _, own in named)
        if stage is not None:
            annotations.append(Annotation(origin.position, stage, tuple(shardings)))
    written = {origin.writes for origin in origins}

    def is_covered(index: int) -> bool:
        """True if each split axis of the node indexes an annotated tensor."""
        node = graph.nodes[index]
        space = spaces[index]
        dimensions = zip(
            (*node.inputs, *node.outputs), (*space.operands, *space.results), strict=True
        )
        axes = {
            axis
            for name, own in dimensions
            if name in covered[index]
            for each in own or ()
            for axis in each
        }
        return {split.axis for split in group_of[index].splits_of(index)} <= axes

    left_out = (
        each.name for at, each in enumerate(graph.nodes) if at not in written or not is_covered(at)
    )
    size = len(device_names)
    return Configuration(f"autopipe-{size}", size, device_names, tuple(annotations)), tuple(
        left_out
    )


def _tensor_layouts(graph: Graph, node: int, space: Space, stage: Stage) -> dict[str, Layout]:
    """Return, by name, the layouts of the tensors that a node reads and writes, over the devices of
    its stage.

    A tensor that the node reads in several layouts is omitted, and so is a tensor whose shards are
    read through windows and cannot be replaced by equal shards.
    """
    own = graph.nodes[node]
    axes = mesh_axis_by_name(stage.splits_of(node), len(stage.devices))
    found: dict[str, set[Layout]] = {}
    for place, (name, dimensions) in enumerate(zip(own.inputs, space.operands, strict=True)):
        if name and dimensions is not None:
            layout = operand_layout(
                dimensions, graph.type_of(name).shape, axes, space.windows_of(place)
            )
            found.setdefault(name, set()).add(
                layout.with_even_shards()
                if layout.with_even_shards().shard_axes == layout.shard_axes
                else layout
            )
    for name, dimensions in zip(own.outputs, space.results, strict=True):
        if name and dimensions is not None:
            layout = result_layout(space, dimensions, graph.type_of(name).shape, axes)
            found.setdefault(name, set()).add(layout.after_all_reduce())
    single = {name: layouts.pop() for name, layouts in found.items() if len(layouts) == 1}
    return {name: layout for name, layout in single.items() if not layout.windows}


@functools.lru_cache(maxsize=4096)
def _sharding_fields(
    cuts: tuple[MeshAxes, ...], devices: tuple[int, ...]
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]]:
    """Return (dimensions, shards) for a layout over `devices`, as the fields `cuts` and `devices`
    of `Sharding`: pairs (sharded dimension, degree), and for each shard the devices that hold it.

    `cuts` are the mesh axes that shard each dimension. The result is cached, because models with
    equal layers have few layouts.
    """
    cut = {dimension: axes for dimension, axes in enumerate(cuts) if total_degree(axes) > 1}

    def shard_index(position: int) -> tuple[int, ...]:
        """Return the index along each sharded dimension of the shard of a device."""
        return tuple(combined_coordinate(axes, position) for axes in cut.values())

    blocks = itertools.groupby(sorted(range(len(devices)), key=shard_index), shard_index)
    copies = tuple(tuple(devices[position] for position in group) for _, group in blocks)
    return tuple((dimension, total_degree(axes)) for dimension, axes in cut.items()), copies


IR_VERSION: Final = 11
"""First ONNX IR version with multi-device annotations."""
MODEL_FUNCTION: Final = 25
"""Field number of the local functions in a serialized model."""

Piece = bytes | memoryview


def write_annotated(model: Path, target: Path, configuration: Configuration) -> None:
    """Write a copy of the file `model` with the annotations of `configuration` to `target`,
    atomically.

    Weights in the file are copied; weights in external files stay there. Local functions of the
    file are inlined. Raise ConfigurationError if `target` cannot be written, is the file `model`,
    or is in another folder than `model` although weights are in external files.
    """
    import onnx

    if target.exists() and target.samefile(model):
        raise ConfigurationError(
            f"the output file {target} is the model itself", hint="choose another file"
        )
    graph = load(model).graph
    folder = model.absolute().parent
    constants = (attribute.t for node in graph.node for attribute in node.attribute)
    has_files = any(
        tensor.external_data for tensors in (graph.initializer, constants) for tensor in tensors
    )
    if has_files and target.absolute().parent.resolve() != folder.resolve():
        raise ConfigurationError(
            f"the output file {target} is not in the folder of the model, which contains the "
            "external data files of the model",
            hint=f"choose a file in {folder}",
        )
    data = map_file(model)
    if any(field.number == MODEL_FUNCTION for field in wire.fields_of(data, 0, len(data))):
        data = memoryview(
            inline_functions(onnx.ModelProto.FromString(bytes(data))).SerializeToString()
        )
    try:
        with open_replacement_file(target) as file:
            for piece in _annotated_pieces(data, configuration):
                file.write(piece)
    except OSError as error:
        raise ConfigurationError(
            f"the file {target} cannot be written: {error.strerror}", hint="choose another folder"
        ) from error


def _annotated_pieces(data: memoryview, configuration: Configuration) -> Iterator[Piece]:
    """Yield consecutive pieces of bytes that together are a serialized model: the model `data` with
    the annotations of `configuration` added.

    They replace the annotations of existing configurations that have the name or the number of
    devices of `configuration`.
    """
    import onnx

    fields = list(wire.fields_of(data, 0, len(data)))
    versions = [each for each in fields if each.number == wire.MODEL_IR_VERSION]
    newest = max(
        (wire.read_varint(data, each.payload, each.end)[0] for each in versions), default=0
    )
    declared = {
        field.start: onnx.DeviceConfigurationProto.FromString(
            bytes(data[field.payload : field.end])
        )
        for field in fields
        if _is_bytes_field(field, wire.MODEL_CONFIGURATION)
    }
    name = configuration.name
    devices = configuration.devices
    replaced = {
        each.name for each in declared.values() if each.name == name or each.num_devices == devices
    }
    dropped = {each.start for each in versions} | {
        at for at, each in declared.items() if each.name in replaced
    }
    annotations = {
        each.node: wire.frame_payload(
            wire.NODE_CONFIGURATION, annotation_proto(each, configuration.name).SerializeToString()
        )
        for each in configuration.annotations
    }
    yield wire.encode_varint(wire.MODEL_IR_VERSION << 3 | wire.VARINT) + wire.encode_varint(
        max(IR_VERSION, newest)
    )
    positions = itertools.count()
    for field in fields:
        if _is_bytes_field(field, wire.MODEL_GRAPH):
            pieces = list(_graph_pieces(data, field, replaced, annotations, positions))
            yield wire.field_header(wire.MODEL_GRAPH, sum(map(len, pieces)))
            yield from pieces
        elif field.start not in dropped:
            yield data[field.start : field.end]
    yield wire.frame_payload(
        wire.MODEL_CONFIGURATION, configuration_proto(configuration).SerializeToString()
    )


def _graph_pieces(
    data: memoryview,
    graph: wire.Field,
    replaced: set[str],
    annotations: Mapping[int, bytes],
    positions: Iterator[int],
) -> Iterator[Piece]:
    """Yield consecutive pieces of bytes that together are the contents of the field `graph` of the
    serialized model `data`, with changed annotations of nodes.

    Annotations for the configurations whose names are in `replaced` are removed. `annotations` maps
    positions of nodes in the file to the serialized annotations to add. `positions` counts the
    nodes.
    """
    import onnx

    for part in wire.fields_of(data, graph.payload, graph.end):
        if not _is_bytes_field(part, wire.GRAPH_NODE):
            yield data[part.start : part.end]
            continue
        pieces: list[Piece] = []
        for field in wire.fields_of(data, part.payload, part.end):
            own = (
                bytes(data[field.payload : field.end])
                if _is_bytes_field(field, wire.NODE_CONFIGURATION)
                else None
            )
            if (
                own is None
                or onnx.NodeDeviceConfigurationProto.FromString(own).configuration_id
                not in replaced
            ):
                pieces.append(data[field.start : field.end])
        pieces.append(annotations.get(next(positions), b""))
        yield wire.field_header(wire.GRAPH_NODE, sum(map(len, pieces)))
        yield from pieces


def _is_bytes_field(field: wire.Field, number: int) -> bool:
    """True if `field` has this field number and contains bytes (a message or a string)."""
    return field.number == number and field.wire == wire.LENGTH
