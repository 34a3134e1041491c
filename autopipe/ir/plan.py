"""A finished plan (decisions, digest of the graph, predictions, alternatives) and its files:
`plan.json`, and `schedule.json` with the order and the start times of the tasks.

`schedule.json` has the format of `autopipe.ir.block_schedule`. Its blocks are the phases of the
stages, and its units are the micro-batches of the step. A stage with smaller micro-batches runs
several of them per unit, and has a block for each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from autopipe.ir.block_schedule import SCHEDULE_FORMAT, task_order_json
from autopipe.ir.codec import (
    Amount,
    Count,
    FormerKey,
    Index,
    KeyPath,
    OmitDefault,
    Predicate,
    decode,
    encode,
    encode_as,
)
from autopipe.ir.degrees import PlanDegrees
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.files import JsonRecord, document_text, read_json_record
from autopipe.ir.memo import memoize
from autopipe.ir.model_parts import ModelPart, parts_text
from autopipe.ir.movable_paths import relative_path, resolve_path
from autopipe.ir.placement import Placement, SplitProof
from autopipe.ir.problem import AVERAGED_LOSS, LossDivision, Scores
from autopipe.ir.program import COMMUNICATION_KINDS
from autopipe.ir.schedule import (
    InvalidScheduleError,
    Phase,
    Proof,
    Repetends,
    Schedule,
    StageGraph,
    Task,
    expand_to_devices,
    micro_batch_ratios,
    pipelines_of,
)
from autopipe.ir.timeline import Message, Prediction, Timeline
from autopipe.ir.words import plural


@dataclass(frozen=True, slots=True)
class Choice:
    """The settings that determine a candidate of the search: equal settings give an equal plan.

    `options` are the options of the strategy that differ from their defaults, as in a configuration
    file. `schedule` is the name of the scheduler, or None if the schedule was not searched.
    `micro_batches` is None if neither the request nor the search sets their number. The strategy or
    its default then determines it. `shard` is the value of `Optimizer.shard`.
    """

    strategy: str
    options: tuple[tuple[str, str], ...] = ()
    schedule: str | None = None
    micro_batches: Count | None = None
    recompute: str = "none"
    shard: bool = False
    scores: Annotated[Scores | None, OmitDefault()] = None
    """Choice for the losses, to keep or to recompute their logits, as in `LossScores.choice`; None
    if the model has no such choice.
    """


@dataclass(frozen=True, slots=True)
class Alternative:
    """A candidate of the search: its settings, and the metrics of its placement and of its
    simulated step. The metrics are None if the candidate has no placement or no step.

    `lower_bound_s` is a lower bound of the step for all schedules of the placement. `refused` is
    the reason why the candidate has no step. `same_as` is the strategy that found an equal
    placement earlier; the step of that placement is used.
    """

    choice: Choice
    step_time_s: Annotated[Amount | None, OmitDefault()] = None
    lower_bound_s: Annotated[Amount | None, OmitDefault()] = None
    micro_batches: Annotated[Index | None, OmitDefault()] = None
    stages: Annotated[Index | None, OmitDefault()] = None
    bubble_rate: Annotated[float | None, OmitDefault()] = None
    peak_memory_bytes: Annotated[Index | None, OmitDefault()] = None
    refused: Annotated[str | None, OmitDefault()] = None
    same_as: Annotated[str | None, OmitDefault()] = None

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key of the candidate: the seconds of its step (infinite without a step), then the
        seconds of its lower bound if it has no step.
        """
        if self.step_time_s is not None:
            return self.step_time_s, 0.0
        return math.inf, math.inf if self.lower_bound_s is None else self.lower_bound_s


def best_per_strategy(alternatives: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Return, for each strategy, the alternative with the shortest step. The strategy with the
    shortest step comes first.

    Of alternatives with equal steps, the first one is chosen. Of strategies with an equal
    placement, the one that found the placement first precedes the others.
    """
    found: dict[str, Alternative] = {}
    for each in alternatives:
        best = found.setdefault(each.choice.strategy, each)
        if each.rank < best.rank:
            found[each.choice.strategy] = each
    return tuple(sorted(found.values(), key=lambda each: (*each.rank, each.same_as is not None)))


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The seconds of a step, divided into parts that add up to the step. The parts are averages
    over the devices.

    The ideal is the time of linear speed-up at the roofline: the time of one device for the full
    batch, with unlimited memory and without launch overhead, divided by the number of devices.
    Devices of different types share the ideal work in proportion to their speed, and have this
    weight in the averages.
    """

    ideal_s: Amount
    bubble_s: float = 0.0
    """Time that the busiest device would wait if messages took no time."""
    imbalance_s: float = 0.0
    """Time that devices would wait because they have less work than the busiest device."""
    exposed_p2p_s: Annotated[float, FormerKey("messages_s")] = 0.0
    """Time of P2P messages between stages that is not hidden by computation."""
    collectives_s: float = 0.0
    """Time of collectives inside stages whose operators are split."""
    gradients_s: float = 0.0
    """Time of the all-reduce of gradients at the end of the step and, if the optimizer state is
    sharded, of the all-gather of parameters.
    """
    recomputation_s: float = 0.0
    """Time of forwards that run again in backward."""
    redundant_compute_s: Annotated[float, FormerKey("repetition_s")] = 0.0
    """Time of operators that several devices compute for the same samples, because they are not
    split over all devices of their stage.
    """
    update_s: float = 0.0
    """Time of the optimizer update in addition to the update's ideal time with linear speed-up. It
    consists of launch overhead, and of updates of replicated parameters.
    """
    launch_overhead_s: Annotated[float, FormerKey("launches_s")] = 0.0
    """Overhead of kernel launches, of starting tasks and of posting messages, and time lost by
    lower efficiency for small tensors. It is negative if devices of different types each run the
    operators for which they are fastest.
    """
    host_s: Annotated[float, OmitDefault()] = 0.0
    """Time that devices wait because the host launches operators more slowly than the devices
    compute them.
    """

    @property
    def step_s(self) -> float:
        """Seconds of the step: the sum of all parts."""
        return math.fsum(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part by its name, the ideal first. The names are those of the fields in
        words, such as `exposed P2P`.
        """
        return {
            field.name.removesuffix("_s").replace("_", " ").replace("p2p", "P2P"): getattr(
                self, field.name
            )
            for field in dataclasses.fields(self)
        }

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """(name, seconds) of each part except the ideal, the longest first."""
        _, *found = self.parts.items()
        return tuple(sorted(found, key=lambda each: -each[1]))


@dataclass(frozen=True, slots=True)
class CostCoverage:
    """Number of nodes whose operators were measured, and number of nodes whose time is
    extrapolated: their roofline time, multiplied by the ratio of measured to roofline time of the
    measured operators.
    """

    measured: Index
    extrapolated: Annotated[Index, FormerKey("judged")]


@dataclass(frozen=True, slots=True)
class LossScores:
    """The choice whether the losses keep their logits (scores) for backward or recompute them, and
    the costs of both.

    Times and bytes are for one micro-batch on one device. They include the matmul that computes the
    logits, the loss, and the nodes between them.
    """

    choice: Scores
    keep_s: Amount
    """Seconds of forward and backward if the losses keep their logits."""
    recompute_s: Amount
    """Seconds of forward and backward if the losses recompute their logits."""
    saved_bytes: Index
    """Bytes of the logits that are saved for backward if the losses keep them."""
    other_step_s: Annotated[Amount | None, OmitDefault()] = None
    """Seconds of the step of a plan with the other choice; None if no such plan was made."""
    other_refused: Annotated[str | None, OmitDefault()] = None
    """Reason why there is no plan with the other choice; "" if there is one or none was tried."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The metrics of a plan that users compare; they are the keys of `summary` in `plan.json`."""

    strategy: str
    schedule: str
    devices: Count
    stages: Count
    micro_batches: Count
    micro_batch_size: Count
    depth: Count
    """Number of stages on the longest path of the stage graph."""
    step_time_s: Amount
    samples_per_s: Amount
    bubble_rate: float
    peak_memory_bytes: tuple[Index, ...]
    search_time_s: tuple[tuple[str, Amount], ...]
    lower_bound_s: Amount
    """Lower bound, in seconds, of the step for all schedules of this placement."""
    optimal: bool
    """True if the schedule is proven optimal for the placement, up to the rounding that the proof
    states. The proof is about the period if the schedule has a steady state, otherwise about the
    step.
    """
    gap: float | None
    """Fraction of the period, or of the step, by which it may exceed the optimum; 0 if it is
    optimal.
    """
    communication_bytes: tuple[tuple[str, Index], ...] | None
    """Bytes that the communication of a step moves, over all devices, by kind (see
    `COMMUNICATION_KINDS` in `ir/program.py`); None if code generation does not support the
    placement.
    """
    splits: SplitProof | None = None
    costs: Annotated[CostCoverage | None, OmitDefault()] = None
    scores: Annotated[LossScores | None, OmitDefault()] = None
    """Choice of the losses' logits and its costs; None if the model has no such choice."""
    bound_holds_for: Annotated[Literal["placement"] | None, OmitDefault()] = None
    """Scope of `lower_bound_s`, `optimal` and `gap`: all schedules of this placement, but no other
    placements.

    None in a plan of an earlier version of autopipe, as are the metrics below.
    """
    degrees: Annotated[PlanDegrees | None, OmitDefault()] = None
    tokens_per_sample: Annotated[Count | None, OmitDefault()] = None
    """Number of tokens of a sample; None if samples are not sequences of tokens."""
    mfu: Annotated[Amount | None, OmitDefault()] = None
    """Model FLOPs utilisation: the FLOPs of forward and backward without recomputation, divided by
    the seconds of the step and by the peak FLOP/s of all devices in the precision of matmuls.
    """

    @property
    def rate_per_device(self) -> tuple[float, str]:
        """(amount, unit) that a device processes per second: tokens or, for a model without tokens,
        samples.
        """
        samples_per_s = self.samples_per_s / self.devices
        if self.tokens_per_sample is None:
            return samples_per_s, "samples/s"
        return samples_per_s * self.tokens_per_sample, "tokens/s"


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan: a placement and a schedule for the graph with the digest `graph_digest`, whose ONNX
    file is `model`.

    `device_names` has the device type of each device if the cluster has several pools, otherwise it
    is (). `alternatives` are the candidates of the search; () if the user named the strategy.
    `schedule.json` contains the schedule, and `plan.json` everything else.
    """

    written: ClassVar = (
        "model",
        "graph_digest",
        "mode",
        "batch_size",
        "loss_division",
        "summary",
        "memory_limits",
        "device_names",
        "placement",
        "stage_parts",
        "prediction",
        "breakdown",
        "alternatives",
    )
    model: str
    graph_digest: str
    mode: Annotated[str, Predicate(("train", "infer").__contains__, "train or infer")]
    batch_size: Count
    placement: Placement
    schedule: Schedule
    summary: Summary
    prediction: Annotated[Prediction, KeyPath("predictions")] = field(default_factory=Prediction)
    memory_limits: tuple[Index, ...] = ()
    device_names: Annotated[tuple[str, ...], OmitDefault()] = ()
    alternatives: Annotated[tuple[Alternative, ...], OmitDefault()] = ()
    breakdown: Breakdown | None = None
    loss_division: Annotated[LossDivision, OmitDefault()] = AVERAGED_LOSS
    stage_parts: Annotated[tuple[tuple[ModelPart, ...], ...], OmitDefault()] = ()
    """The parts of the model that each stage holds, such as its layers; () in a plan of an earlier
    version of autopipe.
    """

    @property
    def stage_labels(self) -> tuple[str, ...]:
        """The parts of the model that each stage holds as text, such as `layers 0–7`; "" for a
        stage without such parts.
        """
        parts = self.stage_parts or ((),) * len(self.placement.stages)
        return tuple(map(parts_text, parts))

    @property
    def host_bound_stages(self) -> tuple[int, ...]:
        """Ascending indices of the stages for whose micro-batches the host needs more time than the
        device.
        """
        return tuple(
            index for index, stage in enumerate(self.prediction.stages) if stage.host_bound
        )

    @property
    def has_different_micro_batch_sizes(self) -> bool:
        """True if a stage has a micro-batch size other than that of the step."""
        return any(
            stage.micro_batch_size != self.summary.micro_batch_size
            for stage in self.placement.stages
        )


FORMAT = "autopipe.plan/1"
PLAN_FILE = "plan.json"
SCHEDULE_FILE = "schedule.json"
_MESSAGE_COLUMNS = tuple(field.name for field in dataclasses.fields(Message))[:-2]
_SLICE_COLUMNS = ("source_turn", "source_turns", "target_turn", "target_turns")
"""Additional columns of messages, if stages have micro-batches of different sizes."""


def write_plan(folder: Path, plan: Plan, timeline: Timeline, home: Path | None = None) -> None:
    """Write `plan.json` and `schedule.json` into `folder`. The path of the model becomes relative
    to `home`, the folder to which the files will be moved (default: `folder`).
    """
    model = relative_path(plan.model, home or folder)
    (folder / PLAN_FILE).write_text(
        document_text(plan_json(dataclasses.replace(plan, model=model))), encoding="utf-8"
    )
    (folder / SCHEDULE_FILE).write_text(
        document_text(schedule_json(plan, timeline)), encoding="utf-8"
    )


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan without its schedule as lists, dicts and scalars. Messages are lists, whose
    columns are named once.
    """
    form = encode(plan)
    stages, messages = form["predictions"].values()
    columns = _MESSAGE_COLUMNS + _SLICE_COLUMNS
    if all(each.source_slice.of * each.target_slice.of == 1 for each in plan.prediction.messages):
        columns = _MESSAGE_COLUMNS
        messages = [row[: len(_MESSAGE_COLUMNS)] for row in messages]
    form["predictions"] = {"stages": stages, "message_columns": list(columns), "messages": messages}
    return {"format": FORMAT, **form}


@memoize(2)
def plan_digest(plan: Plan) -> str:
    """Return the SHA-256 of the digest of the graph, the mode, the batch size, the placement, the
    predictions, and the order of the schedule.

    Search times, the strategy's notes and options, and the path of the ONNX file do not affect the
    digest.
    """
    form = plan_json(
        dataclasses.replace(
            plan, placement=dataclasses.replace(plan.placement, notes=(), options=())
        )
    )
    chosen = {
        key: form[key] for key in ("graph_digest", "mode", "batch_size", "placement", "predictions")
    }
    return hashlib.sha256(
        (json.dumps(chosen, sort_keys=True) + plan.schedule.grid()).encode()
    ).hexdigest()


def read_plan(folder: Path) -> Plan:
    """Return the plan in `folder`, with an absolute path of its model. Raise ConfigurationError,
    with file and key, if the plan is invalid.
    """
    record = read_json_record(folder / PLAN_FILE, FORMAT)
    plan: Plan = decode(record, Plan, schedule=Schedule(0, ()))
    _check_prediction(record.at("predictions"), plan.prediction, plan.placement)
    if plan.stage_parts and len(plan.stage_parts) != len(plan.placement.stages):
        record.at("stage_parts").reject(
            f"one entry for each of {len(plan.placement.stages)} "
            f"{plural(len(plan.placement.stages), 'stage')}"
        )
    summary = plan.summary
    peaks = summary.peak_memory_bytes
    if len(peaks) < max(1, plan.placement.devices):
        record.at("summary").at("peak_memory_bytes").reject(
            f"an entry for each of {plan.placement.devices} "
            f"{plural(plan.placement.devices, 'device')}"
        )
    if plan.memory_limits and len(plan.memory_limits) != len(peaks):
        record.at("memory_limits").reject(
            f"{len(peaks)} {plural(len(peaks), 'entry')}, one per device of the cluster"
        )
    count = summary.micro_batches
    size = summary.micro_batch_size
    if plan.batch_size != count * size:
        record.at("batch_size").reject(
            f"{count * size}, which is {count} {plural(count, 'micro-batch')} of {size} "
            f"{plural(size, 'sample')}"
        )
    if summary.communication_bytes is not None:
        moved = record.at("summary").at("communication_bytes")
        summary = dataclasses.replace(
            summary,
            communication_bytes=tuple(
                (kind, moved.get(kind, Index)) for kind in COMMUNICATION_KINDS
            ),
        )
    try:
        ratios = micro_batch_ratios(plan.placement, summary.micro_batch_size)
    except InfeasibleError as error:
        raise ConfigurationError(
            error.message, "plan again", f"{record.file}: placement"
        ) from error
    groups = tuple(stage.devices for stage in plan.placement.stages)
    stages = StageGraph(
        plan.placement.devices, groups, plan.prediction.edges, pipelines_of(plan.placement), ratios
    )
    schedule = _read_schedule(folder / SCHEDULE_FILE, stages, plan.mode == "train")
    if schedule.micro_batches != count:
        message = (
            f"the schedule is for {schedule.micro_batches} "
            f"{plural(schedule.micro_batches, 'micro-batch')}, but its plan is for {count}"
        )
        raise ConfigurationError(message, "plan again", f"{folder / SCHEDULE_FILE}: units")
    return dataclasses.replace(
        plan, model=resolve_path(folder, plan.model), summary=summary, schedule=schedule
    )


def _check_prediction(record: JsonRecord, prediction: Prediction, placement: Placement) -> None:
    """Raise ConfigurationError if the number of predictions, or the stages and devices of messages,
    do not fit the placement.
    """
    if len(prediction.stages) != len(placement.stages):
        record.at("stages").reject(
            f"one entry for each of {len(placement.stages)} "
            f"{plural(len(placement.stages), 'stage')}"
        )
    for row, each in zip(record.at("messages").items(), prediction.messages, strict=True):
        if len(row.value) not in (len(_MESSAGE_COLUMNS), len(_MESSAGE_COLUMNS + _SLICE_COLUMNS)):
            row.reject(
                f"{len(_MESSAGE_COLUMNS)} {plural(len(_MESSAGE_COLUMNS), 'column')}, or "
                f"{len(_MESSAGE_COLUMNS + _SLICE_COLUMNS)} if the message is a slice"
            )
        if not each.source_stage < each.target_stage < len(placement.stages):
            row.reject("a message from a stage to a later stage")
        for stage, device in ((each.source_stage, each.source), (each.target_stage, each.target)):
            if device not in placement.stages[stage].devices:
                row.reject(
                    f"devices of the listed stages, but device {device} is not in stage {stage}"
                )
        for part in (each.source_slice, each.target_slice):
            if part.index >= part.of:
                row.reject(
                    f"the index of a slice from 0 to {part.of - 1}, but the index is {part.index}"
                )


_BLOCK_NAME_PATTERN = re.compile(r"(\d{1,9})([FBIW])(?:\.(\d{1,9}))?")
TaskKind = tuple[int, Phase, int]
"""(stage, phase, number of the stage's micro-batch within a micro-batch of the step): the tasks of
a block.
"""
_BACKWARD_PHASES_FOR_OTHER_STAGES = (Phase.BACKWARD, Phase.INPUT_GRADIENT)


def schedule_json(plan: Plan, timeline: Timeline) -> dict[str, object]:
    """Return the schedule of a plan as lists, dicts and scalars, with times in seconds and memory
    in bytes.

    A block is a phase of a stage, for example its forward. The memory of a block is the change of
    the memory in use: positive for a forward, which saves tensors for backward; negative for a
    backward. For the two halves of a split backward, the sum is negative.
    """
    schedule = plan.schedule
    stages = plan.prediction.stages
    proof = None if schedule.period is None else schedule.proof
    ratios = micro_batch_ratios(plan.placement, plan.summary.micro_batch_size) or (1,) * len(stages)
    # Devices with equal orders of tasks usually refer to one list object. Each object is visited
    # only a single time.
    distinct = {id(order): order for order in schedule.tasks}.values()

    def kind_of(task: Task) -> TaskKind:
        """Return the kind of a task, which is also the key of its block."""
        return task.stage, task.phase, task.micro_batch % ratios[task.stage]

    found = {kind_of(task) for order in distinct for task in order}
    kinds = sorted(found, key=lambda kind: ("FBIW".index(kind[1].value), kind[0], kind[2]))
    index = {kind: position for position, kind in enumerate(kinds)}
    graph = StageGraph(schedule.devices, (), plan.prediction.edges, (), ratios)
    blocks = []
    for stage, phase, turn in kinds:
        own = stages[stage]
        needs = set(graph.dependencies_of(stage, phase, turn))
        if phase in _BACKWARD_PHASES_FOR_OTHER_STAGES:
            # Another stage may split its backward or not, so the dependency is added for both kinds
            # of backward.
            needs |= {
                (other, half, part)
                for other, _, part in needs
                if other != stage
                for half in _BACKWARD_PHASES_FOR_OTHER_STAGES
            }
        block = {
            "name": f"{stage}{phase.value}" + (f".{turn}" if ratios[stage] > 1 else ""),
            "devices": list(plan.placement.stages[stage].devices),
            "time": own.seconds(phase),
            "memory": own.added_bytes(phase) if plan.mode == "train" else 0,
            "after": sorted(index[kind] for kind in needs if kind in index),
        }
        blocks.append(block)
    starts = {(span.device, span.task): span.start for span in timeline.own_spans}
    lanes = timeline.lanes or tuple((device,) for device in range(schedule.devices))
    orders = [
        task_order_json(
            (
                index[kind_of(task)],
                task.micro_batch // ratios[task.stage],
                round(starts[devices[0], task], 12),
            )
            for task in schedule.tasks[devices[0]]
        )
        for devices in lanes
    ]
    return {
        "format": SCHEDULE_FORMAT,
        "devices": schedule.devices,
        "units": schedule.micro_batches,
        "makespan": max((span.end for span in timeline.own_spans), default=0.0),
        "period": schedule.period,
        # The values `optimal` and `gap` refer to `lower_bound`: the bound of the period if it has a
        # proof, otherwise the bound of the step.
        "lower_bound": plan.summary.lower_bound_s if proof is None else proof.lower_bound,
        "optimal": plan.summary.optimal,
        "gap": plan.summary.gap,
        "proof": encode_as(schedule.proof, Proof | None),
        "peak_memory": list(timeline.peak_memory),
        "repetends": encode_as(schedule.repetends or (), Repetends),
        "blocks": blocks,
        "tasks": expand_to_devices(lanes, orders),
    }


def _read_schedule(path: Path, stages: StageGraph, train: bool) -> Schedule:
    """Return the schedule in the file `path`. Raise ConfigurationError, with file and key, if it is
    invalid or cannot run. `train` is False for inference.
    """
    record = read_json_record(path, SCHEDULE_FORMAT)
    kinds = [_read_task_kind(block, stages) for block in record.at("blocks").items()]
    orders = tuple(_read_task_orders(record.at("tasks"), kinds, stages))
    if len(orders) != (devices := record.get("devices", Count)):
        record.at("tasks").reject(f"one list per device, for {devices} {plural(devices, 'device')}")
    schedule = Schedule(
        record.get("units", Count),
        orders,
        record.get("repetends", Repetends) or None,
        record.get("period", Amount | None),
        record.get("proof", Proof | None),
    )
    if devices < stages.devices:
        message = (
            f"tasks are for {devices} {plural(devices, 'device')}, the placement has "
            f"{stages.devices}"
        )
        raise ConfigurationError(message, where=str(path))
    try:
        schedule.verify(dataclasses.replace(stages, devices=devices), train)
    except InvalidScheduleError as error:
        message = f"{error.reason}: {error.around or 'it has no tasks'}"
        raise ConfigurationError(message, "plan again", f"{path}: {error.where}") from error
    return schedule


def _read_task_orders(
    tasks: JsonRecord, kinds: list[TaskKind], stages: StageGraph
) -> Iterator[tuple[Task, ...]]:
    """Yield the tasks of each device in order. Devices with equal task lists share one tuple."""

    def read_task(record: JsonRecord) -> Task:
        """Return the task that a JSON object represents."""
        block = record.get("block", Index)
        unit = record.get("unit", Index)
        if block >= len(kinds):
            record.at("block").reject(f"the index of a block, from 0 to {len(kinds) - 1}")
        stage, phase, turn = kinds[block]
        return Task(stage, phase, unit * stages.micro_batch_ratio_at(stage) + turn)

    known: list[tuple[object, tuple[Task, ...]]] = []
    for each in tasks.items():
        order = next((found for value, found in known if value == each.value), None)
        if order is None:
            order = tuple(map(read_task, each.items()))
            known.append((each.value, order))
        yield order


def _read_task_kind(record: JsonRecord, stages: StageGraph) -> TaskKind:
    """Return the kind of tasks that a block of the file represents. Raise ConfigurationError if it
    does not fit the stages.
    """
    match = _BLOCK_NAME_PATTERN.fullmatch(record.get("name", str))
    if match is None or int(match[1]) >= len(stages.stage_devices):
        record.at("name").reject(
            f"a stage number below {len(stages.stage_devices)} and a phase, such as 0F"
        )
    stage = int(match[1])
    turn = int(match[3] or 0)
    if turn >= (turns := stages.micro_batch_ratio_at(stage)):
        record.at("name").reject(
            f"a part of the micro-batch of stage {stage}, numbered from 0 to {turns - 1}"
        )
    if record.get("devices", tuple[Index, ...]) != (devices := stages.stage_devices[stage]):
        record.at("devices").reject(f"the devices of stage {stage}, which are {list(devices)}")
    return stage, Phase(match[2]), turn
