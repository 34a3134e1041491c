"""What else could be done with a stage: other ends, devices, splits, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.ir.rebatch import rebatched
from autopipe.passes.cost.splits import sample_axes
from autopipe.passes.explain.node import moved_nodes
from autopipe.passes.explain.prices import Change

_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""By how many nodes a stage's end is moved."""


def stage_changes(problem: Problem, placement: Placement, index: int) -> Iterator[Change]:
    """The changes of one stage, of a placement with one pipeline (of several, that it runs its forward again)."""
    if problem.train:
        yield from _recomputation(placement, index)
    if placement.pipelines == 1:
        yield from _shared_samples(problem, placement, index)
        for other in (index - 1, index + 1):
            if 0 <= other < len(placement.stages):
                yield from _moved_end(problem, placement, index, other)
                yield from _other_devices(problem, placement, index, other)
                yield from _merged(problem, placement, min(index, other))


def _recomputation(placement: Placement, index: int) -> Iterator[Change]:
    stage = placement.stages[index]
    what = "its forward is not run again" if stage.recompute else "its forward is run again for its backward"
    yield Change(what, _replaced(placement, {index: replace(stage, recompute=not stage.recompute)}))


def _shared_samples(problem: Problem, placement: Placement, index: int) -> Iterator[Change]:
    stage = placement.stages[index]
    edited = _by_samples(problem, stage, stage.devices, stage.nodes)
    if edited is not None and edited != stage:
        yield Change("its devices share samples and split nothing else", _replaced(placement, {index: edited}))


def _moved_end(problem: Problem, placement: Placement, index: int, other: int) -> Iterator[Change]:
    """The end between two stages some nodes further on, either way."""
    for source, target in ((index, other), (other, index)):
        nodes = placement.stages[source].nodes
        for count in _COUNTS:
            if count < len(nodes):
                moved = nodes[-count:] if target > source else nodes[:count]
                edited = moved_nodes(problem, placement, moved, source, target)
                if edited is not None:
                    which = "last" if target > source else "first"
                    told = f"its {which}" if source == index else f"the {which}"
                    whose = "" if source == index else f" of stage {other}"
                    there = f"in stage {other}" if source == index else "in it"
                    plural = "s" if count > 1 else ""
                    yield Change(f"{told} {count} node{plural}{whose} {there}", edited)


def _other_devices(problem: Problem, placement: Placement, index: int, other: int) -> Iterator[Change]:
    """Half of one stage's devices for its neighbour, both sharing out samples."""
    for giver, taker in ((index, other), (other, index)):
        old, new = placement.stages[giver], placement.stages[taker]
        half = len(old.devices) // 2
        if not half or set(old.devices) & set(new.devices):
            continue
        kept, given = (
            (old.devices[:-half], old.devices[-half:]) if taker > giver else (old.devices[half:], old.devices[:half])
        )
        devices = (*given, *new.devices) if taker > giver else (*new.devices, *given)
        edited = {
            giver: _by_samples(problem, old, kept, old.nodes),
            taker: _by_samples(problem, new, devices, new.nodes),
        }
        if all(each is not None for each in edited.values()):
            whose = "its" if giver == index else f"stage {other}'s"
            whom = f"for stage {other}" if giver == index else "for it"
            stages = {place: each for place, each in edited.items() if each is not None}
            yield Change(f"{half} of {whose} devices {whom}", _replaced(placement, stages))


def _merged(problem: Problem, placement: Placement, first: int) -> Iterator[Change]:
    """A stage and the next as one, on the devices of both."""
    old, new = placement.stages[first], placement.stages[first + 1]
    devices = tuple(dict.fromkeys((*old.devices, *new.devices)))
    joined = _by_samples(problem, old, devices, tuple(sorted((*old.nodes, *new.nodes))))
    if joined is not None and old.micro_batch_size == new.micro_batch_size:
        stages = (*placement.stages[:first], joined, *placement.stages[first + 2 :])
        yield Change(f"stages {first} and {first + 1} as one", Placement(stages))


def _by_samples(problem: Problem, stage: Stage, devices: tuple[int, ...], nodes: tuple[int, ...]) -> Stage | None:
    """The stage with other devices and nodes, sharing samples; None where these cannot be shared so."""
    graph, size = problem.graph, stage.micro_batch_size
    samples = sample_axes(graph if size == problem.micro_batch_size else rebatched(graph, size))
    try:
        splits = samples.splits(nodes, len(devices))
    except InfeasibleError:
        return None
    return replace(stage, nodes=nodes, devices=devices, splits=splits)


def _replaced(placement: Placement, stages: dict[int, Stage]) -> Placement:
    return Placement(tuple(stages.get(index, stage) for index, stage in enumerate(placement.stages)))
