"""What a plan must keep to so that generated programs can run it."""

from __future__ import annotations

from collections.abc import Iterable

from autopipe.ir.errors import CodegenError
from autopipe.ir.placement import Placement
from autopipe.ir.program import Piece
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


def check_messages(pieces: Iterable[Piece], schedule: Schedule) -> None:
    """Raise CodegenError where two ranks take micro-batches in different orders: messages arrive in the order sent."""
    orders = {
        (stage, device, phase): [
            task.micro_batch for task in schedule.tasks[device] if (task.stage, task.phase) == (stage, phase)
        ]
        for stage, device, phase in _ends(pieces)
    }
    for piece in pieces:
        for phase in _phases(piece):
            source = orders[piece.source_stage, piece.source_rank, phase]
            target = orders[piece.target_stage, piece.target_rank, phase]
            if source != target:
                raise CodegenError(
                    f"stages {piece.source_stage} and {piece.target_stage} run the {phase.name.lower()}s of "
                    "micro-batches in different orders",
                    hint="choose a scheduler that keeps their order",
                    where=f"devices {piece.source_rank} and {piece.target_rank}",
                )


def _phases(piece: Piece) -> tuple[Phase, ...]:
    if piece.source_rank == piece.target_rank:
        return ()
    return (Phase.FORWARD, Phase.BACKWARD) if piece.needs_gradient else (Phase.FORWARD,)


def _ends(pieces: Iterable[Piece]) -> set[tuple[int, int, Phase]]:
    ends = set()
    for piece in pieces:
        for phase in _phases(piece):
            ends.add((piece.source_stage, piece.source_rank, phase))
            ends.add((piece.target_stage, piece.target_rank, phase))
    return ends
