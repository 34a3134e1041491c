"""`schedule.json` of blocks given by hand: whole times, with what is known of how good the schedule is."""

from __future__ import annotations

from pathlib import Path

from autopipe.ir.block_check import check_blocks
from autopipe.ir.blocks import Block, BlockGraph, BlockRepetend, BlockSchedule
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.serial.record import JsonRecord, read_record
from autopipe.ir.serial.schedule_form import FORMAT, block_form, order_form

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
