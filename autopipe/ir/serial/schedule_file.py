"""`schedule.json` of a plan: who runs what and when, as blocks (a phase of a stage) on units (micro-batches)."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from autopipe.ir.plan import Plan
from autopipe.ir.prediction import StagePrediction
from autopipe.ir.schedule import Phase, Proof, Repetend, Schedule, Task
from autopipe.ir.serial.record import Record, read_record
from autopipe.ir.serial.schedule_form import FORMAT, block_form, order_form
from autopipe.ir.timeline import Timeline

_BLOCK = re.compile(r"(\d{1,9})([FBIW])")


def schedule_form(plan: Plan, timeline: Timeline) -> dict[str, object]:
    """The schedule of a plan as lists, dicts and scalars, with times in seconds and memory in bytes.

    A block's memory is what it adds: a forward what it keeps, a backward, or its halves together, as much less.
    """
    schedule, stages = plan.schedule, plan.prediction.stages
    kinds = sorted({(task.stage, task.phase.value) for order in schedule.tasks for task in order}, key=_block_order)
    index = {kind: position for position, kind in enumerate(kinds)}
    trains = plan.mode == "train"
    blocks = []
    for stage, letter in kinds:
        phase = Phase(letter)
        after = sorted(index[kind] for kind in _before(plan, stage, letter) if kind in index)
        devices, memory = plan.placement.stages[stage].devices, _change(stages[stage], phase) if trains else 0
        blocks.append(block_form(f"{stage}{letter}", devices, stages[stage].seconds(phase), memory, after))
    starts = {(span.device, span.task): span.start for span in timeline.spans}
    tasks = [
        order_form(
            (index[task.stage, task.phase.value], task.micro_batch, round(starts[device, task], 12)) for task in order
        )
        for device, order in enumerate(schedule.tasks)
    ]
    return {
        "format": FORMAT,
        "devices": schedule.devices,
        "units": schedule.micro_batches,
        "makespan": max((span.end for span in timeline.spans), default=0.0),
        "period": schedule.period,
        "lower_bound": _bound(plan),
        "optimal": plan.summary.optimal,
        "gap": plan.summary.gap,
        "proof": _proof_form(schedule.proof),
        "peak_memory": list(timeline.peak_memory),
        "repetends": [[each.start, each.length, each.count, each.stride] for each in schedule.repetends or ()],
        "blocks": blocks,
        "tasks": tasks,
    }


def read_schedule(path: Path, stage_devices: tuple[tuple[int, ...], ...]) -> Schedule:
    """The order of tasks in `path`, for stages on these devices. Raises ConfigurationError with file and key."""
    record = read_record(path, FORMAT)
    kinds = [_kind_of(block, stage_devices) for block in record.at("blocks").items()]
    tasks = record.at("tasks")
    orders = tuple(tuple(_task_of(each, kinds) for each in order.items()) for order in tasks.items())
    if len(orders) != record.at("devices").integer(1):
        tasks.refuse(f"one list for each of {record.at('devices').integer(1)} devices")
    repetends = tuple(_repetend_of(each) for each in record.at("repetends").items())
    period = record.at("period")
    return Schedule(
        record.at("units").integer(1),
        orders,
        repetends or None,
        None if period.value is None else period.number(),
        _proof_of(record.at("proof")),
    )


def _bound(plan: Plan) -> float:
    """What `optimal` and `gap` count from: the period's bound where there is a proven period, otherwise the step's."""
    schedule = plan.schedule
    if schedule.proof is None or schedule.period is None:
        return plan.summary.lower_bound_s
    return schedule.proof.lower_bound


def _proof_form(proof: Proof | None) -> dict[str, object] | None:
    return None if proof is None else {field.name: getattr(proof, field.name) for field in dataclasses.fields(proof)}


def _proof_of(record: Record) -> Proof | None:
    if record.value is None:
        return None
    order, lower_bound = record.at("order").text(), record.at("lower_bound").number()
    return Proof(order, lower_bound, record.at("optimal").boolean(), record.at("rounding").number())


def _block_order(kind: tuple[int, str]) -> tuple[int, int]:
    return "FBIW".index(kind[1]), kind[0]


def _change(stage: StagePrediction, phase: Phase) -> int:
    match phase:
        case Phase.FORWARD:
            return stage.kept_bytes
        case Phase.BACKWARD:
            return -stage.kept_bytes
        case Phase.INPUT_GRADIENT:
            return stage.weight_kept_bytes - stage.kept_bytes
        case Phase.WEIGHT_GRADIENT:
            return -stage.weight_kept_bytes


def _before(plan: Plan, stage: int, letter: str) -> list[tuple[int, str]]:
    """The blocks that a block waits for on the same unit, which may have a later stage's backward whole or split."""
    edges = plan.prediction.edges
    if letter == Phase.FORWARD.value:
        return [(source, letter) for source, target in edges if target == stage]
    if letter == Phase.WEIGHT_GRADIENT.value:
        return [(stage, Phase.INPUT_GRADIENT.value)]
    later = [target for source, target in edges if source == stage]
    halves = (Phase.BACKWARD.value, Phase.INPUT_GRADIENT.value)
    return [(stage, Phase.FORWARD.value), *((target, backward) for target in later for backward in halves)]


def _kind_of(record: Record, stage_devices: tuple[tuple[int, ...], ...]) -> tuple[int, Phase]:
    name = record.at("name")
    match = _BLOCK.fullmatch(name.text())
    if match is None or int(match[1]) >= len(stage_devices):
        name.refuse(f"a stage below {len(stage_devices)} and a phase, such as 0F")
    stage = int(match[1])
    devices = record.at("devices")
    if devices.integers() != stage_devices[stage]:
        devices.refuse(f"the devices of stage {stage}: {list(stage_devices[stage])}")
    return stage, Phase(match[2])


def _task_of(record: Record, kinds: list[tuple[int, Phase]]) -> Task:
    block = record.at("block")
    if block.integer() >= len(kinds):
        block.refuse(f"the index of one of {len(kinds)} blocks")
    stage, phase = kinds[block.integer()]
    return Task(stage, phase, record.at("unit").integer())


def _repetend_of(record: Record) -> Repetend:
    cells = record.integers()
    if len(cells) != 4:
        record.refuse("start, length, count and stride")
    return Repetend(*cells)
