"""The placement that is written down, stage by stage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.batch import rebatched
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Split, Stage, crossing_values
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import checked_splits
from autopipe.passes.analysis.operators import SampleAxes, sample_axes
from autopipe.passes.batching import Division
from autopipe.passes.placement.given.nodes import NodeEntry, NodeNames
from autopipe.passes.placement.given.stages import SAMPLES, GivenSplits, GivenStage, devices_of


@dataclass(frozen=True, slots=True)
class Given:
    """Takes a placement as it is written, if it can be run: nothing is searched, and constraints are not asked.

    `placement.yaml` in the folder of every plan is its placement in this form. Edited, `autopipe plan --from DIR`
    takes it.
    """

    name: ClassVar[str] = "given"

    placement: tuple[GivenStage, ...] = ()
    """The stages in order: each may read from earlier ones only."""

    @property
    def devices(self) -> int:
        """One more than the largest device of its stages. Raises ConfigurationError for what is no device."""
        return 1 + max(
            (device for index in range(len(self.placement)) for device in self.devices_at(index)), default=-1
        )

    def devices_at(self, index: int) -> tuple[int, ...]:
        """The devices of a stage. Raises ConfigurationError, naming the stage, for what is no device."""
        try:
            return devices_of(self.placement[index].devices)
        except ConfigurationError as error:
            raise ConfigurationError(f"stage {index}: {error.message}", error.hint) from error

    def division(self, graph: Graph) -> Division:
        """It may have several stages."""
        return Division.MANY

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError where no stage is given."""
        if not self.placement:
            raise ConfigurationError(
                "strategy given takes stages as they are written, and none are",
                hint="autopipe plan --from DIR takes those of DIR/placement.yaml",
            )

    def run(self, problem: Problem) -> Placement:
        """The placement.

        Raises ConfigurationError, naming the stage and the node, where stages leave out nodes or share them, read from
        later ones, name devices that there are not, or split what cannot be split so.
        """
        names, samples = NodeNames(problem.graph), _Samples(problem)
        stages = tuple(
            _stage(problem, names, samples, index, given, self.devices_at(index))
            for index, given in enumerate(self.placement)
        )
        placement = Placement(stages)
        for pipeline in range(placement.pipelines):
            _check_partition(problem.graph, placement, pipeline)
        _check_order(problem.graph, placement)
        return placement


class _Samples:
    """The sample axes of a problem's graph on micro-batches of any size, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._found: dict[int, SampleAxes] = {}

    def on(self, size: int) -> SampleAxes:
        """The sample axes on micro-batches of `size` samples."""
        if size not in self._found:
            graph = self._problem.graph
            self._found[size] = sample_axes(graph if size == self._problem.micro_batch_size else rebatched(graph, size))
        return self._found[size]


def _stage(
    problem: Problem, names: NodeNames, samples: _Samples, index: int, given: GivenStage, devices: tuple[int, ...]
) -> Stage:
    whole = problem.micro_batch_size
    size = whole if given.micro_batch_size is None else given.micro_batch_size
    if size < 1 or whole % size:
        raise ConfigurationError(
            f"stage {index} has micro-batches of {size} samples, which do not divide the step's of {whole}"
        )
    if given.pipeline < 0:
        raise ConfigurationError(f"stage {index} is in pipeline {given.pipeline}", hint="number pipelines from 0")
    _check_devices(index, devices, problem.cluster.size)
    nodes = {node for entry in given.nodes for node in _meant(names, index, entry)}
    if not nodes:
        raise ConfigurationError(f"stage {index} has no nodes", hint="give it some, or remove it")
    splits = _splits(names, samples.on(size), index, given, nodes)
    for node, own in splits:
        parts = math.prod(split.degree for split in own)
        if len(devices) % parts:
            raise ConfigurationError(
                f"stage {index} splits it into {parts} parts ({', '.join(map(str, own))}) on {len(devices)} devices",
                hint="the product of the degrees must divide the number of devices",
                where=f"node {node}, {names.names[node]!r}",
            )
    return Stage(tuple(sorted(nodes)), devices, size, splits, given.recompute, given.pipeline)


def _check_devices(index: int, devices: tuple[int, ...], count: int) -> None:
    if not devices:
        raise ConfigurationError(f"stage {index} has no devices", hint="name at least one")
    missing = next((device for device in devices if device >= count), None)
    if missing is not None:
        raise ConfigurationError(
            f"stage {index} names device {missing}, but there are {count}", hint=f"devices are 0 to {count - 1}"
        )
    twice = next((device for device in devices if devices.count(device) > 1), None)
    if twice is not None:
        raise ConfigurationError(f"stage {index} names device {twice} twice", hint="name each device once")


def _meant(names: NodeNames, index: int, entry: NodeEntry) -> tuple[int, ...]:
    try:
        return names.meant(entry)
    except AutopipeError as error:
        raise ConfigurationError(f"stage {index}: {error.message}", error.hint) from error


def _splits(
    names: NodeNames, samples: SampleAxes, index: int, given: GivenStage, nodes: set[int]
) -> tuple[tuple[int, tuple[Split, ...]], ...]:
    """The splits of a stage's nodes, ascending; nodes that are not split are left out."""
    asked: dict[int, tuple[tuple[str, int], ...]] = {}
    for each in given.splits:
        for node in _same_splits(names, samples, index, each, nodes):
            asked[node] = split_of(samples, node, each.split)
    checked = ((node, checked_splits(f"stage {index}", samples, node, asked[node])) for node in sorted(asked))
    return tuple((node, own) for node, own in checked if own)


def _same_splits(names: NodeNames, samples: SampleAxes, index: int, given: GivenSplits, nodes: set[int]) -> set[int]:
    """The nodes that are split alike."""
    found: set[int] = set()
    for entry in given.nodes:
        inside = nodes.intersection(_meant(names, index, entry))
        if not inside:
            raise ConfigurationError(
                f"stage {index} splits {_spelled(entry)}, which it does not have",
                hint="splits stand with the stage of their nodes: move them there, or remove them",
            )
        found |= inside
    for axis, _ in given.split:
        if found and not any(_own_axis(samples, node, axis) for node in found):
            first = min(found)
            axes = ", ".join(each.name for each in samples.uses[first].space.axes)
            raise ConfigurationError(
                f"stage {index} splits axis {axis!r}, which none of the nodes it names has",
                hint=f"{names.names[first]!r} has {axes or 'none'}",
            )
    return found


def split_of(samples: SampleAxes, node: int, split: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
    """Of degrees by axis those along axes that the node has, under the node's own names."""
    return tuple((own, degree) for axis, degree in split if (own := _own_axis(samples, node, axis)) is not None)


def _own_axis(samples: SampleAxes, node: int, axis: str) -> str | None:
    own = samples.axes[node] if axis == SAMPLES else axis
    return own if any(each.name == own for each in samples.uses[node].space.axes) else None


def _spelled(entry: NodeEntry) -> str:
    return f"the range from {entry[0]!r} to {entry[1]!r}" if isinstance(entry, tuple) else repr(entry)


def _check_partition(graph: Graph, placement: Placement, pipeline: int) -> None:
    """Raise ConfigurationError unless each node is in one stage of the pipeline."""
    owner: dict[int, int] = {}
    for index, stage in enumerate(placement.stages):
        for node in stage.nodes if stage.pipeline == pipeline else ():
            if node in owner:
                raise ConfigurationError(
                    f"this node is in stages {owner[node]} and {index}",
                    hint="leave it to one of them",
                    where=f"node {node}, {graph.nodes[node].name!r}",
                )
            owner[node] = index
    missing = [node for node in range(len(graph.nodes)) if node not in owner]
    if missing:
        where = f" of pipeline {pipeline}" if placement.pipelines > 1 else ""
        others = f", and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise ConfigurationError(
            f"this node is in no stage{where}{others}",
            hint="give it to one",
            where=f"node {missing[0]}, {graph.nodes[missing[0]].name!r}",
        )


def _check_order(graph: Graph, placement: Placement) -> None:
    """Raise ConfigurationError where a stage needs what a later one computes."""
    for value, source, target in crossing_values(graph, placement):
        if source > target:
            reader = next(node for node in placement.stages[target].nodes if value in graph.nodes[node].inputs)
            producer = graph.producer(value)
            assert producer is not None
            raise ConfigurationError(
                f"this node is in stage {target}, but it reads from {graph.nodes[producer].name!r} in stage {source}",
                hint="a stage may read from earlier stages only",
                where=f"node {reader}, {graph.nodes[reader].name!r}",
            )
