"""Layers of nodes, by the scopes that PyTorch's exporter writes into the metadata of each node."""

from __future__ import annotations

import ast

import onnx

from autopipe.ir.graph import Graph
from autopipe.passes.frontend.load import Source

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Key of a list as Python spells it: the modules around an operator, outermost first, and the
operator's own name.
"""


def layers_of(source: Source | None, graph: Graph) -> tuple[str, ...]:
    """Return the layer of each node of `graph`: its outermost module with a number, such as
    `model.layers.3`.

    A node in no such module has "", a node that the file does not have is in the layer of the node
    before. () if the file tells no layers, or if names of nodes are not unique.
    """
    if source is None:
        return ()
    scopes = {node.name: found for node in source.nodes if (found := _scopes(node))}
    names = [node.name for node in graph.nodes]
    if len(set(names)) < len(names):
        return ()
    layers: list[str] = []
    for name in names:
        if name in scopes:
            layers.append(_layer(scopes[name]))
        else:
            layers.append(layers[-1] if layers else "")
    return tuple(layers) if any(layers) else ()


def _scopes(node: onnx.NodeProto) -> list[str]:
    """Return the modules around a node; [] if its metadata have none, or something else."""
    text = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    try:
        found = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    is_list = isinstance(found, list) and all(isinstance(each, str) for each in found)
    return found[:-1] if is_list else []


def _layer(scopes: list[str]) -> str:
    """Return the outermost module that is one of a numbered list; "" if none is."""
    return next((scope for scope in scopes if scope.rpartition(".")[2].isdecimal()), "")
