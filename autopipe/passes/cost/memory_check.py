"""Memory of a placement against its limits, with recomputation where that helps; and which devices
a stage may share.

Without being asked to, no stage straddles devices of different kinds.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopipe.ir.cluster import Cluster
from autopipe.ir.errors import InfeasibleError, OutOfMemoryError
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import StageGraph
from autopipe.ir.words import plural
from autopipe.passes.analysis.operators import low_precision_copies
from autopipe.passes.cost.memory import stages_in_flight, state_of, static_memory
from autopipe.passes.cost.stages import StageCost, stage_costs


def check_operators(problem: Problem) -> None:
    if not problem.graph.nodes:
        raise InfeasibleError("the model has no operators to place")


def check_state(problem: Problem, devices: int, parts: int) -> None:
    """Raise OutOfMemoryError if devices with one stage cannot hold its parameters and their state
    in `parts` parts.

    No micro-batches are small enough then.
    """
    names = [each.value.name for each in problem.graph.parameters]
    copies = dict.fromkeys(names, max(1, devices // parts))
    least = state_of(problem, ((name, parts) for name in names), copies, read_again=names).total
    if least > problem.memory_of(0):
        shared = f", sharded over {parts} {plural(parts, 'device')}" if parts > 1 else ""
        raise out_of_memory(
            problem, [0], 1, 0, least, detail=f"for parameters and their state alone{shared}"
        )


def check_least(problem: Problem, least: float, stages: list[int], count: int) -> None:
    """Raise OutOfMemoryError if every memory is less than the `least` bytes that `stages`, of
    `count`, need.

    `least` must hold for all placements that the caller can make.
    """
    device = max(range(problem.cluster.size), key=problem.memory_of)
    if least > problem.memory_of(device):
        raise out_of_memory(problem, stages, count, device, least, least=True)


def in_flight(problem: Problem, placement: Placement) -> tuple[int, ...]:
    """Micro-batches that each stage keeps under 1F1B: its place from the end on the longest way
    there.

    Where they differ in size, those that hold as many samples as GraphPipe's Table 2 asks for.
    """
    if not problem.train:
        return (1,) * len(placement.stages)
    graph = StageGraph.of(problem, placement)
    sizes = [stage.micro_batch_size for stage in placement.stages]
    samples = stages_in_flight((1,) * len(sizes), sizes, graph.edges)
    own = (len(graph.micro_batches_of(stage, problem.micro_batches)) for stage in range(len(sizes)))
    return tuple(
        min(each // size, count) for each, size, count in zip(samples, sizes, own, strict=True)
    )


def without_copies(placement: Placement) -> Placement:
    return replace(
        placement, stages=tuple(replace(each, holds_copies=False) for each in placement.stages)
    )


def with_copies(problem: Problem, placement: Placement) -> Placement:
    """The placement in which stages that recompute hold copies of parameters in 16 bits where their
    devices have room: with twice the micro-batches in flight that 1F1B keeps, since other schedules
    keep more.
    """
    holding = replace(
        placement,
        stages=tuple(replace(each, holds_copies=each.recompute) for each in placement.stages),
    )
    plain = without_copies(placement)
    if (
        not problem.train
        or not low_precision_copies(problem.graph, problem.precision)
        or plain == holding
    ):
        return plain
    used: defaultdict[int, int] = defaultdict(int)
    costs = stage_costs(problem, holding)
    counts = in_flight(problem, holding)
    for stage, cost, count in zip(holding.stages, costs, counts, strict=True):
        for device in stage.devices:
            used[device] += cost.memory_bytes(
                min(2 * count, problem.batch_size // stage.micro_batch_size)
            )
    roomy = {device for device, most in used.items() if most <= problem.memory_of(device)}
    stages = zip(holding.stages, plain.stages, strict=True)
    return replace(
        placement,
        stages=tuple(one if roomy.issuperset(one.devices) else other for one, other in stages),
    )


def fitted(problem: Problem, placement: Placement) -> Placement:
    """The placement, recomputing in stages of devices that 1F1B would overfill where `recompute` is
    `auto`.

    Raises InfeasibleError, naming stage, device and by how much, where a device's memory does not
    hold its stages under any schedule; whether it does under the one that is chosen shows when that
    is simulated.
    """

    def overfull(used: Sequence[int]) -> list[int]:
        return [device for device, need in enumerate(used) if need > problem.memory_of(device)]

    while True:
        costs = stage_costs(problem, placement)
        if not problem.train or problem.recompute != "auto":
            break
        # For each overfull device the stage that keeps most and does not recompute yet.
        kept = [
            cost.kept_bytes * count
            for cost, count in zip(costs, in_flight(problem, placement), strict=True)
        ]
        plain = [index for index, stage in enumerate(placement.stages) if not stage.recompute]
        choices = (
            [index for index in plain if device in placement.stages[index].devices]
            for device in overfull(device_memory(problem, placement, costs))
        )
        relieved = {max(choice, key=lambda index: kept[index]) for choice in choices if choice}
        if not relieved:
            break
        placement = Placement(
            tuple(
                replace(stage, recompute=stage.recompute or index in relieved)
                for index, stage in enumerate(placement.stages)
            )
        )
    least = least_memory(problem, placement, costs)
    if too_full := overfull(least):
        worst = max(too_full, key=lambda device: least[device] - problem.memory_of(device))
        stages = [index for index, stage in enumerate(placement.stages) if worst in stage.devices]
        raise out_of_memory(problem, stages, len(placement.stages), worst, least[worst])
    return placement


def least_memory(
    problem: Problem, placement: Placement, costs: tuple[StageCost, ...]
) -> tuple[int, ...]:
    """Bytes on each device that any schedule needs: what one micro-batch keeps when its last
    forward has run.
    """
    always = list(static_memory(problem, placement))
    passing = [0] * len(always)
    kept: Counter[tuple[int, int]] = Counter()
    for stage, cost in zip(placement.stages, costs, strict=True):
        for device in stage.devices:
            always[device] += cost.buffer_bytes
            kept[device, stage.pipeline] += cost.kept_bytes
            passing[device] = max(
                passing[device],
                cost.kept_bytes + cost.transient_bytes,
                kept[device, stage.pipeline],
            )
    return tuple(held + most for held, most in zip(always, passing, strict=True))


def device_memory(
    problem: Problem, placement: Placement, costs: tuple[StageCost, ...]
) -> tuple[int, ...]:
    """Most bytes in use on each device of the cluster under 1F1B, all its stages together."""
    used = list(static_memory(problem, placement))
    passing = [0] * len(used)
    for stage, cost, count in zip(
        placement.stages, costs, in_flight(problem, placement), strict=True
    ):
        for device in stage.devices:
            used[device] += cost.buffer_bytes + cost.kept_bytes * count
            passing[device] = max(passing[device], cost.transient_bytes)
    return tuple(held + most for held, most in zip(used, passing, strict=True))


def out_of_memory(
    problem: Problem,
    stages: list[int],
    count: int,
    device: int,
    need: float,
    least: bool = False,
    detail: str = "",
) -> OutOfMemoryError:
    """Return the error for `stages` (of `count`) that need `need` bytes on a device that has fewer.

    `least` says that every other placement of the strategy needs at least as much. `detail` ends
    the message.
    """
    limit = problem.memory_of(device)
    several = len(stages) > 1
    who = (
        f"stages {', '.join(map(str, stages))} of {count} need"
        if several
        else f"stage {stages[0]} of {count} needs"
    )
    details = ["in the placement that needs least"] * least + [detail] * bool(detail)
    return OutOfMemoryError(
        (
            f"{who} {size_text(need)} on device {device}, {size_text(need - limit)} over the limit "
            f"of {size_text(limit)}"
        )
        + "".join(f", {each}" for each in details),
        hint="use more devices, smaller micro-batches or a higher memory limit",
    )


def size_text(count: float) -> str:
    """A number of bytes in the largest unit of which it is a tenth at least, so that a small excess
    still shows.
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power / 10:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count:.0f} {plural(count, 'byte')}"


def equal_device_runs(cluster: Cluster) -> tuple[range, ...]:
    """The longest runs of neighbouring devices that one stage may have: of one kind, or all where
    stages may straddle.

    Their order is that of the devices.
    """
    if cluster.straddle:
        return (range(cluster.size),)
    lengths = (len(list(run)) for _, run in itertools.groupby(cluster.devices))
    ends = list(itertools.accumulate(lengths, initial=0))
    return tuple(range(first, end) for first, end in itertools.pairwise(ends))


def describe_kinds(cluster: Cluster, devices: Iterable[int]) -> str:
    """The kinds among `devices` in words: `8 A100-SXM4-80GB and 8 V100-SXM2-32GB`."""
    counts = Counter(cluster.devices[device].name for device in devices)
    return " and ".join(f"{count} {name}" for name, count in counts.items())


def may_share(problem: Problem, devices: Sequence[int]) -> bool:
    """True if a stage may have all of these devices: of one kind, or straddling kinds as
    constraints say.
    """
    cluster = problem.cluster
    if cluster.straddle or len(cluster.kinds_among(devices)) == 1:
        return True
    groups = (
        each.devices or range(cluster.size)
        for each in problem.constraints
        if each.devices is not None
    )
    return any(set(each) == set(devices) for each in groups)


def check_one_kind(problem: Problem, strategy: str) -> None:
    """Raise InfeasibleError where a strategy's one stage on all devices would straddle kinds
    without being asked to.
    """
    _check_kinds(problem, range(problem.cluster.size), f"{strategy} would put one stage on devices")


def check_kinds(problem: Problem, placement: Placement) -> None:
    """Raise InfeasibleError for a stage that straddles kinds without being asked to."""
    if len(equal_device_runs(problem.cluster)) > 1:
        for index, stage in enumerate(placement.stages):
            _check_kinds(problem, stage.devices, f"stage {index} would have devices")


def _check_kinds(problem: Problem, devices: Sequence[int], who: str) -> None:
    if not may_share(problem, devices):
        raise InfeasibleError(
            f"{who} of different kinds: {describe_kinds(problem.cluster, devices)}",
            hint="set cluster.straddle to true, or take a strategy that makes stages: pipedream, "
            "graphpipe, tepdist or "
            "grid",
        )
