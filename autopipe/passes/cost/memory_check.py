"""Check the memory of a placement against the limits of its devices, enable recomputation if
necessary, and check that a stage uses devices of one type.

A stage uses devices of different types only if the cluster or a constraint permits it.
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
from autopipe.passes.cost.memory import in_flight_samples_by_stage, parameter_state, static_memory
from autopipe.passes.cost.stages import StageCost, stage_costs


def check_operators(problem: Problem) -> None:
    """Raise InfeasibleError if the graph has no nodes."""
    if not problem.graph.nodes:
        raise InfeasibleError("the model has no operators, expected at least one")


def check_state_fits(problem: Problem, devices: int, parts: int) -> None:
    """Raise OutOfMemoryError if a single stage on `devices` devices cannot hold the parameters of
    the model with their gradients and optimizer state.

    Each parameter is divided into `parts` shards. Memory for activations is not counted, so smaller
    micro-batches do not help in this case.
    """
    names = [each.value.name for each in problem.graph.parameters]
    copies = dict.fromkeys(names, max(1, devices // parts))
    least = parameter_state(problem, ((name, parts) for name in names), copies, recast=names).total
    if least > problem.memory_of(0):
        shared = f", sharded over {parts} {plural(parts, 'device')}" if parts > 1 else ""
        raise out_of_memory_error(
            problem, [0], 1, 0, least, detail=f"for parameters and their state alone{shared}"
        )


def check_memory_bound(problem: Problem, least: float, stages: list[int], count: int) -> None:
    """Raise OutOfMemoryError if `least` bytes exceed the memory of every device.

    `least` is a lower bound on the bytes that the stages with indices `stages`, of `count` stages
    in total, need on one device. It holds for all placements that the caller can create.
    """
    device = max(range(problem.cluster.size), key=problem.memory_of)
    if least > problem.memory_of(device):
        raise out_of_memory_error(problem, stages, count, device, least, least=True)


def micro_batches_in_flight(problem: Problem, placement: Placement) -> tuple[int, ...]:
    """Return the number of micro-batches in flight at each stage under 1F1B: their forward has run
    and their backward has not. It is 1 in inference.

    The number is that of the stages on the longest path from the stage to the end of its pipeline,
    the stage included, but at most all micro-batches that the stage runs. If stages have
    micro-batches of different sizes, it follows from GraphPipe's Table 2 (`in_flight_samples`).
    """
    if not problem.train:
        return (1,) * len(placement.stages)
    graph = StageGraph.of(problem, placement)
    sizes = [stage.micro_batch_size for stage in placement.stages]
    samples = in_flight_samples_by_stage((1,) * len(sizes), sizes, graph.edges)
    own = (len(graph.micro_batches_of(stage, problem.micro_batches)) for stage in range(len(sizes)))
    return tuple(
        min(each // size, count) for each, size, count in zip(samples, sizes, own, strict=True)
    )


def without_16_bit_copies(placement: Placement) -> Placement:
    """Return the placement changed so that stages that recompute do not keep 16-bit copies of their
    parameters during a step.
    """
    return replace(
        placement, stages=tuple(replace(each, holds_copies=False) for each in placement.stages)
    )


def with_16_bit_copies(problem: Problem, placement: Placement) -> Placement:
    """Return the placement changed so that a stage that recomputes keeps the 16-bit copies of its
    parameters during a step, if the memory of all its devices suffices. Other stages that recompute
    create the copies again in each forward.

    The check assumes twice as many micro-batches in flight as 1F1B has, because the schedule is not
    chosen yet and can have more in flight.
    """
    holding = replace(
        placement,
        stages=tuple(replace(each, holds_copies=each.recompute) for each in placement.stages),
    )
    plain = without_16_bit_copies(placement)
    if (
        not problem.train
        or not low_precision_copies(problem.graph, problem.precision)
        or plain == holding
    ):
        return plain
    used: defaultdict[int, int] = defaultdict(int)
    costs = stage_costs(problem, holding)
    counts = micro_batches_in_flight(problem, holding)
    for stage, cost, count in zip(holding.stages, costs, counts, strict=True):
        for device in stage.devices:
            used[device] += cost.memory_bytes(
                min(2 * count, problem.batch_size // stage.micro_batch_size)
            )
    sufficient = {device for device, size in used.items() if size <= problem.memory_of(device)}
    stages = zip(holding.stages, plain.stages, strict=True)
    return replace(
        placement,
        stages=tuple(one if sufficient.issuperset(one.devices) else other for one, other in stages),
    )


def with_required_recomputation(problem: Problem, placement: Placement) -> Placement:
    """Return the placement with recomputation enabled in the stages that need it to fit into
    memory.

    If the problem's `recompute` is `auto` and 1F1B would exceed the memory of a device,
    recomputation is enabled in the stage of this device that saves the most bytes. This repeats
    until no device exceeds its memory, or until each device that exceeds it has only stages that
    recompute.

    Raises OutOfMemoryError, with the stages, the device and the excess, if a device's memory is too
    small under any schedule. The simulation of the chosen schedule later checks the memory that
    this schedule needs.
    """

    def overfull_devices(used: Sequence[int]) -> list[int]:
        """Return the devices whose memory is smaller than their entry of `used`, in bytes."""
        return [device for device, need in enumerate(used) if need > problem.memory_of(device)]

    while True:
        costs = stage_costs(problem, placement)
        if not problem.train or problem.recompute != "auto":
            break
        # Recomputation usually frees the most memory in the stage that saves the most bytes. Choose
        # this stage for each device that exceeds its memory, among stages that do not recompute.
        kept = [
            cost.kept_bytes * count
            for cost, count in zip(costs, micro_batches_in_flight(problem, placement), strict=True)
        ]
        plain = [index for index, stage in enumerate(placement.stages) if not stage.recompute]
        choices = (
            [index for index in plain if device in placement.stages[index].devices]
            for device in overfull_devices(device_memory(problem, placement, costs))
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
    least = minimum_device_memory(problem, placement, costs)
    if too_full := overfull_devices(least):
        worst = max(too_full, key=lambda device: least[device] - problem.memory_of(device))
        stages = [index for index, stage in enumerate(placement.stages) if worst in stage.devices]
        raise out_of_memory_error(problem, stages, len(placement.stages), worst, least[worst])
    return placement


def minimum_device_memory(
    problem: Problem, placement: Placement, costs: tuple[StageCost, ...]
) -> tuple[int, ...]:
    """Return, for each device of the cluster, a lower bound on its peak bytes under any schedule.

    It is the sum of parameters, gradients, optimizer state and message buffers, and the larger of
    two amounts: the saved and temporary tensors during one backward of a stage, and the tensors
    that one micro-batch has saved after its last forward on the device. `costs` are the costs of
    the placement's stages.
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
    """Return, for each device of the cluster, the peak bytes of all its stages together under 1F1B.
    `costs` are the costs of the placement's stages.
    """
    used = list(static_memory(problem, placement))
    passing = [0] * len(used)
    for stage, cost, count in zip(
        placement.stages, costs, micro_batches_in_flight(problem, placement), strict=True
    ):
        for device in stage.devices:
            used[device] += cost.buffer_bytes + cost.kept_bytes * count
            passing[device] = max(passing[device], cost.transient_bytes)
    return tuple(held + most for held, most in zip(used, passing, strict=True))


def out_of_memory_error(
    problem: Problem,
    stages: list[int],
    count: int,
    device: int,
    need: float,
    least: bool = False,
    detail: str = "",
) -> OutOfMemoryError:
    """Return the error for the stages with indices `stages`, of `count` stages in total, which need
    `need` bytes on device `device`.

    If `least` is True, the message states that no other placement of the strategy needs fewer
    bytes. `detail` is appended to the message.
    """
    limit = problem.memory_of(device)
    several = len(stages) > 1
    who = (
        f"stages {', '.join(map(str, stages))} of {count} need"
        if several
        else f"stage {stages[0]} of {count} needs"
    )
    details = ["in the placement with the lowest memory requirement"] * least + [detail] * bool(
        detail
    )
    return OutOfMemoryError(
        (
            f"{who} {size_text(need)} on device {device}, {size_text(need - limit)} over the limit "
            f"of {size_text(limit)}"
        )
        + "".join(f", {each}" for each in details),
        hint="use more devices, smaller micro-batches or a higher memory limit",
    )


def size_text(count: float) -> str:
    """Return a number of bytes as text, in the largest unit in which it is at least 0.1.

    Example: 150 MiB is `0.15 GiB`, 50 MiB is `50.00 MiB`.
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power / 10:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count:.0f} {plural(count, 'byte')}"


def equal_device_ranges(cluster: Cluster) -> tuple[range, ...]:
    """Return the longest ranges of consecutive devices of one type, in ascending order. A stage may
    use any devices of one range.

    If the cluster permits stages on mixed device types, one range contains all devices.
    """
    if cluster.allow_mixed_stages:
        return (range(cluster.size),)
    lengths = (len(list(run)) for _, run in itertools.groupby(cluster.devices))
    ends = list(itertools.accumulate(lengths, initial=0))
    return tuple(range(first, end) for first, end in itertools.pairwise(ends))


def describe_device_types(cluster: Cluster, devices: Iterable[int]) -> str:
    """Return how many of `devices` have each device type, as text, for example
    `8 A100-SXM4-80GB and 8 V100-SXM2-32GB`.
    """
    counts = Counter(cluster.devices[device].name for device in devices)
    return " and ".join(f"{count} {name}" for name, count in counts.items())


def may_share_stage(problem: Problem, devices: Sequence[int]) -> bool:
    """True if one stage may use all of `devices`: they have one type, the cluster permits stages on
    mixed types, or a constraint of the user names exactly these devices.
    """
    cluster = problem.cluster
    if cluster.allow_mixed_stages or len(cluster.device_types_among(devices)) == 1:
        return True
    groups = (
        each.devices or range(cluster.size)
        for each in problem.constraints
        if each.devices is not None
    )
    return any(set(each) == set(devices) for each in groups)


def check_single_stage_devices(problem: Problem, strategy: str) -> None:
    """Raise InfeasibleError if one stage may not use all devices of the cluster together, because
    they have different types and neither the cluster nor a constraint permits such a stage.

    `strategy` is the name of the strategy, for the message.
    """
    _check_may_share_stage(
        problem, range(problem.cluster.size), f"{strategy} would put one stage on devices"
    )


def check_stage_devices(problem: Problem, placement: Placement) -> None:
    """Raise InfeasibleError if a stage of `placement` uses devices of different types and neither
    the cluster nor a constraint permits it.
    """
    if len(equal_device_ranges(problem.cluster)) > 1:
        for index, stage in enumerate(placement.stages):
            _check_may_share_stage(problem, stage.devices, f"stage {index} would have devices")


def _check_may_share_stage(problem: Problem, devices: Sequence[int], who: str) -> None:
    """Raise InfeasibleError unless one stage may use all of `devices` (`may_share_stage`). `who` is
    the start of the message, up to the word "devices".
    """
    if not may_share_stage(problem, devices):
        raise InfeasibleError(
            f"{who} of different kinds: {describe_device_types(problem.cluster, devices)}",
            hint="set cluster.allow_mixed_stages to true, or use a strategy that creates "
            "stages: pipedream, graphpipe, tepdist or grid",
        )
