"""What a plan must keep to so that generated programs can run it."""

from __future__ import annotations

from autopipe.ir.errors import CodegenError
from autopipe.ir.placement import Placement
from autopipe.ir.schedule import Schedule


def check_tasks(placement: Placement, schedule: Schedule) -> None:
    """Raise CodegenError unless all stages run equal micro-batches."""
    sizes = {stage.micro_batch_size for stage in placement.stages}
    if len(sizes) > 1:
        raise CodegenError(
            f"stages run micro-batches of {' and '.join(map(str, sorted(sizes)))} samples",
            hint="generated programs run equal micro-batches; choose another strategy",
        )
    if placement.devices > schedule.devices:
        raise CodegenError(f"the placement uses {placement.devices} devices, the schedule has {schedule.devices}")
