"""Under autocast activations come in bfloat16 and parameters in float32: no operator may refuse the
two together.
"""

from __future__ import annotations

import pytest
import torch

from autopipe.ir.ops import OPERATORS, signature_of
from tests.conformance.adapter import to_tensor
from tests.conformance.cases import all_cases
from tests.conformance.single_nodes import SINGLE, use_in
from tests.ir.ops.splitting import computed


def _mixed() -> list[tuple[str, str]]:
    """Cases of one node with several operands in float32; one of each operator and set of operands
    is enough.
    """
    chosen = {}
    for kind, name in SINGLE:
        model = all_cases()[kind, name].model
        if model is None:
            continue
        node = model.graph.node[0]
        types = [each.type.tensor_type.elem_type for each in model.graph.input]
        row = OPERATORS.get(node.op_type)
        if row is not None and 0 not in row.static and types.count(1) > 1:
            chosen.setdefault(
                (node.op_type, tuple(bool(each) for each in node.input)), (kind, name)
            )
    return sorted(chosen.values())


@pytest.mark.conformance
@pytest.mark.parametrize(("kind", "name"), _mixed())
def test_first_operand_in_bfloat16(kind: str, name: str) -> None:
    use = use_in(kind, name)
    assert use is not None
    tensors = {each: to_tensor(array) for each, array in use.arrays.items()}
    signature = signature_of(use.graph, use.node)
    exact = computed(signature, tensors)
    first = next(
        each for each in use.node.inputs if each in tensors and tensors[each].dtype == torch.float32
    )
    tensors[first] = tensors[first].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = computed(signature, tensors)
    for left, right in zip(found, exact, strict=True):
        if right.is_floating_point() and right.numel():
            scale = right.double().norm().clamp(min=1e-3)
            assert (left.double() - right.double()).norm() / scale < 0.05
