"""How wide the elements of each value are while a program runs at a precision.

With `bf16` and `fp16` parameters stay in fp32 and torch's autocast narrows what products, convolutions and recurrent
operators read and write, a bias that is added in the same call included; normalizations, reductions and losses compute
in fp32; the rest runs in the widest type of its operands (PyTorch documentation, "Automatic Mixed Precision package",
op-specific behavior).
"""

from __future__ import annotations

from autopipe.ir.graph import Graph
from autopipe.ir.memo import GRAPHS, remembered
from autopipe.passes.cost.biases import bias_additions
from autopipe.passes.cost.uses import OpInstance

PRODUCT_KINDS = frozenset({"matmul", "convolution", "recurrent"})
"""Kinds of operators that autocast runs in the narrow type."""

_FULL_KINDS = frozenset({"normalization", "reduction"})
_HALF = frozenset({"bf16", "fp16"})


def narrows(precision: str) -> bool:
    """True if products run in 16 bits."""
    return precision in _HALF


@remembered(GRAPHS)
def element_bytes(graph: Graph, uses: tuple[OpInstance, ...], precision: str) -> dict[str, int]:
    """Bytes an element of every value, by name, when the graph runs at `precision`."""
    held = [each.value for each in graph.parameters] + [each.value for each in graph.constants]
    widths = {value.name: value.dtype.itemsize for value in (*graph.inputs, *held, *graph.values)}
    if not narrows(precision):
        return widths
    floating = {name for name in widths if graph.type_of(name).dtype.is_floating}
    with_product = frozenset(bias_additions(graph).values())
    for index, (node, use) in enumerate(zip(graph.nodes, uses, strict=True)):
        if use.row.kind in _FULL_KINDS:
            continue
        width = 2
        if use.row.kind not in PRODUCT_KINDS and index not in with_product:
            read = [name for name in node.inputs if name in floating]
            # Scalars take part without widening the result (PyTorch's type promotion).
            wide = [widths[name] for name in read if graph.type_of(name).shape] or [widths[name] for name in read]
            width = max(wide, default=4)
        for name in node.outputs:
            if name in floating:
                widths[name] = min(width, widths[name])
    return widths
