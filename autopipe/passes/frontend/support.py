"""Unsupported parts of a file, all of them at once."""

from __future__ import annotations

import difflib
from collections import Counter
from typing import TYPE_CHECKING

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Graph
from autopipe.ir.ops import OPERATORS, qualified_name
from autopipe.passes.frontend.model import Unsupported

if TYPE_CHECKING:
    from autopipe.passes.frontend.load import Source

REMOVED = frozenset({"Constant", "Identity", "CastLike", "Shape", "Size"})
"""Operators that reading always removes, when shapes are static."""


def unsupported_operators(graph: Graph) -> tuple[Unsupported, ...]:
    """The operators of a graph without a row, most frequent first."""
    return _without_row([(qualified_name(node), node.name) for node in graph.nodes])


def require_readable(source: Source) -> None:
    """Raise ModelError, naming every operator that cannot be typed and has no row: control flow, other domains.

    Operators that ONNX can type may still be computed while reading, and are judged afterwards; raises too where the
    operands or attributes of one are not what ONNX defines.
    """
    import onnx.checker
    import onnx.defs

    context = onnx.checker.C.CheckerContext()
    context.ir_version = onnx.IR_VERSION
    context.opset_imports = dict(source.opsets)
    opsets, unreadable = dict(source.opsets), []
    for node in source.nodes:
        domain = "" if node.domain == "ai.onnx" else node.domain
        name = f"{domain}.{node.op_type}" if domain else node.op_type
        flow = any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute)
        known = onnx.defs.has(node.op_type, opsets.get(domain, 1), domain)
        if name not in OPERATORS and name not in REMOVED and (flow or not known or name.startswith("Sequence")):
            unreadable.append((name, node.name))
        elif known and name != "Constant":  # whose numbers may have been left in the file
            try:
                onnx.checker.check_node(node, context)
            except onnx.checker.ValidationError as error:
                reason = str(error).strip().splitlines()[0]
                raise ModelError(f"not as ONNX defines it: {reason}", where=f"{node.op_type} {node.name!r}") from error
    if unreadable:
        raise refusal(_without_row(unreadable))


def refusal(unsupported: tuple[Unsupported, ...]) -> ModelError:
    """The error that names them all with their numbers."""
    names = ", ".join(f"{each.operator} ({each.count})" for each in unsupported)
    near = [f"{each.nearest} is supported" for each in unsupported if each.nearest]
    where = repr(unsupported[0].node)
    return ModelError(f"operators that are not supported: {names}", hint="; ".join(near), where=where)


def _without_row(uses: list[tuple[str, str]]) -> tuple[Unsupported, ...]:
    counts = Counter(name for name, _ in uses)
    first = dict(reversed(uses))
    return tuple(
        Unsupported(name, count, first[name], next(iter(difflib.get_close_matches(name, OPERATORS, n=1)), ""))
        for name, count in counts.most_common()
        if name not in OPERATORS
    )
