"""The `state_dict` of an exported module: its names and what an ONNX file of the trace does not hold of it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from autopipe.backends.torch import torch_interfaces
from autopipe.ir.state_names import KEY, PREFIX, StateNames

_STORED: Final = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8}
    | {torch.uint8, torch.bool}
)
"""Element types of tensors that are put into the file."""
_STATISTICS: Final = (3, 4)
"""Positions of the running statistics among the arguments of a traced batch normalization, and of the new ones among
its results."""


@dataclass(frozen=True, slots=True)
class BufferChanges:
    """Changes of the buffers of a traced module in one forward pass."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """Increments of counters that nothing reads, by the buffer's name."""
    others: tuple[str, ...] = ()
    """Buffers that change in a way that is no increment and no running statistic of a batch normalization."""


def buffer_changes(traced: torch.export.ExportedProgram) -> BufferChanges:
    """Return how the forward pass of a functional traced program changes buffers."""
    signature = traced.graph_signature
    results = {each.name: each for each in traced.graph.output_node().args[0] if isinstance(each, torch.fx.Node)}
    counts: dict[str, int] = {}
    others: list[str] = []
    for result, name in signature.buffers_to_mutate.items():
        node = results[result]
        count = _increment(node, signature.inputs_to_buffers, name)
        if count is not None:
            counts[name] = count
        elif not _is_statistic(node, signature.inputs_to_buffers, name):
            others.append(name)
    return BufferChanges(counts, tuple(others))


def _increment(node: torch.fx.Node, buffers: Mapping[str, str], name: str) -> int | None:
    """Return the sum of the integers that are added to a buffer of integers, None if something else happens to it or
    if something reads it."""
    total = 0
    while node.op == "call_function" and node.target is torch.ops.aten.add.Tensor and len(node.users) == 1:
        before, amount = node.args[:2]
        if not isinstance(before, torch.fx.Node) or type(amount) is not int or node.kwargs or amount < 0:
            return None
        total += amount
        node = before
    value = node.meta.get("val")
    if buffers.get(node.name) != name or len(node.users) != 1 or value is None or value.is_floating_point():
        return None
    return total


def _is_statistic(node: torch.fx.Node, buffers: Mapping[str, str], name: str) -> bool:
    """Return True if a value is the running statistic that batch normalizations have moved from that of a buffer, and
    nothing else reads it in between."""
    while node.op == "call_function" and node.target is operator.getitem:
        call, result = node.args
        if not all(user.op == "output" or user.target is torch_interfaces.batch_norm for user in node.users):
            return False
        if not isinstance(call, torch.fx.Node) or call.target is not torch_interfaces.batch_norm:
            return False
        before = call.args[result] if isinstance(result, int) and result in _STATISTICS else None
        if not isinstance(before, torch.fx.Node):
            return False
        node = before
    return buffers.get(node.name) == name


def record_state(
    model: Any, state: Mapping[str, Any], held: Mapping[int, Sequence[str]], counts: Mapping[str, int]
) -> list[str]:
    """Write the names of a module's `state_dict` into the metadata of an exported `model`, and add the tensors of it
    that the file does not hold. Return the entries that are not recorded, each with the reason.

    `held` are the names of each parameter and buffer by its `id`, as the file has them; `counts` the increments of
    counters by name.
    """
    initializers = {value.name for value in model.graph.initializers.values()}
    names: dict[str, str] = {}
    stored: dict[str, torch.Tensor] = {}
    increments: dict[str, int] = {}
    left_out: list[str] = []
    for name, tensor in state.items():
        reason = _reason_to_leave_out(tensor, held)
        if reason:
            left_out.append(f"{name} ({reason})")
            continue
        known = held[id(tensor)]
        found = next((each for each in known if each in initializers), None)
        if found is None:
            found = f"{PREFIX}{known[0]}"
            stored[found] = tensor
            count = next((counts[each] for each in known if each in counts), 0)
            if count:
                increments[found] = count
        names[name] = found
    for name, tensor in stored.items():
        _add_initializer(model, name, tensor)
    model.metadata_props[KEY] = StateNames(names, increments).text()
    return left_out


def _reason_to_leave_out(entry: object, held: Mapping[int, Sequence[str]]) -> str:
    """Return why an entry of a `state_dict` cannot be recorded; "" if it can."""
    if not isinstance(entry, torch.Tensor):
        return f"a {type(entry).__name__}, no tensor"
    if id(entry) not in held:
        return "computed by a hook of the module"
    if entry.dtype not in _STORED:
        return f"of type {str(entry.dtype).removeprefix('torch.')}"
    return ""


def _add_initializer(model: Any, name: str, tensor: torch.Tensor) -> None:
    import onnx_ir
    from onnx_ir.tensor_adapters import TorchTensor

    content = TorchTensor(tensor.detach().cpu().contiguous(), name=name)
    value = onnx_ir.Value(name=name, shape=content.shape, type=onnx_ir.TensorType(content.dtype), const_value=content)
    model.graph.initializers[name] = value


def tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers of a module, tied ones under each of their names."""
    yield from chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
