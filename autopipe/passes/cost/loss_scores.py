"""Comparison of the two forms of a model's losses: scores (logits) kept for backward, or recomputed
there.

Both forms are graphs of one model (`Model.with_scores`). Which of them is faster is local: only the
nodes from the product to the loss differ. Memory couples the choice with all others of a plan, so
the pipeline plans both forms if memory may be short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.plan import LossScores
from autopipe.ir.problem import Problem, Scores, Work
from autopipe.passes.cost.measured import costed_work
from autopipe.passes.cost.memory import static_memory
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stages import stage_costs

_MARGIN = 2
"""Factor on the bytes that one device needs for everything: with more devices, buffers of messages
and of collectives are needed besides.
"""


@dataclass(frozen=True, slots=True)
class _Form:
    """Seconds of the nodes that only one form has, forward and backward, and bytes that all nodes
    save for backward.
    """

    seconds: float
    saved_bytes: int


def compare_scores(problem: Problem, other: Graph, choice: Scores) -> LossScores:
    """Return what both forms of the losses take for one micro-batch, whole, on the mean of the
    cluster's devices.

    The problem's graph has the form `choice`, `other` is the same graph with the other form.
    """
    work = costed_work(other, problem.precision, problem.cluster, problem.costs, problem.compiled)
    own = _form(problem, problem.graph, problem.work, other)
    others = _form(problem, other, work, problem.graph)
    keep, recompute = (own, others) if choice == "keep" else (others, own)
    saved = max(0, keep.saved_bytes - recompute.saved_bytes) if problem.train else 0
    return LossScores(choice, keep.seconds, recompute.seconds, saved)


def _form(problem: Problem, graph: Graph, work: Sequence[Work], other: Graph) -> _Form:
    common = {(node.op, node.outputs) for node in other.nodes}
    own = [
        each
        for node, each in zip(graph.nodes, work, strict=True)
        if (node.op, node.outputs) not in common
    ]
    seconds = []
    for device in problem.cluster.kinds:
        forward, backward = node_seconds(own, device, problem.precision)
        seconds.append(float(forward.sum()) + (float(backward.sum()) if problem.train else 0.0))
    return _Form(sum(seconds) / len(seconds), sum(each.kept_bytes for each in work))


def may_be_short(problem: Problem) -> bool:
    """True if there may be a placement that does not fit the memory of a device.

    There is none if each device has memory for the whole model and everything that a step saves of
    its batch, with a margin.
    """
    placement = Placement(
        (Stage(tuple(range(len(problem.graph.nodes))), (0,), problem.micro_batch_size),)
    )
    (cost,) = stage_costs(problem, placement)
    kept = cost.kept_bytes * (problem.micro_batches if problem.train else 1)
    need = static_memory(problem, placement)[0] + cost.buffer_bytes + kept + cost.transient_bytes
    return _MARGIN * need > min(map(problem.memory_of, range(problem.cluster.size)))
