"""Assignment of nodes to layers. It uses the module names that PyTorch's exporter writes into the
metadata of nodes.
"""

from __future__ import annotations

import ast

import onnx

from autopipe.ir.graph import Graph
from autopipe.passes.frontend.load import Source

_SCOPES = "pkg.torch.onnx.name_scopes"
"""Metadata key of a list of strings in Python's syntax: the names of the modules that contain an
operator, outermost first, then the operator's name.
"""


def layers_of(source: Source | None, graph: Graph) -> tuple[str, ...]:
    """Return for each node of `graph` the name of its layer: the outermost module around it whose
    name ends in a number, for example `model.layers.3`.

    The layer is "" for a node outside of numbered modules. A node that is not in the file belongs
    to the layer of the preceding node. Returns () if the file lacks layers, or if names of nodes
    are not unique.
    """
    if source is None:
        return ()
    scopes = {node.name: found for node in source.nodes if (found := _module_names(node))}
    names = [node.name for node in graph.nodes]
    if len(set(names)) < len(names):
        return ()
    layers: list[str] = []
    for name in names:
        if name in scopes:
            layers.append(_find_layer(scopes[name]))
        else:
            layers.append(layers[-1] if layers else "")
    return tuple(layers) if any(layers) else ()


def _module_names(node: onnx.NodeProto) -> list[str]:
    """Return the names of the modules that contain a node, outermost first; [] if its metadata lack
    a valid list.
    """
    text = next((entry.value for entry in node.metadata_props if entry.key == _SCOPES), "")
    try:
        found = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    is_list = isinstance(found, list) and all(isinstance(each, str) for each in found)
    return found[:-1] if is_list else []


def _find_layer(scopes: list[str]) -> str:
    """Return the outermost module of `scopes` whose name ends in a number; "" if there is none."""
    return next((scope for scope in scopes if scope.rpartition(".")[2].isdecimal()), "")
