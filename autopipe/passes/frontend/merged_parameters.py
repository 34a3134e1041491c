"""Parameters that an exporter merged because their numbers were equal, as a new model's biases and
scales are.

Torch's newer exporter says in each node's metadata which parameter it reads; its older one leaves
an Identity named after each; of other files' tensors, those all of whose numbers are equal and that
stand where scales and offsets do are one parameter a use.
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
"""Traced operators that take rows of a table."""
SAME = frozenset(
    {"alias", "clone", "contiguous", "detach", "_to_copy", "lift_fresh_copy", "view", "expand"}
)
"""Traced operators that give a parameter another name."""
PRODUCER = "pytorch"
CONSTANT = "/constant"
"""Added to the name of a parameter for uses of its numbers that are none of it."""
NAMESAKE = "/merged"
"""Added to the result of an Identity whose readers read a tensor of their own instead."""
Read = tuple[int, int]
"""Position of a node in the graph, and of an operand of it."""
Numbers = Callable[["onnx.TensorProto"], "np.ndarray | None"]


@dataclass(frozen=True, slots=True)
class Apart:
    """Tensors of their own for uses of merged ones."""

    copies: Mapping[str, str] = field(default_factory=dict)
    """By the name of the new tensor the merged one, whose numbers it begins with."""
    doubtful: tuple[str, ...] = ()
    """Tensors told apart although nothing in the file says that they are several."""


def take_apart(model: onnx.ModelProto, metadata: Mapping[str, str], numbers: Numbers) -> Apart:
    """Give each parameter of `model` a tensor of its own, in place. `numbers` reads a tensor's,
    None where it cannot.

    Nodes keep their places; an Identity that named a parameter is left without a reader.
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
    """Uses of tensors that are for another parameter than the tensor is, as the nodes' calls
    say.
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
                # Equal rows of a table, unless all numbers are one, are the same rows looked up
                # twice.
                if plain is None:
                    array = numbers(known[name])
                    plain = array is not None and is_uniform(array)
                if not plain:
                    continue
            yield read, name, f"{name}{CONSTANT}" if meant is None else meant


def _meant(
    graph: onnx.GraphProto, read: Read, together: list[Read], signature: Signature, made: set[str]
) -> str | None:
    """The parameter that a node's call names for an operand; "" where it does not tell, None where
    it is no parameter.

    `together` are all such operands of the same call.
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
    """Which of the parameters that a call names an operand is for.

    Operands that are, by their own names, one of them are for that; the others follow in the order
    of the arguments, behind what a normalization is given where it has no scale.
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
    """Parameter that an Identity of a tensor names, which the older exporter found to be equal."""
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
            # Layers that were copied begin with equal weights, second operands; the first are given
            # to them.
            outer = drawn and all(slot == 0 for _, slot in readers.get(name, ()))
            if not plain and (own <= scopes or outer):
                # The same module, called again, or a tensor that several modules are given.
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
    """Every use but the first of a scale or offset all of whose numbers are equal."""
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
