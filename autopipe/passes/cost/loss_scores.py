"""Compare the two variants of a model's losses: logits saved for backward, or recomputed in
backward.

Both variants are graphs of one model (`Model.with_scores`). They differ only in the nodes from the
matmul that computes the logits to the loss, so these nodes determine which variant is faster. If
memory may not suffice, the variant that saves fewer bytes can permit a better plan, so the pipeline
then plans both variants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.plan import LossScores
from autopipe.ir.problem import NodeCost, Problem, Scores
from autopipe.passes.cost.measured import costed_work
from autopipe.passes.cost.memory import static_memory
from autopipe.passes.cost.roofline import node_seconds
from autopipe.passes.cost.stages import stage_costs

_MARGIN = 2
"""Factor on the bytes that one device needs for the whole model. It leaves memory for the buffers
of messages and collectives that exist only with several devices.
"""


@dataclass(frozen=True, slots=True)
class _VariantCost:
    """The cost of one variant for one micro-batch on one device.

    seconds: forward, and in training backward, of the nodes that only this variant has, averaged
    over the device types of the cluster.
    saved_bytes: bytes that all nodes of the graph save for backward.
    """

    seconds: float
    saved_bytes: int


def compare_scores(problem: Problem, other: Graph, choice: Scores) -> LossScores:
    """Return the seconds and saved bytes of both variants for one micro-batch on one device,
    averaged over the device types of the cluster.

    The problem's graph is the variant `choice`; `other` is the other variant of this graph.
    """
    work = costed_work(other, problem.precision, problem.cluster, problem.costs, problem.compiled)
    own = _variant_cost(problem, problem.graph, problem.work, other)
    others = _variant_cost(problem, other, work, problem.graph)
    keep, recompute = (own, others) if choice == "keep" else (others, own)
    saved = max(0, keep.saved_bytes - recompute.saved_bytes) if problem.train else 0
    return LossScores(choice, keep.seconds, recompute.seconds, saved)


def _variant_cost(
    problem: Problem, graph: Graph, work: Sequence[NodeCost], other: Graph
) -> _VariantCost:
    """Return the cost of the variant `graph`, whose nodes have the costs `work`. `other` is the
    graph of the other variant.
    """
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
    return _VariantCost(sum(seconds) / len(seconds), sum(each.kept_bytes for each in work))


def may_exceed_memory(problem: Problem) -> bool:
    """True if a placement of the problem might exceed the memory of a device.

    False if `_MARGIN` times the bytes that one device needs for the whole model fit into the memory
    of each device. In training, these bytes include the tensors that all micro-batches of a step
    save for backward.
    """
    placement = Placement(
        (Stage(tuple(range(len(problem.graph.nodes))), (0,), problem.micro_batch_size),)
    )
    (cost,) = stage_costs(problem, placement)
    kept = cost.kept_bytes * (problem.micro_batches if problem.train else 1)
    need = static_memory(problem, placement)[0] + cost.buffer_bytes + kept + cost.transient_bytes
    return _MARGIN * need > min(map(problem.memory_of, range(problem.cluster.size)))
