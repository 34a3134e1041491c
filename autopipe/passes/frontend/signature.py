"""Metadata of files that torch.onnx.export(dynamo=True) writes.

The graph's metadata contain the signature of the traced program: which tensors are parameters,
which are buffers, and from which of them constants were folded. A node's metadata contain the call
of the traced program that the node is a part of.
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
"""Key of the graph's metadata with the signature: parameters, buffers, inputs, outputs."""
FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""Key of a value's metadata: the values from which a constant was folded."""
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Key of a value's metadata: PARAMETER or BUFFER."""
CALL = "pkg.torch.onnx.fx_node"
"""Key of a node's metadata: the call of the traced program that the node is a part of."""
DETACH = re.compile(r"\[target=torch\.ops\.aten\.detach_?\.default\]")
PADDED = re.compile(
    r"\[target=torch\.ops\.aten\.embedding\.default\]\(args = \(%\w+, %\w+"
    r"(?:, (?P<third>\d+)|.*kwargs = \{.*padding_idx: (?P<named>\d+))"
)
"""In a traced call of an embedding: its `padding_idx`, the row without gradient. The call omits the
argument if there is no such row.
"""
TORCH_BATCH_NORM = re.compile(r"\[target=torch\.ops\.aten\.\w*batch_norm")
SIGNED = re.compile(
    r"^(\w+): (PARAMETER|BUFFER) target='([^'\n]+)'( persistent=False)?", re.MULTILINE
)
ARGUMENT = re.compile(r"%([A-Za-z_]\w*)")
TEXT = re.compile(r"'([^']*)'")
TARGET = re.compile(r"call_function\[target=(?:torch\.ops\.)?(?:\w+\.)?(\w+)")
"""In a traced call: the name of the operator without its overload."""
INTERNAL = re.compile(r"_?val_\d+|onnx::\w+")
"""Names of values inside of the decomposition of one traced call. Other values are named after the
traced operator that computes them.
"""
NUMBERED = re.compile(r"_\d+$")
STATISTIC_SLOTS = (3, 4)
"""Operands of a BatchNormalization that are the running mean and variance."""
PRODUCTS = frozenset({"einsum", "linear", "matmul", "mm", "bmm", "addmm", "convolution", "conv2d"})
"""Traced operators that are matrix products or convolutions."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters and buffers of the traced program. It is false if it has no parameters."""

    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    temporary: frozenset[str] = frozenset()
    """Buffers that are not in the module's state_dict (persistent=False)."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Parameters and buffers, by the names of the traced program's arguments."""
    folded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By constant, the values from which it was folded."""

    @classmethod
    def of(cls, graph: onnx.GraphProto, metadata: Mapping[str, str]) -> Signature:
        """Return the signature of a file; an empty one if the file has none, or if none of its
        tensors is a parameter or was folded from one.
        """
        found = SIGNED.findall(metadata.get(SIGNATURE, ""))
        if not found:
            return cls()
        metadata_of = [
            (info.name, entry) for info in graph.value_info for entry in info.metadata_props
        ]
        kinds = {name: entry.value for name, entry in metadata_of if entry.key == KIND}
        signature = cls(
            parameters=frozenset(target for _, kind, target, _ in found if kind == "PARAMETER")
            | {name for name, kind in kinds.items() if kind == "PARAMETER"},
            buffers=frozenset(target for _, kind, target, _ in found if kind == "BUFFER"),
            temporary=frozenset(target for _, _, target, is_temporary in found if is_temporary),
            arguments={argument: target for argument, _, target, _ in found},
            folded={
                name: tuple(TEXT.findall(entry.value))
                for name, entry in metadata_of
                if entry.key == FOLDED
            },
        )
        names = {tensor.name for tensor in graph.initializer} | {
            name for node in graph.node for name in node.input
        }
        return signature if any(signature.is_trained(name) for name in names) else cls()

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def origins(self, name: str) -> tuple[str, ...]:
        """Return the parameter that a tensor is, or the parameters from which it was folded."""
        if name in self.parameters:
            return (name,)
        return tuple(each for each in self.folded.get(name, ()) if each in self.parameters)

    def operator_counts(self, name: str) -> dict[str, int]:
        """Return the number of calls of each traced operator that was folded into a tensor, as far
        as values are named after the operators.
        """
        names = (name, *self.folded.get(name, ()))
        known = (
            NUMBERED.sub("", each)
            for each in names
            if not (self.declares(each) or INTERNAL.fullmatch(each))
        )
        return dict(Counter(known))

    def operators(self, name: str) -> frozenset[str]:
        """Return the traced operators that were folded into a tensor, as far as values are named
        after the operators.
        """
        return frozenset(self.operator_counts(name))

    def is_product(self, name: str) -> bool:
        """True if a matrix product or convolution was folded into a tensor: its parameters cannot
        be computed from it.
        """
        return name not in self.parameters and not PRODUCTS.isdisjoint(self.operators(name))

    def omitted_parameters(self, graph: onnx.GraphProto) -> list[str]:
        """Return the parameters that no tensor of the file holds, although a traced call has them
        as arguments: the exporter omits the addition of zeros.
        """
        held = {tensor.name for tensor in graph.initializer}
        found = {origin for name in held for origin in self.origins(name)}
        reads: dict[str, set[str]] = {}
        names: dict[str, set[str]] = {}
        for node in graph.node:
            call, arguments = traced_call(node)
            reads.setdefault(call, set()).update(
                name for name in node.input if self.is_trained(name)
            )
            names.setdefault(
                call, {self.arguments[each] for each in arguments if each in self.arguments}
            )
        few = (
            named & self.parameters
            for call, named in names.items()
            if len(reads[call]) < len(named)
        )
        return sorted(set[str]().union(*few) - found)

    def declares(self, name: str) -> bool:
        """True if a tensor is a parameter or a buffer."""
        return name in self.parameters or name in self.buffers

    def is_trained(self, name: str) -> bool:
        """True if a tensor is a parameter or was folded from parameters."""
        return bool(self.origins(name))

    def declaration_of(self, tensor: onnx.TensorProto, merged: str) -> onnx.ValueInfoProto:
        """Return metadata that declare `tensor`, a copy of the tensor `merged`, as a parameter on
        which the folds of `merged` were applied.
        """
        import onnx.helper

        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        info.metadata_props.add(key=KIND, value="PARAMETER")
        # The folds of `merged` without its parameters: the copy is computed from a parameter with
        # its data.
        folded = [
            each for each in (merged, *self.folded.get(merged, ())) if each not in self.parameters
        ]
        info.metadata_props.add(key=FOLDED, value=str(folded))
        return info


def is_detach(node: onnx.NodeProto) -> bool:
    """True if the traced call that a node is a part of is a `detach`."""
    return any(entry.key == CALL and DETACH.search(entry.value) for entry in node.metadata_props)


def trains_statistics(node: onnx.NodeProto) -> bool:
    """True if a node is a BatchNormalization in training mode."""
    trains = any(each.name == "training_mode" and each.i for each in node.attribute)
    return trains and node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx")


def padding_row(node: onnx.NodeProto) -> int | None:
    """Return the `padding_idx` of the embedding that a Gather was traced from: the row of the table
    that gets no gradient. None if there is none.
    """
    if node.op_type != "Gather" or len(node.input) != 2:
        return None
    found = PADDED.search(traced_call(node)[0])
    return None if found is None else int(found["third"] or found["named"])


def estimates_variance(node: onnx.NodeProto) -> bool:
    """True if a node is a batch normalization of torch in training. Its running variance is updated
    with Σ (x - mean)² / (n - 1), that of ONNX with Σ (x - mean)² / n.
    """
    if not trains_statistics(node):
        return False
    return any(
        entry.key == CALL and TORCH_BATCH_NORM.search(entry.value) for entry in node.metadata_props
    )


def stop_gradient_node(node: onnx.NodeProto) -> onnx.NodeProto:
    """Return a StopGradient node with the name, operands and results of `node`."""
    import onnx.helper

    return onnx.helper.make_node(
        "StopGradient", node.input, node.output, name=node.name, domain="autopipe"
    )


def traced_call(node: onnx.NodeProto) -> tuple[str, tuple[str, ...]]:
    """Return the traced call that a node is a part of and the names of the call's arguments; "" and
    () if the metadata have no call.
    """
    call = next((entry.value for entry in node.metadata_props if entry.key == CALL), "")
    return call, tuple(ARGUMENT.findall(call.partition("](args")[2]))


def traced_operator(node: onnx.NodeProto) -> str:
    """Return the operator of the traced call that a node is a part of, such as `linear`; "" if the
    metadata have no call.
    """
    found = TARGET.search(traced_call(node)[0])
    return "" if found is None else found[1]
