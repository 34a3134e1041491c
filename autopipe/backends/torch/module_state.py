"""The `state_dict` of an exported module: its names and what an ONNX file of the trace does not
hold of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from autopipe.backends.torch import torch_interfaces
from autopipe.ir.state_names import INITIALIZER_PREFIX, METADATA_KEY, StateNames

_STORABLE_TYPES: Final = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
    }
    | {torch.uint8, torch.bool}
)
"""Element types of tensors that are put into the file."""
_EXTRA_STATE_SUFFIX: Final = "_extra_state"
"""Last part of the name of what a module's `get_extra_state` returns."""
_STATISTICS_POSITIONS: Final = (3, 4)
"""Positions of the running statistics among the arguments of a traced batch or instance
normalization, and of the new ones among the results of a batch normalization.
"""
_COUNTING_OPERATORS: Final = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.detach.default})
"""Traced operators between a counter and its new value: `detach` stands behind regions under
`no_grad`.
"""


@dataclass(frozen=True, slots=True)
class BufferChanges:
    """Changes of the buffers of a traced module in one forward pass."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """Increments of counters that nothing reads, by the buffer's name."""
    statistics: tuple[str, ...] = ()
    """Running statistics of batch normalizations."""
    others: tuple[str, ...] = ()
    """Buffers and parameters that change in another way."""


def buffer_changes(traced: torch.export.ExportedProgram) -> BufferChanges:
    """Return how the forward pass of a functional traced program changes buffers and parameters."""
    signature = traced.graph_signature
    results = {
        each.name: each
        for each in traced.graph.output_node().args[0]
        if isinstance(each, torch.fx.Node)
    }
    counts: dict[str, int] = {}
    statistics: list[str] = []
    others = [*signature.parameters_to_mutate.values(), *_instance_norm_statistics(traced)]
    for result, name in signature.buffers_to_mutate.items():
        count = _counter_increment(results[result], signature.inputs_to_buffers, name)
        if count is not None:
            counts[name] = count
        elif _is_statistic(results[result], signature.inputs_to_buffers, name):
            statistics.append(name)
        else:
            others.append(name)
    return BufferChanges(counts, tuple(statistics), tuple(others))


def _instance_norm_statistics(traced: torch.export.ExportedProgram) -> Iterator[str]:
    """Yield the running statistics of instance normalizations in training, whose changes no
    signature lists.
    """
    for node in traced.graph.nodes:
        if (
            node.op == "call_function"
            and node.target is torch.ops.aten.instance_norm.default
            and node.args[5]
        ):
            for slot in _STATISTICS_POSITIONS:
                if isinstance(node.args[slot], torch.fx.Node):
                    yield traced.graph_signature.inputs_to_buffers[node.args[slot].name]


def _counter_increment(node: torch.fx.Node, buffers: Mapping[str, str], name: str) -> int | None:
    """Return the sum of the integers that are added to a buffer of integers, None if something else
    happens to it or if something reads it.
    """
    total = 0
    while (
        node.op == "call_function" and node.target in _COUNTING_OPERATORS and len(node.users) == 1
    ):
        before = node.args[0]
        amount = node.args[1] if len(node.args) > 1 else 0
        if (
            not isinstance(before, torch.fx.Node)
            or type(amount) is not int
            or node.kwargs
            or amount < 0
        ):
            return None
        total += amount
        node = before
    value = node.meta.get("val")
    if (
        buffers.get(node.name) != name
        or len(node.users) != 1
        or value is None
        or value.is_floating_point()
    ):
        return None
    return total


def _is_statistic(node: torch.fx.Node, buffers: Mapping[str, str], name: str) -> bool:
    """Return True if a value is the running statistic that batch normalizations have moved from
    that of a buffer, and nothing else reads it in between.
    """
    while node.op == "call_function" and node.target is operator.getitem:
        call, result = node.args
        if not all(
            user.op == "output" or user.target is torch_interfaces.batch_norm for user in node.users
        ):
            return False
        if not isinstance(call, torch.fx.Node) or call.target is not torch_interfaces.batch_norm:
            return False
        before = (
            call.args[result]
            if isinstance(result, int) and result in _STATISTICS_POSITIONS
            else None
        )
        if not isinstance(before, torch.fx.Node):
            return False
        node = before
    return buffers.get(node.name) == name


def record_state(
    model: Any,
    state: Mapping[str, Any],
    held: Mapping[int, Sequence[str]],
    counts: Mapping[str, int],
) -> list[str]:
    """Write the names of a module's `state_dict` into the metadata of an exported `model`, and add
    the tensors of it that the file does not hold. Return the entries that are not recorded, each
    with the reason.

    `held` are the names of each parameter and buffer by its `id`, as the file has them; `counts`
    the increments of counters by name.
    """
    initializers = {value.name for value in model.graph.initializers.values()}
    names: dict[str, str] = {}
    stored: dict[str, torch.Tensor] = {}
    increments: dict[str, int] = {}
    left_out: list[str] = []
    for name, tensor in state.items():
        reason = _reason_to_omit(name, tensor, held)
        if reason:
            left_out.append(f"{name} ({reason})")
            continue
        known = held.get(id(tensor), [name])
        found = next((each for each in known if each in initializers), None)
        if found is None:
            found = f"{INITIALIZER_PREFIX}{known[0]}"
            stored[found] = tensor
            count = next((counts[each] for each in known if each in counts), 0)
            if count:
                increments[found] = count
        names[name] = found
    for name, tensor in stored.items():
        _add_initializer(model, name, tensor)
    model.metadata_props[METADATA_KEY] = StateNames(names, increments).text()
    return left_out


def _reason_to_omit(name: str, entry: object, held: Mapping[int, Sequence[str]]) -> str:
    """Return why an entry of a `state_dict` cannot be recorded; "" if it can."""
    if not isinstance(entry, torch.Tensor):
        return f"a {type(entry).__name__}, no tensor"
    if id(entry) not in held and name.rpartition(".")[2] != _EXTRA_STATE_SUFFIX:
        return "computed by a hook of the module"
    if entry.dtype not in _STORABLE_TYPES:
        return f"of type {str(entry.dtype).removeprefix('torch.')}"
    return ""


def _add_initializer(model: Any, name: str, tensor: torch.Tensor) -> None:
    import onnx_ir
    from onnx_ir.tensor_adapters import TorchTensor

    content = TorchTensor(tensor.detach().cpu().contiguous(), name=name)
    value = onnx_ir.Value(
        name=name, shape=content.shape, type=onnx_ir.TensorType(content.dtype), const_value=content
    )
    model.graph.initializers[name] = value


def overlapping_tensors(module: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of parameters and buffers that are different tensors and have elements of one
    memory in common. An exported file holds them apart, so that a change of one would no longer
    change the other.
    """
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    seen: set[int] = set()
    for name, tensor in named_tensors(module):
        if id(tensor) not in seen and tensor.numel() and tensor.layout is torch.strided:
            seen.add(id(tensor))
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
    found: list[tuple[str, str]] = []
    for sharing in by_storage.values():
        for place, (name, tensor) in enumerate(sharing):
            found += [
                (name, other) for other, each in sharing[place + 1 :] if _share_bytes(tensor, each)
            ]
    return found


def _share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of one storage have a byte in common."""
    starts, stops = zip(*map(_byte_range, (one, other)), strict=True)
    if max(starts) >= min(stops):
        return False
    if one.dtype != other.dtype:
        return True
    taken = torch.zeros(max(stops) // one.element_size(), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after the last one."""
    last = sum(
        (extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + int(last) + 1) * tensor.element_size()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all parameters and buffers of a module, tied ones under each of their names."""
    yield from chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )


def first_name_of_each(module: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter and buffer of a module, by each of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(module)}
