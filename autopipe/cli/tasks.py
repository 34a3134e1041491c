"""`autopipe show --tasks`: the task graphs of a plan's ranks, in the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.output import Output, bytes_text, devices_text, plain_table
from autopipe.cli.plan_folder import open_plan
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.program import Program
from autopipe.ir.task_graph import LoopedTasks, TaskGraph, TaskNode
from autopipe.passes.lower.lower import lower
from autopipe.passes.lower.task_graph import TaskSource


def show_tasks(output: Output, folder: Path, rank: int | None) -> None:
    """A table of the ranks and the tasks of rank 0, or those of `rank`, of the plan in `folder`, lowered again.

    Raises ConfigurationError for a folder without a plan, or a rank that it does not have; ModelError for its model.
    """
    planned = open_plan(folder)
    plan, problem = planned.plan, planned.problem
    devices = plan.schedule.devices
    if rank is not None and rank >= devices:
        raise ConfigurationError(f"there is no rank {rank}", hint=f"the plan has ranks 0 to {devices - 1}")
    loss = problem.loss if problem.train else None
    program = lower(problem.graph, plan.placement, plan.schedule, loss, problem.optimizer.shard)
    source = TaskSource.of(program, problem.graph, plan.placement, plan.prediction.stages)
    if output.as_json:
        ranks = range(program.world_size) if rank is None else (rank,)
        output.result({"plan": folder, "ranks": [task_graph_form(source.graph(each)) for each in ranks]})
        return
    screen = list(task_screen(source.graph(rank or 0), _buffers(program, rank or 0)))
    if rank is None and program.world_size > 1:
        table = rank_table([source.graph(each) for each in selected_ranks(program.world_size)], program.world_size)
        screen = [table, "", *screen]
    output.result({}, *screen)


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
    optional = {"messages": node.messages, "group": node.group, "inside": node.inside, "what": node.what}
    return {
        "id": place,
        "kind": node.kind,
        "name": node.name,
        "stage": node.stage,
        "micro_batch": node.micro_batch,
        "bytes": node.bytes,
        "after": node.after,
        "memory_bytes": held,
        **{key: value for key, value in optional.items() if value not in ((), "", None)},
    }


_MOST_ROWS = 48
"""Tasks listed of what stands in a row, or in one loop."""
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
    table = plain_table("rank", "stages", "tasks", "sends", "receives", "exchanges", "sums", "memory", right=2)
    for position, graph in enumerate(graphs):
        if len(graphs) < count and position == len(graphs) // 2:
            table.add_row("...")
        stages = sorted({node.stage for node in graph.nodes if node.stage is not None})
        computed = sum(
            node.kind in ("forward", "backward", "input_gradient", "weight_gradient") for node in graph.nodes
        )
        sizes = (
            sum(node.bytes for node in graph.nodes if node.kind in kinds)
            for kinds in (("send",), ("receive",), ("collective",), ("reduce", "gather"))
        )
        texts = (bytes_text(size) if size else "-" for size in sizes)
        table.add_row(str(graph.rank), devices_text(stages) or "-", str(computed), *texts, bytes_text(graph.peak_bytes))
    return table


def task_screen(graph: TaskGraph, buffers: str) -> Iterator[RenderableType]:
    """Table of one rank's tasks; `buffers` describes the memory for messages."""
    held, peak = bytes_text(graph.static_bytes), bytes_text(graph.peak_bytes)
    yield f"rank {graph.rank}: {len(graph.nodes):,} tasks a step; {held} all through it, at most {peak}{buffers}"
    yield ""
    freed: dict[int, list[str]] = {}
    for node in graph.nodes:
        if node.kind == "free":
            freed.setdefault(node.after[0], []).append(node.what)
    rows: list[_Row] = [_HEADS]
    for (section, _), several in groupby(
        graph.stretches, key=lambda each: (each.section, each.count > 1 and each.start)
    ):
        stretches = tuple(several)
        found = [row for each in stretches for row in _rows(graph, each, freed)]
        if len(found) > _MOST_ROWS:
            half = _MOST_ROWS // 2
            more = f"{len(found) - 2 * half:,} more, which --json has"
            found = [*found[:half], ("  ...", more, "", "", "", ""), *found[-half:]]
        if found:
            rows += [(_title(section, stretches[0]),), *found]
    # A row of a single cell is a line of its own.
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1), strict=True)]
    for row in rows:
        cells = zip(row, widths, _HEADS, strict=False)
        line = (f"{cell:>{width}}" if head in _RIGHT else f"{cell:<{width}}" for cell, width, head in cells)
        yield "  ".join(line).rstrip()


def _title(section: str, stretch: LoopedTasks) -> str:
    if stretch.count == 1:
        return section
    several = "micro-batch" if stretch.stride == 1 else "micro-batches"
    further = "" if stretch.stride is None else f", each time {stretch.stride} {several} further"
    return f"{section}, {stretch.count} times{further}; the first time:"


def _rows(graph: TaskGraph, stretch: LoopedTasks, freed: Mapping[int, Sequence[str]]) -> Iterator[_Row]:
    """A row a task, behind the collectives inside it.

    Memory is that in use during or, but for computations, after the task; in a loop the first and the last time.
    """
    inside: list[TaskNode] = []
    for place in range(stretch.start, stretch.end):
        node = graph.nodes[place]
        if node.kind == "collective":
            inside.append(node)
        elif node.kind != "free":
            yield from _collectives(inside)
            inside = []
            moved = bytes_text(node.bytes) if node.bytes else ""
            times = dict.fromkeys((graph.held[place], graph.held[stretch.last + place - stretch.start]))
            memory = " … ".join(map(bytes_text, times))
            yield (f"  {node.name}", _does(node), moved, memory, _after(graph, node), _names(freed.get(place, ())))
    yield from _collectives(inside)


def _collectives(nodes: list[TaskNode]) -> Iterator[_Row]:
    """The collectives of one task, those of one kind and group in one row."""
    found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for node in nodes:
        found.setdefault((node.what.partition(" ")[0], node.group), []).append(node.bytes)
    for (kind, group), sizes in found.items():
        times = f"{len(sizes)} × " if len(sizes) > 1 else ""
        does = f"{times}{kind.replace('_', '-')} over ranks {devices_text(group)}"
        yield ("", f"  {does}", bytes_text(sum(sizes)), "", "", "")


def _does(node: TaskNode) -> str:
    match node.kind:
        case "send" | "receive":
            ranks = sorted({each.peer for each in node.messages})
            channels = sorted({each.channel for each in node.messages})
            peers = f"rank{'s' if len(ranks) > 1 else ''} {devices_text(ranks)}"
            way = "send to" if node.kind == "send" else "receive from"
            return f"{way} {peers}, channel{'s' if len(channels) > 1 else ''} {devices_text(channels)}"
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


def _after(graph: TaskGraph, node: TaskNode) -> str:
    """Dependencies of a task: of a receive, on the other rank."""
    if node.kind == "receive":
        return _names(list(dict.fromkeys(each.task for each in node.messages)))
    return _names([graph.nodes[place].name for place in node.after])


def _names(names: Sequence[str]) -> str:
    if len(names) <= _MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MOST_NAMES - 1])} and {len(names) - _MOST_NAMES + 1} more"


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
    found = [(each.buffers, sizes[each.number]) for each in program.channels if each.target_rank == rank]
    found += [(each.gradient_buffers, sizes[each.number]) for each in program.channels if each.source_rank == rank]
    buffers = sum(count for count, _ in found)
    if not buffers:
        return ""
    total = sum(count * size for count, size in found)
    return f"; {buffers} buffers of {bytes_text(total)} in all for messages that come"
