"""Which of a stage's values gradients come back to."""

from __future__ import annotations

from collections.abc import Iterable

from autopipe.ir.ops import operator_of
from autopipe.ir.program import Collective, Compute, StageCode


def flowing_values(code: StageCode, differentiable: frozenset[str]) -> set[str]:
    """The stage's values, by their local names, that a gradient comes back to: autograd runs no other backward.

    They depend on something that wants a gradient, and something that the stage gives depends on them.
    """
    read = (*code.inputs, *(value for _, value in code.parameters))
    wanting = {value.name for value in read if value.name in differentiable}
    for operation in code.operations:
        if _passes_gradients(operation) and not wanting.isdisjoint(operation.reads):
            wanting.update(_floating(operation))
    flowing = wanting & {value.name for value in code.outputs}
    for operation in reversed(code.operations):
        if _passes_gradients(operation) and not flowing.isdisjoint(operation.writes):
            flowing.update(wanting.intersection(operation.reads))
    return flowing


def _passes_gradients(operation: Compute | Collective) -> bool:
    if isinstance(operation, Collective):
        return True
    row = operator_of(operation.signature.node)
    return row is not None and row.differentiable


def _floating(operation: Compute | Collective) -> Iterable[str]:
    """The results that can have a gradient."""
    results = (operation.result,) if isinstance(operation, Collective) else operation.signature.results
    return (value.name for value in results if value is not None and value.dtype.is_floating)
