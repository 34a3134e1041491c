"""Metadata of files that PyTorch's newer exporter, torch.onnx.export(dynamo=True), writes.

The graph's metadata contain the signature of the traced program: which tensors are parameters and
which are buffers. The metadata of a constant list the values from which the exporter computed it
(constant folding). The metadata of a node contain the call of the traced program that the node is a
part of.
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
"""Key of the graph's metadata whose entry is the signature: parameters, buffers, inputs and
outputs.
"""
FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""Key of a value's metadata whose entry lists the values from which a constant was computed."""
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Key of a value's metadata whose entry is PARAMETER or BUFFER."""
CALL = "pkg.torch.onnx.fx_node"
"""Key of a node's metadata whose entry is the call of the traced program that the node is a part
of.
"""
DETACH = re.compile(r"\[target=torch\.ops\.aten\.detach_?\.default\]")
"""Pattern of a call of `detach` in PyTorch's traced program."""
PADDED = re.compile(
    r"\[target=torch\.ops\.aten\.embedding\.default\]\(args = \(%\w+, %\w+"
    r"(?:, (?P<third>\d+)|.*kwargs = \{.*padding_idx: (?P<named>\d+))"
)
"""Pattern of a call of an embedding with `padding_idx` in PyTorch's traced program. `padding_idx`
is the index of the row that receives no gradient. The exporter omits the argument if no row is
excluded.
"""
TORCH_BATCH_NORM = re.compile(r"\[target=torch\.ops\.aten\.\w*batch_norm")
"""Pattern of a call of a batch normalization in PyTorch's traced program."""
SIGNED = re.compile(
    r"^(\w+): (PARAMETER|BUFFER) target='([^'\n]+)'( persistent=False)?", re.MULTILINE
)
"""Pattern of a parameter or buffer in the signature: its argument, kind, name in the module, and
whether it is missing in the state_dict.
"""
ARGUMENT = re.compile(r"%([A-Za-z_]\w*)")
"""Pattern of a value in a call of PyTorch's traced program."""
TEXT = re.compile(r"'([^']*)'")
"""Pattern of a quoted name in a list."""
TARGET = re.compile(r"call_function\[target=(?:torch\.ops\.)?(?:\w+\.)?(\w+)")
"""Pattern of the operator in a call of PyTorch's traced program. The group is the operator's name
without overload.
"""
INTERNAL = re.compile(r"_?val_\d+|onnx::\w+")
"""Pattern of the names of values inside the decomposition of one call of PyTorch's traced program.
Other values are named after the operator that computes them.
"""
NUMBERED = re.compile(r"_\d+$")
"""Pattern of the number that distinguishes several values named after the same operator."""
STATISTIC_SLOTS = (3, 4)
"""Indices of the operands of a BatchNormalization that are the running mean and variance."""
PRODUCTS = frozenset({"einsum", "linear", "matmul", "mm", "bmm", "addmm", "convolution", "conv2d"})
"""Operators of the traced program that are matrix products or convolutions."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters and buffers of the traced program of a file. It is false as a condition if it
    has no parameters.
    """

    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    temporary: frozenset[str] = frozenset()
    """Buffers that the module's state_dict lacks (persistent=False)."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """For each argument of the traced program that is a parameter or buffer, its name in the
    module.
    """
    folded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each constant that the exporter computed, the names of the values from which it was
    computed.
    """

    @classmethod
    def of(cls, graph: onnx.GraphProto, metadata: Mapping[str, str]) -> Signature:
        """Return the signature of a file. It is empty if the file has none, or if none of the
        tensors in the file is a parameter or was computed from one.
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
        """Return the names of the parameters from which the exporter computed the tensor `name`;
        only `name` if it is a parameter.
        """
        if name in self.parameters:
            return (name,)
        return tuple(each for each in self.folded.get(name, ()) if each in self.parameters)

    def operator_counts(self, name: str) -> dict[str, int]:
        """Return for each operator of PyTorch's traced program the number of its calls that the
        exporter evaluated to compute the tensor `name`. Only calls whose results are named after
        the operator are counted.
        """
        names = (name, *self.folded.get(name, ()))
        known = (
            NUMBERED.sub("", each)
            for each in names
            if not (self.declares(each) or INTERNAL.fullmatch(each))
        )
        return dict(Counter(known))

    def operators(self, name: str) -> frozenset[str]:
        """Return the operators of PyTorch's traced program that the exporter evaluated to compute
        the tensor `name`. Only operators after which a value is named are included.
        """
        return frozenset(self.operator_counts(name))

    def is_product(self, name: str) -> bool:
        """True if the exporter evaluated a matrix product or convolution to compute the tensor
        `name`. Its parameters can then not be recovered from it.
        """
        return name not in self.parameters and not PRODUCTS.isdisjoint(self.operators(name))

    def omitted_parameters(self, graph: onnx.GraphProto) -> list[str]:
        """Return the parameters that are arguments of a call of PyTorch's traced program although
        no tensor of the file contains them. The exporter omits, for example, the addition of a
        parameter of zeros.
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
        """True if the tensor `name` is a parameter or a buffer of the signature."""
        return name in self.parameters or name in self.buffers

    def is_trained(self, name: str) -> bool:
        """True if the tensor `name` is a parameter or was computed from parameters."""
        return bool(self.origins(name))

    def declaration_of(self, tensor: onnx.TensorProto, merged: str) -> onnx.ValueInfoProto:
        """Return an entry of the graph's `value_info` for `tensor`, a copy of the tensor `merged`.
        Its metadata declare `tensor` as a parameter, and list the values from which the exporter
        computed `merged`, without the parameters among them.
        """
        import onnx.helper

        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        info.metadata_props.add(key=KIND, value="PARAMETER")
        # The exporter computed the copy from another parameter with equal data. The parameters of
        # `merged` are therefore not its origins and are omitted.
        folded = [
            each for each in (merged, *self.folded.get(merged, ())) if each not in self.parameters
        ]
        info.metadata_props.add(key=FOLDED, value=str(folded))
        return info


def is_detach(node: onnx.NodeProto) -> bool:
    """True if a node is part of a call of `detach` in PyTorch's traced program."""
    return any(entry.key == CALL and DETACH.search(entry.value) for entry in node.metadata_props)


def is_training_batch_norm(node: onnx.NodeProto) -> bool:
    """True if a node is a BatchNormalization in training mode, which updates its running
    statistics.
    """
    trains = any(each.name == "training_mode" and each.i for each in node.attribute)
    return trains and node.op_type == "BatchNormalization" and node.domain in ("", "ai.onnx")


def padding_row(node: onnx.NodeProto) -> int | None:
    """Return the index of the table row that receives no gradient, for a Gather that was traced
    from an embedding with `padding_idx`. None for other nodes.
    """
    if node.op_type != "Gather" or len(node.input) != 2:
        return None
    found = PADDED.search(traced_call(node)[0])
    return None if found is None else int(found["third"] or found["named"])


def uses_unbiased_variance(node: onnx.NodeProto) -> bool:
    """True if a node is a batch normalization of PyTorch in training mode. PyTorch updates the
    running variance with Σ (x - mean)² / (n - 1), ONNX with Σ (x - mean)² / n.
    """
    if not is_training_batch_norm(node):
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
    """Return (call, names of its arguments) for the call of PyTorch's traced program that a node is
    a part of; ("", ()) if the node's metadata lack a call.
    """
    call = next((entry.value for entry in node.metadata_props if entry.key == CALL), "")
    return call, tuple(ARGUMENT.findall(call.partition("](args")[2]))


def traced_operator(node: onnx.NodeProto) -> str:
    """Return the operator, for example `linear`, of the call of PyTorch's traced program that a
    node is a part of; "" if the node's metadata lack a call.
    """
    found = TARGET.search(traced_call(node)[0])
    return "" if found is None else found[1]
