"""How a model's parameters begin, counted."""

from __future__ import annotations

from collections import Counter

from autopipe.ir.graph import FileSlice, Fill, Graph, Storage


def initial_values(graph: Graph) -> dict[str, int]:
    """Number of parameters by how they begin, most first: `stored` in the model's files, or how they are drawn."""
    return dict(Counter(_described(each.storage) for each in graph.parameters).most_common())


def _described(storage: Storage) -> str:
    match storage:
        case FileSlice():
            return "stored"
        case Fill():
            return f"all {storage.value:g}"
    if storage.scheme in ("normal", "uniform"):
        return f"{storage.scheme} {'±' if storage.scheme == 'uniform' else ''}{storage.scale:.3g}"
    return storage.scheme
