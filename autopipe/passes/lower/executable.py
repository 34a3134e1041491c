"""Requirements on a plan for generated programs to run it."""

from __future__ import annotations

from autopipe.ir.errors import CodegenError
from autopipe.ir.placement import Placement
from autopipe.ir.schedule import Schedule


def check_tasks(placement: Placement, schedule: Schedule) -> None:
    """Raise CodegenError unless the schedule has a row for each device of the placement."""
    if placement.devices > schedule.devices:
        raise CodegenError(f"the placement uses {placement.devices} devices, the schedule has {schedule.devices}")
