"""The layer that each node belongs to, by the module names that PyTorch's exporter writes into node
metadata.
"""

from __future__ import annotations

import ast

import onnx

from autopipe.ir.graph import Graph
from autopipe.passes.frontend.load import Source

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata key of a Python list literal: the names of the modules around an operator, outermost
first, then the operator's name.
"""


def layers_of(source: Source | None, graph: Graph) -> tuple[str, ...]:
    """Return the layer of each node of `graph`: its outermost module with a number, such as
    `model.layers.3`.

    The layer is "" for a node in no such module, and that of the preceding node for a node that the
    file does not have. Return () if the file has no layers, or if names of nodes are not unique.
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
    """Return the names of the modules around a node; [] if its metadata have no valid list."""
    text = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    try:
        found = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    is_list = isinstance(found, list) and all(isinstance(each, str) for each in found)
    return found[:-1] if is_list else []


def _layer(scopes: list[str]) -> str:
    """Return the outermost module whose name ends in a number; "" if there is none."""
    return next((scope for scope in scopes if scope.rpartition(".")[2].isdecimal()), "")
