"""Graph to graph: what a model exported in training mode computes at inference."""

from __future__ import annotations

import dataclasses

from autopipe.ir.graph import Graph, Node
from autopipe.ir.ops import signature_of
from autopipe.ir.ops.elementwise import is_active
from autopipe.ir.ops.normalization import trains
from autopipe.passes.frontend.clean import renamed, values_of, without_unread


def at_inference(graph: Graph) -> Graph:
    """The graph without Dropout, whose BatchNormalization reads running statistics; itself where it is so already."""
    return _without_batch_statistics(without_dropout(graph))


def without_dropout(graph: Graph) -> Graph:
    """The graph in which nothing is dropped; itself where nothing is."""
    names: dict[str, str] = {}
    kept: list[Node] = []
    for node in graph.nodes:
        if node.op != "Dropout" or node.domain or not is_active(signature_of(graph, node)):
            kept.append(node)
        elif any(_is_used(graph, name) for name in node.outputs[1:]):
            kept.append(dataclasses.replace(node, inputs=node.inputs[:2], attributes=(("is_test", 1),)))
        elif node.outputs[0] in graph.outputs:
            kept.append(
                dataclasses.replace(
                    node, op="Identity", inputs=node.inputs[:1], outputs=node.outputs[:1], attributes=()
                )
            )
        else:
            names[node.outputs[0]] = names.get(node.inputs[0], node.inputs[0])
    nodes = tuple(kept)
    if nodes == graph.nodes:
        return graph
    return without_unread(renamed(dataclasses.replace(graph, nodes=nodes, values=values_of(graph, nodes)), names))


def _without_batch_statistics(graph: Graph) -> Graph:
    kept: list[Node] = []
    for node in graph.nodes:
        if node.op != "BatchNormalization" or node.domain or not trains(signature_of(graph, node)):
            kept.append(node)
            continue
        settings = tuple(each for each in node.attributes if each[0] != "training_mode")
        kept.append(dataclasses.replace(node, outputs=node.outputs[:1], attributes=settings))
        for running, name in zip(node.inputs[3:5], node.outputs[1:3], strict=False):
            if _is_used(graph, name):  # They stay as they are.
                kept.append(Node(f"{node.name}/{name}", "Identity", (running,), (name,)))
    nodes = tuple(kept)
    return graph if nodes == graph.nodes else dataclasses.replace(graph, nodes=nodes, values=values_of(graph, nodes))


def _is_used(graph: Graph, name: str) -> bool:
    return bool(name) and (name in graph.consumers() or name in graph.outputs)
