"""`autopipe show --tasks`: the task graphs of a plan's ranks, in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.output import bytes_text, devices_text, plain_table
from autopipe.cli.plan_folder import open_plan
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.program import Program
from autopipe.ir.task_graph import LoopedTasks, MessageEnd, TaskGraph, TaskNode
from autopipe.passes.lower.lower import lower
from autopipe.passes.lower.task_graph import TaskSource


def task_graph_form(graph: TaskGraph) -> dict[str, object]:
    """One rank's task graph, all of it; a task's `id` is its place in the rank's order."""
    return {
        "rank": graph.rank,
        "static_memory_bytes": graph.static_bytes,
        "peak_memory_bytes": graph.peak_bytes,
        "tasks": [_task_form(place, node, graph.held[place]) for place, node in enumerate(graph.nodes)],
        "loops": [
            {"section": each.section, "first": each.start, "tasks": each.end - each.start, "times": each.count}
            for each in graph.stretches
            if each.count > 1
        ],
    }


def _task_form(place: int, node: TaskNode, held: int) -> dict[str, object]:
    found: dict[str, object] = {
        "id": place,
        "kind": node.kind,
        "name": node.name,
        "stage": node.stage,
        "micro_batch": node.micro_batch,
        "bytes": node.bytes,
        "after": node.after,
        "memory_bytes": held,
    }
    if node.messages:
        found["messages"] = node.messages
    if node.group:
        found["group"] = node.group
    if node.inside is not None:
        found["inside"] = node.inside
    if node.what:
        found["what"] = node.what
    return found


_MOST_ROWS = 48
"""Tasks shown of what stands in a row, or in one loop."""
_MOST_NAMES = 3
_MOST_RANKS = 16
_Row = tuple[str, ...]
_HEADS = ("task", "does", "bytes", "memory", "after", "frees")
_RIGHT = ("bytes", "memory")


def selected_ranks(count: int) -> tuple[int, ...]:
    """The ranks of the table of ranks: of many, the first and the last ones."""
    half = _MOST_RANKS // 2
    return tuple(range(count)) if count <= _MOST_RANKS else (*range(half), *range(count - half, count))


def rank_table(graphs: Sequence[TaskGraph], count: int) -> Table:
    """A row a rank, of `count`."""
    table = plain_table("rank", "stages", "tasks", "sends", "receives", "exchanges", "sums", "memory", right=2)
    for position, graph in enumerate(graphs):
        if len(graphs) < count and position == len(graphs) // 2:
            table.add_row("...")
        stages = sorted({node.stage for node in graph.nodes if node.stage is not None})
        sizes = [
            sum(node.bytes for node in graph.nodes if node.kind in kinds)
            for kinds in (("send",), ("receive",), ("collective",), ("reduce", "gather"))
        ]
        computed = sum(
            node.kind in ("forward", "backward", "input_gradient", "weight_gradient") for node in graph.nodes
        )
        texts = (bytes_text(size) if size else "-" for size in sizes)
        table.add_row(str(graph.rank), devices_text(stages) or "-", str(computed), *texts, bytes_text(graph.peak_bytes))
    return table


def task_screen(graph: TaskGraph, buffers: str) -> Iterator[RenderableType]:
    """Table of one rank's tasks; `buffers` describes the memory for messages."""
    held, peak = bytes_text(graph.static_bytes), bytes_text(graph.peak_bytes)
    yield f"rank {graph.rank}: {len(graph.nodes):,} tasks a step; {held} all through it, at most {peak}{buffers}"
    yield ""
    rows: list[_Row] = [_HEADS]
    frees = _frees(graph)
    for title, several in groupby(graph.stretches, key=lambda each: (each.section, each.count > 1 and each.start)):
        stretches = tuple(several)
        found = [row for each in stretches for row in _rows(graph, each, frees)]
        if found:
            rows += [(_title(title[0], stretches[0]),), *_bounded(found)]
    yield from _aligned(rows)


def _aligned(rows: Sequence[_Row]) -> Iterator[str]:
    """Rows as lines; one of a single cell is a line of its own."""
    full = [row for row in rows if len(row) > 1]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    for row in rows:
        cells = zip(row, widths, _HEADS, strict=False)
        yield "  ".join(
            f"{cell:>{width}}" if head in _RIGHT else f"{cell:<{width}}" for cell, width, head in cells
        ).rstrip()


def _title(section: str, stretch: LoopedTasks) -> str:
    if stretch.count == 1:
        return section
    several = "micro-batch" if stretch.stride == 1 else "micro-batches"
    further = "" if stretch.stride is None else f", each time {stretch.stride} {several} further"
    return f"{section}, {stretch.count} times{further}; the first time:"


def _bounded(rows: list[_Row]) -> Iterator[_Row]:
    """The rows, the middle ones left out where they are many."""
    if len(rows) <= _MOST_ROWS:
        yield from rows
        return
    half = _MOST_ROWS // 2
    yield from rows[:half]
    yield ("  ...", f"{len(rows) - 2 * half:,} more, which --json has", "", "", "", "")
    yield from rows[-half:]


def _rows(graph: TaskGraph, stretch: LoopedTasks, frees: dict[int, list[TaskNode]]) -> Iterator[_Row]:
    inside: list[TaskNode] = []
    for place in range(stretch.start, stretch.end):
        node = graph.nodes[place]
        if node.kind == "free":
            continue
        if node.kind == "collective":
            inside.append(node)
            continue
        yield from _collectives(inside)
        inside = []
        moved = "" if not node.bytes else bytes_text(node.bytes)
        freed = _names([each.what for each in frees.get(place, ())])
        memory = _memory(graph, stretch, place)
        yield (f"  {node.name}", _does(node), moved, memory, _after(graph, node), freed)
    yield from _collectives(inside)


def _collectives(nodes: list[TaskNode]) -> Iterator[_Row]:
    """The collectives of one task, alike ones in one row."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for node in nodes:
        found.setdefault((node.what.partition(" ")[0], node.group), []).append(node.bytes)
    for (kind, group), sizes in found.items():
        times = f"{len(sizes)} × " if len(sizes) > 1 else ""
        does = f"{times}{kind.replace('_', '-')} over ranks {devices_text(group)}"
        yield ("", f"  {does}", bytes_text(sum(sizes)), "", "", "")


def _does(node: TaskNode) -> str:
    match node.kind:
        case "send":
            return f"send to {_peers(node.messages)}"
        case "receive":
            return f"receive from {_peers(node.messages)}"
        case "accumulate":
            return "add up gradients"
        case "reduce":
            kind = "reduce-scatter" if node.what else "all-reduce"
            return f"{kind} of gradients over ranks {devices_text(node.group)}"
        case "update":
            return "update of parameters"
        case "gather":
            return f"all-gather of parameters over ranks {devices_text(node.group)}"
    return node.kind.replace("_", " ")


def _peers(messages: tuple[MessageEnd, ...]) -> str:
    """The other ranks of messages, with their channels."""
    ranks = sorted({each.peer for each in messages})
    channels = sorted({each.channel for each in messages})
    words = ("rank" if len(ranks) == 1 else "ranks", "channel" if len(channels) == 1 else "channels")
    return f"{words[0]} {devices_text(ranks)}, {words[1]} {devices_text(channels)}"


def _after(graph: TaskGraph, node: TaskNode) -> str:
    """Dependencies of a task: of a receive, on the other rank."""
    if node.kind == "receive":
        return _names(list(dict.fromkeys(each.task for each in node.messages)))
    return _names([graph.nodes[place].name for place in node.after])


def _names(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"


def _memory(graph: TaskGraph, stretch: LoopedTasks, place: int) -> str:
    """Memory in use during or, but for computations, after a task; the first and the last time of a loop."""
    first, last = graph.held[place], graph.held[stretch.last + place - stretch.start]
    return bytes_text(first) if first == last else f"{bytes_text(first)} … {bytes_text(last)}"


def _frees(graph: TaskGraph) -> dict[int, list[TaskNode]]:
    """Nodes freed after each task."""
    found: dict[int, list[TaskNode]] = {}
    for node in graph.nodes:
        if node.kind == "free":
            found.setdefault(node.after[0], []).append(node)
    return found


@dataclass(frozen=True, slots=True)
class TaskView:
    """The task graphs of one rank, or of all."""

    folder: Path
    source: TaskSource
    rank: int | None

    @staticmethod
    def open(folder: Path, rank: int | None) -> TaskView:
        """Tasks of the plan in `folder`, lowered again from its model.

        Raises ConfigurationError for a folder without a plan, or a rank that it does not have; ModelError for its
        model.
        """
        planned = open_plan(folder)
        plan, problem = planned.plan, planned.problem
        devices = plan.schedule.devices
        if rank is not None and rank >= devices:
            raise ConfigurationError(f"there is no rank {rank}", hint=f"the plan has ranks 0 to {devices - 1}")
        loss = problem.loss if problem.train else None
        program = lower(problem.graph, plan.placement, plan.schedule, loss, problem.optimizer.shard)
        return TaskView(folder, TaskSource.of(program, problem.graph, plan.placement, plan.prediction.stages), rank)

    def screen(self) -> Iterator[RenderableType]:
        """A table of the ranks and the tasks of rank 0, or those of the rank that was asked for."""
        program = self.source.program
        if self.rank is None and program.world_size > 1:
            yield rank_table(
                [self.source.graph(rank) for rank in selected_ranks(program.world_size)], program.world_size
            )
            yield ""
        rank = self.rank or 0
        yield from task_screen(self.source.graph(rank), _buffers(program, rank))

    def data(self) -> dict[str, object]:
        """The graphs, whole."""
        ranks = range(self.source.program.world_size) if self.rank is None else (self.rank,)
        return {"plan": self.folder, "ranks": [task_graph_form(self.source.graph(rank)) for rank in ranks]}


def _buffers(program: Program, rank: int) -> str:
    """Receive buffers of a rank, in words."""
    sizes = {
        piece.channel: piece.sent.elements * value.dtype.itemsize
        for code in program.ranks
        for wired in code.stages
        for piece in wired.sends
        for value in program.stages[wired.stage].outputs
        if value.name == piece.tensor
    }
    rings = [(each.buffers, sizes[each.number]) for each in program.channels if each.target_rank == rank]
    rings += [(each.gradient_buffers, sizes[each.number]) for each in program.channels if each.source_rank == rank]
    rings = [(count, size) for count, size in rings if count]
    if not rings:
        return ""
    total = sum(count * size for count, size in rings)
    buffers = sum(count for count, _ in rings)
    return f"; {buffers} buffers of {bytes_text(total)} in all for messages that come"
