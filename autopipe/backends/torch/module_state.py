"""Preservation of a PyTorch module's `state_dict` in an exported ONNX file: names of tensors,
tensors that no node of the file reads, and changes of buffers in a forward pass.
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
"""Element types of the tensors of a `state_dict` that the exported file can hold."""
_EXTRA_STATE_SUFFIX: Final = "_extra_state"
"""Last part of the name under which `state_dict` has the result of a module's `get_extra_state`."""
_STATISTICS_POSITIONS: Final = (3, 4)
"""Positions of running mean and running variance among the arguments of a traced batch or instance
normalization. The updated values are at these positions among the results of a batch normalization.
"""
_COUNTING_OPERATORS: Final = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.detach.default})
"""Traced operators between the old and the new value of a counter buffer. Torch traces a `detach`
for a value that leaves a region under `no_grad`.
"""


@dataclass(frozen=True, slots=True)
class BufferChanges:
    """How one forward pass changes the buffers and parameters of a traced module. All fields
    contain names of buffers or parameters.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    """Increment of each counter that the forward pass only increments and does not read, such as
    `num_batches_tracked`.
    """
    statistics: tuple[str, ...] = ()
    """Running statistics of batch normalizations."""
    others: tuple[str, ...] = ()
    """Buffers and parameters that change in any other way, which the exported file does not
    reproduce.
    """


def buffer_changes(traced: torch.export.ExportedProgram) -> BufferChanges:
    """Return how the forward pass of a traced program changes buffers and parameters. The program
    must be in functional form, in which changes are additional results.
    """
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
        elif _is_updated_statistic(results[result], signature.inputs_to_buffers, name):
            statistics.append(name)
        else:
            others.append(name)
    return BufferChanges(counts, tuple(statistics), tuple(others))


def _instance_norm_statistics(traced: torch.export.ExportedProgram) -> Iterator[str]:
    """Yield the names of the running statistics that instance normalizations in training update.
    The signature of the traced program does not list these updates.
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
    """Return the total increment of the integer buffer `name` in a forward pass. `node` computes
    the new value of the buffer. `buffers` maps argument names of the traced program to names of
    buffers.

    Return None if the new value is not the old value plus nonnegative integer constants, or if
    another node reads the buffer or an intermediate sum.
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


def _is_updated_statistic(node: torch.fx.Node, buffers: Mapping[str, str], name: str) -> bool:
    """Return True if `node`, the new value of the buffer `name`, is a running statistic: one or
    several batch normalizations compute it in sequence from the old value. Only batch
    normalizations and the program's output may read the results of this sequence. `buffers` maps
    argument names of the traced program to names of buffers.
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
    """Write the names of a module's `state_dict`, `state`, into the metadata of the exported
    `model`. Add those of its tensors that the file does not hold, as initializers. Return the
    entries that cannot be recorded, as texts `NAME (REASON)`.

    `held` has the names in the module of each parameter and buffer, by the tensor's `id`. `counts`
    has the increment per forward pass of each counter, by name.
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
    """Return why the entry called `name` of a `state_dict` cannot be recorded, or "" if it can be.
    `held` has the names in the module of each parameter and buffer, by the tensor's `id`.
    """
    if not isinstance(entry, torch.Tensor):
        return f"a {type(entry).__name__}, no tensor"
    if id(entry) not in held and name.rpartition(".")[2] != _EXTRA_STATE_SUFFIX:
        return "computed by a hook of the module"
    if entry.dtype not in _STORABLE_TYPES:
        return f"of type {str(entry.dtype).removeprefix('torch.')}"
    return ""


def _add_initializer(model: Any, name: str, tensor: torch.Tensor) -> None:
    """Add `tensor` to the exported `model` as an initializer called `name`, which no node reads."""
    import onnx_ir
    from onnx_ir.tensor_adapters import TorchTensor

    content = TorchTensor(tensor.detach().cpu().contiguous(), name=name)
    value = onnx_ir.Value(
        name=name, shape=content.shape, type=onnx_ir.TensorType(content.dtype), const_value=content
    )
    model.graph.initializers[name] = value


def overlapping_tensors(module: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of names of parameters and buffers that are different tensors with shared
    memory. An exported file stores such tensors separately, so a change of one of them would no
    longer change the other.
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
                (name, other)
                for other, each in sharing[place + 1 :]
                if _have_common_bytes(tensor, each)
            ]
    return found


def _have_common_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors with the same storage have at least one byte of it in common."""
    starts, stops = zip(*map(_byte_range, (one, other)), strict=True)
    if max(starts) >= min(stops):
        return False
    if one.dtype != other.dtype:
        return True
    taken = torch.zeros(max(stops) // one.element_size(), dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return (first, end): the offset of the first byte of a tensor in its storage, and the offset
    after its last byte.
    """
    last = sum(
        (extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + int(last) + 1) * tensor.element_size()


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for all parameters and buffers of a module. A tied tensor is yielded
    under each of its names.
    """
    yield from chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )


def first_names(module: nn.Module) -> dict[str, str]:
    """Return a mapping from each name of a parameter or buffer to the tensor's first name. The two
    differ only for tied tensors.
    """
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(module)}
