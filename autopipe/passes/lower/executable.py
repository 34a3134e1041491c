"""What a plan must keep to so that generated programs can run it."""

from __future__ import annotations

from autopipe.ir.errors import CodegenError
from autopipe.ir.placement import Placement
from autopipe.ir.schedule import Phase, Schedule


def check_tasks(placement: Placement, schedule: Schedule) -> None:
    """Raise CodegenError unless all stages run equal micro-batches and backwards are whole."""
    sizes = {stage.micro_batch_size for stage in placement.stages}
    if len(sizes) > 1:
        raise CodegenError(
            f"stages run micro-batches of {' and '.join(map(str, sorted(sizes)))} samples",
            hint="generated programs run equal micro-batches; choose another strategy",
        )
    if placement.devices > schedule.devices:
        raise CodegenError(f"the placement uses {placement.devices} devices, the schedule has {schedule.devices}")
    for device, order in enumerate(schedule.tasks):
        for task in order:
            if task.phase not in (Phase.FORWARD, Phase.BACKWARD):
                raise CodegenError(
                    f"{task} is half a backward, which cannot be executed",
                    hint="choose a scheduler that leaves backwards whole",
                    where=f"device {device}",
                )
