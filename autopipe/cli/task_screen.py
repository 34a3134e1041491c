"""A rank's task graph in the terminal: its three sections, each loop once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import RenderableType
from rich.table import Table

from autopipe.cli.figures import bytes_text, devices_text
from autopipe.ir.task_graph import LoopedTasks, MessageEnd, TaskGraph, TaskNode

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
    table = Table(
        "rank", "stages", "tasks", "sends", "receives", "exchanges", "sums", "memory", box=None, pad_edge=False
    )
    for column in table.columns[2:]:
        column.justify = "right"
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
