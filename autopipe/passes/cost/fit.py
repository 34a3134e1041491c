"""Whether a placement fits into memory, and what recomputation does about it."""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, stage_edges
from autopipe.ir.problem import Problem
from autopipe.passes.cost.memory import static_memory
from autopipe.passes.cost.stages import StageCost, stage_costs


def in_flight(problem: Problem, placement: Placement) -> tuple[int, ...]:
    """Micro-batches that each stage keeps under 1F1B: its place from the end on the longest way there."""
    if not problem.train:
        return (1,) * len(placement.stages)
    places = [1] * len(placement.stages)
    for source, target in reversed(stage_edges(problem.graph, placement)):
        places[source] = max(places[source], places[target] + 1)
    return tuple(min(place, problem.micro_batches) for place in places)


def fitted(problem: Problem, placement: Placement) -> Placement:
    """The placement, recomputing in the stages of overfull devices where `recompute` is `auto`.

    Raises InfeasibleError, naming stage, device and by how much, where a device's memory does not hold its stages.
    """
    worst = _worst(problem, placement)
    if worst is None:
        return placement
    if problem.train and problem.recompute == "auto":
        kept = in_flight(problem, placement)
        while worst is not None:
            device, _ = worst
            costs = stage_costs(problem, placement)
            plain = [index for index, stage in enumerate(placement.stages) if device in stage.devices]
            plain = [index for index in plain if not placement.stages[index].recompute]
            if not plain:
                break
            most = max(plain, key=lambda index: costs[index].kept_bytes * kept[index])
            stages = list(placement.stages)
            stages[most] = replace(stages[most], recompute=True)
            placement = Placement(tuple(stages))
            worst = _worst(problem, placement)
    if worst is None:
        return placement
    device, need = worst
    on_device = [index for index, stage in enumerate(placement.stages) if device in stage.devices]
    raise out_of_memory(problem, on_device, len(placement.stages), device, need)


def device_memory(problem: Problem, placement: Placement, costs: tuple[StageCost, ...]) -> tuple[int, ...]:
    """Most bytes in use on each device of the cluster under 1F1B, all its stages together."""
    used = list(static_memory(problem, placement))
    passing = [0] * len(used)
    for stage, cost, count in zip(placement.stages, costs, in_flight(problem, placement), strict=True):
        for device in stage.devices:
            used[device] += cost.buffer_bytes + cost.kept_bytes * count
            passing[device] = max(passing[device], cost.transient_bytes)
    return tuple(held + most for held, most in zip(used, passing, strict=True))


def out_of_memory(
    problem: Problem, stages: list[int], count: int, device: int, need: float, least: bool = False
) -> InfeasibleError:
    """The error for `stages` (of `count`) that need `need` bytes on a device that has fewer."""
    limit = problem.memory_of(device)
    several = len(stages) > 1
    who = f"stages {', '.join(map(str, stages))} of {count} need" if several else f"stage {stages[0]} of {count} needs"
    hint = "use more devices, smaller micro-batches or a higher memory limit"
    if problem.train and problem.recompute == "none":
        hint = f"try recompute: auto, or {hint}"
    return InfeasibleError(
        f"{who} {_size(need)} on device {device}, {_size(need - limit)} over the limit of {_size(limit)}"
        + (", in the placement that needs least" if least else ""),
        hint=hint,
    )


def _worst(problem: Problem, placement: Placement) -> tuple[int, int] | None:
    """The device most over its limit and what it needs; None where all fit."""
    used = device_memory(problem, placement, stage_costs(problem, placement))
    over = {device: need - problem.memory_of(device) for device, need in enumerate(used)}
    device = max(over, key=lambda index: over[index])
    return (device, used[device]) if over[device] > 0 else None


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
