"""What the devices of one stage send to those of another for each micro-batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import partial

from autopipe.ir.cluster import Cluster
from autopipe.ir.placement import Placement
from autopipe.ir.prediction import Message
from autopipe.ir.problem import Problem
from autopipe.passes.cost.assignment import stage_work
from autopipe.passes.lower.gradients import differentiable_values


def stage_messages(problem: Problem, placement: Placement) -> tuple[Message, ...]:
    """All messages of one micro-batch, sorted by their stages, then their devices.

    A value that a group holds in n parts lies in equal slices, in order, each on an equal number of neighbouring
    devices; a device that needs a slice asks one of those that hold it, in turn, and itself where it does.
    """
    graph = problem.graph
    works = stage_work(problem, placement)
    gradients = differentiable_values(graph) if problem.train else frozenset()
    held = {
        (work.stage.pipeline, name): (index, parts)
        for index, work in enumerate(works)
        for name, parts in work.given.items()
    }
    forward: defaultdict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    backward: defaultdict[tuple[int, int, int, int], list[int]] = defaultdict(list)
    for target, work in enumerate(works):
        for name, needed in work.received.items():
            if (work.stage.pipeline, name) not in held:
                continue
            source, parts = held[work.stage.pipeline, name]
            for sender, receiver, share in _slices(works[source].stage.devices, parts, work.stage.devices, needed):
                size = round(graph.type_of(name).bytes * share)
                forward[source, target, sender, receiver].append(size)
                if name in gradients:
                    backward[source, target, sender, receiver].append(size)
    seconds = partial(_seconds, problem.cluster)
    return tuple(
        Message(
            *key, sum(sizes), sum(backward[key]), seconds(key[2], key[3], sizes), seconds(key[3], key[2], backward[key])
        )
        for key, sizes in sorted(forward.items())
    )


def _seconds(cluster: Cluster, source: int, target: int, sizes: list[int]) -> float:
    """Seconds of sending values of these sizes, each a message of its own; a device sends itself nothing."""
    return 0.0 if source == target else sum(cluster.link(source, target).seconds(size) for size in sizes)


def _slices(
    senders: tuple[int, ...], held: int, receivers: tuple[int, ...], needed: int
) -> Iterator[tuple[int, int, Fraction]]:
    """(sender, receiver, share of the value) for each slice that moves from one group to another."""
    copies = len(senders) // held
    for position, receiver in enumerate(receivers):
        wanted = position * needed // len(receivers)
        start, stop = Fraction(wanted, needed), Fraction(wanted + 1, needed)
        for part in range(int(start * held), held):
            share = min(stop, Fraction(part + 1, held)) - max(start, Fraction(part, held))
            if share <= 0:
                break
            holders = senders[part * copies : (part + 1) * copies]
            yield receiver if receiver in holders else holders[position % copies], receiver, share
