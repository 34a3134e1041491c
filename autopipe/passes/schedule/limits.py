"""What a simulated step is held against: the memory there is, and the least time it could take."""

from __future__ import annotations

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.prediction import Prediction
from autopipe.ir.problem import Problem
from autopipe.ir.stage_graph import StageGraph
from autopipe.ir.timeline import Timeline
from autopipe.passes.cost.fit import size_text


def check_memory(problem: Problem, placement: Placement, timeline: Timeline) -> None:
    """Raise InfeasibleError, naming the device that misses its limit by most, its stages and by how much."""
    excess = {
        device: peak - problem.memory_of(device)
        for device, peak in enumerate(timeline.peak_memory)
        if peak > problem.memory_of(device)
    }
    if not excess:
        return
    device = max(excess, key=lambda each: (excess[each], -each))
    stages = [index for index, stage in enumerate(placement.stages) if device in stage.devices]
    named = f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
    peak, limit, static = timeline.peak_memory[device], problem.memory_of(device), timeline.static_memory[device]
    others = f", and {len(excess) - 1} more devices exceed theirs" if len(excess) > 1 else ""
    raise InfeasibleError(
        f"{named} on device {device} would need {size_text(peak)} where {size_text(limit)} may be used: "
        f"{size_text(excess[device])} too much "
        f"({size_text(static)} are parameters, gradients, optimizer state and buffers){others}",
        hint="use more micro-batches, recomputation (--set recompute=full), more devices or a larger memory limit",
    )


def lower_bound(problem: Problem, placement: Placement, prediction: Prediction) -> float:
    """Seconds below which no schedule of this placement's work can be.

    The larger of all computation shared perfectly by all devices and the computation of the busiest device.
    """
    graph = StageGraph.of(problem, placement)
    busy = [0.0] * problem.cluster.size
    for stage, predicted in enumerate(prediction.stages):
        split = predicted.input_gradient_s + predicted.weight_gradient_s
        backward = min(predicted.backward_s, split or predicted.backward_s)
        count = len(graph.micro_batches_of(stage, problem.micro_batches))
        for device in graph.stage_devices[stage]:
            busy[device] += count * (predicted.forward_s + backward)
    return max(sum(busy) / len(busy), *busy)
