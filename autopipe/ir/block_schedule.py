"""Problems and solutions of the schedule search in a form that does not depend on models (Lin et
al., "Tessel", HPCA 2024, section III). The file `schedule.json` contains such a schedule.

A block is a task of one micro-batch; it runs for a fixed time on one or several devices at once,
and changes the used memory of its devices when it starts. A block graph contains the blocks of one
micro-batch or of one group of micro-batches, called a unit. All units have the same blocks and are
independent. Times and memory are integers in arbitrary units of measurement. `check_start_times`
shares no code with the searches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated

from autopipe.ir.codec import AtLeast, AtMost, Count, Index, OmitDefault, decode, encode, encode_as
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.files import JsonRecord, read_json_record
from autopipe.ir.words import plural

SCHEDULE_FORMAT = "autopipe.schedule/1"
_MAX_INTEGER = 2**53
"""Maximum integer in a file, because some JSON readers round larger integers."""
NonNegativeInteger = Annotated[int, AtLeast(0), AtMost(_MAX_INTEGER)]
SignedInteger = Annotated[int, AtLeast(-_MAX_INTEGER), AtMost(_MAX_INTEGER)]
DeviceCount = Annotated[int, AtLeast(1), AtMost(4096)]


@dataclass(frozen=True, slots=True)
class Block:
    """One task of each unit (a micro-batch or a group of micro-batches). It runs on the devices
    `devices`, for the duration `time`.
    """

    name: str
    devices: tuple[Index, ...]
    time: SignedInteger
    memory: SignedInteger = 0
    """Change of the used memory of each of its devices when the block starts. Negative if the block
    frees memory.
    """
    after: tuple[Index, ...] = ()
    """Indices of the blocks of the same unit (micro-batch or group of micro-batches) that must have
    ended before this block starts.
    """
    delays: Annotated[tuple[NonNegativeInteger, ...], OmitDefault()] = ()
    """Minimum time between the end of each block in `after` and the start of this block, for
    example the time of a message; () if all are 0.
    """

    def delay(self, position: int) -> int:
        """Return the delay after the block at index `position` of `after`."""
        return self.delays[position] if self.delays else 0


@dataclass(frozen=True)
class BlockGraph:
    """The blocks of one unit (a micro-batch or a group of micro-batches), the number of devices,
    and their memory limits.
    """

    devices: DeviceCount
    blocks: tuple[Block, ...]
    memory: tuple[NonNegativeInteger | None, ...]
    """Memory limit of each device; None for a device without a limit."""
    micro_batches_per_unit: Annotated[int, AtLeast(1), OmitDefault()] = 1

    def verify(self) -> None:
        """Raise ConfigurationError if a block has invalid devices, times, dependencies or delays,
        or if blocks depend on one another in a cycle.
        """
        if not self.blocks:
            raise ConfigurationError("the placement has no blocks, expected at least one")
        if len(self.memory) != self.devices:
            raise ConfigurationError(
                f"the number of memory limits is {len(self.memory)}, expected one for each of "
                f"{self.devices} {plural(self.devices, 'device')}"
            )
        for block in self.blocks:
            message, hint = self._error_and_hint(block)
            if message:
                raise ConfigurationError(message, hint, f"block {block.name!r}")
        if stuck := set(range(len(self.blocks))) - set(self.order):
            path = [min(stuck)]
            while path[-1] not in path[:-1]:
                path.append(next(other for other in self.blocks[path[-1]].after if other in stuck))
            circle = [repr(self.blocks[index].name) for index in path[path.index(path[-1]) :]]
            if len(circle) > 8:
                circle = [*circle[:6], "...", circle[-1]]
            message = f"blocks wait in a circle: {' after '.join(circle)}"
            raise ConfigurationError(message, where=f"block {self.blocks[path[0]].name!r}")

    def _error_and_hint(self, block: Block) -> tuple[str, str]:
        """Return (error, hint) for an invalid block, or ("", "") for a valid one."""
        if not block.devices:
            return "the block is on no device", ""
        if len(set(block.devices)) != len(block.devices):
            return f"the block lists a device twice: {list(block.devices)}", ""
        for device in block.devices:
            if not 0 <= device < self.devices:
                return (
                    f"the block is on device {device}, which does not exist",
                    f"use devices 0 to {self.devices - 1}",
                )
        if block.time <= 0:
            return f"the time of the block is {block.time}, expected a number above 0", ""
        if any(not 0 <= other < len(self.blocks) for other in block.after):
            return "the block depends on a block that does not exist", ""
        if block.delays and (len(block.delays) != len(block.after) or min(block.delays) < 0):
            return (
                "the block requires one delay of 0 or more for each block on which it depends",
                "",
            )
        return "", ""

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Indices of the blocks in topological order. Blocks in a cycle are missing, and so are
        blocks that depend on a block in a cycle.
        """
        left = [len(set(block.after)) for block in self.blocks]
        found = [index for index, count in enumerate(left) if count == 0]
        for index in found:
            for other in self.following[index]:
                left[other] -= 1
                if left[other] == 0:
                    found.append(other)
        return tuple(found)

    @cached_property
    def following(self) -> tuple[tuple[int, ...], ...]:
        """For each block, the ascending indices of the blocks that depend on it directly."""
        return _invert_index_sets((block.after for block in self.blocks), len(self.blocks))

    @cached_property
    def waits(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each block, pairs (other, time): the block starts at least `time` after the start of
        the block with index `other`.
        """
        return tuple(
            tuple(
                (other, self.blocks[other].time + block.delay(at))
                for at, other in enumerate(block.after)
            )
            for block in self.blocks
        )

    @cached_property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """For each device, the ascending indices of its blocks."""
        return _invert_index_sets((block.devices for block in self.blocks), self.devices)

    @cached_property
    def loads(self) -> tuple[int, ...]:
        """For each device, the total time of its blocks of one unit (a micro-batch or a group of
        micro-batches).
        """
        return tuple(sum(self.blocks[index].time for index in members) for members in self.members)


def _invert_index_sets(sets: Iterable[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each number from 0 to below `count`, the ascending indices of the sets that
    contain it.
    """
    found: list[list[int]] = [[] for _ in range(count)]
    for index, each in enumerate(sets):
        for number in set(each):
            found[number].append(index)
    return tuple(map(tuple, found))


@dataclass(frozen=True, slots=True)
class BlockRepetend:
    """The steady state of a schedule (Tessel: repetend). A unit is a micro-batch or a group of
    micro-batches. Block i of unit n starts at `starts[i] + period * (n - offsets[i])`.

    Each repetition contains each block once, of different units. `offsets[i]` is the number of the
    unit of block i, counted from the oldest unit of the repetition (Tessel: micro-batch index).
    """

    starts: tuple[Index, ...]
    offsets: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class BlockSchedule:
    """Start times of all blocks of all units (micro-batches, or groups of micro-batches), with a
    lower bound and a proof of optimality.
    """

    graph: BlockGraph
    starts: tuple[tuple[int, ...], ...]
    """`starts[n][i]`: start of block i of unit n. A unit is a micro-batch or a group of
    micro-batches.
    """
    period: int | None = None
    """Time between the starts of consecutive units (micro-batches or groups of them) in the steady
    state; None if there is no steady state.
    """
    lower_bound: int = 0
    """Lower bound of the period or, if `repetend` is None, of the makespan. A unit is a micro-batch
    or a group of micro-batches. The bound of the period holds for schedules whose repetitions
    contain each block once. If memory is limited and the period exceeds the largest load of a
    device, a schedule whose repetitions contain several units can take less time per unit.
    """
    optimal: bool = False
    """True if the period or, if `repetend` is None, the makespan is proven optimal."""
    repetend: BlockRepetend | None = None
    search_time_s: float = 0.0

    @property
    def units(self) -> int:
        """Number of units: micro-batches, or groups of micro-batches."""
        return len(self.starts)

    @property
    def makespan(self) -> int:
        """End of the last block. Time starts at 0."""
        blocks = self.graph.blocks
        return max(
            start + block.time
            for unit in self.starts
            for start, block in zip(unit, blocks, strict=True)
        )

    @property
    def gap(self) -> float:
        """(value - lower bound) / value, where the value is the period or, if `repetend` is None,
        the makespan; 0 if it is proven optimal.
        """
        value = self.makespan if self.repetend is None or self.period is None else self.period
        return 0.0 if self.optimal else max(0.0, (value - self.lower_bound) / value)

    @property
    def steady_bubble_rate(self) -> float | None:
        """Fraction of a period in which the busiest device is idle; None if there is no period."""
        return 1.0 - max(self.graph.loads) / self.period if self.period else None

    @property
    def tasks(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For each device, its tasks (start, index of the micro-batch or group of micro-batches,
        index of the block), sorted by start.
        """
        found: list[list[tuple[int, int, int]]] = [[] for _ in range(self.graph.devices)]
        for unit, starts in enumerate(self.starts):
            for index, start in enumerate(starts):
                for device in self.graph.blocks[index].devices:
                    found[device].append((start, unit, index))
        return tuple(tuple(sorted(each)) for each in found)

    @property
    def peak_memory(self) -> tuple[int, ...]:
        """For each device, the maximum memory in use."""
        memory = [block.memory for block in self.graph.blocks]
        return tuple(
            max(accumulate((memory[index] for _, _, index in tasks), initial=0))
            for tasks in self.tasks
        )


def check_start_times(schedule: BlockSchedule) -> None:
    """Raise InfeasibleError if a block starts too early, while one of its devices runs another
    block, or without sufficient memory. A block starts too early if its start is negative, or
    before the end of a block on which it depends plus the delay between both.
    """
    blocks = schedule.graph.blocks

    def block_title(unit: int, index: int) -> str:
        return f"block {blocks[index].name!r} of micro-batch {unit}"

    for unit, starts in enumerate(schedule.starts):
        if len(starts) != len(blocks):
            raise InfeasibleError(
                f"the number of starts is {len(starts)}, expected one for each of {len(blocks)} "
                f"{plural(len(blocks), 'block')}",
                where=f"micro-batch {unit}",
            )
        for index, (start, block) in enumerate(zip(starts, blocks, strict=True)):
            if start < 0:
                raise InfeasibleError(
                    f"{block_title(unit, index)} starts at {start}, expected 0 or later"
                )
            for position, other in enumerate(block.after):
                ready = starts[other] + blocks[other].time + block.delay(position)
                if start < ready:
                    raise InfeasibleError(
                        f"{block_title(unit, index)} starts at {start}, but requires "
                        f"{block_title(unit, other)}, whose result arrives at {ready}"
                    )
    for device, (tasks, room) in enumerate(zip(schedule.tasks, schedule.graph.memory, strict=True)):
        used = free = 0
        before = ""
        where = f"device {device}"
        for start, unit, index in tasks:
            name = block_title(unit, index)
            if start < free:
                raise InfeasibleError(
                    f"{name} starts at {start}, but {before} runs on the device until {free}",
                    where=where,
                )
            used += blocks[index].memory
            if room is not None and used > room:
                message = f"memory in use is {used} when {name} starts, above the limit of {room}"
                raise InfeasibleError(message, where=where)
            free = start + blocks[index].time
            before = name


def task_order_json(tasks: Iterable[tuple[int, int, float]]) -> list[dict[str, object]]:
    """Return the tasks of a device as JSON objects. A task is (block, index of the micro-batch or
    group of micro-batches, start).
    """
    return [{"block": block, "unit": unit, "start": start} for block, unit, start in tasks]


def block_schedule_json(schedule: BlockSchedule) -> dict[str, object]:
    """Return the schedule as lists, dicts and scalars for JSON. A block on several devices is in
    the task list of each of them.
    """
    graph = schedule.graph
    figures = (
        "makespan",
        "period",
        "lower_bound",
        "optimal",
        "gap",
        "steady_bubble_rate",
        "peak_memory",
    )
    return {
        "format": SCHEDULE_FORMAT,
        "devices": graph.devices,
        "units": schedule.units,
        "micro_batches_per_unit": graph.micro_batches_per_unit,
        "memory": list(graph.memory),
        **{name: getattr(schedule, name) for name in figures},
        "repetend": encode_as(schedule.repetend, BlockRepetend | None),
        "search_time_s": schedule.search_time_s,
        "blocks": [
            encode(each if any(each.delays) else replace(each, delays=())) for each in graph.blocks
        ],
        "tasks": [
            task_order_json((block, unit, start) for start, unit, block in order)
            for order in schedule.tasks
        ],
    }


def read_block_schedule(path: Path) -> BlockSchedule:
    """Return the schedule in the file `path`. Raise ConfigurationError, with file and key, if the
    schedule is invalid.
    """
    record = read_json_record(path, SCHEDULE_FORMAT)
    if record.has("repetends"):
        hint = "give the folder of the plan that it belongs to"
        raise record.error("the file is the schedule of a plan, not of blocks", hint)
    if not record.has("memory"):
        devices = record.get("devices", DeviceCount)
        record.value["memory"] = (None,) * devices
    graph = decode(record, BlockGraph)
    try:
        graph.verify()
    except ConfigurationError as error:
        raise ConfigurationError(error.message, error.hint, f"{path}: {error.where}") from error
    repetend = record.get("repetend", BlockRepetend | None)
    for name in ("starts", "offsets") if repetend else ():
        if len(getattr(repetend, name)) != len(graph.blocks):
            record.at("repetend").at(name).reject(
                f"a list of one number for each of {len(graph.blocks)} "
                f"{plural(len(graph.blocks), 'block')}"
            )
    schedule = BlockSchedule(
        graph=graph,
        starts=_read_starts(record, graph),
        period=record.get("period", NonNegativeInteger | None),
        lower_bound=record.get("lower_bound", NonNegativeInteger),
        optimal=record.get("optimal", bool),
        repetend=repetend,
        search_time_s=record.get("search_time_s", float),
    )
    try:
        check_start_times(schedule)
    except InfeasibleError as error:
        place = f"{path}: {error.where}" if error.where else str(path)
        raise ConfigurationError(
            error.message, "search a new schedule for the blocks", place
        ) from error
    if record.get("makespan", NonNegativeInteger) != schedule.makespan:
        record.at("makespan").reject(f"the end of the last task, which is {schedule.makespan}")
    return schedule


def _read_starts(record: JsonRecord, graph: BlockGraph) -> tuple[tuple[int, ...], ...]:
    """Return the start times as one tuple per unit (a micro-batch or a group of micro-batches),
    with one entry per block. Raise ConfigurationError unless each block is once in the task list of
    each of its devices, with one start time.
    """
    units = record.get("units", Count)
    orders = list(record.at("tasks").items())
    if len(orders) != graph.devices:
        record.at("tasks").reject(
            f"one list for each of {graph.devices} {plural(graph.devices, 'device')}"
        )
    found: dict[tuple[int, int, int], int] = {}
    for device, order in enumerate(orders):
        for task in order.items():
            unit = task.get("unit", Index)
            index = task.get("block", Index)
            if unit >= units:
                task.at("unit").reject(f"the number of a micro-batch below {units}")
            if index >= len(graph.blocks) or device not in graph.blocks[index].devices:
                task.at("block").reject(f"the index of a block on device {device}")
            if (unit, index, device) in found:
                task.reject("a task that occurs once in the schedule")
            found[unit, index, device] = task.get("start", NonNegativeInteger)
    # A file can declare many more units than it has tasks. The loop raises an error at the first
    # incomplete unit, so its time depends on the number of tasks only.
    for unit in range(units):
        for index, block in enumerate(graph.blocks):
            starts = {found.get((unit, index, device)) for device in block.devices}
            if len(starts) > 1 or None in starts:
                what = (
                    "does not run"
                    if starts == {None}
                    else "does not start at one time on all its devices"
                )
                message = f"block {block.name!r} of micro-batch {unit} {what}"
                hint = "search a new schedule for the blocks"
                raise ConfigurationError(message, hint, f"{record.file}: tasks")
    return tuple(
        tuple(found[unit, index, block.devices[0]] for index, block in enumerate(graph.blocks))
        for unit in range(units)
    )
