"""The notation of every row against onnx's own cases: each axis that can be split is split and put
together again.
"""

from __future__ import annotations

import pytest

from autopipe.ir.graph import DType
from tests.conformance.cases import all_cases, data_of, model_of, skips
from tests.conformance.importer import import_model
from tests.ir.ops.splitting import Use, check

SINGLE = [
    (kind, name)
    for kind, name in all_cases()
    if kind != "simple"
    and name not in skips()
    and len(model_of(all_cases()[kind, name]).graph.node) == 1
]


def use_in(kind: str, name: str) -> Use | None:
    """The one node of a case with its numbers; None where it has no row and is expanded."""
    case = all_cases()[kind, name]
    model = model_of(case)
    inputs, _ = next(data_of(case))
    imported = import_model(model, inputs)
    graph = imported.graph
    if len(graph.nodes) != 1:
        return None
    held = {each.name for each in model.graph.initializer}
    names = [each.name for each in model.graph.input if each.name not in held]
    weights = {
        each.value.name: array
        for each, array in zip(graph.parameters, imported.weights, strict=True)
    }
    return Use(graph, graph.nodes[0], {**dict(zip(names, inputs, strict=False)), **weights})


@pytest.mark.conformance
@pytest.mark.parametrize(("kind", "name"), SINGLE)
def test_parts_make_the_whole(kind: str, name: str) -> None:
    use = use_in(kind, name)
    if use is None:
        pytest.skip("no row of its own: expanded")
    coarse = any(value.dtype in (DType.FLOAT16, DType.BFLOAT16) for value in use.graph.values)
    check(use, *((1e-2, 1e-2) if coarse else (1e-4, 1e-5)))
