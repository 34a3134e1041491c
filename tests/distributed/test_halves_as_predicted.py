"""What a generated program computes in each half of a backward, and holds between them, is what the
cost model says.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.flop_counter import FlopCounterMode

from autopipe.backends.torch.runtime.state.arguments import (
    Arguments,
    read_attributes,
    set_attributes,
)
from autopipe.backends.torch.runtime.step.weight_gradients import (
    PendingWeightGradients,
    WeightGradQueue,
    compute_weight_gradients,
)
from autopipe.ir.graph import DType, Graph
from autopipe.ir.placement import Placement, Stage
from autopipe.ir.schedule import Schedule, Task
from autopipe.passes.cost.stage_work import stage_work
from autopipe.passes.cost.stages import stage_costs, weight_gradient_fractions
from tests.distributed.support.builder import Builder
from tests.distributed.support.running import batch_of, drawn_parameters, write
from tests.passes.cost.graphs import cluster, problem


def model() -> tuple[Graph, str]:
    """A lookup, two layers, one with a bias, and the table once more as the head."""
    builder = Builder(DType.FLOAT32)
    table = builder.parameter((16, 8))
    hidden = builder.node("Gather", table, builder.input((4, 3), DType.INT64))
    wide = builder.node(
        "Add", builder.node("MatMul", hidden, builder.parameter((8, 24))), builder.parameter((24,))
    )
    hidden = builder.node(
        "Tanh", builder.node("MatMul", builder.node("Tanh", wide), builder.parameter((24, 8)))
    )
    logits = builder.node("MatMul", hidden, builder.node("Transpose", table, perm=(1, 0)))
    loss = builder.mean_square(logits)
    return builder.graph(loss), loss


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("halved_stage", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_work_and_memory_of_both_halves(tmp_path: Path) -> None:
    graph, loss = model()
    placement = Placement((Stage(tuple(range(len(graph.nodes))), (0,), 4),))
    order = tuple(Task.parse(word) for word in ("0F0", "0I0", "0W0"))
    write(graph, placement, Schedule(1, (order,)), loss, tmp_path / "program")
    given = problem(graph, cluster(1), micro_batches=1, loss=loss)
    (cost,) = stage_costs(given, placement)
    (work,) = stage_work(given, placement)
    shares = weight_gradient_fractions(graph)[[each.index for each in work.nodes]]
    products = [each.index for each in work.nodes if each.use.row.kind == "matmul"]
    total = sum(given.work[index].backward_flops for index in products)
    waits = sum(
        given.work[each.index].backward_flops * share
        for each, share in zip(work.nodes, shares, strict=True)
    )

    module = imported(tmp_path / "program" / "stage_00.py")
    parameters = list(drawn_parameters(graph, tmp_path / "program").values())
    for each in parameters:
        each.requires_grad_(True)
    later = WeightGradQueue(parameters)
    named = {f"w{index}": tensor for index, tensor in enumerate(parameters)}
    arguments = Arguments(device=torch.device("cpu"), weight_grads=later)
    set_attributes(arguments, read_attributes(module).attributes, named)
    (ids,) = (torch.from_numpy(array) for array in batch_of(graph, 1).values())
    (result,) = module.forward(arguments, ids)
    with FlopCounterMode(display=False) as counter:
        result.sum().backward()
    assert counter.get_total_flops() == total - waits
    waiting = later.take()
    known = {tensor.untyped_storage().data_ptr() for tensor in (*parameters, ids)}
    held = {place: size for place, size in _held(waiting).items() if place not in known}
    assert sum(held.values()) == cost.weight_kept_bytes
    with FlopCounterMode(display=False) as counter:
        compute_weight_gradients(waiting)
    assert counter.get_total_flops() == waits


def _held(waiting: PendingWeightGradients) -> dict[int, int]:
    """Bytes of the operands and the results' gradients that wait, by where they lie."""
    found: list[torch.Tensor] = []
    for each in waiting:
        assert isinstance(each.add, partial), "by formula, from the operand"
        found += [*each.add.args, *(gradient for (gradient,) in each.arrived)]
    storages = [tensor.untyped_storage() for tensor in found]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
