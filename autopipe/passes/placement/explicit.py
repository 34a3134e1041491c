"""Strategy `explicit`: run a placement that a YAML file describes stage by stage, and write a given
placement in this form.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import Annotated, ClassVar

from autopipe.ir.batch import resize_batch
from autopipe.ir.codec import OmitDefault
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.model_parts import LayerSelection
from autopipe.ir.placement import Placement, Split, Stage, crossing_values, node_ranges
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import axis_of_node, checked_splits
from autopipe.passes.analysis.inherited_stages import inherited_stages
from autopipe.passes.analysis.layer_ranges import (
    layer_selection,
    layer_series,
    nodes_of_layers,
    selected_layers,
)
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.batching import Division

NodeName = int | str
"""A node's index in the graph, its name, or a glob over names."""
NodeEntry = NodeName | tuple[NodeName, NodeName]
"""An entry that selects nodes: a `NodeName`, or (first, last) for a range of nodes in the order of
the graph.
"""

Degrees = tuple[tuple[str, int], ...]
"""(axis, degree) pairs, from the outermost to the innermost split. `degree` is the number of parts
into which the axis is split.
"""
SAMPLES = "samples"
"""Name that stands for the sample axis of each node in a split, whatever the axis is called in the
node's iteration space.
"""
EVERY = ("*",)
"""The node entries (a single glob) that select all nodes of a stage."""
_LAST = chr(0x10FFFF)
_SPECIAL = re.compile(r"[*?[]")
_RUN = re.compile(r"(\d{1,9})-(\d{1,9})")
_MINIMUM_RUN = 3
"""Minimum number of consecutive devices that are written as one range, such as `0-2`."""
_MAXIMUM_GLOBS = 256
"""Maximum number of globs that `role_globs` yields."""


class NodeNames:
    """Translates between the nodes of a graph and the names by which placement files refer to them.
    Names can be equal, empty, or contain glob characters.
    """

    def __init__(self, graph: Graph) -> None:
        self.names = tuple(node.name for node in graph.nodes)
        self._positions: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            self._positions.setdefault(name, []).append(index)
        variants = [(name, index) for index, name in enumerate(self.names)]
        # A glob may omit the slash with which the names of exported nodes begin, so each such name
        # is also stored without it.
        variants += [(name[1:], index) for name, index in variants if name.startswith("/")]
        self._sorted = sorted(variants)
        self._globs: dict[str, tuple[int, ...]] = {}

    def selected_nodes(self, entry: NodeEntry) -> tuple[int, ...]:
        """Return the nodes that an entry selects, ascending; at least one.

        A text that equals the name of a node selects the nodes of that name, even if it contains
        glob characters. Raise ConfigurationError for an index or a name that no node has (the hint
        contains the most similar name), and for a range whose last node comes before its first or
        one of whose ends selects several nodes.
        """
        if isinstance(entry, tuple):
            first, last = map(self._single_node, entry)
            if first > last:
                raise ConfigurationError(
                    f"{_entry_text(entry)} has its last node before its first node"
                )
            return tuple(range(first, last + 1))
        if isinstance(entry, int):
            if not 0 <= entry < len(self.names):
                raise ConfigurationError(
                    f"no node has the index {entry}",
                    f"use an index from 0 to {len(self.names) - 1}",
                )
            return (entry,)
        matched = tuple(self._positions.get(entry, ())) or self.matching_nodes(entry)
        if not matched:
            near = difflib.get_close_matches(entry, self._positions, n=1, cutoff=0.0)
            hint = (
                f"use a node's name, such as {near[0]!r}, which is the most similar name"
                if near
                else ""
            )
            raise ConfigurationError(f"{entry!r} matches the name of no node", hint)
        return matched

    def matching_nodes(self, glob: str) -> tuple[int, ...]:
        """Return the nodes whose names match a glob, ascending; () if there are none."""
        if glob not in self._globs:
            prefix = _SPECIAL.split(glob, maxsplit=1)[0]
            low = bisect_left(self._sorted, (prefix,))
            high = bisect_right(self._sorted, (prefix + _LAST,))
            matches = re.compile(fnmatch.translate(glob)).fullmatch
            found = {index for name, index in self._sorted[low:high] if matches(name)}
            self._globs[glob] = tuple(sorted(found))
        return self._globs[glob]

    def reference_to(self, node: int) -> NodeName:
        """Return how a placement file refers to a node: by its name if no other node has it,
        otherwise by its index.
        """
        name = self.names[node]
        return name if len(self._positions[name]) == 1 else node

    def has_name(self, name: str) -> bool:
        """True if a node has this name."""
        return name in self._positions

    def _single_node(self, end: NodeName) -> int:
        """Return the node that `end`, an end of a range, selects. Raise ConfigurationError if it
        selects several nodes.
        """
        found = self.selected_nodes(end)
        if len(found) > 1:
            hint = f"use the index of one node: {', '.join(map(str, found[:4]))}" + (
                ", ..." if len(found) > 4 else ""
            )
            raise ConfigurationError(
                f"{end!r} selects {len(found)} {plural(len(found), 'node')}, expected one node "
                "at the end of a range",
                hint,
            )
        return found[0]


def _entry_text(entry: NodeEntry) -> str:
    """Return an entry as text for messages."""
    return (
        f"the range from {entry[0]!r} to {entry[1]!r}" if isinstance(entry, tuple) else repr(entry)
    )


def node_entries(
    names: NodeNames,
    nodes: Collection[int],
    among: Sequence[int],
    allowed: Collection[int],
    globs: Iterable[str],
    layers: Sequence[str] = (),
) -> tuple[NodeEntry, ...]:
    """Return entries that select nodes, in the order of the graph.

    Of the nodes in `among` (ascending), the entries select all of `nodes` and possibly further
    nodes of `allowed`, which contains `nodes`. A glob of `globs` becomes an entry if all nodes of
    `among` that it matches are in `allowed` and at least one of them is not selected yet. Nodes
    that no glob selects are written as ranges of consecutive nodes of `among`. If `layers` contains
    the name of each node's layer, no range extends beyond one layer.
    """
    found: list[tuple[int, NodeEntry]] = []
    remaining = set(nodes)
    candidates = set(among)
    for glob in globs:
        if not remaining:
            break
        matched = candidates.intersection(
            () if names.has_name(glob) else names.matching_nodes(glob)
        )
        if not remaining.isdisjoint(matched) and all(node in allowed for node in matched):
            found.append((min(matched), glob))
            remaining -= matched
    positions = [position for position, node in enumerate(among) if node in remaining]
    parts = [
        list(part)
        for _, part in groupby(
            positions, key=lambda position: layers[among[position]] if layers else ""
        )
    ]
    for start, stop in chain.from_iterable(map(node_ranges, parts)):
        first = names.reference_to(among[start])
        last = names.reference_to(among[stop - 1])
        found.append((among[start], first if start + 1 == stop else (first, last)))
    return tuple(entry for _, entry in sorted(found, key=lambda each: each[0]))


def layer_globs(names: NodeNames, nodes: Iterable[int]) -> Iterator[str]:
    """Yield one glob per layer of a model, such as `encoder/layer.0/*`: the common prefix of node
    names up to and including the first folder with a digit. Nodes without such a folder give no
    glob.
    """
    layers: dict[str, None] = {}
    for node in nodes:
        folders = names.names[node].split("/")[:-1]
        count = next(
            (index for index, folder in enumerate(folders, 1) if any(map(str.isdigit, folder))), 0
        )
        layers["".join(f"{folder}/" for folder in folders[:count])] = None
    return (f"{_escape_glob(layer)}*" for layer in layers if layer)


def role_globs(names: NodeNames, nodes: Iterable[int]) -> Iterator[str]:
    """Yield globs that match nodes of equal role in all layers, such as `encoder/layer.*/add`: a
    node's name, in which each number in a folder is replaced by `*`. Nodes without a number in
    their folders give no glob. At most `_MAXIMUM_GLOBS` globs are yielded.
    """
    folders_and_own = (names.names[node].rpartition("/") for node in nodes)
    roles = (
        re.sub(r"\d+", "*", _escape_glob(folders)) + slash + _escape_glob(own)
        for folders, slash, own in folders_and_own
        if re.search(r"\d", folders)
    )
    return islice(dict.fromkeys(roles), _MAXIMUM_GLOBS)


def _escape_glob(text: str) -> str:
    """Return a glob that matches only `text`, with all glob characters escaped."""
    return _SPECIAL.sub(r"[\g<0>]", text)


@dataclass(frozen=True, slots=True)
class ExplicitSplits:
    """A split, and the nodes of a stage to which it applies."""

    split: Degrees
    """Number of parts by axis of the iteration space, from the outermost to the innermost split of
    the stage's devices. `samples` is the sample axis, whatever its name in an operator. A node is
    split along those of the axes that it has. `{}` splits nothing.
    """
    nodes: tuple[NodeEntry, ...]
    """The nodes that are split, written like the nodes of a stage. If several entries select a
    node, the last one counts. An entry also applies to nodes that were moved from this stage to
    another stage, unless that stage has an entry for them other than `*`, or the number of its
    devices is not divisible by the number of parts.
    """


@dataclass(frozen=True, slots=True)
class ExplicitStage:
    """One stage of a written placement."""

    devices: tuple[int | str, ...]
    """The devices, in the order in which splits number them. `0-3` means devices 0, 1, 2 and 3."""
    nodes: tuple[NodeEntry, ...] = ()
    """The nodes: names, globs over names, indices into the graph's nodes (for equal or empty
    names), or `[first, last]` for a range in the order of the graph.
    """
    layers: Annotated[LayerSelection | None, OmitDefault()] = None
    """Repeated layers of the model whose nodes are in the stage, in addition to `nodes`: `[first,
    last]` for a range of layers, or texts such as `encoder[0:4]` for layers 0 to 3 of the encoder.
    """
    micro_batch_size: int | None = None
    """Samples per micro-batch of the stage. Default: the step's micro-batch size."""
    recompute: bool = False
    """True to run the forward again before the backward instead of saving its tensors (activation
    recomputation).
    """
    pipeline: int = 0
    """Number of the pipeline to which the stage belongs, from 0; each pipeline contains
    all nodes.
    """
    splits: tuple[ExplicitSplits, ...] = ()
    """Splits of the stage's nodes over its devices. Nodes without a split are computed in full by
    each device.
    """


def parse_devices(written: Sequence[int | str]) -> tuple[int, ...]:
    """Return the devices that `written` lists by number, such as 4, and by range, such as "0-3".
    Raise ConfigurationError for an entry of another form.
    """
    found: list[int] = []
    for entry in written:
        match = _RUN.fullmatch(entry) if isinstance(entry, str) else None
        ends = (
            list(map(int, match.groups())) if match else [entry] if isinstance(entry, int) else []
        )
        if not ends or not 0 <= ends[0] <= ends[-1] < 2**20:
            raise ConfigurationError(
                f"{entry!r} is not a device", "use the number of a device, or a range such as 0-3"
            )
        found += range(ends[0], ends[-1] + 1)
    return tuple(found)


def device_entries(devices: Sequence[int]) -> Iterator[int | str]:
    """Yield entries for `devices` in the form that `parse_devices` reads, in the given order. At
    least `_MINIMUM_RUN` consecutive devices become a range.
    """
    for _, each in groupby(enumerate(devices), key=lambda numbered: numbered[1] - numbered[0]):
        run = [device for _, device in each]
        yield from [f"{run[0]}-{run[-1]}"] if len(run) >= _MINIMUM_RUN else run


@dataclass(frozen=True, slots=True)
class Explicit:
    """Run a placement as it is written, if it can be executed. Nothing is searched, and constraints
    are ignored.

    The folder of each plan contains the file `placement.yaml` with the plan's placement in this
    form. `autopipe plan --from DIR` reads this file, which may have been edited.
    """

    name: ClassVar[str] = "explicit"

    placement: tuple[ExplicitStage, ...] = ()
    """The stages in order. A stage may read values of earlier stages only.

    If a stage of a pipeline lists layers, nodes of this pipeline that are in no stage and in no
    repeated layer, such as the embedding and the head, join the last of the stages that they read
    from. If they read from no stage, they join the first stage that reads their result.
    """

    @property
    def devices(self) -> int:
        """Return the number of devices that the placement requires: the largest device number plus
        1, or 0 without devices. Raise ConfigurationError for an entry that is not a device.
        """
        every = map(self.devices_at, range(len(self.placement)))
        return 1 + max(chain.from_iterable(every), default=-1)

    def devices_at(self, index: int) -> tuple[int, ...]:
        """Return the devices of stage `index`. Raise ConfigurationError, which names the stage, for
        an entry that is not a device.
        """
        with _add_stage_to_errors(index):
            return parse_devices(self.placement[index].devices)

    def division(self, graph: Graph) -> Division:
        """Return `Division.MANY`: a pipeline is kept busy by many micro-batches."""
        return Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError if the option `placement` lists no stages."""
        if not self.placement:
            raise ConfigurationError(
                "strategy explicit requires stages, but the key `placement` lists none",
                hint="use autopipe plan --from DIR, which reads DIR/placement.yaml",
            )

    def run(self, problem: Problem) -> Placement:
        """Return the written placement.

        Raise ConfigurationError, which names the stage, the layer or the node, if a node is in no
        stage or in several, a layer does not exist, a stage reads from a later stage, a device does
        not exist, or a split is not possible.
        """
        names = NodeNames(problem.graph)
        homes = self._listed_nodes(problem.graph, names)
        stages = []
        for index, each in enumerate(self.placement):
            moved = self._splits_of_moved_nodes(names, homes, index)
            stages.append(
                _make_stage(
                    problem, names, index, each, self.devices_at(index), homes[index], moved
                )
            )
        placement = Placement(tuple(stages))
        for pipeline in range(placement.pipelines):
            _check_partition(problem.graph, placement, pipeline)
        _check_order(problem.graph, placement)
        return placement

    def _listed_nodes(self, graph: Graph, names: NodeNames) -> list[set[int]]:
        """Return the nodes of each stage: the nodes that the stage lists, the nodes of its layers
        and, in a pipeline with layers, the nodes outside of layers that no stage lists.
        """
        homes = []
        owner: dict[tuple[int, str, int], int] = {}
        for index, each in enumerate(self.placement):
            with _add_stage_to_errors(index):
                nodes = {node for entry in each.nodes for node in names.selected_nodes(entry)}
                layers = () if each.layers is None else selected_layers(graph, each.layers)
            for name, number in layers:
                other = owner.setdefault((each.pipeline, name, number), index)
                if other != index:
                    raise ConfigurationError(
                        f"{name} {number} is in stages {other} and {index}, expected one stage",
                        "remove the layer from all but one of the stages",
                    )
            homes.append(nodes.union(nodes_of_layers(graph, layers)))
        for pipeline in {each.pipeline for each in self.placement if each.layers is not None}:
            own = [index for index, each in enumerate(self.placement) if each.pipeline == pipeline]
            of = f" of pipeline {pipeline}" if len(own) < len(homes) else ""
            _check_layers(graph, [homes[index] for index in own], of)
            _add_nodes_outside_layers(graph, [homes[index] for index in own])
        for index, nodes in enumerate(homes):
            if not nodes:
                raise ConfigurationError(
                    f"stage {index} has no nodes", hint="add nodes to the stage, or remove it"
                )
        return homes

    def _splits_of_moved_nodes(
        self, names: NodeNames, homes: Sequence[set[int]], index: int
    ) -> dict[int, Degrees]:
        """Return, by node, the splits of nodes of stage `index` that are listed in other stages of
        its pipeline.

        A node that was moved to another stage keeps the split that its former stage lists for it.
        An entry of another stage shows that a node was moved if it is a name or a glob that selects
        no node of its own stage, or a range with an end outside of its own stage. If several of
        these entries select a node, the last one counts. `homes` contains the nodes of each stage.
        """
        found: dict[int, Degrees] = {}
        for other, stage in enumerate(self.placement):
            if other == index or stage.pipeline != self.placement[index].pipeline:
                continue
            for given in stage.splits:
                for entry in given.nodes:
                    with _add_stage_to_errors(other):
                        meant = names.selected_nodes(entry)
                    if _selects_moved_nodes(entry, meant, homes[other]):
                        found.update((node, given.split) for node in meant if node in homes[index])
        return found


def _selects_moved_nodes(entry: NodeEntry, meant: Sequence[int], home: set[int]) -> bool:
    """True if `entry` shows that a node was moved out of the stage that lists the entry.

    A range shows this if its first or last node is not in the stage, and a name or glob if it
    selects no node of the stage. `meant` contains the nodes that the entry selects, ascending;
    `home` contains the nodes of the stage.
    """
    if isinstance(entry, tuple):
        return meant[0] not in home or meant[-1] not in home
    return home.isdisjoint(meant)


def _check_layers(graph: Graph, homes: Sequence[set[int]], of: str) -> None:
    """Raise ConfigurationError if all nodes of a layer are in none of the stages whose nodes are
    `homes`. `of` names their pipeline in the message.
    """
    placed = set[int]().union(*homes)
    for series in layer_series(graph):
        for number, layer in enumerate(series.layers):
            if placed.isdisjoint(layer):
                raise ConfigurationError(
                    f"{series.name} {number} is in no stage{of}",
                    "add the layer to the layers of a stage",
                )


def _add_nodes_outside_layers(graph: Graph, homes: Sequence[set[int]]) -> None:
    """Add the nodes that are in no layer and in no stage to the stages of a pipeline, whose nodes
    are `homes`.
    """
    wanted = {node: index for index, nodes in enumerate(homes) for node in nodes}
    inside = {node for series in layer_series(graph) for layer in series.layers for node in layer}
    for node, each in enumerate(inherited_stages(graph, wanted)):
        if node not in wanted and node not in inside:
            homes[each.stage].add(node)


def _make_stage(
    problem: Problem,
    names: NodeNames,
    index: int,
    given: ExplicitStage,
    devices: tuple[int, ...],
    nodes: set[int],
    moved: Mapping[int, Degrees],
) -> Stage:
    """Return stage `index` of the written placement, with the nodes `nodes` on the devices
    `devices`.

    `moved` contains splits, by node, that are listed in other stages for nodes of this stage. They
    count if the stage has no entry for the node other than `*`. Raise ConfigurationError for values
    that are out of range or contradict each other.
    """
    whole = problem.micro_batch_size
    size = whole if given.micro_batch_size is None else given.micro_batch_size
    if size < 1 or whole % size:
        reason = (
            f"has micro-batches of {size} {plural(size, 'sample')}, which do not divide the "
            f"{whole} {plural(whole, 'sample')} of a micro-batch of the step"
        )
        raise ConfigurationError(f"stage {index} {reason}")
    if given.pipeline < 0:
        raise ConfigurationError(
            f"stage {index} is in pipeline {given.pipeline}, expected at least 0",
            hint="number the pipelines from 0",
        )
    if not devices:
        raise ConfigurationError(
            f"stage {index} lists no devices, expected at least one",
            hint="add devices to the stage",
        )
    last = problem.cluster.size - 1
    for device in devices:
        if device > last:
            hint = f"use devices 0 to {last}"
            raise ConfigurationError(
                f"stage {index} lists device {device}, but the cluster has {last + 1} "
                f"{plural(last + 1, 'device')}",
                hint,
            )
    twice = next((device for device in devices if devices.count(device) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            f"stage {index} lists device {twice} twice", hint="list each device once"
        )
    samples = sample_axes(problem.graph if size == whole else resize_batch(problem.graph, size))
    required: dict[int, Degrees] = {}
    named: set[int] = set()
    for each in given.splits:
        found = _select_nodes(names, samples, index, each, nodes)
        required |= {node: node_split(samples, node, each.split) for node in found}
        named |= found if each.nodes != EVERY else set()
    for node in moved.keys() - named:
        required.update(_moved_split(samples, node, moved[node], len(devices), node in required))
    checked = (
        (node, checked_splits(f"stage {index}", samples, node, required[node]))
        for node in sorted(required)
    )
    splits = tuple((node, own) for node, own in checked if own)
    for node, own in splits:
        parts = math.prod(split.degree for split in own)
        if len(devices) % parts:
            raise ConfigurationError(
                f"stage {index} splits the node into {parts} {plural(parts, 'part')} "
                f"({', '.join(map(str, own))}), which do not divide its {len(devices)} "
                f"{plural(len(devices), 'device')}",
                hint="choose degrees whose product divides the number of devices",
                where=_node_text(problem.graph, node),
            )
    return Stage(tuple(sorted(nodes)), devices, size, splits, given.recompute, given.pipeline)


def _moved_split(
    samples: SampleAxes, node: int, split: Degrees, devices: int, has_other: bool
) -> Iterator[tuple[int, Degrees]]:
    """Yield the pair (node, split) for a node that was moved to a stage of `devices` devices, or
    nothing if `split` does not determine a split there.

    The node keeps `split` if the number of its parts divides `devices`. Otherwise, if the stage has
    no split for all its nodes (`has_other` is False), the node's samples are split over all
    devices, if they can be divided evenly.
    """
    own = node_split(samples, node, split)
    if devices % math.prod(degree for _, degree in own) == 0:
        yield node, own
    elif not has_other and devices > 1 and samples.can_divide(node, devices):
        yield node, node_split(samples, node, ((SAMPLES, devices),))


@contextmanager
def _add_stage_to_errors(index: int) -> Iterator[None]:
    """Return a context manager that prepends the number of the stage to the message of a
    ConfigurationError.
    """
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"stage {index}: {error.message}", error.hint) from error


def _select_nodes(
    names: NodeNames, samples: SampleAxes, index: int, given: ExplicitSplits, nodes: set[int]
) -> set[int]:
    """Return the nodes of stage `index` that the entries of `given` select. The result is empty if
    all of them were moved to other stages. Raise ConfigurationError if none of the nodes has an
    axis along which `given` splits.
    """
    found: set[int] = set()
    for entry in given.nodes:
        with _add_stage_to_errors(index):
            found |= nodes.intersection(names.selected_nodes(entry))
    for axis, _ in given.split:
        if found and not any(axis_of_node(samples, node, axis, SAMPLES) for node in found):
            first = min(found)
            axes = ", ".join(each.name for each in samples.uses[first].space.axes)
            raise ConfigurationError(
                f"stage {index} splits axis {axis!r}, but none of the selected nodes has this axis",
                hint=f"use an axis of {names.names[first]!r}: {axes or 'none'}",
            )
    return found


def node_split(samples: SampleAxes, node: int, split: Degrees) -> Degrees:
    """Return the part of `split` that applies to a node: axes that the node lacks are omitted, and
    `samples` is replaced by the name of the node's sample axis.
    """
    named = ((axis_of_node(samples, node, axis, SAMPLES), degree) for axis, degree in split)
    return tuple((own, degree) for own, degree in named if own is not None)


def _check_partition(graph: Graph, placement: Placement, pipeline: int) -> None:
    """Raise ConfigurationError unless each node is in exactly one stage of the pipeline."""
    owner: dict[int, int] = {}
    for index, stage in enumerate(placement.stages):
        for node in stage.nodes if stage.pipeline == pipeline else ():
            if owner.setdefault(node, index) != index:
                both = f"the node is in stages {owner[node]} and {index}, expected one stage"
                raise ConfigurationError(
                    both, "remove the node from all but one of the stages", _node_text(graph, node)
                )
    missing = [node for node in range(len(graph.nodes)) if node not in owner]
    if missing:
        of = f" of pipeline {pipeline}" if placement.pipelines > 1 else ""
        others = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ConfigurationError(
            f"the node is in no stage{of}{others}",
            "add the node to the nodes of a stage",
            _node_text(graph, missing[0]),
        )


def _check_order(graph: Graph, placement: Placement) -> None:
    """Raise ConfigurationError if a stage reads a value that a later stage computes."""
    for value, source, target in crossing_values(graph, placement):
        if source > target:
            reader = next(
                node for node in placement.stages[target].nodes if value in graph.nodes[node].inputs
            )
            producer = graph.producer(value)
            assert producer is not None
            raise ConfigurationError(
                (
                    f"the node is in stage {target}, but it reads a value of "
                    f"{graph.nodes[producer].name!r} in the later stage {source}"
                ),
                hint="move one of the two nodes, so that stages read from earlier stages only",
                where=_node_text(graph, reader),
            )


def _node_text(graph: Graph, node: int) -> str:
    """Return the index and the name of a node as text for messages."""
    return f"node {node}, {graph.nodes[node].name!r}"


def explicit_strategy(graph: Graph, placement: Placement, layers: Sequence[str] = ()) -> Explicit:
    """Return the strategy that produces exactly this placement of `graph`, with as few entries as
    ranges of layers, ranges of nodes and globs permit. Complete layers are written as layers, and
    all other nodes as nodes.

    If `layers` contains the name of each node's layer, no range of nodes extends beyond one layer.
    """
    names = NodeNames(graph)
    samples = sample_axes(graph)
    everywhere = range(len(names.names))
    stages = []
    for stage in placement.stages:
        selection, inside = layer_selection(graph, stage.nodes)
        remaining = set(stage.nodes).difference(inside)
        stages.append(
            ExplicitStage(
                devices=tuple(device_entries(stage.devices)),
                layers=selection,
                nodes=node_entries(
                    names,
                    remaining,
                    everywhere,
                    remaining,
                    layer_globs(names, sorted(remaining)),
                    layers,
                ),
                micro_batch_size=stage.micro_batch_size,
                recompute=stage.recompute,
                pipeline=stage.pipeline,
                splits=_split_entries(names, samples, stage),
            )
        )
    return Explicit(tuple(stages))


def _split_entries(
    names: NodeNames, samples: SampleAxes, stage: Stage
) -> tuple[ExplicitSplits, ...]:
    """Return the splits of a stage as entries.

    If one split applies to more than half of the split nodes, it is written first, for all nodes
    (`*`), unless a node has the name `*`. Nodes whose split differs from it follow, with one entry
    per distinct split.
    """
    degrees_by_node = {
        node: node_degrees(samples, node, stage.splits_of(node)) for node in stage.nodes
    }
    counted = Counter(filter(None, degrees_by_node.values()))
    found = []
    remaining = [node for node in stage.nodes if degrees_by_node[node]]
    for most_frequent, count in counted.most_common(1):
        if 2 * count > counted.total() and not names.has_name("*"):
            found.append(ExplicitSplits(most_frequent, EVERY))
            served = _nodes_with_splits(samples, stage, most_frequent)
            remaining = [node for node in stage.nodes if node not in served]
    for degrees in dict.fromkeys(degrees_by_node[node] for node in remaining):
        same = [node for node in remaining if degrees_by_node[node] == degrees]
        allowed = _nodes_with_splits(samples, stage, degrees)
        found.append(
            ExplicitSplits(
                degrees, node_entries(names, same, stage.nodes, allowed, role_globs(names, same))
            )
        )
    return tuple(found)


def node_degrees(samples: SampleAxes, node: int, splits: tuple[Split, ...]) -> Degrees:
    """Return the splits of a node as (axis, degree) pairs. The node's sample axis is called
    `samples`.
    """
    own = samples.axes[node]
    return tuple((SAMPLES if split.axis == own else split.axis, split.degree) for split in splits)


def _nodes_with_splits(samples: SampleAxes, stage: Stage, degrees: Degrees) -> frozenset[int]:
    """Return the nodes of a stage whose splits equal `degrees`, after `node_split` has reduced
    `degrees` to the axes that the node has.
    """
    found = {
        node: tuple(Split(*each) for each in node_split(samples, node, degrees))
        for node in stage.nodes
    }
    return frozenset(node for node, splits in found.items() if splits == stage.splits_of(node))
