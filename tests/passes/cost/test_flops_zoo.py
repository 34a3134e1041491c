"""Operations of the zoo's models, forward and backward, against what torch counts while the emitted
code runs.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.configs import zoo
from autopipe.ir.graph import Graph, Value
from autopipe.ir.space import AxisKind
from autopipe.passes.analysis.input_ranges import input_ranges
from autopipe.passes.analysis.operators import PRODUCT_KINDS, OpInstance, op_instances
from autopipe.passes.cost.roofline import roofline_costs
from autopipe.passes.frontend.read import read_model
from tests.conformance.adapter import forward_of, stage_of, to_tensor

BATCH = 2
MODELS = sorted(zoo.MODELS)
ATEN = torch.ops.aten


def attention_forward(query, key, value, *_, **__):  # type: ignore[no-untyped-def]
    return sdpa_flop_count(query, key, value)


def attention_backward(gradient, query, key, value, *_, **__):  # type: ignore[no-untyped-def]
    return sdpa_backward_flop_count(gradient, query, key, value)


# torch counts attention on CUDA only; the CPU's kernels are given the same formulas.
KERNELS = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: attention_forward,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


TOLERANCES = {
    # The CPU's kernel for attention with a trained bias keeps the scores; others, and the row,
    # compute them again.
    "mt5": 0.01,
    # The first step's state is zero and gets no gradient.
    "rnnlm": 0.02,
}


def sums(use: OpInstance) -> bool:
    """Whether torch counts a use: a product that adds up nothing runs as a multiplication, which it
    does not count.
    """
    plain = any(axis.kind is AxisKind.SUM for axis in use.space.axes)
    return use.row.kind in PRODUCT_KINDS and (plain or use.row.name != "Einsum")


def graph_of(name: str, folder: Path) -> Graph:
    model = zoo.configure(name, {"weights": "none", "loss": "true"})
    path = folder / f"{name}.onnx"
    zoo.build(model).save(path)
    return read_model(path, batch=BATCH).graph


def parameter(value: Value, trainable: bool) -> torch.Tensor:
    tensor = torch.full(value.shape, 0.01, dtype=getattr(torch, value.dtype.value))
    return tensor.requires_grad_(trainable and value.dtype.is_floating)


def counted(graph: Graph) -> tuple[int, int]:
    """What torch counts for one forward and for its backward."""
    torch.manual_seed(0)
    inputs = []
    for entry in input_ranges(graph):
        dtype = getattr(torch, entry.value.dtype.value)
        number = (
            torch.rand(entry.value.shape)
            if entry.below is None
            else torch.rand(entry.value.shape) * entry.below
        )
        inputs.append(number.to(dtype))
    held = SimpleNamespace(
        device=torch.device("cpu"),
        **{
            f"w{index}": parameter(each.value, each.trainable)
            for index, each in enumerate(graph.parameters)
        },
        **{f"c{index}": to_tensor(each.array) for index, each in enumerate(graph.constants)},
    )
    forward = forward_of(emit_forward(stage_of(graph)).text)
    with torch.backends.mkldnn.flags(enabled=False):
        with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
            results = forward(held, *inputs)
        with FlopCounterMode(display=False, custom_mapping=KERNELS) as back:
            sum(result.sum() for result in results if result.requires_grad).backward()
    return counter.get_total_flops(), back.get_total_flops()


@pytest.mark.parametrize("name", MODELS)
def test_totals_are_those_that_torch_counts(name: str, tmp_path: Path) -> None:
    graph = graph_of(name, tmp_path)
    work = [
        work
        for work, use in zip(roofline_costs(graph), op_instances(graph), strict=True)
        if sums(use)
    ]
    forward, backward = counted(graph)
    assert forward > 0
    assert sum(each.forward_flops for each in work) == forward
    assert sum(each.backward_flops for each in work) == pytest.approx(
        backward, rel=TOLERANCES.get(name, 0.0)
    )
