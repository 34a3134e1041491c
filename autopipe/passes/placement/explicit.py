"""The placement that is written down, stage by stage, so that a person can read and edit it; and
how one is written.
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

from autopipe.ir.batch import rebatched
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage, crossing_values, node_ranges
from autopipe.ir.problem import Problem
from autopipe.ir.words import plural
from autopipe.passes.analysis.constraints import checked_splits, own_axis
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.batching import Division

NodeName = int | str  # A node's index in the graph, its name, or a glob over names.
NodeEntry = NodeName | tuple[NodeName, NodeName]
"""A name, or the first and the last of nodes that follow one another in the graph."""

Degrees = tuple[tuple[str, int], ...]  # Degrees by axis, outer to inner.
# In a split: the axis that counts samples, whatever it is called in a node's iteration space.
SAMPLES = "samples"
EVERY = ("*",)
"""Entries that mean all nodes of a stage."""
_LAST = chr(0x10FFFF)
_SPECIAL = re.compile(r"[*?[]")
_RUN = re.compile(r"(\d{1,9})-(\d{1,9})")
_LEAST_RUN = 3  # Devices that are written as a run; fewer are written one by one.
# Globs that are tried for nodes beyond one a layer: names that nobody's layers explain are many.
_MOST_GLOBS = 256


class NodeNames:
    """The names of a graph's nodes, of which some may be equal, empty, or look like globs."""

    def __init__(self, graph: Graph) -> None:
        self.names = tuple(node.name for node in graph.nodes)
        self._positions: dict[str, list[int]] = {}
        for index, name in enumerate(self.names):
            self._positions.setdefault(name, []).append(index)
        spelled = [(name, index) for index, name in enumerate(self.names)]
        # Exporters put a slash first, which a glob may leave out.
        spelled += [(name[1:], index) for name, index in spelled if name.startswith("/")]
        self._sorted = sorted(spelled)
        self._globs: dict[str, tuple[int, ...]] = {}

    def meant(self, entry: NodeEntry) -> tuple[int, ...]:
        """The nodes that an entry means, ascending, at least one; a name that a node has is no
        glob. Raises ConfigurationError for an index or a name that there is not, with the nearest
        name, and for a range whose ends are several nodes each or the wrong way round.
        """
        if isinstance(entry, tuple):
            first, last = map(self._one, entry)
            if first > last:
                raise ConfigurationError(f"{_spelled(entry)} ends before it begins")
            return tuple(range(first, last + 1))
        if isinstance(entry, int):
            if not 0 <= entry < len(self.names):
                raise ConfigurationError(
                    f"there is no node {entry}", f"nodes are 0 to {len(self.names) - 1}"
                )
            return (entry,)
        matched = tuple(self._positions.get(entry, ())) or self.matched(entry)
        if not matched:
            near = difflib.get_close_matches(entry, self._positions, n=1, cutoff=0.0)
            hint = f"the nearest name is {near[0]!r}" if near else ""
            raise ConfigurationError(f"no node's name matches {entry!r}", hint)
        return matched

    def matched(self, glob: str) -> tuple[int, ...]:
        """The nodes whose names match a glob, ascending."""
        if glob not in self._globs:
            prefix = _SPECIAL.split(glob, maxsplit=1)[0]
            low = bisect_left(self._sorted, (prefix,))
            high = bisect_right(self._sorted, (prefix + _LAST,))
            matches = re.compile(fnmatch.translate(glob)).fullmatch
            found = {index for name, index in self._sorted[low:high] if matches(name)}
            self._globs[glob] = tuple(sorted(found))
        return self._globs[glob]

    def called(self, node: int) -> NodeName:
        """The node's name where no other node has it, else its index."""
        name = self.names[node]
        return name if len(self._positions[name]) == 1 else node

    def has(self, name: str) -> bool:
        return name in self._positions

    def _one(self, end: NodeName) -> int:
        found = self.meant(end)
        if len(found) > 1:
            hint = f"write its number: {', '.join(map(str, found[:4]))}" + (
                ", ..." if len(found) > 4 else ""
            )
            raise ConfigurationError(
                f"{end!r} is {len(found)} {plural(len(found), 'node')}, and a range ends at one",
                hint,
            )
        return found[0]


def _spelled(entry: NodeEntry) -> str:
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
    """Entries that, of the nodes of `among` (ascending), mean `nodes` and none that is not
    `allowed`. In the order of the graph. Each of `globs` is taken where that holds of it; what is
    left is told by ranges, of which none goes on from one layer to the next if `layers` has the
    layer of each node.
    """
    found: list[tuple[int, NodeEntry]] = []
    left = set(nodes)
    inside = set(among)
    for glob in globs:
        if not left:
            break
        matched = inside.intersection(() if names.has(glob) else names.matched(glob))
        if not left.isdisjoint(matched) and all(node in allowed for node in matched):
            found.append((min(matched), glob))
            left -= matched
    places = [place for place, node in enumerate(among) if node in left]
    parts = [
        list(part)
        for _, part in groupby(places, key=lambda place: layers[among[place]] if layers else "")
    ]
    for start, stop in chain.from_iterable(map(node_ranges, parts)):
        first = names.called(among[start])
        last = names.called(among[stop - 1])
        found.append((among[start], first if start + 1 == stop else (first, last)))
    return tuple(entry for _, entry in sorted(found, key=lambda each: each[0]))


def layer_globs(names: NodeNames, nodes: Iterable[int]) -> Iterator[str]:
    """A glob for each layer: the beginnings of its nodes' names, up to the first folder with a
    number.
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
    """Globs for the roles of nodes in whichever layer: names, with any number in place of those of
    their folders.
    """
    folders_and_own = (names.names[node].rpartition("/") for node in nodes)
    roles = (
        re.sub(r"\d+", "*", _literal(folders)) + slash + _literal(own)
        for folders, slash, own in folders_and_own
        if re.search(r"\d", folders)
    )
    return islice(dict.fromkeys(roles), _MOST_GLOBS)


def _literal(text: str) -> str:
    """A glob that matches `text` alone."""
    return _SPECIAL.sub(r"[\g<0>]", text)


@dataclass(frozen=True, slots=True)
class GivenSplits:
    """Nodes of a stage that are split alike."""

    split: Degrees
    """Degrees by axis of the iteration space, outer to inner over the stage's devices; `samples` is
    the axis that counts samples, whatever an operator calls it. A node is split along those that it
    has; `{}` splits nothing.
    """
    nodes: tuple[NodeEntry, ...]
    """The nodes, written as those of a stage. Of several entries that mean a node the last one
    counts. An entry follows nodes that were moved to another stage, unless an entry there names
    them or the devices cannot be divided so.
    """


@dataclass(frozen=True, slots=True)
class GivenStage:
    """One stage."""

    devices: tuple[int | str, ...]
    """Its devices in order; `0-3` is four of them."""
    nodes: tuple[NodeEntry, ...]
    """Its nodes: names, globs over names, indices into the graph's nodes (for nodes whose names are
    alike or empty), or `[first, last]` for a range in the order of the graph.
    """
    micro_batch_size: int | None = None
    """Samples of one of its micro-batches; those of the step's where it is not given."""
    recompute: bool = False
    """Run its forward again for its backward."""
    pipeline: int = 0
    """Which of several pipelines it belongs to; each holds all nodes."""
    splits: tuple[GivenSplits, ...] = ()
    """How its nodes are split over its devices; every device computes the others whole."""


def devices_of(written: Sequence[int | str]) -> tuple[int, ...]:
    """The devices that are written down as numbers and runs. Raises ConfigurationError for what is
    neither.
    """
    found: list[int] = []
    for entry in written:
        match = _RUN.fullmatch(entry) if isinstance(entry, str) else None
        ends = (
            list(map(int, match.groups())) if match else [entry] if isinstance(entry, int) else []
        )
        if not ends or not 0 <= ends[0] <= ends[-1] < 2**20:
            raise ConfigurationError(
                f"{entry!r} is no device", "write numbers, or 0-3 for four of them"
            )
        found += range(ends[0], ends[-1] + 1)
    return tuple(found)


def written_devices(devices: Sequence[int]) -> Iterator[int | str]:
    """Devices in the form that `devices_of` reads, in this order."""
    for _, each in groupby(enumerate(devices), key=lambda numbered: numbered[1] - numbered[0]):
        run = [device for _, device in each]
        yield from [f"{run[0]}-{run[-1]}"] if len(run) >= _LEAST_RUN else run


@dataclass(frozen=True, slots=True)
class Explicit:
    """Takes a placement as it is written, if it can be run: nothing is searched, and constraints
    are not asked.

    `placement.yaml` in the folder of every plan is its placement in this form. Edited, `autopipe
    plan --from DIR` takes it.
    """

    name: ClassVar[str] = "explicit"

    placement: tuple[GivenStage, ...] = ()
    """The stages in order: each may read from earlier ones only."""

    @property
    def devices(self) -> int:
        """One more than the largest device of its stages. Raises ConfigurationError for what is no
        device.
        """
        every = map(self.devices_at, range(len(self.placement)))
        return 1 + max(chain.from_iterable(every), default=-1)

    def devices_at(self, index: int) -> tuple[int, ...]:
        """The devices of a stage. Raises ConfigurationError, naming the stage, for what is no
        device.
        """
        with _naming(index):
            return devices_of(self.placement[index].devices)

    def division(self, graph: Graph) -> Division:
        return Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError where no stage is given."""
        if not self.placement:
            raise ConfigurationError(
                "strategy explicit takes stages as they are written, and none are",
                hint="autopipe plan --from DIR takes those of DIR/placement.yaml",
            )

    def run(self, problem: Problem) -> Placement:
        """The placement. Raises ConfigurationError, naming the stage and the node, where stages
        leave out nodes or share them, read from later ones, name devices that there are not, or
        split what cannot be split so.
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
        """Return the splits of nodes of a stage that entries of other stages of its pipeline name.

        An entry follows a node that was moved: a name, a range of which an end is no longer in the
        entry's stage, or a glob that matches nothing in it. The last entry of a node counts.
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
    """True if nodes of an entry, which stands with the stage of the nodes `home`, were moved out of
    this stage.
    """
    if isinstance(entry, tuple):
        return meant[0] not in home or meant[-1] not in home
    return home.isdisjoint(meant)


def _stage_nodes(names: NodeNames, index: int, given: GivenStage) -> set[int]:
    """Return the nodes of a stage. Raises ConfigurationError if there are none."""
    with _naming(index):
        nodes = {node for entry in given.nodes for node in names.meant(entry)}
    if not nodes:
        raise ConfigurationError(f"stage {index} has no nodes", hint="give it some, or remove it")
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
    """Return a stage of `nodes`, of which `moved` have splits that stand with other stages."""
    whole = problem.micro_batch_size
    size = whole if given.micro_batch_size is None else given.micro_batch_size
    if size < 1 or whole % size:
        reason = (
            f"has micro-batches of {size} {plural(size, 'sample')}, which do not divide the step's "
            f"of {whole}"
        )
        raise ConfigurationError(f"stage {index} {reason}")
    if given.pipeline < 0:
        raise ConfigurationError(
            f"stage {index} is in pipeline {given.pipeline}", hint="number pipelines from 0"
        )
    if not devices:
        raise ConfigurationError(f"stage {index} has no devices", hint="name at least one")
    last = problem.cluster.size - 1
    for device in devices:
        if device > last:
            hint = f"devices are 0 to {last}"
            raise ConfigurationError(
                f"stage {index} names device {device}, but there are {last + 1}", hint
            )
    twice = next((device for device in devices if devices.count(device) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            f"stage {index} names device {twice} twice", hint="name each device once"
        )
    samples = sample_axes(problem.graph if size == whole else rebatched(problem.graph, size))
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
                f"stage {index} splits it into {parts} {plural(parts, 'part')} "
                f"({', '.join(map(str, own))}) "
                f"on {len(devices)} {plural(len(devices), 'device')}",
                hint="the product of the degrees must divide the number of devices",
                where=_place(problem.graph, node),
            )
    return Stage(tuple(sorted(nodes)), devices, size, splits, given.recompute, given.pipeline)


def _moved_split(
    samples: SampleAxes, node: int, split: Degrees, devices: int, has_other: bool
) -> Iterator[tuple[int, Degrees]]:
    """Yield the split that a node keeps in a stage of `devices` devices, if it keeps any.

    If its parts do not divide the devices, the node is split as the stage says of all nodes
    (`has_other`), else by samples if the devices can share them, else not at all.
    """
    own = split_of(samples, node, split)
    if devices % math.prod(degree for _, degree in own) == 0:
        yield node, own
    elif not has_other and devices > 1 and samples.divides(node, devices):
        yield node, split_of(samples, node, ((SAMPLES, devices),))


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Errors inside name the stage."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"stage {index}: {error.message}", error.hint) from error


def _nodes_of(
    names: NodeNames, samples: SampleAxes, index: int, given: GivenSplits, nodes: set[int]
) -> set[int]:
    """The nodes of a stage that are split as `given` says; none if all that it names were moved to
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
                f"stage {index} splits axis {axis!r}, which none of the nodes it names has",
                hint=f"{names.names[first]!r} has {axes or 'none'}",
            )
    return found


def split_of(samples: SampleAxes, node: int, split: Degrees) -> Degrees:
    """Of degrees by axis those along axes that the node has, under the node's own names."""
    named = ((own_axis(samples, node, axis, SAMPLES), degree) for axis, degree in split)
    return tuple((own, degree) for own, degree in named if own is not None)


def _check_partition(graph: Graph, placement: Placement, pipeline: int) -> None:
    """Raise ConfigurationError unless each node is in one stage of the pipeline."""
    owner: dict[int, int] = {}
    for index, stage in enumerate(placement.stages):
        for node in stage.nodes if stage.pipeline == pipeline else ():
            if owner.setdefault(node, index) != index:
                both = f"this node is in stages {owner[node]} and {index}"
                raise ConfigurationError(both, "leave it to one of them", _place(graph, node))
    missing = [node for node in range(len(graph.nodes)) if node not in owner]
    if missing:
        of = f" of pipeline {pipeline}" if placement.pipelines > 1 else ""
        others = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ConfigurationError(
            f"this node is in no stage{of}{others}", "give it to one", _place(graph, missing[0])
        )


def _check_order(graph: Graph, placement: Placement) -> None:
    """Raise ConfigurationError where a stage needs what a later one computes."""
    for value, source, target in crossing_values(graph, placement):
        if source > target:
            reader = next(
                node for node in placement.stages[target].nodes if value in graph.nodes[node].inputs
            )
            producer = graph.producer(value)
            assert producer is not None
            raise ConfigurationError(
                (
                    f"this node is in stage {target}, but it reads from "
                    f"{graph.nodes[producer].name!r} in stage {source}"
                ),
                hint="a stage may read from earlier stages only",
                where=_place(graph, reader),
            )


def _place(graph: Graph, node: int) -> str:
    return f"node {node}, {graph.nodes[node].name!r}"


def written(graph: Graph, placement: Placement, layers: Sequence[str] = ()) -> Explicit:
    """The strategy that gives exactly this placement of `graph`, in as few words as that takes: an
    entry per layer if `layers` has the layer of each node.
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
    """Splits as entries: first the most frequent one, for all nodes; then the others, equal ones
    together.
    """
    wanted = {node: degrees_of(samples, node, stage.splits_of(node)) for node in stage.nodes}
    counted = Counter(filter(None, wanted.values()))
    found = []
    left = [node for node in stage.nodes if wanted[node]]
    for usual, count in counted.most_common(1):
        if 2 * count > counted.total() and not names.has("*"):
            found.append(GivenSplits(usual, EVERY))
            served = _served(samples, stage, usual)
            left = [node for node in stage.nodes if node not in served]
    for degrees in dict.fromkeys(wanted[node] for node in left):
        same = [node for node in left if wanted[node] == degrees]
        allowed = _served(samples, stage, degrees)
        found.append(
            GivenSplits(
                degrees, entries_of(names, same, stage.nodes, allowed, role_globs(names, same))
            )
        )
    return tuple(found)


def degrees_of(samples: SampleAxes, node: int, splits: tuple[Split, ...]) -> Degrees:
    """A node's splits as degrees by axis, its sample axis called `samples`."""
    own = samples.axes[node]
    return tuple((SAMPLES if split.axis == own else split.axis, split.degree) for split in splits)


def _served(samples: SampleAxes, stage: Stage, degrees: Degrees) -> frozenset[int]:
    """The nodes of a stage that `degrees` split as they are to be split."""
    found = {
        node: tuple(Split(*each) for each in split_of(samples, node, degrees))
        for node in stage.nodes
    }
    return frozenset(node for node, splits in found.items() if splits == stage.splits_of(node))
