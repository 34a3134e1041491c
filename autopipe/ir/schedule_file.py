"""`schedule.json` of a plan: who runs what and when, as blocks (a phase of a stage) on units (micro-batches).

A stage that runs several micro-batches of its own for one of the largest has a block for each of these turns.

`schedule.json` of blocks given by hand: whole times, with what is known of how good the schedule is.

Common parts of every `schedule.json`, a plan's and one of blocks given by hand.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from autopipe.ir.block_schedule import Block, BlockGraph, BlockRepetend, BlockSchedule, check_blocks
from autopipe.ir.codec import JsonRecord, read_record
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.plan import Plan
from autopipe.ir.schedule import Phase, Proof, Repetend, Schedule, Task, micro_batch_ratios, on_each_device, sharing
from autopipe.ir.timeline import StagePrediction, Timeline

FORMAT = "autopipe.schedule/1"


def block_form(
    name: str, devices: Sequence[int], time: float, memory: int, after: Sequence[int], delays: Sequence[float] = ()
) -> dict[str, object]:
    """A block; `after` are indices into the list of blocks, `delays` stands there only where there are any."""
    form: dict[str, object] = {
        "name": name,
        "devices": list(devices),
        "time": time,
        "memory": memory,
        "after": list(after),
    }
    return {**form, "delays": list(delays)} if any(delays) else form


def order_form(tasks: Iterable[tuple[int, int, float]]) -> list[dict[str, object]]:
    """A device's order, from the block, the unit and the start of each of its tasks."""
    return [{"block": block, "unit": unit, "start": start} for block, unit, start in tasks]


_BLOCK = re.compile(r"(\d{1,9})([FBIW])(?:\.(\d{1,9}))?")

Kind = tuple[int, Phase, int]
"""A stage, what it does, and in which of its turns."""


def schedule_form(plan: Plan, timeline: Timeline) -> dict[str, object]:
    """The schedule of a plan as lists, dicts and scalars, with times in seconds and memory in bytes.

    A block's memory is what it adds: a forward what it keeps, a backward, or its halves together, as much less.
    """
    schedule, stages = plan.schedule, plan.prediction.stages
    turns = micro_batch_ratios(plan.placement, plan.summary.micro_batch_size) or (1,) * len(stages)
    distinct = {id(order): order for order in schedule.tasks}.values()  # Devices of a group mostly have one.
    kinds = sorted({_kind(task, turns) for order in distinct for task in order}, key=_block_order)
    index = {kind: position for position, kind in enumerate(kinds)}
    trains = plan.mode == "train"
    blocks = []
    for stage, phase, turn in kinds:
        after = sorted(index[kind] for kind in _before(plan, turns, (stage, phase, turn)) if kind in index)
        devices, memory = plan.placement.stages[stage].devices, _change(stages[stage], phase) if trains else 0
        name = f"{stage}{phase.value}" + (f".{turn}" if turns[stage] > 1 else "")
        blocks.append(block_form(name, devices, stages[stage].seconds(phase), memory, after))
    starts = {(span.device, span.task): span.start for span in timeline.own_spans}
    lanes = timeline.lanes or tuple((device,) for device in range(schedule.devices))
    orders = [
        order_form(
            (index[_kind(task, turns)], task.micro_batch // turns[task.stage], round(starts[devices[0], task], 12))
            for task in schedule.tasks[devices[0]]
        )
        for devices in lanes
    ]
    return {
        "format": FORMAT,
        "devices": schedule.devices,
        "units": schedule.micro_batches,
        "makespan": max((span.end for span in timeline.own_spans), default=0.0),
        "period": schedule.period,
        "lower_bound": _bound(plan),
        "optimal": plan.summary.optimal,
        "gap": plan.summary.gap,
        "proof": proof_form(schedule.proof),
        "peak_memory": list(timeline.peak_memory),
        "repetends": repetends_form(schedule.repetends),
        "blocks": blocks,
        "tasks": on_each_device(lanes, orders),
    }


def read_schedule(path: Path, stage_devices: tuple[tuple[int, ...], ...], turns: tuple[int, ...]) -> Schedule:
    """Order of tasks in `path`, for stages on these devices with these numbers of micro-batches a unit (() where all
    have one). Raises ConfigurationError with file and key.
    """
    record = read_record(path, FORMAT)
    turns = turns or (1,) * len(stage_devices)
    kinds = [_kind_of(block, stage_devices, turns) for block in record.at("blocks").items()]
    tasks = record.at("tasks")
    orders = tuple(_orders_of(tasks, kinds, turns))
    if len(orders) != record.at("devices").integer(1):
        tasks.refuse(f"one list for each of {record.at('devices').integer(1)} devices")
    repetends = tuple(repetend_of(each) for each in record.at("repetends").items())
    period = record.at("period")
    return Schedule(
        record.at("units").integer(1),
        orders,
        repetends or None,
        None if period.value is None else period.number(),
        proof_of(record.at("proof")),
    )


def _orders_of(tasks: JsonRecord, kinds: list[Kind], turns: tuple[int, ...]) -> Iterator[tuple[Task, ...]]:
    """The order of each device: one and the same where lists are equal, as they are within groups of devices."""
    known: list[tuple[object, tuple[Task, ...]]] = []
    for each in tasks.items():
        order = next((found for value, found in known if value == each.value), None)
        if order is None:
            order = tuple(_task_of(task, kinds, turns) for task in each.items())
            known.append((each.value, order))
        yield order


def _bound(plan: Plan) -> float:
    """Bound that `optimal` and `gap` count from: the period's where there is a proven period, otherwise the step's."""
    schedule = plan.schedule
    if schedule.proof is None or schedule.period is None:
        return plan.summary.lower_bound_s
    return schedule.proof.lower_bound


def repetends_form(repetends: Sequence[Repetend] | None) -> list[list[int]]:
    """The repetends as lists of whole numbers, none where they are not known."""
    return [[each.start, each.length, each.count, each.stride] for each in repetends or ()]


def proof_form(proof: Proof | None) -> dict[str, object] | None:
    """Proof, by the names of its fields."""
    return None if proof is None else {field.name: getattr(proof, field.name) for field in dataclasses.fields(proof)}


def proof_of(record: JsonRecord) -> Proof | None:
    """Inverse of `proof_form`. Raises ConfigurationError."""
    if record.value is None:
        return None
    order, lower_bound = record.at("order").text(), record.at("lower_bound").number()
    return Proof(order, lower_bound, record.at("optimal").boolean(), record.at("rounding").number())


def _kind(task: Task, turns: tuple[int, ...]) -> Kind:
    return task.stage, task.phase, task.micro_batch % turns[task.stage]


def _block_order(kind: Kind) -> tuple[int, int, int]:
    return "FBIW".index(kind[1].value), kind[0], kind[2]


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


def _before(plan: Plan, turns: tuple[int, ...], kind: Kind) -> list[Kind]:
    """The blocks that a block waits for on the same unit, which may have a later stage's backward whole or split."""
    stage, phase, turn = kind
    edges = plan.prediction.edges

    def overlapping(other: int, phase: Phase) -> list[Kind]:
        return [(other, phase, number) for number in sharing(turn, turns[stage], turns[other])]

    if phase is Phase.FORWARD:
        return [each for source, target in edges if target == stage for each in overlapping(source, phase)]
    if phase is Phase.WEIGHT_GRADIENT:
        return [(stage, Phase.INPUT_GRADIENT, turn)]
    later = [target for source, target in edges if source == stage]
    halves = (Phase.BACKWARD, Phase.INPUT_GRADIENT)
    return [
        (stage, Phase.FORWARD, turn),
        *(each for target in later for half in halves for each in overlapping(target, half)),
    ]


def _kind_of(record: JsonRecord, stage_devices: tuple[tuple[int, ...], ...], turns: tuple[int, ...]) -> Kind:
    name = record.at("name")
    match = _BLOCK.fullmatch(name.text())
    if match is None or int(match[1]) >= len(stage_devices):
        name.refuse(f"a stage below {len(stage_devices)} and a phase, such as 0F")
    stage, turn = int(match[1]), int(match[3] or 0)
    if turn >= turns[stage]:
        name.refuse(f"one of {turns[stage]} turns of stage {stage}, counted from 0")
    devices = record.at("devices")
    if devices.integers() != stage_devices[stage]:
        devices.refuse(f"the devices of stage {stage}: {list(stage_devices[stage])}")
    return stage, Phase(match[2]), turn


def _task_of(record: JsonRecord, kinds: list[Kind], turns: tuple[int, ...]) -> Task:
    block = record.at("block")
    if block.integer() >= len(kinds):
        block.refuse(f"the index of one of {len(kinds)} blocks")
    stage, phase, turn = kinds[block.integer()]
    return Task(stage, phase, record.at("unit").integer() * turns[stage] + turn)


def repetend_of(record: JsonRecord) -> Repetend:
    """One of the lists that `repetends_form` gave. Raises ConfigurationError."""
    cells = record.integers()
    if len(cells) != 4:
        record.refuse("start, length, count and stride")
    return Repetend(*cells)


_MOST = 2**53
"""Largest whole number that is taken: a larger one is not exact in every reader of JSON."""
_MOST_DEVICES = 4096


def block_schedule_form(schedule: BlockSchedule) -> dict[str, object]:
    """The schedule as lists, dicts and scalars; a block on several devices stands in the order of each."""
    graph, repetend = schedule.graph, schedule.repetend
    return {
        "format": FORMAT,
        "devices": graph.devices,
        "units": schedule.units,
        "micro_batches_per_unit": graph.micro_batches_per_unit,
        "memory": list(graph.memory),
        "makespan": schedule.makespan,
        "period": schedule.period,
        "lower_bound": schedule.lower_bound,
        "optimal": schedule.optimal,
        "gap": schedule.gap,
        "steady_bubble_rate": schedule.steady_bubble_rate,
        "peak_memory": list(schedule.peak_memory),
        "repetend": None if repetend is None else {"starts": repetend.starts, "offsets": repetend.offsets},
        "search_time_s": schedule.search_time_s,
        "blocks": [
            block_form(each.name, each.devices, each.time, each.memory, each.after, each.delays)
            for each in graph.blocks
        ],
        "tasks": [order_form((block, unit, start) for start, unit, block in order) for order in schedule.tasks],
    }


def read_block_schedule(path: Path) -> BlockSchedule:
    """The schedule in `path`, which can run. Raises ConfigurationError with file and key."""
    record = read_record(path, FORMAT)
    if record.has("repetends"):
        hint = "give the folder of the plan that it belongs to"
        raise ConfigurationError("the file is the schedule of a plan, not of blocks", hint, str(path))
    graph = _graph_of(record)
    try:
        graph.verify()
    except ConfigurationError as error:
        raise ConfigurationError(error.message, error.hint, f"{path}: {error.where}") from error
    schedule = BlockSchedule(
        graph=graph,
        starts=_starts_of(record, graph),
        period=_optional_whole(record, "period"),
        lower_bound=_whole(record.at("lower_bound")),
        optimal=record.at("optimal").boolean(),
        repetend=_repetend_of(record.at("repetend"), graph),
        search_time_s=record.at("search_time_s").number(),
    )
    try:
        check_blocks(schedule)
    except InfeasibleError as error:
        place = f"{path}: {error.where}" if error.where else str(path)
        raise ConfigurationError(error.message, "the tasks do not fit the blocks; search anew", place) from error
    if _whole(record.at("makespan")) != schedule.makespan:
        record.at("makespan").refuse(f"the end of the last task, {schedule.makespan}")
    return schedule


def _graph_of(record: JsonRecord) -> BlockGraph:
    devices = record.at("devices").integer(1)
    if devices > _MOST_DEVICES:
        record.at("devices").refuse(f"at most {_MOST_DEVICES} devices")
    blocks = tuple(_block_of(each) for each in record.at("blocks").items())
    memory: tuple[int | None, ...] = (None,) * devices
    if record.has("memory"):
        memory = tuple(None if each.value is None else _whole(each) for each in record.at("memory").items())
    unit = record.at("micro_batches_per_unit").integer(1) if record.has("micro_batches_per_unit") else 1
    return BlockGraph(devices, blocks, memory, unit)


def _block_of(record: JsonRecord) -> Block:
    return Block(
        name=record.at("name").text(),
        devices=record.at("devices").integers(),
        time=_whole(record.at("time"), -_MOST),
        memory=_whole(record.at("memory"), -_MOST),
        after=record.at("after").integers(),
        delays=tuple(_whole(each) for each in record.at("delays").items()) if record.has("delays") else (),
    )


def _starts_of(record: JsonRecord, graph: BlockGraph) -> tuple[tuple[int, ...], ...]:
    """The start of each block of each unit: each stands once in the order of each of its devices, at one time."""
    units, orders = record.at("units").integer(1), list(record.at("tasks").items())
    if len(orders) != graph.devices:
        record.at("tasks").refuse(f"one list for each of {graph.devices} devices")
    found: dict[tuple[int, int, int], int] = {}
    for device, order in enumerate(orders):
        for task in order.items():
            unit, index = task.at("unit").integer(), task.at("block").integer()
            if unit >= units:
                task.at("unit").refuse(f"one of {units} units")
            if index >= len(graph.blocks) or device not in graph.blocks[index].devices:
                task.at("block").refuse(f"the index of a block on device {device}")
            if (unit, index, device) in found:
                task.refuse("each block of a unit once")
            found[unit, index, device] = _whole(task.at("start"))
    _check_complete(record, graph, units, found)
    return tuple(
        tuple(found[unit, index, block.devices[0]] for index, block in enumerate(graph.blocks)) for unit in range(units)
    )


def _check_complete(record: JsonRecord, graph: BlockGraph, units: int, found: dict[tuple[int, int, int], int]) -> None:
    """That each block of each unit runs on all its devices, at one time; stops at the first that does not."""
    for unit in range(units):
        for index, block in enumerate(graph.blocks):
            starts = {found.get((unit, index, device)) for device in block.devices}
            if len(starts) > 1 or None in starts:
                what = "does not run" if starts == {None} else "does not start at one time on all its devices"
                message = f"block {block.name!r} of unit {unit} {what}"
                raise ConfigurationError(
                    message, "the tasks do not fit the blocks; search anew", f"{record.file}: tasks"
                )


def _repetend_of(record: JsonRecord, graph: BlockGraph) -> BlockRepetend | None:
    if record.value is None:
        return None
    starts, offsets = record.at("starts"), record.at("offsets")
    for each in (starts, offsets):
        if len(each.integers()) != len(graph.blocks):
            each.refuse(f"one number for each of {len(graph.blocks)} blocks")
    return BlockRepetend(starts.integers(), offsets.integers())


def _optional_whole(record: JsonRecord, key: str) -> int | None:
    return None if record.at(key).value is None else _whole(record.at(key))


def _whole(record: JsonRecord, least: int = 0) -> int:
    """A whole number of at least `least`, not too large."""
    value = record.integer(least)
    if value > _MOST:
        record.refuse("a number up to 2^53")
    return value
