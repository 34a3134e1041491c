"""A whole model on one device."""

from __future__ import annotations

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.program import Program
from autopipe.ir.schedule import Phase, Schedule, Task
from autopipe.passes.lower.assemble import lower


def one_device_program(graph: Graph, micro_batches: int, micro_batch_size: int, loss: str | None) -> Program:
    """Program of `micro_batches` micro-batches in one stage, one after the other: training with `loss`, forwards
    without. Raises CodegenError as `lower` does.
    """
    stage = Stage(tuple(range(len(graph.nodes))), (0,), micro_batch_size)
    phases = (Phase.FORWARD, Phase.BACKWARD) if loss is not None else (Phase.FORWARD,)
    order = tuple(Task(0, phase, index) for index in range(micro_batches) for phase in phases)
    return lower(graph, Placement((stage,)), Schedule(micro_batches, (order,)), loss)
