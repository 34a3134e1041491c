"""Alternatives for a stage: other ends, devices, splits, recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.explain.node_changes import moved_nodes, neighbours, samples_of, with_stages
from autopipe.passes.explain.prices import Change

_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""By how many nodes a stage's end is moved."""


def stage_changes(problem: Problem, placement: Placement, index: int) -> Iterator[Change]:
    """The changes of one stage, and of the ends that it shares with its neighbours."""
    if problem.train:
        yield from _recomputation(placement, index)
    yield from _shared_samples(problem, placement, index)
    for other in neighbours(placement, index):
        yield from _moved_end(problem, placement, index, other)
        yield from _other_devices(problem, placement, index, other)
        yield from _merged(problem, placement, *sorted((index, other)))


def _recomputation(placement: Placement, index: int) -> Iterator[Change]:
    stage = placement.stages[index]
    what = "its forward is not run again" if stage.recompute else "its forward is run again for its backward"
    yield Change("recomputation", what, with_stages(placement, {index: replace(stage, recompute=not stage.recompute)}))


def _shared_samples(problem: Problem, placement: Placement, index: int) -> Iterator[Change]:
    stage = placement.stages[index]
    edited = _by_samples(problem, stage, stage.devices, stage.nodes)
    if edited is not None and edited != stage:
        yield Change(
            "samples", "its devices share samples and split nothing else", with_stages(placement, {index: edited})
        )


def _moved_end(problem: Problem, placement: Placement, index: int, other: int) -> Iterator[Change]:
    """The end between two stages some nodes further on, either way."""
    for source, target in ((index, other), (other, index)):
        nodes = placement.stages[source].nodes
        for count in _COUNTS:
            if count < len(nodes):
                moved = nodes[-count:] if target > source else nodes[:count]
                edited = moved_nodes(problem, placement, moved, source, target)
                if edited is not None:
                    which = f"{'last' if target > source else 'first'} {f'{count} nodes' if count > 1 else 'node'}"
                    if source == index:
                        yield Change(f"end {other}", f"its {which} in stage {other}", edited)
                    else:
                        yield Change(f"end {other}", f"the {which} of stage {other} in it", edited)


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
            told = f"{half} of {whose} devices {whom}"
            yield Change(f"devices {other}", told, with_stages(placement, stages))


def _merged(problem: Problem, placement: Placement, first: int, second: int) -> Iterator[Change]:
    """A stage and the next as one, on the devices of both."""
    old, new = placement.stages[first], placement.stages[second]
    devices = tuple(dict.fromkeys((*old.devices, *new.devices)))
    joined = _by_samples(problem, old, devices, tuple(sorted((*old.nodes, *new.nodes))))
    if joined is not None and old.micro_batch_size == new.micro_batch_size:
        stages = [stage for index, stage in enumerate(placement.stages) if index != second]
        stages[first] = joined
        told = f"stages {first} and {second} as one"
        yield Change(told, told, Placement(tuple(stages)))


def _by_samples(problem: Problem, stage: Stage, devices: tuple[int, ...], nodes: tuple[int, ...]) -> Stage | None:
    """The stage with other devices and nodes, sharing samples; None where these cannot be shared so."""
    try:
        splits = samples_of(problem, stage).splits(nodes, len(devices))
    except InfeasibleError:
        return None
    return replace(stage, nodes=nodes, devices=devices, splits=splits)
