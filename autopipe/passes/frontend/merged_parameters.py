"""Separation of parameters that an exporter merged because their values were equal, for example the
biases and scales of a new model.

PyTorch's newer exporter (dynamo) records in each node's metadata which parameter the node reads.
Its older exporter (TorchScript) leaves an Identity named after each merged parameter. In files of
other exporters, a tensor with a single repeated value that is used only as scale or offset becomes
one parameter per use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopipe.passes.frontend.protobuf_scan import FLOATING
from autopipe.passes.frontend.signature import NUMBERED, Signature, traced_call
from autopipe.passes.frontend.tables import is_random, is_uniform
from autopipe.passes.frontend.uses import AFFINE_SLOTS, LIFTED, scope_of

if TYPE_CHECKING:
    import onnx

LOOKUPS = frozenset({"embedding", "index", "index_select", "select"})
"""Operators of PyTorch's traced program that read rows of a table."""
SAME = frozenset(
    {"alias", "clone", "contiguous", "detach", "_to_copy", "lift_fresh_copy", "view", "expand"}
)
"""Operators of PyTorch's traced program whose result has the elements of the operand, in the same
order.
"""
PRODUCER = "pytorch"
"""Producer name that PyTorch's exporters write into files."""
CONSTANT = "/constant"
"""Suffix of a new tensor that is read where the traced program has a constant. The constant was
merged with a parameter of equal values.
"""
NAMESAKE = "/merged"
"""Suffix that is appended to the name of an Identity's result. The readers of the result then read
a separate tensor, which has the old name.
"""
Read = tuple[int, int]
"""(position of a node in the graph, index of one of its operands): a use of a tensor."""
Numbers = Callable[["onnx.TensorProto"], "np.ndarray | None"]
"""Returns the data of a tensor; None if they are not available."""


@dataclass(frozen=True, slots=True)
class UntiedParameters:
    """The separate tensors that were added for parameters that an exporter merged."""

    copies: Mapping[str, str] = field(default_factory=dict)
    """Name of each new tensor → name of the merged tensor, which has its initial values."""
    doubtful: tuple[str, ...] = ()
    """New tensors for which the file does not declare that they are parameters of their own."""


def untie_parameters(
    model: onnx.ModelProto, metadata: Mapping[str, str], numbers: Numbers
) -> UntiedParameters:
    """Add a separate tensor to `model` for each parameter that was merged with another one, and
    return the new tensors. Modifies `model`.

    `metadata` are the file's metadata; `numbers` returns the data of a tensor. Nodes are not moved.
    An Identity that named a parameter loses its readers. The model is unchanged if it contains
    functions or lists its parameters in the metadata.
    """
    graph = model.graph
    if model.functions or "autopipe.parameters" in metadata:
        return UntiedParameters()
    held = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_type in FLOATING and tensor.dims
    }
    signature = Signature.of(graph, metadata)
    if signature:
        wanted = list(_uses_in_metadata(graph, held, signature, numbers))
    else:
        wanted = list(
            (_uses_of_identities if model.producer_name == PRODUCER else _uses_of_uniform)(
                graph, held, numbers
            )
        )
    taken = {each.name for each in (*graph.initializer, *graph.input)}
    taken.update(name for node in graph.node for name in node.output)
    copies: dict[str, str] = {}
    doubtful: list[str] = []
    for read, merged, name in wanted:
        own = copies.get(name)
        if own is None and name in taken:
            name = f"{merged}/{name}"
        if name not in copies and name not in taken:
            copies[name] = merged
            copy = graph.initializer.add()
            copy.CopyFrom(held[merged])
            copy.name = name
            if signature and not (signature.declares(name) or name.endswith(CONSTANT)):
                graph.value_info.append(signature.declaration_of(copy, merged))
            if not signature:
                array = (
                    numbers(held[merged])
                    if model.producer_name == PRODUCER and LIFTED.fullmatch(name)
                    else None
                )
                if model.producer_name != PRODUCER or (array is not None and not is_uniform(array)):
                    doubtful.append(name)
        if copies.get(name) == merged:
            graph.node[read[0]].input[read[1]] = name
    return UntiedParameters(copies, tuple(doubtful))


def _find_reads(graph: onnx.GraphProto, names: Mapping[str, object]) -> dict[str, list[Read]]:
    """Return, for each value of `names`, its uses: (node position, operand index) of each node that
    reads it.
    """
    found: dict[str, list[Read]] = {}
    for position, node in enumerate(graph.node):
        for slot, name in enumerate(node.input):
            if name in names:
                found.setdefault(name, []).append((position, slot))
    return found


def _uses_in_metadata(
    graph: onnx.GraphProto,
    held: Mapping[str, onnx.TensorProto],
    signature: Signature,
    numbers: Numbers,
) -> Iterator[tuple[Read, str, str]]:
    """Yield (use, merged tensor, new name) for each use of a tensor that stands for another
    parameter, with which it was merged. The metadata of PyTorch's newer exporter tell which
    parameter is meant. The new name is that of this parameter, or ends in `CONSTANT` if the traced
    program has a constant there. A use is (node position, operand index). `held` contains the
    tensors of the file by name.
    """
    known = {name: held[name] for name in held if signature.is_trained(name)}
    readers = _find_reads(graph, known)
    calls: dict[str, list[Read]] = {}
    for reads in readers.values():
        for read in reads:
            calls.setdefault(traced_call(graph.node[read[0]])[0], []).append(read)
    made = {name for node in graph.node for name in node.output} | {
        each.name for each in graph.input
    }
    for name, reads in readers.items():
        if len(reads) < 2:
            continue
        own = set(signature.origins(name)) | {name}
        plain: bool | None = None
        for read in reads:
            meant = _parameter_in_call(
                graph, read, sorted(calls[traced_call(graph.node[read[0]])[0]]), signature, made
            )
            if meant is not None and (not meant or meant in own):
                continue
            if meant is None or NUMBERED.sub("", meant) in LOOKUPS:
                # If the table's values differ, two reads of equal rows read one row of one
                # parameter twice. If all of its values are equal, the reads may be of different
                # parameters, which the exporter merged.
                if plain is None:
                    array = numbers(known[name])
                    plain = array is not None and is_uniform(array)
                if not plain:
                    continue
            yield read, name, f"{name}{CONSTANT}" if meant is None else meant


def _parameter_in_call(
    graph: onnx.GraphProto, read: Read, together: list[Read], signature: Signature, made: set[str]
) -> str | None:
    """Return the name of the parameter that is read as the operand `read`. The node of the operand
    is a part of a call of PyTorch's traced program, and the parameter is an argument of this call.
    Return "" if the call does not determine the parameter, and None if the operand is not a
    parameter.

    `together` lists the uses of trained tensors by nodes of that call. `made` contains the names of
    inputs and of values that nodes write.
    """
    node = graph.node[read[0]]
    call, arguments = traced_call(node)
    if not call:
        return ""
    named = [signature.arguments[each] for each in arguments if each in signature.arguments]
    if named:
        return _match_argument(graph, read, together, signature, named)
    if len(together) == 1 and len(arguments) == sum(bool(each) for each in node.input):
        found = arguments[sum(bool(each) for each in node.input[: read[1]])]
        return "" if found in made or NUMBERED.sub("", found) in SAME else found
    return None if node.op_type.endswith("Normalization") else ""


def _match_argument(
    graph: onnx.GraphProto, read: Read, together: list[Read], signature: Signature, named: list[str]
) -> str | None:
    """Return the name of the parameter that is read as the operand `read`. The node of the operand
    is a part of a call of PyTorch's traced program, and `named` lists the parameters that are
    arguments of this call. `together` lists the operands of the call's nodes that are trained
    tensors.

    An operand whose tensor belongs to a parameter in `named` is that parameter. The other operands
    are the remaining parameters in argument order. If operands outnumber parameters, the result for
    the first operands is "", or None for a normalization, whose scale may be implicit. If
    parameters outnumber operands, the result is "".
    """
    left = list(named)
    others: list[Read] = []
    for at, slot in together:
        own = next(
            (each for each in signature.origins(graph.node[at].input[slot]) if each in left), None
        )
        if own is None:
            others.append((at, slot))
            continue
        left.remove(own)
        if (at, slot) == read:
            return own
    place = others.index(read) - (len(others) - len(left))
    if len(left) > len(others):
        return ""
    if place >= 0:
        return left[place]
    return None if graph.node[read[0]].op_type.endswith("Normalization") else ""


def _uses_of_identities(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], numbers: Numbers
) -> Iterator[tuple[Read, str, str]]:
    """Yield (use, merged tensor, new name) for each use of an Identity with which PyTorch's older
    exporter names a merged parameter. A use is (node position, operand index). Renames the results
    of these Identity nodes in place.
    """
    names = {
        node.output[0]: node.input[0] for node in graph.node if _is_naming_identity(node, held)
    }
    outputs = {info.name for info in graph.output}
    readers = _find_reads(graph, {**held, **names})
    looked: dict[str, tuple[bool, bool]] = {}
    for node in graph.node:
        if not _is_naming_identity(node, held) or node.output[0] in outputs:
            continue
        name = node.output[0]
        merged = node.input[0]
        if LIFTED.fullmatch(name):
            if merged not in looked:
                array = numbers(held[merged])
                looked[merged] = (
                    (True, False) if array is None else (is_uniform(array), is_random(array))
                )
            plain, drawn = looked[merged]
            scopes = {scope_of(graph.node[position]) for position, _ in readers.get(merged, ())} - {
                ""
            }
            own = {scope_of(graph.node[position]) for position, _ in readers.get(name, ())}
            # Copied layers start with equal random weights, which their nodes read as second
            # operand. Random data that is read only as first operand is an input of the layers, not
            # a merged weight.
            outer = drawn and all(slot == 0 for _, slot in readers.get(name, ()))
            if not plain and (own <= scopes or outer):
                # These readers do not indicate a merged parameter: either one module is called
                # several times, or several modules read one tensor on purpose.
                continue
        node.output[0] = f"{name}{NAMESAKE}"
        for read in readers.get(name, ()):
            yield read, merged, name


def _is_naming_identity(node: onnx.NodeProto, held: Mapping[str, onnx.TensorProto]) -> bool:
    """True if a node is an Identity of a tensor of the file."""
    return (
        node.op_type == "Identity"
        and not node.domain
        and len(node.input) == 1
        and node.input[0] in held
    )


def _uses_of_uniform(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], numbers: Numbers
) -> Iterator[tuple[Read, str, str]]:
    """Yield (use, merged tensor, new name) for each use, except the first, of a tensor with a
    single repeated value that is only used as scale or offset. A use is (node position, operand
    index).
    """
    for name, reads in _find_reads(graph, held).items():
        if len(reads) < 2 or not all(
            (graph.node[at].op_type, slot) in AFFINE_SLOTS for at, slot in reads
        ):
            continue
        array = numbers(held[name])
        if array is not None and array.size > 1 and is_uniform(array):
            for at, slot in reads[1:]:
                node = graph.node[at]
                yield (at, slot), name, f"{name}/{node.name or node.output[0]}"
