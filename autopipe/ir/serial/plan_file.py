"""`plan.json`: all of a plan but its schedule, and `schedule.json` beside it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path

from autopipe.ir.breakdown import Breakdown
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement
from autopipe.ir.plan import CostCoverage, Plan, Summary
from autopipe.ir.prediction import Prediction
from autopipe.ir.problem import Mode
from autopipe.ir.remembered import remembered
from autopipe.ir.schedule import Schedule
from autopipe.ir.serial.alternatives_form import alternatives_form, alternatives_of
from autopipe.ir.serial.placement_form import placement_form, placement_of, split_proof_form, split_proof_of
from autopipe.ir.serial.prediction_form import prediction_form, prediction_of
from autopipe.ir.serial.record import JsonRecord, read_record, record_text
from autopipe.ir.serial.schedule_file import read_schedule, schedule_form
from autopipe.ir.stage_graph import StageGraph, micro_batch_ratios, pipelines_of
from autopipe.ir.timeline import Timeline
from autopipe.ir.traffic import KINDS

FORMAT = "autopipe.plan/1"
PLAN_FILE = "plan.json"
SCHEDULE_FILE = "schedule.json"
_SHOWN = 6
"""Cells on either side of a marked one."""
MODES = tuple(mode.value for mode in Mode)


def write_plan(folder: Path, plan: Plan, timeline: Timeline, home: Path | None = None) -> None:
    """Write `plan.json` and `schedule.json` into `folder`. The model's path is written relative to `home`, the folder
    that they are to lie in (default: `folder`)."""
    model = os.path.relpath(plan.model, home or folder)
    (folder / PLAN_FILE).write_text(record_text(plan_form(dataclasses.replace(plan, model=model))), encoding="utf-8")
    (folder / SCHEDULE_FILE).write_text(record_text(schedule_form(plan, timeline)), encoding="utf-8")


def read_plan(folder: Path) -> Plan:
    """The plan in `folder`, its model's path made absolute. Raises ConfigurationError with file and key."""
    record = read_record(folder / PLAN_FILE, FORMAT)
    placement = placement_of(record.at("placement"))
    prediction = prediction_of(record.at("predictions"), placement)
    mode = record.at("mode")
    if mode.text() not in MODES:
        mode.refuse(" or ".join(MODES))
    summary = _summary_of(record.at("summary"))
    stages = _stages_of(record.at("placement"), placement, prediction, summary)
    schedule = _schedule_of(folder / SCHEDULE_FILE, placement, stages, mode.text() == "train")
    return Plan(
        model=os.path.normpath(os.path.join(folder.resolve(), record.at("model").text())),
        graph_digest=record.at("graph_digest").text(),
        mode=mode.text(),
        batch_size=record.at("batch_size").integer(1),
        placement=placement,
        schedule=schedule,
        summary=summary,
        prediction=prediction,
        memory_limits=record.at("memory_limits").integers(),
        device_names=_texts_of(record.at("device_names")) if record.has("device_names") else (),
        alternatives=alternatives_of(record.at("alternatives")) if record.has("alternatives") else (),
        breakdown=_breakdown_of(record.at("breakdown")),
    )


def _texts_of(record: JsonRecord) -> tuple[str, ...]:
    return tuple(item.text() for item in record.items())


def _stages_of(record: JsonRecord, placement: Placement, prediction: Prediction, summary: Summary) -> StageGraph:
    """The stage graph, on the devices of the placement."""
    try:
        turns = micro_batch_ratios(placement, summary.micro_batch_size)
    except InfeasibleError as error:
        raise ConfigurationError(error.message, "plan again", f"{record.file}: {record.path}") from error
    groups = tuple(stage.devices for stage in placement.stages)
    return StageGraph(placement.devices, groups, prediction.edges, pipelines_of(placement), turns)


def _schedule_of(path: Path, placement: Placement, stages: StageGraph, train: bool) -> Schedule:
    """The schedule in `path`, which must be able to run."""
    schedule = read_schedule(path, stages.stage_devices, stages.turns)
    if schedule.devices < placement.devices:
        raise ConfigurationError(
            f"tasks are for {schedule.devices} devices, the placement has {placement.devices}", where=str(path)
        )
    graph = dataclasses.replace(stages, devices=schedule.devices)
    try:
        schedule.verify(graph, train)
    except InfeasibleError as error:
        reason, _, grid = error.message.partition("\n")
        raise ConfigurationError(f"{reason}: {_marked(grid)}", "plan again", f"{path}: {error.where}") from error
    return schedule


def _marked(grid: str) -> str:
    """The marked cell of a grid with those around it, on one line."""
    cells = next(line for line in grid.splitlines() if "[" in line or line.endswith(": ")).split()
    place = next((index for index, cell in enumerate(cells) if cell.startswith("[")), 0)
    around = cells[max(1, place - _SHOWN) : place + _SHOWN + 1]
    before, after = place - _SHOWN > 1, place + _SHOWN + 1 < len(cells)
    return " ".join([*["..."] * before, *around, *["..."] * after]) or "it has no tasks"


@remembered(2)
def plan_digest(plan: Plan) -> str:
    """SHA-256 of what was decided and for which graph.

    Search times, what the strategy noted and the file's path do not count.
    """
    form = plan_form(dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, notes=())))
    decided = {key: form[key] for key in ("graph_digest", "mode", "batch_size", "placement", "predictions")}
    return hashlib.sha256((json.dumps(decided, sort_keys=True) + plan.schedule.grid()).encode()).hexdigest()


def plan_form(plan: Plan) -> dict[str, object]:
    """The plan, without its schedule, as lists, dicts and scalars."""
    return {
        "format": FORMAT,
        "model": plan.model,
        "graph_digest": plan.graph_digest,
        "mode": plan.mode,
        "batch_size": plan.batch_size,
        "summary": summary_form(plan.summary),
        "memory_limits": list(plan.memory_limits),
        **({"device_names": list(plan.device_names)} if plan.device_names else {}),
        "placement": placement_form(plan.placement),
        "predictions": prediction_form(plan.prediction),
        "breakdown": None if plan.breakdown is None else dataclasses.asdict(plan.breakdown),
        **({"alternatives": alternatives_form(plan.alternatives)} if plan.alternatives else {}),
    }


def summary_form(summary: Summary) -> dict[str, object]:
    """A summary as a dict with its fields' names."""
    form = {field.name: getattr(summary, field.name) for field in dataclasses.fields(summary)}
    moved = summary.communication_bytes
    costs = form.pop("costs")
    return {
        **form,
        "peak_memory_bytes": list(summary.peak_memory_bytes),
        "search_time_s": dict(summary.search_time_s),
        "communication_bytes": None if moved is None else dict(moved),
        "splits": split_proof_form(summary.splits),
        **({} if costs is None else {"costs": dataclasses.asdict(costs)}),
    }


def _summary_of(record: JsonRecord) -> Summary:
    gap, moved = record.at("gap"), record.at("communication_bytes")
    return Summary(
        strategy=record.at("strategy").text(),
        schedule=record.at("schedule").text(),
        devices=record.at("devices").integer(1),
        stages=record.at("stages").integer(1),
        micro_batches=record.at("micro_batches").integer(1),
        micro_batch_size=record.at("micro_batch_size").integer(1),
        depth=record.at("depth").integer(1),
        step_time_s=record.at("step_time_s").number(),
        samples_per_s=record.at("samples_per_s").number(),
        bubble_rate=record.at("bubble_rate").number(),
        peak_memory_bytes=record.at("peak_memory_bytes").integers(),
        search_time_s=tuple((name, each.number()) for name, each in record.at("search_time_s").members()),
        lower_bound_s=record.at("lower_bound_s").number(),
        optimal=record.at("optimal").boolean(),
        gap=None if gap.value is None else gap.number(),
        communication_bytes=None if moved.value is None else tuple((kind, moved.at(kind).integer(0)) for kind in KINDS),
        splits=split_proof_of(record.at("splits")),
        costs=_coverage_of(record.at("costs")) if record.has("costs") else None,
    )


def _breakdown_of(record: JsonRecord) -> Breakdown | None:
    if record.value is None:
        return None
    return Breakdown(**{field.name: record.at(field.name).number() for field in dataclasses.fields(Breakdown)})


def _coverage_of(record: JsonRecord) -> CostCoverage:
    return CostCoverage(record.at("measured").integer(), record.at("judged").integer())
