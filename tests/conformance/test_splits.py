"""The notation of every row against onnx's own cases: each axis that can be split is split and put together again."""

from __future__ import annotations

import pytest

from autopipe.ir.dtype import DType
from tests.conformance.cases import all_cases, data_of, model_of, skips
from tests.conformance.importer import import_model
from tests.ir.ops.splitting import Use, check

SINGLE = [
    (kind, name)
    for kind, name in all_cases()
    if kind != "simple" and name not in skips() and len(model_of(all_cases()[kind, name]).graph.node) == 1
]


@pytest.mark.conformance
@pytest.mark.parametrize(("kind", "name"), SINGLE)
def test_parts_make_the_whole(kind: str, name: str) -> None:
    case = all_cases()[kind, name]
    model = model_of(case)
    inputs, _ = next(data_of(case))
    imported = import_model(model, inputs)
    graph = imported.graph
    if len(graph.nodes) != 1:
        pytest.skip("no row of its own: expanded")
    held = {each.name for each in model.graph.initializer}
    names = [each.name for each in model.graph.input if each.name not in held]
    weights = {each.value.name: array for each, array in zip(graph.parameters, imported.weights, strict=True)}
    use = Use(graph, graph.nodes[0], {**dict(zip(names, inputs, strict=False)), **weights})
    coarse = any(value.dtype in (DType.FLOAT16, DType.BFLOAT16) for value in graph.values)
    check(use, *((1e-2, 1e-2) if coarse else (1e-4, 1e-5)))
