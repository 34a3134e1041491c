"""Torch's word on a file's tensors: which are parameters, and which it folded from them.

The newer exporter's graph carries the signature of the traced program, and its nodes the traced
call that they spell.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
"""The graph's metadata in which torch's exporter tells parameters from buffers."""
FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""A value's metadata: the values that a computed constant depends on."""
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""A value's metadata: PARAMETER or BUFFER."""
CALL = "pkg.torch.onnx.fx_node"
"""A node's metadata: the call of the traced program that it is a part of."""
DETACH = re.compile(r"\[target=torch\.ops\.aten\.detach_?\.default\]")
PADDED = re.compile(
    r"\[target=torch\.ops\.aten\.embedding\.default\]\(args = \(%\w+, %\w+"
    r"(?:, (?P<third>\d+)|.*kwargs = \{.*padding_idx: (?P<named>\d+))"
)
"""In a traced call: the row of an embedding's table that torch gives no gradient, not written if
there is none.
"""
TORCH_BATCH_NORM = re.compile(r"\[target=torch\.ops\.aten\.\w*batch_norm")
SIGNED = re.compile(
    r"^(\w+): (PARAMETER|BUFFER) target='([^'\n]+)'( persistent=False)?", re.MULTILINE
)
ARGUMENT = re.compile(r"%([A-Za-z_]\w*)")
TEXT = re.compile(r"'([^']*)'")
TARGET = re.compile(r"call_function\[target=(?:torch\.ops\.)?(?:\w+\.)?(\w+)")
"""In a traced call: the operator's name without its overload."""
INTERNAL = re.compile(r"_?val_\d+|onnx::\w+")
"""Names of values within the operators that spell one traced call, which say nothing of operators.
"""
NUMBERED = re.compile(r"_\d+$")
STATISTIC_SLOTS = (3, 4)
"""Operands of a BatchNormalization that are its running statistics."""
PRODUCTS = frozenset({"einsum", "linear", "matmul", "mm", "bmm", "addmm", "convolution", "conv2d"})
"""Traced operators that multiply and add up."""


@dataclass(frozen=True, slots=True)
class Signature:
    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    temporary: frozenset[str] = frozenset()
    """Buffers that the module does not save."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Parameters and buffers by the traced program's names for them."""
    folded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each computed constant the values that it was folded from."""

    @classmethod
    def of(cls, graph: onnx.GraphProto, metadata: Mapping[str, str]) -> Signature:
        """The signature of a file; an empty one where there is none, or where it names none of the
        file's tensors.
        """
        found = SIGNED.findall(metadata.get(SIGNATURE, ""))
        if not found:
            return cls()
        said = [(info.name, entry) for info in graph.value_info for entry in info.metadata_props]
        kinds = {name: entry.value for name, entry in said if entry.key == KIND}
        signature = cls(
            parameters=frozenset(target for _, kind, target, _ in found if kind == "PARAMETER")
            | {name for name, kind in kinds.items() if kind == "PARAMETER"},
            buffers=frozenset(target for _, kind, target, _ in found if kind == "BUFFER"),
            temporary=frozenset(target for _, _, target, is_temporary in found if is_temporary),
            arguments={argument: target for argument, _, target, _ in found},
            folded={
                name: tuple(TEXT.findall(entry.value))
                for name, entry in said
                if entry.key == FOLDED
            },
        )
        names = {tensor.name for tensor in graph.initializer} | {
            name for node in graph.node for name in node.input
        }
        return signature if any(signature.trains(name) for name in names) else cls()

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def origins(self, name: str) -> tuple[str, ...]:
        """The parameters that a tensor is, or was folded from."""
        if name in self.parameters:
            return (name,)
        return tuple(each for each in self.folded.get(name, ()) if each in self.parameters)

    def counted(self, name: str) -> dict[str, int]:
        """Return the traced operators that were folded into a tensor, each with the number of its
        calls.
        """
        names = (name, *self.folded.get(name, ()))
        known = (
            NUMBERED.sub("", each)
            for each in names
            if not (self.names(each) or INTERNAL.fullmatch(each))
        )
        return dict(Counter(known))

    def operators(self, name: str) -> frozenset[str]:
        """Return the traced operators that were folded into a tensor, as far as values are named
        after them.
        """
        return frozenset(self.counted(name))

    def multiplied(self, name: str) -> bool:
        """True if a tensor is a product of parameters, or of one and a table, which cannot be taken
        apart again.
        """
        return name not in self.parameters and not PRODUCTS.isdisjoint(self.operators(name))

    def left_out(self, graph: onnx.GraphProto) -> list[str]:
        """The parameters that a traced call names and its nodes do not read: zeros that the
        exporter does not add.
        """
        held = {tensor.name for tensor in graph.initializer}
        found = {origin for name in held for origin in self.origins(name)}
        reads: dict[str, set[str]] = {}
        names: dict[str, set[str]] = {}
        for node in graph.node:
            call, arguments = arguments_of(node)
            reads.setdefault(call, set()).update(name for name in node.input if self.trains(name))
            names.setdefault(
                call, {self.arguments[each] for each in arguments if each in self.arguments}
            )
        few = (
            named & self.parameters
            for call, named in names.items()
            if len(reads[call]) < len(named)
        )
        return sorted(set[str]().union(*few) - found)

    def names(self, name: str) -> bool:
        return name in self.parameters or name in self.buffers

    def trains(self, name: str) -> bool:
        """True if a tensor is a parameter, perhaps in a folded form."""
        return bool(self.origins(name))

    def stated(self, tensor: onnx.TensorProto, merged: str) -> onnx.ValueInfoProto:
        """The exporter's word that `tensor`, told apart from `merged`, is a parameter, folded as
        that is.
        """
        import onnx.helper

        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        info.metadata_props.add(key=KIND, value="PARAMETER")
        # Without a fold of its own, the new tensor is a function of a parameter that has its
        # values.
        folded = [
            each for each in (merged, *self.folded.get(merged, ())) if each not in self.parameters
        ]
        info.metadata_props.add(key=FOLDED, value=str(folded))
        return info


def is_detach(node: onnx.NodeProto) -> bool:
    """True if the traced call that a node is a part of stops the gradient of its argument."""
    return any(entry.key == CALL and DETACH.search(entry.value) for entry in node.metadata_props)


def trains_statistics(node: onnx.NodeProto) -> bool:
    """Return True if a node is a batch normalization in training."""
    trains = any(each.name == "training_mode" and each.i for each in node.attribute)
    return trains and node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx")


def padding_row(node: onnx.NodeProto) -> int | None:
    """Return the row of its table to which a lookup gives no gradient, as the traced call says
    (`padding_idx`); None if there is none.
    """
    if node.op_type != "Gather" or len(node.input) != 2:
        return None
    found = PADDED.search(arguments_of(node)[0])
    return None if found is None else int(found["third"] or found["named"])


def estimates_variance(node: onnx.NodeProto) -> bool:
    """True if a node is torch's batch normalization in training, whose running variance moves
    towards the estimate for a population, Σ (x - mean)² / (n - 1). ONNX's own moves towards Σ (x -
    mean)² / n.
    """
    if not trains_statistics(node):
        return False
    return any(
        entry.key == CALL and TORCH_BATCH_NORM.search(entry.value) for entry in node.metadata_props
    )


def stop_of(node: onnx.NodeProto) -> onnx.NodeProto:
    """The node that computes what `node`, a `detach`, computes, and has no gradient."""
    import onnx.helper

    return onnx.helper.make_node(
        "StopGradient", node.input, node.output, name=node.name, domain="autopipe"
    )


def arguments_of(node: onnx.NodeProto) -> tuple[str, tuple[str, ...]]:
    """The traced call that a node is a part of, and the values that it reads there; "" where it is
    not said.
    """
    call = next((entry.value for entry in node.metadata_props if entry.key == CALL), "")
    return call, tuple(ARGUMENT.findall(call.partition("](args")[2]))


def target_of(node: onnx.NodeProto) -> str:
    """Return the operator of the traced call that a node is a part of, such as `linear`; "" if it
    is not said.
    """
    found = TARGET.search(arguments_of(node)[0])
    return "" if found is None else found[1]
