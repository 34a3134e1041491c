"""The graph at the size of each stage's own micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autopipe.ir.batch import rebatched
from autopipe.ir.errors import CodegenError, InfeasibleError
from autopipe.ir.graph import Constant, Graph
from autopipe.ir.placement import Placement
from autopipe.ir.schedule import micro_batch_ratios

if TYPE_CHECKING:
    from autopipe.ir.program import StageCode


def micro_batch_size(graph: Graph, placement: Placement) -> int:
    """Samples of one evaluation of the graph; the stages' own where no input carries samples."""
    for name, axis in graph.batch_axes:
        return graph.type_of(name).shape[axis]
    return max(stage.micro_batch_size for stage in placement.stages)


def stage_micro_batches(graph: Graph, placement: Placement) -> tuple[int, ...]:
    """Micro-batches of its own that each stage makes of one of the graph's.

    Raises CodegenError where the samples cannot be shared out like that.
    """
    try:
        turns = micro_batch_ratios(placement, micro_batch_size(graph, placement))
    except InfeasibleError as error:
        raise CodegenError(error.message, hint=error.hint) from error
    return turns or (1,) * len(placement.stages)


def stage_graphs(graph: Graph, placement: Placement) -> tuple[Graph, ...]:
    """For each stage the graph of one of its own micro-batches; nodes, values and parameters keep names and places.

    Raises ModelError where the graph's batch cannot shrink.
    """
    sizes = [stage.micro_batch_size for stage in placement.stages]
    whole = micro_batch_size(graph, placement)
    by_size = {size: graph if size == whole else rebatched(graph, size) for size in sizes}
    return tuple(by_size[size] for size in sizes)


def with_numbered_constants(codes: Sequence[StageCode], graphs: Sequence[Graph], graph: Graph) -> tuple[StageCode, ...]:
    """The stages with constants numbered over all graphs: those that `graph` has too keep their places in it."""
    numbers = {id(constant): index for index, constant in enumerate(graph.constants)}

    def number(constant: Constant) -> int:
        return numbers.setdefault(id(constant), len(numbers))

    def numbered(code: StageCode, own: Graph) -> StageCode:
        if own is graph:
            return code
        constants = ((number(own.constants[index]), constant) for index, constant in code.constants)
        return replace(code, constants=tuple(sorted(constants, key=lambda each: each[0])))

    return tuple(numbered(code, own) for code, own in zip(codes, graphs, strict=True))
