"""Undo the merging of parameters whose values were equal at export, such as the biases and scales
of a new model.

PyTorch's newer exporter records in each node's metadata which parameter the node reads. Its older
exporter leaves an Identity named after each merged parameter. In files of other exporters, a tensor
with a single repeated value that is used only as scale or offset becomes one parameter per use.
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
"""Traced operators that read rows of a table."""
SAME = frozenset(
    {"alias", "clone", "contiguous", "detach", "_to_copy", "lift_fresh_copy", "view", "expand"}
)
"""Traced operators whose result is the parameter itself or a copy under another name."""
PRODUCER = "pytorch"
CONSTANT = "/constant"
"""Suffix of the copy of a parameter for uses that are a constant with equal values, not the
parameter.
"""
NAMESAKE = "/merged"
"""Suffix of the result of an Identity whose readers now read a separate tensor."""
Read = tuple[int, int]
"""Position of a node in the graph, and position of one of its operands."""
Numbers = Callable[["onnx.TensorProto"], "np.ndarray | None"]


@dataclass(frozen=True, slots=True)
class Apart:
    """Separate tensors that were created for uses of merged parameters."""

    copies: Mapping[str, str] = field(default_factory=dict)
    """Name of each new tensor -> name of the merged tensor with its initial values."""
    doubtful: tuple[str, ...] = ()
    """New tensors that were separated although nothing in the file states that they are several
    parameters.
    """


def take_apart(model: onnx.ModelProto, metadata: Mapping[str, str], numbers: Numbers) -> Apart:
    """Give each merged parameter of `model` a separate tensor, in place, and return the new
    tensors.

    `numbers` returns the values of a tensor, or None if they are not available. Nodes keep their
    positions. An Identity that named a parameter loses its readers.
    """
    graph = model.graph
    if model.functions or "autopipe.parameters" in metadata:
        return Apart()
    held = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_type in FLOATING and tensor.dims
    }
    signature = Signature.of(graph, metadata)
    if signature:
        wanted = list(_signed(graph, held, signature, numbers))
    else:
        wanted = list((_named if model.producer_name == PRODUCER else _used)(graph, held, numbers))
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
    return Apart(copies, tuple(doubtful))


def _readers(graph: onnx.GraphProto, names: Mapping[str, object]) -> dict[str, list[Read]]:
    found: dict[str, list[Read]] = {}
    for position, node in enumerate(graph.node):
        for slot, name in enumerate(node.input):
            if name in names:
                found.setdefault(name, []).append((position, slot))
    return found


def _signed(
    graph: onnx.GraphProto,
    held: Mapping[str, onnx.TensorProto],
    signature: Signature,
    numbers: Numbers,
) -> Iterator[tuple[Read, str, str]]:
    """Yield (use, merged tensor, new name) for each use of a tensor as another parameter, according
    to the traced calls in the nodes' metadata.
    """
    known = {name: held[name] for name in held if signature.is_trained(name)}
    readers = _readers(graph, known)
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
            meant = _meant(
                graph, read, sorted(calls[traced_call(graph.node[read[0]])[0]]), signature, made
            )
            if meant is not None and (not meant or meant in own):
                continue
            if meant is None or NUMBERED.sub("", meant) in LOOKUPS:
                # Equal rows of a table are the same rows read twice, unless all of the table's
                # values are equal.
                if plain is None:
                    array = numbers(known[name])
                    plain = array is not None and is_uniform(array)
                if not plain:
                    continue
            yield read, name, f"{name}{CONSTANT}" if meant is None else meant


def _meant(
    graph: onnx.GraphProto, read: Read, together: list[Read], signature: Signature, made: set[str]
) -> str | None:
    """Return the name of the parameter that a node's traced call has for an operand. Return "" if
    the call does not determine it, and None if the operand is not a parameter.

    `together` lists all trained operands of the call.
    """
    node = graph.node[read[0]]
    call, arguments = traced_call(node)
    if not call:
        return ""
    named = [signature.arguments[each] for each in arguments if each in signature.arguments]
    if named:
        return _claimed(graph, read, together, signature, named)
    if len(together) == 1 and len(arguments) == sum(bool(each) for each in node.input):
        found = arguments[sum(bool(each) for each in node.input[: read[1]])]
        return "" if found in made or NUMBERED.sub("", found) in SAME else found
    return None if node.op_type.endswith("Normalization") else ""


def _claimed(
    graph: onnx.GraphProto, read: Read, together: list[Read], signature: Signature, named: list[str]
) -> str | None:
    """Return the parameter, of the names in `named` from a traced call, that belongs to the operand
    `read`.

    An operand whose own name is in `named` gets that parameter. The other operands get the
    remaining names in argument order. If there are more operands than names, the first operands get
    none: "", or None for the implicit scale of a normalization.
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


def _named(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], numbers: Numbers
) -> Iterator[tuple[Read, str, str]]:
    """Yield (use, merged tensor, new name) for the readers of an Identity with which PyTorch's
    older exporter names a merged parameter.
    """
    names = {node.output[0]: node.input[0] for node in graph.node if _is_name(node, held)}
    outputs = {info.name for info in graph.output}
    readers = _readers(graph, {**held, **names})
    looked: dict[str, tuple[bool, bool]] = {}
    for node in graph.node:
        if not _is_name(node, held) or node.output[0] in outputs:
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
            # Copied layers start with equal weights, which are second operands. A first operand is
            # an input of the layer.
            outer = drawn and all(slot == 0 for _, slot in readers.get(name, ()))
            if not plain and (own <= scopes or outer):
                # The same module is called again, or several modules read one tensor.
                continue
        node.output[0] = f"{name}{NAMESAKE}"
        for read in readers.get(name, ()):
            yield read, merged, name


def _is_name(node: onnx.NodeProto, held: Mapping[str, onnx.TensorProto]) -> bool:
    return (
        node.op_type == "Identity"
        and not node.domain
        and len(node.input) == 1
        and node.input[0] in held
    )


def _used(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], numbers: Numbers
) -> Iterator[tuple[Read, str, str]]:
    """Yield (use, merged tensor, new name) for each use except the first of a scale or offset with
    a single repeated value.
    """
    for name, reads in _readers(graph, held).items():
        if len(reads) < 2 or not all(
            (graph.node[at].op_type, slot) in AFFINE_SLOTS for at, slot in reads
        ):
            continue
        array = numbers(held[name])
        if array is not None and array.size > 1 and is_uniform(array):
            for at, slot in reads[1:]:
                node = graph.node[at]
                yield (at, slot), name, f"{name}/{node.name or node.output[0]}"
