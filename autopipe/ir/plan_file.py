"""`plan.json`: all of a plan but its schedule, and `schedule.json` beside it.

A placement as JSON: nodes as ranges, nodes that are split alike together.

Predictions as JSON.

Alternatives as JSON: an object for each; unknown members are left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from autopipe.ir.codec import JsonRecord, read_record, record_text
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.memo import remembered
from autopipe.ir.placement import Placement, Split, SplitProof, Stage, node_ranges
from autopipe.ir.plan import Alternative, Breakdown, Choice, CostCoverage, Plan, Summary
from autopipe.ir.problem import Mode
from autopipe.ir.program import KINDS
from autopipe.ir.schedule import MicroBatchSlice, Schedule, StageGraph, micro_batch_ratios, pipelines_of
from autopipe.ir.schedule_file import read_schedule, schedule_form
from autopipe.ir.timeline import Message, Prediction, StagePrediction, Timeline


def alternatives_form(alternatives: Iterable[Alternative]) -> list[dict[str, object]]:
    """The alternatives as lists, dicts and scalars."""
    return [_form(each) for each in alternatives]


def _form(alternative: Alternative) -> dict[str, object]:
    choice = alternative.choice
    decided: dict[str, object] = {
        "strategy": choice.strategy,
        "options": dict(choice.options),
        "schedule": choice.schedule,
        "micro_batches": choice.micro_batches,
        "recompute": choice.recompute,
        "shard": choice.shard,
    }
    fields = (field.name for field in dataclasses.fields(Alternative) if field.name != "choice")
    found = {name: getattr(alternative, name) for name in fields}
    return {"choice": decided, **{name: value for name, value in found.items() if value is not None}}


def alternatives_of(record: JsonRecord) -> tuple[Alternative, ...]:
    """The alternatives that `alternatives_form` gave. Raises ConfigurationError."""
    return tuple(map(_alternative_of, record.items()))


def _alternative_of(record: JsonRecord) -> Alternative:
    def text(key: str) -> str | None:
        return record.at(key).text() if record.has(key) else None

    def number(key: str) -> float | None:
        return record.at(key).number() if record.has(key) else None

    def integer(key: str) -> int | None:
        return record.at(key).integer() if record.has(key) else None

    return Alternative(
        choice=_choice_of(record.at("choice")),
        step_time_s=number("step_time_s"),
        lower_bound_s=number("lower_bound_s"),
        micro_batches=integer("micro_batches"),
        stages=integer("stages"),
        bubble_rate=number("bubble_rate"),
        peak_memory_bytes=integer("peak_memory_bytes"),
        refused=text("refused"),
        same_as=text("same_as"),
    )


def _choice_of(record: JsonRecord) -> Choice:
    schedule, micro_batches = record.at("schedule"), record.at("micro_batches")
    return Choice(
        strategy=record.at("strategy").text(),
        options=tuple((name, each.text()) for name, each in record.at("options").members()),
        schedule=None if schedule.value is None else schedule.text(),
        micro_batches=None if micro_batches.value is None else micro_batches.integer(1),
        recompute=record.at("recompute").text(),
        shard=record.at("shard").boolean(),
    )


def placement_form(placement: Placement) -> dict[str, object]:
    """The placement as lists, dicts and scalars. Ranges of node indices are half open."""
    notes = {"notes": list(placement.notes)} if placement.notes else {}
    return {"stages": [_stage_form(stage) for stage in placement.stages], **notes}


def placement_of(record: JsonRecord) -> Placement:
    """The placement that `placement_form` gave. Raises ConfigurationError."""
    stages = record.at("stages")
    found = tuple(_stage_of(each) for each in stages.items())
    if not found:
        stages.refuse("at least one stage")
    notes = tuple(each.text() for each in record.at("notes").items()) if record.has("notes") else ()
    return Placement(found, notes=notes)


def split_proof_form(proof: SplitProof | None) -> dict[str, object] | None:
    """Proof of splits, by the names of its fields."""
    return None if proof is None else dataclasses.asdict(proof)


def split_proof_of(record: JsonRecord) -> SplitProof | None:
    """Inverse of `split_proof_form`. Raises ConfigurationError."""
    if record.value is None:
        return None
    return SplitProof(
        cost=record.at("cost").number(),
        lower_bound=record.at("lower_bound").number(),
        optimal=record.at("optimal").boolean(),
        unit=record.at("unit").text(),
    )


def _stage_form(stage: Stage) -> dict[str, object]:
    alike: dict[tuple[Split, ...], list[int]] = {}
    for node, splits in stage.splits:
        alike.setdefault(splits, []).append(node)
    return {
        "devices": list(stage.devices),
        "micro_batch_size": stage.micro_batch_size,
        "recompute": stage.recompute,
        "pipeline": stage.pipeline,
        "nodes": _ranges_form(stage.nodes),
        "splits": [
            {"split": [[split.axis, split.degree] for split in splits], "nodes": _ranges_form(sorted(nodes))}
            for splits, nodes in alike.items()
        ],
    }


def _stage_of(record: JsonRecord) -> Stage:
    splits: dict[int, tuple[Split, ...]] = {}
    for each in record.at("splits").items():
        split = tuple(_split_of(pair) for pair in each.at("split").items())
        splits.update(dict.fromkeys(_nodes_of(each.at("nodes")), split))
    devices = record.at("devices")
    if not devices.integers():
        devices.refuse("at least one device")
    return Stage(
        nodes=_nodes_of(record.at("nodes")),
        devices=devices.integers(),
        micro_batch_size=record.at("micro_batch_size").integer(1),
        splits=tuple(sorted(splits.items())),
        recompute=record.at("recompute").boolean(),
        pipeline=record.at("pipeline").integer(),
    )


def _split_of(record: JsonRecord) -> Split:
    pair = tuple(record.items())
    if len(pair) != 2:
        record.refuse("an axis and a degree")
    return Split(pair[0].text(), pair[1].integer(1))


def _ranges_form(nodes: tuple[int, ...] | list[int]) -> list[list[int]]:
    return [list(each) for each in node_ranges(nodes)]


def _nodes_of(record: JsonRecord) -> tuple[int, ...]:
    return tuple(chain.from_iterable(_range_of(each) for each in record.items()))


_MOST_NODES = 10_000_000


def _range_of(record: JsonRecord) -> range:
    ends = record.integers()
    if len(ends) != 2 or not ends[0] < ends[1] <= _MOST_NODES:
        record.refuse("a range of nodes: first, one after the last")
    return range(*ends)


_MESSAGE = tuple(field.name for field in dataclasses.fields(Message) if "turn" not in field.name)
_TURNS = ("source_turn", "source_turns", "target_turn", "target_turns")
"""Columns behind those of `_MESSAGE` where stages have micro-batches of different sizes."""


def prediction_form(prediction: Prediction) -> dict[str, object]:
    """The predictions as lists, dicts and scalars; a message is a list whose columns `message_columns` names."""
    turns = any(message.source_turn.of * message.target_turn.of > 1 for message in prediction.messages)
    return {
        "stages": [dataclasses.asdict(stage) for stage in prediction.stages],
        "message_columns": [*_MESSAGE, *(_TURNS if turns else ())],
        "messages": [_message_form(message, turns) for message in prediction.messages],
    }


def _message_form(message: Message, turns: bool) -> list[object]:
    cells = [getattr(message, name) for name in _MESSAGE]
    source, target = message.source_turn, message.target_turn
    return [*cells, source.index, source.of, target.index, target.of] if turns else cells


def prediction_of(record: JsonRecord, placement: Placement) -> Prediction:
    """The predictions that `prediction_form` gave for the stages of `placement`. Raises ConfigurationError."""
    stages = record.at("stages")
    found = tuple(_prediction_form_stage_of(each) for each in stages.items())
    if len(found) != len(placement.stages):
        stages.refuse(f"one entry for each of {len(placement.stages)} stages")
    messages = tuple(_message_of(each, placement) for each in record.at("messages").items())
    return Prediction(found, messages)


def _prediction_form_stage_of(record: JsonRecord) -> StagePrediction:
    return StagePrediction(
        forward_s=record.at("forward_s").number(),
        backward_s=record.at("backward_s").number(),
        input_gradient_s=record.at("input_gradient_s").number(),
        weight_gradient_s=record.at("weight_gradient_s").number(),
        split_s=record.at("split_s").number(),
        gradient_s=record.at("gradient_s").number(),
        update_s=record.at("update_s").number(),
        parameter_bytes=record.at("parameter_bytes").integer(),
        static_bytes=record.at("static_bytes").integer(),
        kept_bytes=record.at("kept_bytes").integer(),
        weight_kept_bytes=record.at("weight_kept_bytes").integer(),
        transient_bytes=record.at("transient_bytes").integer(),
    )


def _message_of(record: JsonRecord, placement: Placement) -> Message:
    cells = tuple(record.items())
    if len(cells) not in (len(_MESSAGE), len(_MESSAGE) + len(_TURNS)):
        record.refuse(f"{len(_MESSAGE)} columns, or {len(_TURNS)} more with turns")
    counts = [cell.integer() for cell in cells[:6]]
    if not counts[0] < counts[1] < len(placement.stages):
        record.refuse("a message from a stage to a later one")
    for stage, device in ((counts[0], counts[2]), (counts[1], counts[3])):
        if device not in placement.stages[stage].devices:
            record.refuse(f"devices of the stages it names: {device} is none of stage {stage}")
    source, target, sender, receiver, forward_bytes, backward_bytes = counts
    forward_s, backward_s = (cell.number() for cell in cells[6:8])
    message = Message(source, target, sender, receiver, forward_bytes, backward_bytes, forward_s, backward_s)
    if len(cells) == len(_MESSAGE):
        return message
    return dataclasses.replace(message, source_turn=_turn_of(*cells[8:10]), target_turn=_turn_of(*cells[10:12]))


def _turn_of(index: JsonRecord, count: JsonRecord) -> MicroBatchSlice:
    if index.integer() >= count.integer(1):
        index.refuse(f"one of {count.integer()} turns, counted from 0")
    return MicroBatchSlice(index.integer(), count.integer())


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
