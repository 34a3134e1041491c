"""Recovery of stopped gradients (`detach`) from the metadata of torch's exporter.

A file that was not optimized has an Identity for each `detach`, which `signature.is_detach`
recognises. Optimization removes the Identity, but the metadata of the nodes that read its result
still call that result `%detach`. A file without metadata has no trace of a `detach`, with one
exception: a straight-through estimator `x + (q - x)`. Its value is `q`, so the expression is only
useful if the gradient of `q - x` is stopped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopipe.passes.frontend.signature import Signature, traced_call

if TYPE_CHECKING:
    import onnx

DETACHED = re.compile(r"detach_?(_\d+)?")
"""Pattern of the names that torch gives to the results of `detach`."""


@dataclass(frozen=True, slots=True)
class DetachedReads:
    """Operands of nodes through which no gradient may flow."""

    operands: frozenset[tuple[str, int]] = frozenset()
    """Pairs of (first result of the reading node, index of the operand)."""
    unknown: tuple[str, ...] = ()
    """Operators and names of nodes that have a detached operand, but whose metadata do not
    determine its index.
    """


def find_detached_reads(nodes: Sequence[onnx.NodeProto], signature: Signature) -> DetachedReads:
    """Return the operands of `nodes` that are results of a `detach` in the traced program,
    according to the metadata of the nodes, although no node of the file writes the result of that
    `detach`.
    """
    written = {name for node in nodes for name in node.output if name}
    constants = {name for node in nodes if node.op_type == "Constant" for name in node.output}
    calls: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        call, arguments = traced_call(node)
        if any(DETACHED.fullmatch(each) and each not in written for each in arguments):
            calls.setdefault(call, []).append(node)
    found: set[tuple[str, int]] = set()
    unknown: list[str] = []
    for together in calls.values():
        inside = {name for node in together for name in node.output}
        for node in together:
            slots = [
                slot
                for slot, name in enumerate(node.input)
                if name
                and name not in inside | constants
                and (name in written or not _is_constant(name, node, signature))
            ]
            arguments = traced_call(node)[1]
            if len(slots) == len(arguments):
                pairs = zip(slots, arguments, strict=True)
                found.update(
                    (node.output[0], slot)
                    for slot, each in pairs
                    if DETACHED.fullmatch(each) and each not in written
                )
            elif Counter(node.input[slot] for slot in slots) - Counter(arguments):
                # Operands and arguments cannot be paired, because the optimization drops arguments
                # (for example the empty tensor of a concatenation). An operand whose name is no
                # argument may be detached, so the node is reported as unknown.
                unknown.append(f"{node.op_type} {node.name!r}")
    return DetachedReads(frozenset(found), tuple(unknown))


def find_straight_through(
    nodes: Sequence[onnx.NodeProto], name_of: Callable[[str], str]
) -> DetachedReads:
    """Return the operands `q - x` of all sums `x + (q - x)` in `nodes`. `name_of` maps each name of
    a value to one name, so that names of the same value can be compared.
    """
    differences = {
        node.output[0]: node for node in nodes if node.op_type == "Sub" and not node.domain
    }
    found: set[tuple[str, int]] = set()
    for node in nodes:
        if node.op_type != "Add" or node.domain:
            continue
        for slot, name in enumerate(node.input):
            difference = differences.get(name)
            if difference is not None and name_of(difference.input[1]) == name_of(
                node.input[1 - slot]
            ):
                found.add((node.output[0], slot))
    return DetachedReads(frozenset(found))


def _is_constant(name: str, node: onnx.NodeProto, signature: Signature) -> bool:
    """True if the exporter created the tensor `name` as a constant. Then `name` is not an argument
    of the call in PyTorch's traced program that the node is a part of.
    """
    given = {signature.arguments.get(each) for each in traced_call(node)[1]}
    is_internal = name.startswith("val_") and not signature.is_trained(name)
    return is_internal and name not in given
