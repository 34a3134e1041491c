"""A finished plan (decisions, graph digest, predictions, alternatives) and its files: `plan.json`,
and `schedule.json` with the order and the start times of tasks.

The blocks of the schedule are phases of stages, and its units are micro-batches of the step. A
stage with smaller micro-batches runs several for each micro-batch of the step, and has a block for
each of them.
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
    """The settings from which a candidate of the search follows: equal settings give an equal plan.

    `options` are the options of the strategy that differ from their defaults, as in a
    configuration. `schedule` is None if no schedule was searched. `micro_batches` is None if the
    strategy chooses their number. `shard` is the value of `Optimizer.shard`.
    """

    strategy: str
    options: tuple[tuple[str, str], ...] = ()
    schedule: str | None = None
    micro_batches: Count | None = None
    recompute: str = "none"
    shard: bool = False
    scores: Annotated[Scores | None, OmitDefault()] = None
    """The form of the losses as in `LossScores.choice`; None if the losses have one form."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A candidate of the search: its settings, and metrics of its placement and its simulated step,
    which are None if the candidate has no placement or no step.

    `lower_bound_s` is a lower bound of the step for any schedule of the placement. `refused` is the
    reason why there is no step. `same_as` is the strategy that gave an equal placement before, from
    which the step is taken.
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
        """Sort key: seconds of the step (infinite without a step), then seconds of the lower bound
        if there is no step.
        """
        if self.step_time_s is not None:
            return self.step_time_s, 0.0
        return math.inf, math.inf if self.lower_bound_s is None else self.lower_bound_s


def best_per_strategy(alternatives: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Return the alternative with the shortest step of each strategy, the best strategy first.

    Ties: the first alternative wins. Strategies with an equal placement are sorted so that the
    strategy that found it first precedes the others.
    """
    found: dict[str, Alternative] = {}
    for each in alternatives:
        best = found.setdefault(each.choice.strategy, each)
        if each.rank < best.rank:
            found[each.choice.strategy] = each
    return tuple(sorted(found.values(), key=lambda each: (*each.rank, each.same_as is not None)))


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Parts of a step in seconds, averaged over the devices. They add up to the step.

    The ideal is linear speed-up at the roofline: the time of one device for the batch, with
    unlimited memory and without launch overhead, divided by the number of devices. Devices of
    different types share the work in proportion to their speed, and have this weight in averages.
    """

    ideal_s: Amount
    bubble_s: float = 0.0
    """Waiting time of the busiest device if messages took no time."""
    imbalance_s: float = 0.0
    """Time in which devices have less work than the busiest device."""
    exposed_p2p_s: Annotated[float, FormerKey("messages_s")] = 0.0
    """P2P communication between stages that no computation hides."""
    collectives_s: float = 0.0
    """Collectives inside stages with split operators."""
    gradients_s: float = 0.0
    """All-reduce of gradients at the end of the step, and all-gather of parameters if the optimizer
    state is sharded.
    """
    recomputation_s: float = 0.0
    """Forward passes that run again for backward."""
    redundant_compute_s: Annotated[float, FormerKey("repetition_s")] = 0.0
    """Operators that several devices compute for the same samples because the operators are not
    sharded over all of these devices.
    """
    update_s: float = 0.0
    """The update beyond the fraction of a device in linear speed-up: its launch, and updates of
    equal parameters by several devices.
    """
    launch_overhead_s: Annotated[float, FormerKey("launches_s")] = 0.0
    """Overhead of launches, of starts of tasks and of posted messages, and the lower efficiency of
    small tensors. Negative if devices of different types each run the operators at which they are
    fastest.
    """
    host_s: Annotated[float, OmitDefault()] = 0.0
    """The device waits because the host starts operators more slowly than the device computes them.
    """

    @property
    def step_s(self) -> float:
        return math.fsum(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def parts(self) -> dict[str, float]:
        """Return the seconds of each part by its name, the ideal first. The name is that of the
        field in words, such as `exposed P2P`.
        """
        return {
            field.name.removesuffix("_s").replace("_", " ").replace("p2p", "P2P"): getattr(
                self, field.name
            )
            for field in dataclasses.fields(self)
        }

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """Return (name, seconds) of each part except the ideal, the longest first."""
        _, *found = self.parts.items()
        return tuple(sorted(found, key=lambda each: -each[1]))


@dataclass(frozen=True, slots=True)
class CostCoverage:
    """Number of nodes whose operators were measured, and number whose time is extrapolated: their
    roofline time is multiplied by the ratio of measured to roofline time of the measured operators.
    """

    measured: Index
    extrapolated: Annotated[Index, FormerKey("judged")]


@dataclass(frozen=True, slots=True)
class LossScores:
    """Form of the losses, which keep their scores (logits) for backward or recompute them, and the
    costs of both forms.

    Times and bytes are for one micro-batch on a single device: the matmul that computes the logits,
    the loss, and the nodes between them.
    """

    choice: Scores
    keep_s: Amount
    """Seconds of forward and backward if the logits are kept."""
    recompute_s: Amount
    """Seconds of forward and backward if the logits are recomputed."""
    saved_bytes: Index
    """Bytes of logits that are saved for backward if they are kept."""
    other_step_s: Annotated[Amount | None, OmitDefault()] = None
    """Seconds of a step with the other form; None if no such plan was made."""
    other_refused: Annotated[str | None, OmitDefault()] = None
    """Reason why there is no plan with the other form."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The metrics of a plan that users compare; the keys of `summary` in `plan.json`."""

    strategy: str
    schedule: str
    devices: Count
    stages: Count
    micro_batches: Count
    micro_batch_size: Count
    depth: Count
    """Stages on the longest path of the stage graph."""
    step_time_s: Amount
    samples_per_s: Amount
    bubble_rate: float
    peak_memory_bytes: tuple[Index, ...]
    search_time_s: tuple[tuple[str, Amount], ...]
    lower_bound_s: Amount
    """No schedule of this placement can take less."""
    optimal: bool
    """True if the schedule is proven optimal for the placement, up to the rounding that the proof
    states: its period if it has a steady state, otherwise its step.
    """
    gap: float | None
    """Fraction of the period, or of the step, above the proven lower bound; 0 if it is optimal."""
    communication_bytes: tuple[tuple[str, Index], ...] | None
    """Bytes that the communication of a step moves over all devices, by kind (`ir/program.py`);
    None if code generation does not support the placement.
    """
    splits: SplitProof | None = None
    costs: Annotated[CostCoverage | None, OmitDefault()] = None
    scores: Annotated[LossScores | None, OmitDefault()] = None
    """None if the model's losses have one form."""
    bound_holds_for: Annotated[Literal["placement"] | None, OmitDefault()] = None
    """Scope of `lower_bound_s`, `optimal` and `gap`: every schedule of this placement, and no other
    placement.

    None in a plan of an earlier version of autopipe, like the figures below.
    """
    degrees: Annotated[PlanDegrees | None, OmitDefault()] = None
    tokens_per_sample: Annotated[Count | None, OmitDefault()] = None
    """Tokens of a sample; None if samples are not sequences of tokens."""
    mfu: Annotated[Amount | None, OmitDefault()] = None
    """Model FLOPs utilisation: FLOPs of forward and backward without recomputation, over the step's
    seconds times the peak FLOP/s of all devices in the number format of products.
    """

    @property
    def rate_per_device(self) -> tuple[float, str]:
        """Return (amount, unit) of what a device processes per second: tokens, or samples of models
        without tokens.
        """
        samples_per_s = self.samples_per_s / self.devices
        if self.tokens_per_sample is None:
            return samples_per_s, "samples/s"
        return samples_per_s * self.tokens_per_sample, "tokens/s"


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement and a schedule for the graph with `graph_digest`, whose ONNX file is `model`.

    `device_names` are the device types by device if the cluster has groups of devices, otherwise
    (). `alternatives` are the candidates of the search, () if the strategy was named. The schedule
    is stored in `schedule.json`.
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

    @property
    def host_bound_stages(self) -> tuple[int, ...]:
        """The stages for whose micro-batches the host takes longer than the device, in ascending
        order.
        """
        return tuple(
            index for index, stage in enumerate(self.prediction.stages) if stage.host_bound
        )

    @property
    def has_own_sizes(self) -> bool:
        """True if a stage has smaller micro-batches than the step."""
        return any(
            stage.micro_batch_size != self.summary.micro_batch_size
            for stage in self.placement.stages
        )


FORMAT = "autopipe.plan/1"
PLAN_FILE = "plan.json"
SCHEDULE_FILE = "schedule.json"
_MESSAGE_COLUMNS = tuple(field.name for field in dataclasses.fields(Message))[:-2]
_SLICE_COLUMNS = ("source_turn", "source_turns", "target_turn", "target_turns")
"""Further columns of messages, if stages have micro-batches of different sizes."""


def write_plan(folder: Path, plan: Plan, timeline: Timeline, home: Path | None = None) -> None:
    """Write `plan.json` and `schedule.json` into `folder`. The path of the model is written
    relative to `home`, the folder that they are moved to (default: `folder`).
    """
    model = relative_path(plan.model, home or folder)
    (folder / PLAN_FILE).write_text(
        document_text(plan_json(dataclasses.replace(plan, model=model))), encoding="utf-8"
    )
    (folder / SCHEDULE_FILE).write_text(
        document_text(schedule_json(plan, timeline)), encoding="utf-8"
    )


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the plan without its schedule as lists, dicts and scalars. A list names the columns of
    messages.
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
    """Return the SHA-256 of the graph digest, the placement, the predictions and the schedule.

    Search times, notes and options of the strategy, and the path of the ONNX file do not affect it.
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
    """Return the plan in `folder`, with an absolute path of its model. Raises ConfigurationError
    with file and key.
    """
    record = read_json_record(folder / PLAN_FILE, FORMAT)
    plan: Plan = decode(record, Plan, schedule=Schedule(0, ()))
    _check_prediction(record.at("predictions"), plan.prediction, plan.placement)
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
    """Raise ConfigurationError if predictions or messages do not fit the stages of the
    placement.
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
"""A stage, a phase, and the number of the stage's micro-batch within a micro-batch of the step."""
_BACKWARD_PHASES_FOR_OTHER_STAGES = (Phase.BACKWARD, Phase.INPUT_GRADIENT)


def schedule_json(plan: Plan, timeline: Timeline) -> dict[str, object]:
    """Return the schedule of a plan as lists, dicts and scalars, with times in seconds and memory
    in bytes.

    The memory of a block is the change of occupied memory: positive for a forward, which saves
    tensors for backward; negative for a backward, or for both of its halves together.
    """
    schedule = plan.schedule
    stages = plan.prediction.stages
    proof = None if schedule.period is None else schedule.proof
    ratios = micro_batch_ratios(plan.placement, plan.summary.micro_batch_size) or (1,) * len(stages)
    # Most devices of a group have one order object in common, so each order is visited once.
    distinct = {id(order): order for order in schedule.tasks}.values()

    def kind_of(task: Task) -> TaskKind:
        return task.stage, task.phase, task.micro_batch % ratios[task.stage]

    found = {kind_of(task) for order in distinct for task in order}
    kinds = sorted(found, key=lambda kind: ("FBIW".index(kind[1].value), kind[0], kind[2]))
    index = {kind: position for position, kind in enumerate(kinds)}
    graph = StageGraph(schedule.devices, (), plan.prediction.edges, (), ratios)
    blocks = []
    for stage, phase, turn in kinds:
        own = stages[stage]
        needs = set(graph.needs(stage, phase, turn))
        if (
            phase in _BACKWARD_PHASES_FOR_OTHER_STAGES
        ):  # Another stage may have its backward whole or split.
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
        # `optimal` and `gap` count from the period's bound where there is a proven period, else
        # from the step's.
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
    """Return the schedule in the file `path`. Raises ConfigurationError, with the file and the key,
    if the schedule cannot run.
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
    """Yield the order of tasks of each device. Devices with equal lists, as in a device group,
    share one tuple.
    """

    def read_task(record: JsonRecord) -> Task:
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
