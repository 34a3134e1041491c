"""Section 7.5: two branches of four blocks on eight devices, a block a device, as a chain and as a graph (Figure 8)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from autopipe.cli.bench.graphpipe.models import problem_of
from autopipe.cli.bench.graphpipe.published import CASE_STUDY, CASE_STUDY_SPEEDUP
from autopipe.cli.bench.graphpipe.steps import Step, graph_step, sequential_step
from autopipe.cli.bench.row import Case, Row
from autopipe.cli.drawing.picture import Picture, step_picture
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage

_CASE = "two-branch/p=8"
_BATCH = 64
_BLOCKS = 4
_SMALL, _LARGE = CASE_STUDY["micro_batch_size"]

_CHAIN, _GRAPH = "chain, micro-batches of", "graph, micro-batches of"

_SLOW_LAUNCH_S = 50e-6
"""Seconds to launch an operator in a runtime that makes a task of each: about what the paper's figures imply."""

_NOTE = (
    f"simulated, one block a device as in the paper; {_BATCH} samples a step, of which the paper does not tell the "
    "number; depth counts the last device's wait for the other branch, which it joins"
)


def case_study() -> list[Case]:
    """One case, with the two timelines of Figure 8."""
    return [Case(_CASE, "Figures 8 and 10", _rows, _pictures)]


def _rows() -> Iterator[Row]:
    for number, (name, size) in enumerate(((_CHAIN, _SMALL), (_GRAPH, _LARGE))):
        step, variant = _step(name, size), f"{name} {size}"
        yield Row(_CASE, "depth", CASE_STUDY["depth"][number], step.depth, "stages", variant, _NOTE)
        yield Row(_CASE, "micro_batch_size", size, _largest_that_fits(name), "samples", variant, _memory_note())
    for name in (_CHAIN, _GRAPH):
        for size in (_SMALL, _LARGE):
            step, variant = _step(name, size), f"{name} {size}"
            yield Row(_CASE, "throughput", None, step.throughput, "samples/s", variant, _NOTE)
            yield Row(_CASE, "peak_memory_bytes", None, max(step.timeline.peak_memory), "bytes", variant, _NOTE)
    yield from _gains(None, "", _NOTE)
    yield from _gains(_SLOW_LAUNCH_S, ", slow launches", f"{_NOTE}; launching an operator takes 50 us, not 5")


def _gains(launch_s: float | None, variant: str, note: str) -> Iterator[Row]:
    base, beside, both = (
        _step(*each, launch_s).throughput for each in ((_CHAIN, _SMALL), (_GRAPH, _SMALL), (_GRAPH, _LARGE))
    )
    gains = {"depth": beside / base, "micro_batch_size": both / beside, "both": both / base}
    for what, gain in gains.items():
        yield Row(_CASE, "speedup", CASE_STUDY_SPEEDUP[what], gain, "times", f"from {what}{variant}", note)


def _pictures() -> Iterator[Picture]:
    for name, size in ((_CHAIN, _SMALL), (_GRAPH, _LARGE)):
        step = _step(name, size)
        limits = (None,) * len(step.timeline.memory)
        yield step_picture(f"{name} {size}, depth {step.depth}", step.schedule, step.timeline, limits)


def _memory_limit() -> int:
    """The memory that both pipelines of the paper get by with."""
    return max(max(_step(*each).timeline.peak_memory) for each in ((_CHAIN, _SMALL), (_GRAPH, _LARGE)))


def _memory_note() -> str:
    return f"ours: the largest whose step fits into {_memory_limit() / 2**30:.2f} GiB, what theirs need by our count"


def _largest_that_fits(name: str) -> int:
    sizes = (size for size in (1, 2, 4, 8, 16) if max(_step(name, size).timeline.peak_memory) <= _memory_limit())
    return max(sizes)


@cache
def _step(name: str, size: int, launch_s: float | None = None) -> Step:
    problem = problem_of("two-branch", 2 * _BLOCKS, _BATCH)
    if launch_s is not None:
        devices = tuple(replace(device, launch_latency_s=launch_s) for device in problem.cluster.devices)
        problem = replace(problem, cluster=replace(problem.cluster, devices=devices))
    run = sequential_step if name == _CHAIN else graph_step
    return run(problem, _one_block_a_device(problem.graph, size))


def _one_block_a_device(graph: Graph, size: int) -> Placement:
    """Branch after branch; what joins them stands on the last device."""
    members: list[list[int]] = [[] for _ in range(2 * _BLOCKS)]
    for index, node in enumerate(graph.nodes):
        _, branch, block, *_ = (*node.name.split("/"), "", "")
        inside = branch.startswith("branches.") and block.startswith("blocks.")
        number = int(branch.partition(".")[2]) * _BLOCKS + int(block.partition(".")[2]) if inside else -1
        members[number].append(index)
    return Placement(tuple(Stage(tuple(nodes), (device,), size) for device, nodes in enumerate(members)))
