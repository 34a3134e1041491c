"""Emitted code on torch's meta device: it fails where a tensor is made on another device, or
numbers are waited for.

What holds there holds on a GPU: no operator names a device of its own, and none stops the host
until results are in.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autopipe.backends.torch.codegen.call import torch_dtype
from autopipe.backends.torch.codegen.stage import emit_forward
from tests.conformance.adapter import forward_of, stage_of, to_tensor
from tests.conformance.test_splits import SINGLE, use_in

WAITING = frozenset({"Compress", "NonZero", "RoiAlign"})
"""Operators that look at numbers while they run: where a condition holds, how many samples a region
takes.
"""


@pytest.mark.conformance
@pytest.mark.parametrize(("kind", "name"), SINGLE)
def test_results_stay_on_the_device_of_the_operands(kind: str, name: str) -> None:
    use = use_in(kind, name)
    if use is None or use.node.op in WAITING:
        pytest.skip("expanded, or looks at numbers")
    graph = use.graph
    held = {
        f"c{index}": to_tensor(each.array).to("meta") for index, each in enumerate(graph.constants)
    }
    held |= {
        f"w{index}": to_tensor(use.arrays[each.value.name]).to("meta")
        for index, each in enumerate(graph.parameters)
    }
    operands = [to_tensor(use.arrays[each.name]).to("meta") for each in graph.inputs]
    forward = forward_of(emit_forward(stage_of(graph)).text)
    results = forward(SimpleNamespace(device=torch.device("meta"), **held), *operands)
    for output, result in zip(graph.outputs, results, strict=True):
        value = graph.type_of(output)
        assert result.device.type == "meta"
        assert tuple(result.shape) == value.shape
        assert str(result.dtype) == torch_dtype(value.dtype)
