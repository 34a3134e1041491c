"""Which tensors of the file hold a model's parameters.

Reading a model gives most parameters the name of a tensor in the file. Three kinds do not stand there as they are: what
an exporter folded operators into is computed from a parameter again, copies of a parameter follow it, and a constant in
the middle of the graph is a node's result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Value
from autopipe.passes.export.numbers import Numbers
from autopipe.passes.frontend.folding import Folded
from autopipe.passes.frontend.parameters import Chosen, roles_of
from autopipe.passes.frontend.weights import Weights

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.load import Source

FIXED: Final = frozenset({"Constant", "ConstantOfShape"})
"""Operators whose results can be parameters."""


def file_tensors(
    source: Source, graph: onnx.GraphProto, trained: Mapping[str, Numbers]
) -> tuple[tuple[Numbers, ...], frozenset[str]]:
    """New values of the tensors of file `graph` from the parameters `trained`, and the names of those it lacks.

    A tensor it lacks is a name that nothing writes. `source` is the same file, its functions inlined. Raises
    ModelError, naming the parameter, for one that no tensor of the file is, or one of another type or shape.
    """
    held = Weights.of(source, roles_of(source), Chosen()).initializers()
    folded = {name: each for name, each in held.items() if isinstance(each, Folded)}
    bases = {each.source.value.name: each.source for each in folded.values() if not isinstance(each.source, str)}
    results = {name: node.op_type for node in graph.node for name in node.output if name}
    given = {info.name for info in graph.input}
    read = {name for node in graph.node for name in node.input}
    found: dict[str, Numbers] = {}
    lacking: set[str] = set()
    for name, numbers in trained.items():
        if name in bases:
            _require_same_type(bases[name].value, numbers.value)
        elif name in held:
            _require_same_type(held[name].value, numbers.value)
            found[name] = numbers
        elif results.get(name) in FIXED:
            found[name] = numbers
        elif name in read and name not in results and name not in given:
            found[name] = numbers
            lacking.add(name)
        else:
            raise ModelError(
                "no tensor of the file holds this parameter: it was made while the model was read",
                where=f"parameter {name!r}",
            )
    for name, each in folded.items():  # What is computed from another tensor stands behind it.
        base = found.get(each.source) if isinstance(each.source, str) else trained.get(each.source.value.name)
        if base is not None:
            found[name] = base.computed(each.value, each)
    return tuple(found.values()), frozenset(lacking)


def _require_same_type(stored: Value, trained: Value) -> None:
    if (stored.dtype, stored.shape) != (trained.dtype, trained.shape):
        raise ModelError(
            f"it was trained as {trained.dtype.value}{list(trained.shape)}, the file has"
            f" {stored.dtype.value}{list(stored.shape)}",
            where=f"parameter {trained.name!r}",
        )
