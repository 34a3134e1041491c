"""The step of a chain of stages under 1F1B, without a list of its tasks: searches ask for thousands of such steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.schedule import StageGraph
from autopipe.ir.timeline import Message, Prediction, StagePrediction

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of a step."""

    end: float
    """Seconds."""
    peak_memory: tuple[int, ...]
    """Most bytes in use on each device."""
    static_memory: tuple[int, ...]
    """Bytes there all through the step, a device each."""


def is_chain(graph: StageGraph, prediction: Prediction) -> bool:
    """True if stages have devices of their own, each sends to the next at least, and all run whole micro-batches."""
    stages = len(graph.stage_devices)
    groups = [device for group in graph.stage_devices for device in group]
    return (
        len(set(groups)) == len(groups)
        and set(graph.edges) >= set(itertools.pairwise(range(stages)))
        and not graph.turns
        and graph.pipeline_count == 1
    )


def chain_step(graph: StageGraph, prediction: Prediction, micro_batches: int, train: bool) -> Step:
    """The step that `simulate` gives for kFkB's order with k = 1, to the last bit, where `is_chain`.

    With tasks of one length, stage s of p runs forward m in slot s + m (warming up) or s + 2m, and its backward in slot
    2p - 1 - s + 2m. Whatever the lengths, a task waits only for tasks of earlier slots, so slots are gone through in
    order, all stages of a slot at once.
    """
    stages = prediction.stages
    ends = _ends(stages, prediction.messages, micro_batches, train)
    last = max(
        float(end + stage.gradient_s) + stage.update_s for end, stage in zip(ends, stages, strict=True)
    )  # In the order in which a simulation adds them.
    peak, static = [0] * graph.devices, [0] * graph.devices
    for index, (stage, group) in enumerate(zip(stages, graph.stage_devices, strict=True)):
        kept = min(len(stages) - index, micro_batches) * stage.kept_bytes if train else 0
        for device in group:
            static[device] = stage.static_bytes
            peak[device] = stage.static_bytes + kept + stage.transient_bytes
    return Step(last, tuple(peak), tuple(static))


def _ends(stages: Sequence[StagePrediction], messages: Sequence[Message], count: int, train: bool) -> _Floats:
    """When each stage's last task ends."""
    size, wires = len(stages), _Wires.of(messages)
    forward = np.array([stage.forward_s for stage in stages])
    backward = np.array([stage.backward_s for stage in stages])
    done = np.zeros(size)
    # When all is there that a micro-batch waits for.
    given, returned = np.zeros((size, count)), np.zeros((size, count))
    every = np.arange(size)
    warm_up = np.minimum(size - every, count) if train else np.full(size, count)
    for slot in range(2 * (size + count) - 1 if train else size + count - 1):
        early, late = slot - every, (slot - every) // 2
        is_early = (early >= 0) & (early < warm_up)
        is_late = ((slot - every) % 2 == 0) & (late >= warm_up) & (late < count)
        runs, number = is_early | is_late, np.where(is_early, early, late)
        done[runs] = np.maximum(done[runs], given[runs, number[runs]]) + forward[runs]
        wires.send(runs, done, number, given)
        if train:
            twice = slot - 2 * size + 1 + every
            runs, number = (twice % 2 == 0) & (twice >= 0) & (twice < 2 * count), twice // 2
            done[runs] = np.maximum(done[runs], returned[runs, number[runs]]) + backward[runs]
            wires.send_back(runs, done, number, returned)
    return done


@dataclass(frozen=True, slots=True, eq=False)
class _Wires:
    """Of each pair of stages the slowest messages there and back: a link has one a micro-batch, in order."""

    sources: NDArray[np.intp]
    targets: NDArray[np.intp]
    there: _Floats
    """Seconds."""
    back: _Floats
    free_there: _Floats
    """When the link is free again."""
    free_back: _Floats

    @staticmethod
    def of(messages: Sequence[Message]) -> _Wires:
        found: dict[tuple[int, int], tuple[float, float]] = {}
        for each in messages:
            there, back = found.get((each.source_stage, each.target_stage), (0.0, 0.0))
            there = max(there, each.forward_s if each.forward_bytes else 0.0)
            back = max(back, each.backward_s if each.backward_bytes else 0.0)
            found[each.source_stage, each.target_stage] = there, back
        pairs = np.array(list(found), dtype=np.intp).reshape(-1, 2)
        seconds = np.array(list(found.values())).reshape(-1, 2)
        free = np.zeros((2, len(pairs)))
        return _Wires(pairs[:, 0], pairs[:, 1], seconds[:, 0], seconds[:, 1], free[0], free[1])

    def send(self, runs: NDArray[np.bool_], done: _Floats, number: NDArray[np.intp], given: _Floats) -> None:
        """Send what the forwards of the stages that run have `done`."""
        sent = runs[self.sources]
        _pass_on(sent, self.sources, self.targets, done, self.there, self.free_there, number, given)

    def send_back(self, runs: NDArray[np.bool_], done: _Floats, number: NDArray[np.intp], given: _Floats) -> None:
        """Send what their backwards have."""
        sent = runs[self.targets]
        _pass_on(sent, self.targets, self.sources, done, self.back, self.free_back, number, given)


def _pass_on(
    sent: NDArray[np.bool_],
    senders: NDArray[np.intp],
    receivers: NDArray[np.intp],
    done: _Floats,
    seconds: _Floats,
    free: _Floats,
    number: NDArray[np.intp],
    given: _Floats,
) -> None:
    # A message of no bytes is there at once, whatever the link does.
    at = senders[sent]
    free[sent] = np.maximum(done[at], free[sent]) + seconds[sent]
    np.maximum.at(given, (receivers[sent], number[at]), free[sent])
