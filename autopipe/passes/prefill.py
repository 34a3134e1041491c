"""Transfer the plan of a decoder to steps with more tokens per sequence (prefill). Stages, devices,
splits and schedule stay unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.kv_cache import TOKENS
from autopipe.ir.placement import Placement, Stage, recomputed_nodes
from autopipe.passes.frontend.load import load
from autopipe.passes.pipeline import PlanResult, read_request_model_uncached


def with_step_length(planned: PlanResult, length: int) -> PlanResult | None:
    """Return the plan of a decoder for steps with `length` tokens per sequence. None if the steps
    of `planned` already have at least `length` tokens, or if the model file fixes the number of
    tokens.

    Raise the errors of reading the model, and InfeasibleError if the graph for `length` tokens has
    other nodes than the planned graph.
    """
    graph = planned.problem.graph
    if graph.type_of(TOKENS).shape[1] >= length:
        return None
    source = planned.model.source or load(planned.request.model)
    symbol = next(
        info.type.tensor_type.shape.dim[1].dim_param
        for info in source.graph.input
        if info.name == TOKENS
    )
    if not symbol:
        return None
    dims = tuple(pair for pair in planned.request.dims if pair[0] != symbol)
    request = replace(planned.request, dims=(*dims, (symbol, length)))
    model = read_request_model_uncached(request, planned.plan.summary.micro_batch_size, source)
    plan = replace(
        planned.plan, placement=_transferred_placement(planned.plan.placement, graph, model.graph)
    )
    return replace(
        planned, plan=plan, model=model, problem=replace(planned.problem, graph=model.graph)
    )


def _transferred_placement(placement: Placement, graph: Graph, other: Graph) -> Placement:
    """Return a placement of `graph` transferred to `other`, the graph of the same model for other
    input shapes. Nodes correspond if they have equal operators and results.

    `other` may have additional nodes that each reading stage computes itself, such as tables that
    are constants in the smaller shape. Raise InfeasibleError for any other difference.
    """
    places = {(node.op, node.outputs): index for index, node in enumerate(other.nodes)}
    own = [
        places[node.op, node.outputs] for node in graph.nodes if (node.op, node.outputs) in places
    ]
    more = set(range(len(other.nodes))) - set(own)
    weights = [[entry.value for entry in each.parameters] for each in (graph, other)]
    if (
        len(own) < len(graph.nodes)
        or weights[0] != weights[1]
        or not more <= recomputed_nodes(other)
    ):
        raise InfeasibleError(
            "the operators of the graph differ between decoding and prefill shapes"
        )

    def transferred_stage(stage: Stage, more: set[int]) -> Stage:
        """Return `stage` with its nodes in `other` and the additional nodes `more`."""
        nodes = sorted({own[node] for node in stage.nodes} | more)
        splits = sorted((own[node], splits) for node, splits in stage.splits)
        return replace(stage, nodes=tuple(nodes), splits=tuple(splits))

    # A placement must assign each node to a stage of each pipeline. The first stage gets the
    # additional nodes, although each stage that reads their results computes them itself.
    firsts = {
        stage.pipeline: index for index, stage in reversed(tuple(enumerate(placement.stages)))
    }
    stages = enumerate(placement.stages)
    found = (
        transferred_stage(stage, more if firsts[stage.pipeline] == index else set())
        for index, stage in stages
    )
    return replace(placement, stages=tuple(found))
