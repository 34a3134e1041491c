"""The first candidate: a plan by rule of thumb, that nearly any memory holds and no search is needed for."""

from __future__ import annotations

from autopipe.passes.auto.candidate import Candidate
from autopipe.passes.placement.grid.strategy import Grid
from autopipe.passes.request import Request


def first_candidate(request: Request) -> Candidate | None:
    """The devices of a node share each layer, nodes are a pipeline, and micro-batches have one sample.

    None where the request says otherwise.
    """
    if request.batch_size is None or request.micro_batches or request.micro_batch_size or request.constraints:
        return None
    cluster = request.cluster
    tensor = max(each for each in range(1, cluster.devices_per_node + 1) if cluster.size % each == 0)
    return Candidate(Grid(cluster.size // tensor, 1, tensor), micro_batches=request.batch_size)
