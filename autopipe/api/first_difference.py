"""Search of the first value of the forward pass that differs between the ranks and one device, or
between one device and ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from autopipe.api.codegen import lower_plan
from autopipe.api.plan_folder import open_plan
from autopipe.backends.torch.codegen.stage import Style, emit_forward
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.modes.records import record_file
from autopipe.backends.torch.verification import array_difference
from autopipe.ir.graph import Graph
from autopipe.ir.layout import Layout
from autopipe.ir.ops import spaces_of
from autopipe.ir.problem import Problem
from autopipe.ir.program import Compute, StageCode
from autopipe.passes.analysis.micro_batches import stage_graphs
from autopipe.passes.analysis.resharding import node_layouts
from autopipe.passes.frontend.cleanup import remove_dropout
from autopipe.passes.lower.lower import one_device_program

_DIFFERENCE_FACTOR = 16
"""Factor of the bound for well-conditioned steps beyond which a value counts as different. A single
value may differ more than the loss that is computed from it.
"""
Arrays = Mapping[str, np.ndarray]


class _WrittenValue(NamedTuple):
    """A value that a node of a stage writes: the index of the node, the name of the value in the
    graph, its variable in the program, and its layout over the devices of the stage.
    """

    node: int
    value: str
    variable: str
    layout: Layout


def first_difference(manifest: Manifest, ranks: Path, one: Path) -> str:
    """Return a sentence about the first value, in the order of the graph, that differs by far more
    than rounding errors; "" if there is none, or if the parent folder of the program does not hold
    its plan.

    `ranks` and `one` are folders with the values that the ranks and one device recorded in the
    first micro-batch.
    """
    planned = open_plan(manifest.folder.parent, manifest.model)
    if planned.digest != manifest.plan:
        return ""
    problem = planned.problem
    placement = planned.plan.placement
    loss = problem.loss if problem.train else None
    program = lower_plan(planned, prove=False)
    expected = _one_device_values(problem, loss, one)
    limit = _DIFFERENCE_FACTOR * manifest.rounding.bound
    found = []
    for stage, own in zip(program.stages, stage_graphs(problem.graph, placement), strict=True):
        blocks = {rank: _read_values(ranks, stage.stage, rank) for rank in stage.devices}
        for each in _written_values(stage, own, manifest.style):
            if each.value in expected:
                # The program on one device recorded its largest micro-batch. The first micro-batch
                # of this stage consists of its first samples, so the recorded value is cut to them.
                whole = expected[each.value][tuple(map(slice, own.type_of(each.value).shape))]
                found += [
                    (each.node, stage.stage, rank, each.value, relative)
                    for position, rank in enumerate(stage.devices)
                    if each.variable in blocks[rank]
                    and not (
                        relative := _relative_difference(
                            blocks[rank][each.variable], whole, each.layout, position
                        )
                    )
                    <= limit
                ]
    if not found:
        return ""
    node, number, rank, value, relative = min(found)
    made = problem.graph.nodes[node]
    return (
        f"the first value that differs is {value!r}, by {relative:.1e}: {made.op} "
        f"{made.name!r}, stage {number}, "
        f"rank {rank}"
    )


def first_difference_from_reference(
    manifest: Manifest, one: Path, reference: Callable[[Collection[str]], Mapping[str, np.ndarray]]
) -> str:
    """Return a sentence about the first value, in the order of the ONNX file, that differs between
    one device and the reference; "" if there is none, or if the plan is not available.

    `one` is a folder with the recorded values of one device. `reference` returns values by name.
    """
    planned = open_plan(manifest.folder.parent, manifest.model)
    if planned.digest != manifest.plan:
        return ""
    graph = planned.problem.graph
    values = _one_device_values(planned.problem, None, one)
    for name, array in reference(values.keys()).items():
        if values[name].shape == array.shape:
            relative = array_difference("", values[name], array).relative
            if not relative <= _DIFFERENCE_FACTOR * manifest.rounding.bound:
                made = graph.nodes[graph.producer(name) or 0]
                return (
                    f"the first value that differs is {name!r}, by {relative:.1e}: {made.op} "
                    f"{made.name!r}"
                )
    return ""


def _one_device_values(problem: Problem, loss: str | None, folder: Path) -> Arrays:
    """Return the values that one device recorded, by their names in the graph."""
    graph = problem.graph if loss is not None else remove_dropout(problem.graph)
    alone = one_device_program(graph, problem.micro_batches, problem.micro_batch_size, loss)
    recorded = _read_values(folder, 0, 0)
    codes = emit_forward(alone.stages[0]).codes
    return {name: recorded[code] for name, code in codes.items() if code in recorded}


def _relative_difference(
    block: np.ndarray, whole: np.ndarray, layout: Layout, position: int
) -> float:
    return array_difference("", block, whole[layout.shard(position).slices]).relative


def _read_values(folder: Path, stage: int, rank: int) -> Arrays:
    with np.load(record_file(folder, "values", stage, rank), allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def _written_values(stage: StageCode, graph: Graph, style: Style) -> Iterator[_WrittenValue]:
    """Yield the values that nodes of a stage write, without partial sums. The variable of a value
    inside the function of a layer is "".
    """
    codes = emit_forward(stage, style).codes
    spaces = spaces_of(graph)
    for operation in stage.operations:
        if isinstance(operation, Compute):
            index = operation.node
            form = node_layouts(graph, index, spaces(index), operation.splits, len(stage.devices))
            for local, value, layout in zip(
                operation.signature.results, form.node.outputs, form.results, strict=True
            ):
                if (
                    local is not None
                    and layout is not None
                    and not layout.is_partial
                    and local.name in codes
                ):
                    yield _WrittenValue(index, value, codes[local.name], layout)
