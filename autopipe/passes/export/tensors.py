"""Which tensors of the file hold a model's parameters.

Reading a model gives most parameters the name of a tensor in the file. Three do not stand there as they are: what an
exporter expanded along the samples is one row here, a transposed copy of an embedding is gone, and a constant in the
middle of the graph is a node's result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Constant, Parameter, Value
from autopipe.passes.export.numbers import Numbers
from autopipe.passes.frontend.parameters import Roles, roles_of
from autopipe.passes.frontend.ties import copies_of_tables
from autopipe.passes.frontend.weights import ROW, Weights

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.load import Source

FIXED: Final = frozenset({"Constant", "ConstantOfShape"})
"""Operators whose results can be parameters."""


def file_tensors(
    source: Source, graph: onnx.GraphProto, trained: Mapping[str, Numbers]
) -> tuple[tuple[Numbers, ...], frozenset[str]]:
    """What tensors of the file `graph` become by the parameters `trained`, and the names of those it lacks.

    A tensor it lacks is a name that nothing writes. `source` is the same file, its functions inlined. Raises
    ModelError, naming the parameter, for one that no tensor of the file is, or one of another type or shape.
    """
    roles = roles_of(source.nodes, source.metadata, ())
    held = Weights.of(source, roles).initializers()
    results = {name: node.op_type for node in graph.node for name in node.output if name}
    given = {info.name for info in graph.input}
    read = {name for node in graph.node for name in node.input}
    found: list[Numbers] = []
    lacking: set[str] = set()
    rows: set[str] = set()
    for name, numbers in trained.items():
        base = name.removesuffix(ROW)
        if name in held:
            _require_alike(held[name].value, numbers.value)
            found.append(numbers)
        elif results.get(name) in FIXED:
            found.append(numbers)
        elif base != name and base in held:
            whole = numbers.repeated(base, held[base].value.shape[0] if held[base].value.shape else 1)
            _require_alike(held[base].value, whole.value)
            found.append(whole)
            rows.add(base)
        elif name in read and name not in results and name not in given:
            found.append(numbers)
            lacking.add(name)
        else:
            raise ModelError(
                "no tensor of the file holds this parameter: it was made while the model was read",
                where=f"parameter {name!r}",
            )
    return (*found, *_copies(source, roles, held, trained)), frozenset(lacking)


def _copies(
    source: Source, roles: Roles, held: Mapping[str, Constant | Parameter], trained: Mapping[str, Numbers]
) -> list[Numbers]:
    """What becomes of the transposed copies of trained embeddings."""
    parameters = [each for each in held.values() if isinstance(each, Parameter)]
    tables = [
        each for each in parameters if each.value.name in trained and ("Gather", 0) in roles.uses.slots(each.value.name)
    ]
    others = [each for each in parameters if each.value.name not in trained]
    found = copies_of_tables(tables, others, source.path)
    return [trained[table.value.name].transposed(copy) for copy, table in found.items()]


def _require_alike(stored: Value, trained: Value) -> None:
    if (stored.dtype, stored.shape) != (trained.dtype, trained.shape):
        raise ModelError(
            f"it was trained as {trained.dtype.value}{list(trained.shape)}, the file has"
            f" {stored.dtype.value}{list(stored.shape)}",
            where=f"parameter {trained.name!r}",
        )
