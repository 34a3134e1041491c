"""The first candidate: a plan by rule of thumb, that nearly any memory holds and no search is needed for."""

from __future__ import annotations

from autopipe.ir.graph import Graph
from autopipe.passes.auto.candidate import Candidate
from autopipe.passes.batching import divisors
from autopipe.passes.placement.grid import Grid
from autopipe.passes.request import Request

_SHARE = 1 / 4
"""The part of a device's memory that parameters and what is kept beside them may fill."""
_PER_STAGE = 4
"""Micro-batches a stage, about: a pipeline then idles a fifth of the step."""
_FEWEST = 16
"""Micro-batches of few stages: one stage needs all at once that backward needs of one."""


def first_candidate(request: Request, graph: Graph) -> Candidate | None:
    """The devices of a node share each layer; as few stages as memory allows, and replicas of those.

    Stages run their forward again where memory asks for it. None where the request says otherwise, or the batch cannot
    be shared so.
    """
    if request.batch_size is None or request.micro_batches or request.micro_batch_size or request.constraints:
        return None
    cluster = request.cluster
    tensor = max(each for each in range(1, cluster.devices_per_node + 1) if cluster.size % each == 0)
    state = sum(parameter.value.bytes for parameter in graph.parameters) * (2 + request.optimizer.states)
    limit = request.memory_limit or min(device.memory_bytes for device in cluster.devices)
    groups = cluster.size // tensor
    stages = [count for count in divisors(groups) if state / (count * tensor) <= _SHARE * limit]
    pipeline = min(stages, default=groups)
    data = groups // pipeline
    counts = [count for count in divisors(request.batch_size) if request.batch_size // count % data == 0]
    if not counts:
        return None
    enough = [count for count in counts if count >= max(_FEWEST, _PER_STAGE * pipeline)]
    return Candidate(Grid(pipeline, data, tensor), min(enough, default=counts[-1]), recompute="auto")
