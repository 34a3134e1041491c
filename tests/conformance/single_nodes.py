"""ONNX's own cases of one node, with the values of their operands."""

from __future__ import annotations

from tests.conformance.cases import all_cases, data_of, model_of, skips
from tests.conformance.importer import import_model
from tests.ir.ops.splitting import Use

SINGLE = [
    (kind, name)
    for kind, name in all_cases()
    if kind != "simple"
    and name not in skips()
    and len(model_of(all_cases()[kind, name]).graph.node) == 1
]
"""(Collection, name) of each case of one node that is run."""


def use_in(kind: str, name: str) -> Use | None:
    """Return the node of a case with the values of its operands, or None if the node has no
    definition of its own and is expanded into several nodes.
    """
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
