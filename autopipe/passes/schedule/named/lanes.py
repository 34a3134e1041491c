"""Which stages share devices, and in which order a pipeline passes them.

A lane is a device, or a group of devices that run the same stages together.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.schedule import Schedule, StageGraph, Task
from autopipe.passes.schedule.repetend import find_repetends

Lanes = tuple[tuple[int, ...], ...]
"""The stages of each lane, ascending; lanes in the order in which the first pipeline reaches them."""

_MOST = 16
"""Stages whose lanes a message tells."""

_LOOPS = "strategy tessel_shapes places stages so with shape: v and chunks: 2 or more, manual by its constraints"
_CHAIN = "strategy tessel_shapes places stages so with shape: v, manual by its constraints"
_WAVES = "strategy tessel_shapes places stages so with shape: v, chunks: 2 and wave: true, manual by its constraints"
_OPPOSITE = "strategy tessel_shapes places stages so with shape: x, manual by its constraints"


def round_robin(schedule: str, graph: StageGraph) -> Lanes:
    """Lanes of a pipeline that passes all of them in turn, once or again and again: 0 1 2 0 1 2.

    Raises InfeasibleError where it does otherwise.
    """
    (path,) = _paths(schedule, graph, 1)
    count = max(path) + 1
    if len(path) % count or path != tuple(range(count)) * (len(path) // count):
        raise _refusal(schedule, "pass all devices in turn, like 0 1 2 0 1 2", path, _LOOPS)
    return _stages_of(path)


def one_each(schedule: str, graph: StageGraph) -> Lanes:
    """Lanes of one stage each. Raises InfeasibleError where some have several."""
    (path,) = _paths(schedule, graph, 1)
    if path != tuple(range(len(path))):
        raise _refusal(schedule, "lie on one device each, like 0 1 2", path, _CHAIN)
    return _stages_of(path)


def waves(schedule: str, graph: StageGraph) -> Lanes:
    """Lanes of a pipeline that goes down and comes up again, once or several times: 0 1 2 2 1 0.

    Raises InfeasibleError where it does otherwise.
    """
    (path,) = _paths(schedule, graph, 1)
    wave = (*range(max(path) + 1), *reversed(range(max(path) + 1)))
    if len(path) % len(wave) or path != wave * (len(path) // len(wave)):
        raise _refusal(schedule, "go down the devices and up again, like 0 1 2 2 1 0", path, _WAVES)
    return _stages_of(path)


def one_wave(schedule: str, graph: StageGraph) -> Lanes:
    """Lanes of two stages each, as of a V: 0 1 2 2 1 0. Raises InfeasibleError where they are otherwise."""
    lanes = waves(schedule, graph)
    if len(lanes[0]) > 2:
        reason = f"schedule {schedule} runs two stages a device, but here are {len(lanes[0])}"
        raise InfeasibleError(reason, hint=_WAVES)
    return lanes


def opposite(schedule: str, graph: StageGraph) -> Lanes:
    """Lanes of two pipelines that pass the same devices, one stage each, in opposite directions; an even number.

    On each lane stands first the stage of pipeline 0. Raises InfeasibleError where they are otherwise.
    """
    down, up = _paths(schedule, graph, 2)
    if down != tuple(range(len(down))) or up != down[::-1]:
        raise _refusal(
            schedule, "form two pipelines that pass the devices in opposite directions", down + up, _OPPOSITE
        )
    if len(down) % 2:
        raise InfeasibleError(f"schedule {schedule} runs on an even number of devices, but a pipeline has {len(down)}")
    stages = _by_pipeline(graph)
    return tuple(zip(stages[0], reversed(stages[1]), strict=True))


def on_devices(graph: StageGraph, micro_batches: int, orders: Sequence[Sequence[Task]]) -> Schedule:
    """The schedule in which all devices of a lane follow its order."""
    lists: list[tuple[Task, ...]] = [()] * graph.devices
    for order in map(tuple, orders):
        for device in graph.stage_devices[order[0].stage]:
            lists[device] = order
    return Schedule(micro_batches, tuple(lists), find_repetends(lists))


def _paths(schedule: str, graph: StageGraph, pipelines: int) -> tuple[tuple[int, ...], ...]:
    """The lane of each stage, for each pipeline. Raises InfeasibleError where there are more or fewer pipelines."""
    if graph.pipeline_count != pipelines:
        wanted = "one pipeline" if pipelines == 1 else f"{pipelines} pipelines"
        reason = f"schedule {schedule} runs {wanted}, but the placement has {graph.pipeline_count}"
        raise InfeasibleError(reason, hint=_CHAIN if pipelines == 1 else _OPPOSITE)
    groups = list(dict.fromkeys(frozenset(group) for group in graph.stage_devices))
    for place, group in enumerate(groups):
        for other in groups[:place]:
            if group & other:
                raise InfeasibleError(
                    f"schedule {schedule} runs stages on the same devices or on different ones, but here are stages on "
                    f"devices {_listed(other)} and on {_listed(group)}",
                    hint="1f1b_plus takes stages on several devices beside stages on one",
                )
    lane = {group: place for place, group in enumerate(groups)}
    return tuple(
        tuple(lane[frozenset(graph.stage_devices[stage])] for stage in stages) for stages in _by_pipeline(graph)
    )


def _by_pipeline(graph: StageGraph) -> list[list[int]]:
    """The stages of each pipeline, ascending."""
    found: list[list[int]] = [[] for _ in range(graph.pipeline_count)]
    for stage in range(len(graph.stage_devices)):
        found[graph.pipelines[stage] if graph.pipelines else 0].append(stage)
    return found


def _stages_of(path: Sequence[int]) -> Lanes:
    found: list[list[int]] = [[] for _ in range(max(path) + 1)]
    for stage, lane in enumerate(path):
        found[lane].append(stage)
    return tuple(map(tuple, found))


def _refusal(schedule: str, wanted: str, path: Sequence[int], hint: str) -> InfeasibleError:
    lies = " ".join(map(str, path[:_MOST])) + (" ..." if len(path) > _MOST else "")
    return InfeasibleError(f"schedule {schedule} wants stages that {wanted}, but they lie on {lies}", hint=hint)


def _listed(devices: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(devices)))
