"""Task graphs as JSON."""

from __future__ import annotations

from autopipe.ir.task_graph import TaskGraph, TaskNode


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
