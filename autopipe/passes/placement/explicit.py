"""Strategy `explicit`: a placement that is written stage by stage in YAML. Also writes placements
in this form.
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
from typing import ClassVar

from autopipe.ir.batch import resize_batch
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage, crossing_values, node_ranges
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import checked_splits, own_axis
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.batching import Division

NodeName = int | str
"""A node's index in the graph, its name, or a glob over names."""
NodeEntry = NodeName | tuple[NodeName, NodeName]
"""A node name, or the (first, last) node of a range in the order of the graph."""

Degrees = tuple[tuple[str, int], ...]
"""(axis, degree) pairs, outer to inner."""
SAMPLES = "samples"
"""The name of the sample axis in a split, whatever its name in a node's iteration space."""
EVERY = ("*",)
"""The node entries that select all nodes of a stage."""
_LAST = chr(0x10FFFF)
_SPECIAL = re.compile(r"[*?[]")
_RUN = re.compile(r"(\d{1,9})-(\d{1,9})")
_MINIMUM_RUN = 3
"""Minimum number of consecutive devices that are written as a range."""
_MAXIMUM_GLOBS = 256
"""Maximum number of role globs that are tried."""


class NodeNames:
    """The names of a graph's nodes. Names can be equal, empty, or contain glob characters."""

    def __init__(self, graph: Graph) -> None:
        self.names = tuple(node.name for node in graph.nodes)
        self._positions: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            self._positions.setdefault(name, []).append(index)
        variants = [(name, index) for index, name in enumerate(self.names)]
        # Exported names begin with a slash, which a glob may omit.
        variants += [(name[1:], index) for name, index in variants if name.startswith("/")]
        self._sorted = sorted(variants)
        self._globs: dict[str, tuple[int, ...]] = {}

    def meant(self, entry: NodeEntry) -> tuple[int, ...]:
        """Return the nodes that an entry selects, ascending; at least one.

        An entry that equals the name of a node is not a glob. Raise ConfigurationError for an index
        or name that does not exist (with the nearest name), and for a range whose ends are reversed
        or select several nodes.
        """
        if isinstance(entry, tuple):
            first, last = map(self._one, entry)
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
        matched = tuple(self._positions.get(entry, ())) or self.matched(entry)
        if not matched:
            near = difflib.get_close_matches(entry, self._positions, n=1, cutoff=0.0)
            hint = (
                f"use a node's name, such as {near[0]!r}, which is the most similar name"
                if near
                else ""
            )
            raise ConfigurationError(f"{entry!r} matches the name of no node", hint)
        return matched

    def matched(self, glob: str) -> tuple[int, ...]:
        """Return the nodes whose names match a glob, ascending."""
        if glob not in self._globs:
            prefix = _SPECIAL.split(glob, maxsplit=1)[0]
            low = bisect_left(self._sorted, (prefix,))
            high = bisect_right(self._sorted, (prefix + _LAST,))
            matches = re.compile(fnmatch.translate(glob)).fullmatch
            found = {index for name, index in self._sorted[low:high] if matches(name)}
            self._globs[glob] = tuple(sorted(found))
        return self._globs[glob]

    def called(self, node: int) -> NodeName:
        """Return the node's name if it is unique, and otherwise the node's index."""
        name = self.names[node]
        return name if len(self._positions[name]) == 1 else node

    def has(self, name: str) -> bool:
        """True if a node has this name."""
        return name in self._positions

    def _one(self, end: NodeName) -> int:
        found = self.meant(end)
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
    return (
        f"the range from {entry[0]!r} to {entry[1]!r}" if isinstance(entry, tuple) else repr(entry)
    )


def entries_of(
    names: NodeNames,
    nodes: Collection[int],
    among: Sequence[int],
    allowed: Collection[int],
    globs: Iterable[str],
    layers: Sequence[str] = (),
) -> tuple[NodeEntry, ...]:
    """Return entries, in the order of the graph, that select all of `nodes` and only nodes of
    `allowed` among `among`.

    `among` is ascending. Each of `globs` is used if it selects permitted nodes only and at least
    one new node. The remaining nodes are written as ranges. If `layers` has the layer of each node,
    no range extends beyond one layer.
    """
    found: list[tuple[int, NodeEntry]] = []
    remaining = set(nodes)
    candidates = set(among)
    for glob in globs:
        if not remaining:
            break
        matched = candidates.intersection(() if names.has(glob) else names.matched(glob))
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
        first = names.called(among[start])
        last = names.called(among[stop - 1])
        found.append((among[start], first if start + 1 == stop else (first, last)))
    return tuple(entry for _, entry in sorted(found, key=lambda each: each[0]))


def layer_globs(names: NodeNames, nodes: Iterable[int]) -> Iterator[str]:
    """Yield one glob per layer: the prefix of its nodes' names up to the first folder that contains
    a digit.
    """
    layers: dict[str, None] = {}
    for node in nodes:
        folders = names.names[node].split("/")[:-1]
        count = next(
            (index for index, folder in enumerate(folders, 1) if any(map(str.isdigit, folder))), 0
        )
        layers["".join(f"{folder}/" for folder in folders[:count])] = None
    return (f"{_literal(layer)}*" for layer in layers if layer)


def role_globs(names: NodeNames, nodes: Iterable[int]) -> Iterator[str]:
    """Yield globs for nodes of equal role in all layers: the node's name, with `*` in place of the
    numbers in its folders.
    """
    folders_and_own = (names.names[node].rpartition("/") for node in nodes)
    roles = (
        re.sub(r"\d+", "*", _literal(folders)) + slash + _literal(own)
        for folders, slash, own in folders_and_own
        if re.search(r"\d", folders)
    )
    return islice(dict.fromkeys(roles), _MAXIMUM_GLOBS)


def _literal(text: str) -> str:
    """Return a glob that matches only `text`."""
    return _SPECIAL.sub(r"[\g<0>]", text)


@dataclass(frozen=True, slots=True)
class GivenSplits:
    """Nodes of a stage with equal splits."""

    split: Degrees
    """Degrees by axis of the iteration space, outer to inner over the stage's devices. `samples` is
    the sample axis, whatever its name in an operator. A node is split along the axes that it has;
    `{}` splits nothing.
    """
    nodes: tuple[NodeEntry, ...]
    """The nodes, written like those of a stage. If several entries select a node, the last one
    counts. An entry also applies to its nodes that were moved to another stage, unless an entry
    there selects them or the devices there cannot be divided accordingly.
    """


@dataclass(frozen=True, slots=True)
class GivenStage:
    """One stage."""

    devices: tuple[int | str, ...]
    """The devices, in order; `0-3` means four devices."""
    nodes: tuple[NodeEntry, ...]
    """The nodes: names, globs over names, indices into the graph's nodes (for equal or empty
    names), or `[first, last]` for a range in the order of the graph.
    """
    micro_batch_size: int | None = None
    """Samples per micro-batch of the stage. Default: the step's micro-batch size."""
    recompute: bool = False
    """Run the forward again for the backward (activation recomputation)."""
    pipeline: int = 0
    """Number of the pipeline to which the stage belongs, from 0; each pipeline contains
    all nodes.
    """
    splits: tuple[GivenSplits, ...] = ()
    """Splits of the stage's nodes over its devices. Each device computes all other
    nodes in full.
    """


def devices_of(written: Sequence[int | str]) -> tuple[int, ...]:
    """Return the devices written as numbers and ranges. Raise ConfigurationError for an entry that
    is neither.
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


def written_devices(devices: Sequence[int]) -> Iterator[int | str]:
    """Yield devices in the form that `devices_of` reads, in this order."""
    for _, each in groupby(enumerate(devices), key=lambda numbered: numbered[1] - numbered[0]):
        run = [device for _, device in each]
        yield from [f"{run[0]}-{run[-1]}"] if len(run) >= _MINIMUM_RUN else run


@dataclass(frozen=True, slots=True)
class Explicit:
    """Run a placement as it is written, if it is executable. Nothing is searched, and constraints
    are ignored.

    The file `placement.yaml` in the folder of each plan contains its placement in this form.
    `autopipe plan --from DIR` reads the file, edited or not.
    """

    name: ClassVar[str] = "explicit"

    placement: tuple[GivenStage, ...] = ()
    """The stages in order; each may read from earlier stages only."""

    @property
    def devices(self) -> int:
        """Return the largest device number plus 1. Raise ConfigurationError for an entry that is
        not a device.
        """
        every = map(self.devices_at, range(len(self.placement)))
        return 1 + max(chain.from_iterable(every), default=-1)

    def devices_at(self, index: int) -> tuple[int, ...]:
        """Return the devices of a stage. Raise ConfigurationError with the stage for an entry that
        is not a device.
        """
        with _naming(index):
            return devices_of(self.placement[index].devices)

    def division(self, graph: Graph) -> Division:
        return Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError if there are no stages."""
        if not self.placement:
            raise ConfigurationError(
                "strategy explicit requires stages, but the key `placement` lists none",
                hint="use autopipe plan --from DIR, which reads DIR/placement.yaml",
            )

    def run(self, problem: Problem) -> Placement:
        """Return the placement.

        Raise ConfigurationError with the stage and the node if a node is in no stage or in several,
        a stage reads from a later one, a device does not exist, or a split is not possible.
        """
        names = NodeNames(problem.graph)
        homes = [_stage_nodes(names, index, each) for index, each in enumerate(self.placement)]
        stages = []
        for index, each in enumerate(self.placement):
            moved = self._moved(names, homes, index)
            stages.append(
                _stage(problem, names, index, each, self.devices_at(index), homes[index], moved)
            )
        placement = Placement(tuple(stages))
        for pipeline in range(placement.pipelines):
            _check_partition(problem.graph, placement, pipeline)
        _check_order(problem.graph, placement)
        return placement

    def _moved(self, names: NodeNames, homes: Sequence[set[int]], index: int) -> dict[int, Degrees]:
        """Return the splits of nodes of stage `index` that entries of other stages of its pipeline
        select.

        An entry follows a node that was moved to another stage. It is recognised by one of: a name
        that is not in the entry's stage, a range with an end outside of the entry's stage, or a
        glob that matches nothing in it. If several entries select a node, the last one counts.
        """
        found: dict[int, Degrees] = {}
        for other, stage in enumerate(self.placement):
            if other == index or stage.pipeline != self.placement[index].pipeline:
                continue
            for given in stage.splits:
                for entry in given.nodes:
                    with _naming(other):
                        meant = names.meant(entry)
                    if _has_left(entry, meant, homes[other]):
                        found.update((node, given.split) for node in meant if node in homes[index])
        return found


def _has_left(entry: NodeEntry, meant: Sequence[int], home: set[int]) -> bool:
    """True if nodes that the entry selects were moved out of the entry's stage, whose nodes are
    `home`.
    """
    if isinstance(entry, tuple):
        return meant[0] not in home or meant[-1] not in home
    return home.isdisjoint(meant)


def _stage_nodes(names: NodeNames, index: int, given: GivenStage) -> set[int]:
    """Return the nodes of a stage. Raise ConfigurationError if there are none."""
    with _naming(index):
        nodes = {node for entry in given.nodes for node in names.meant(entry)}
    if not nodes:
        raise ConfigurationError(
            f"stage {index} has no nodes", hint="add nodes to the stage, or remove it"
        )
    return nodes


def _stage(
    problem: Problem,
    names: NodeNames,
    index: int,
    given: GivenStage,
    devices: tuple[int, ...],
    nodes: set[int],
    moved: Mapping[int, Degrees],
) -> Stage:
    """Return a stage of `nodes`. The nodes in `moved` have splits that are written with other
    stages.
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
        found = _nodes_of(names, samples, index, each, nodes)
        required |= {node: split_of(samples, node, each.split) for node in found}
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
    """Yield (node, split) for a node that was moved to a stage of `devices` devices, if the node is
    split there.

    If the parts of its split do not divide the devices, the node gets the stage's split of all
    nodes (`has_other`), otherwise a split by samples if it is possible, and otherwise none.
    """
    own = split_of(samples, node, split)
    if devices % math.prod(degree for _, degree in own) == 0:
        yield node, own
    elif not has_other and devices > 1 and samples.divides(node, devices):
        yield node, split_of(samples, node, ((SAMPLES, devices),))


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Add the stage to errors that are raised inside."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"stage {index}: {error.message}", error.hint) from error


def _nodes_of(
    names: NodeNames, samples: SampleAxes, index: int, given: GivenSplits, nodes: set[int]
) -> set[int]:
    """Return the nodes of the stage to which `given` applies; empty if all of them were moved to
    other stages.
    """
    found: set[int] = set()
    for entry in given.nodes:
        with _naming(index):
            found |= nodes.intersection(names.meant(entry))
    for axis, _ in given.split:
        if found and not any(own_axis(samples, node, axis, SAMPLES) for node in found):
            first = min(found)
            axes = ", ".join(each.name for each in samples.uses[first].space.axes)
            raise ConfigurationError(
                f"stage {index} splits axis {axis!r}, but none of the selected nodes has this axis",
                hint=f"use an axis of {names.names[first]!r}: {axes or 'none'}",
            )
    return found


def split_of(samples: SampleAxes, node: int, split: Degrees) -> Degrees:
    """Return the degrees along the axes that the node has, under the node's own axis names."""
    named = ((own_axis(samples, node, axis, SAMPLES), degree) for axis, degree in split)
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
    return f"node {node}, {graph.nodes[node].name!r}"


def written(graph: Graph, placement: Placement, layers: Sequence[str] = ()) -> Explicit:
    """Return the strategy that produces exactly this placement of `graph`, with few entries.

    If `layers` has the layer of each node, no range of nodes extends beyond one layer.
    """
    names = NodeNames(graph)
    samples = sample_axes(graph)
    everywhere = range(len(names.names))
    return Explicit(
        tuple(
            GivenStage(
                devices=tuple(written_devices(stage.devices)),
                nodes=entries_of(
                    names,
                    stage.nodes,
                    everywhere,
                    set(stage.nodes),
                    layer_globs(names, stage.nodes),
                    layers,
                ),
                micro_batch_size=stage.micro_batch_size,
                recompute=stage.recompute,
                pipeline=stage.pipeline,
                splits=_written_splits(names, samples, stage),
            )
            for stage in placement.stages
        )
    )


def _written_splits(names: NodeNames, samples: SampleAxes, stage: Stage) -> tuple[GivenSplits, ...]:
    """Return the splits as entries: the split of more than half of the split nodes for all nodes,
    then all others, equal ones together.
    """
    degrees_by_node = {
        node: degrees_of(samples, node, stage.splits_of(node)) for node in stage.nodes
    }
    counted = Counter(filter(None, degrees_by_node.values()))
    found = []
    remaining = [node for node in stage.nodes if degrees_by_node[node]]
    for most_frequent, count in counted.most_common(1):
        if 2 * count > counted.total() and not names.has("*"):
            found.append(GivenSplits(most_frequent, EVERY))
            served = _nodes_with_splits(samples, stage, most_frequent)
            remaining = [node for node in stage.nodes if node not in served]
    for degrees in dict.fromkeys(degrees_by_node[node] for node in remaining):
        same = [node for node in remaining if degrees_by_node[node] == degrees]
        allowed = _nodes_with_splits(samples, stage, degrees)
        found.append(
            GivenSplits(
                degrees, entries_of(names, same, stage.nodes, allowed, role_globs(names, same))
            )
        )
    return tuple(found)


def degrees_of(samples: SampleAxes, node: int, splits: tuple[Split, ...]) -> Degrees:
    """Return a node's splits as (axis, degree) pairs, with its sample axis called `samples`."""
    own = samples.axes[node]
    return tuple((SAMPLES if split.axis == own else split.axis, split.degree) for split in splits)


def _nodes_with_splits(samples: SampleAxes, stage: Stage, degrees: Degrees) -> frozenset[int]:
    """Return the nodes of a stage whose splits are exactly what `degrees` produces."""
    found = {
        node: tuple(Split(*each) for each in split_of(samples, node, degrees))
        for node in stage.nodes
    }
    return frozenset(node for node, splits in found.items() if splits == stage.splits_of(node))
