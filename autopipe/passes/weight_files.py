"""Read the weights of a model from another file (safetensors or an ONNX file), and the layouts that
parameters have in the PyTorch module.

Tensors are matched by the names of parameters in the module, and read in pieces. Two ONNX files of
one module, exported for training and for evaluation, count as one model if they differ only in
training behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Constant, DType, FileSlice, Fill, FoldedSlice, Parameter, Value
from autopipe.ir.layout import TensorSlice, full_slice
from autopipe.ir.state_names import StateNames, module_name
from autopipe.passes.export import FIXED, TensorData, stored_tensor
from autopipe.passes.frontend.elements import read_stored_data
from autopipe.passes.frontend.folding import Folded, Layout, read_folded_data
from autopipe.passes.frontend.load import Source, load
from autopipe.passes.frontend.parameters import TrainingChoice, roles_of
from autopipe.passes.frontend.weights import Weights
from autopipe.passes.module_state import (
    array_slice,
    graph_name,
    in_module_layout,
    initializer_data,
    initializers_of,
    recorded_entries,
    state_only_tensors,
    with_name,
)
from autopipe.passes.safetensors_files import is_safetensors, read_safetensors

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class MatchedWeights:
    """Result of matching the tensors of a weights file with the parameters of a model."""

    numbers: Mapping[str, TensorData]
    """Data for parameters of the model, by name in the model's graph."""
    missing: tuple[str, ...]
    """Names of required parameters that the file lacks."""
    unused: tuple[str, ...]
    """Names of tensors of the file that the model does not have, without `passed_over`. Of an ONNX
    file, only trained parameters and running statistics are listed.
    """
    passed_over: tuple[str, ...]
    """Names of tensors of the file that the model does not have and training does not require:
    batch counters, and second names of tied parameters.
    """
    kept: tuple[str, ...] = ()
    """Names of required parameters that the file lacks and that are not in the module's
    `state_dict`, for example parameters of its loss. They keep their values.
    """


COUNTER: Final = "num_batches_tracked"
"""Last component of the name of the batch counter of a BatchNorm module, which no ONNX operator
reads.
"""


def match_weights(weights: Path, model: Path) -> MatchedWeights:
    """Match the tensors of the file `weights` with the parameters of the ONNX file `model`. The
    data is returned with the names, layouts and element types of the model's parameters.

    Required are each trained parameter and running statistic of the model, under one of its names
    in the module, and each floating-point entry of the module's `state_dict` that no node reads.
    Tables, constants and counters are optional. Raise ModelError for a tensor of another shape, for
    a type that cannot be converted, and for names of one tied parameter with different data. Raise
    ConfigurationError if a file cannot be read.
    """
    source = load(model)
    table = Weights(source, roles_of(source), TrainingChoice())
    kept = _loadable_tensors(table)
    stored: Mapping[str, TensorData]
    if is_safetensors(weights):
        stored = read_safetensors(weights)
        needed = set(stored)
    else:
        stored, needed = _onnx_tensors(weights)
    found: dict[str, TensorData] = {}
    unread: dict[str, Value] = {}
    state = StateNames.of(source.metadata, initializers_of(source))
    entered: set[str] | None = None
    if state is not None:
        entries = recorded_entries(stored, state, weights)
        held = table.read_initializers()
        unread = dict(state_only_tensors(source))
        entered = {graph_name(tensor, held) for tensor in state.names.values()}
        for tensor, numbers in entries.by_tensor.items():
            if tensor in unread:
                found[tensor] = _as_state_only(numbers, unread[tensor], weights)
            else:
                name = graph_name(tensor, held)
                found[name] = _as_parameter(numbers, kept[name], table.layouts.get(name), weights)
        stored = entries.rest
    for name, numbers in stored.items():
        if name in kept:
            found[name] = _as_parameter(numbers, kept[name], table.layouts.get(name), weights)
    named_by_nodes = _node_parameter_names(source)
    found.update(
        (name, each)
        for name, each in stored.items()
        if name in named_by_nodes and name not in found
    )
    required = [
        name for name, each in kept.items() if each.trainable or table.roles.is_statistic(name)
    ]
    kept_names = [
        name
        for name in required
        if entered is not None and name not in entered and name not in found
    ]
    required = [name for name in required if name not in kept_names]
    required += [name for name, value in unread.items() if value.dtype.is_floating]
    unused = [name for name in stored if name in needed and name not in found]
    passed_over = [name for name in unused if _is_optional(stored[name], table, found)]
    return MatchedWeights(
        numbers=found,
        missing=tuple(module_name(name) for name in required if name not in found),
        unused=tuple(name for name in unused if name not in passed_over),
        passed_over=tuple(passed_over),
        kept=tuple(kept_names),
    )


def _as_state_only(numbers: TensorData, value: Value, weights: Path) -> TensorData:
    """Return the tensor `numbers` of the file `weights` with the name and element type of `value`,
    an initializer of the model that no node reads. Raise ModelError if the shapes differ.
    """
    plain = replace(value, name=module_name(value.name))
    return with_name(
        _as_parameter(numbers, Parameter(plain, Fill(0.0), trainable=False), None, weights),
        value.name,
    )


def _loadable_tensors(table: Weights) -> dict[str, Parameter]:
    """Return the tensors of a model that a weights file may contain, by their names in the graph:
    its parameters, and its constants as untrained parameters.
    """
    found: dict[str, Parameter] = {}
    for each in table.read_initializers().values():
        held = each.source if isinstance(each, Folded) else each
        if isinstance(held, Constant):
            held = Parameter(held.value, Fill(0.0), trainable=False)
        if isinstance(held, Parameter):
            found[held.value.name] = held
    return found


def _node_parameter_names(source: Source) -> set[str]:
    """Return names of parameters that are not initializers: the results of nodes without operands
    (`FIXED`), and the names that nodes read although no node, input or initializer provides them.
    """
    constant = {name for node in source.nodes if node.op_type in FIXED for name in node.output}
    written = {name for node in source.nodes for name in node.output}
    written.update(each.name for each in (*source.graph.input, *source.graph.initializer))
    read = {name for node in source.nodes for name in node.input if name}
    return constant | (read - written)


def _as_parameter(
    numbers: TensorData, held: Parameter, layout: Layout | None, weights: Path
) -> TensorData:
    """Return the tensor `numbers` of the file `weights` in the layout and element type of the
    model's parameter `held`. `layout` is the difference between its layouts in the module and in
    the graph; None if they are equal. Raise ModelError if the shapes differ.
    """
    value = held.value
    shape = value.shape if layout is None else layout.shape
    if numbers.value.shape != shape:
        there = list(numbers.value.shape)
        raise ModelError(
            f"tensor {value.name!r} has shape {there}, but the model expects {list(shape)}",
            where=str(weights),
        )
    converted = _with_element_type(numbers, replace(value, shape=shape))
    return (
        converted
        if layout is None
        else converted.computed(value, Folded(value, value.name, layout.steps))
    )


def _is_optional(numbers: TensorData, table: Weights, found: Mapping[str, TensorData]) -> bool:
    """True if an unused tensor of the weights file is not a mistake: it is a batch counter or an
    untrained buffer of integers, or a second name of a tied parameter whose data equals that of the
    first name in `found`.
    """
    name = numbers.value.name
    signature = table.roles.signature
    if not numbers.value.dtype.is_floating:
        return name.rpartition(".")[2] == COUNTER or name in signature.buffers
    if name not in signature.parameters:
        return False
    everything = full_slice(numbers.value.shape)
    return any(
        other.value.shape == numbers.value.shape
        and name not in (other.value.name, *signature.origins(other.value.name))
        and np.array_equal(other.read(everything), numbers.read(everything))
        for other in found.values()
    )


def _with_element_type(numbers: TensorData, value: Value) -> TensorData:
    """Return the tensor `numbers` with the name, element type and shape of `value`. Raise
    ModelError if its element type cannot be converted.
    """
    own = numbers.value.dtype
    if own is value.dtype:
        return replace(numbers, value=value)
    if not own.is_floating or not value.dtype.is_floating or value.dtype is DType.BFLOAT16:
        raise ModelError(
            f"tensor {value.name!r} has type {own.value}, which cannot be converted to the "
            f"model's type {value.dtype.value}"
        )

    def read(box: TensorSlice) -> npt.NDArray[np.generic]:
        """Return a slice of the tensor in the element type of `value`."""
        block = numbers.read(box)
        if own is DType.BFLOAT16:
            block = (block.astype(np.uint32) << 16).view(np.float32)
        return block.astype(value.dtype.storage_type)

    return TensorData(value, read)


def _onnx_tensors(path: Path) -> tuple[dict[str, TensorData], set[str]]:
    """Return (tensors, needed) of an ONNX file from which weights are read.

    tensors: its parameters and constants, and the entries of the module's `state_dict` that no node
    reads, by their names in the module and in the module's layouts.
    needed: the names of its trained parameters and running statistics.
    """
    source = load(path)
    table = Weights(source, roles_of(source), TrainingChoice())
    tensors = initializers_of(source)
    found: dict[str, TensorData] = {}
    needed: set[str] = set()
    for name, _ in state_only_tensors(source):
        unread = initializer_data(tensors[name], source)
        if unread is not None:
            plain = module_name(name)
            found[plain] = with_name(unread, plain)
    for name, each in _loadable_tensors(table).items():
        if isinstance(each.storage, FoldedSlice):
            numbers = _folded_data(each, path)
        elif isinstance(each.storage, FileSlice):
            numbers = stored_tensor(each.value, each.storage, path)
        else:
            tensor = tensors.get(name)
            array = None if tensor is None else read_stored_data(name, tensor, source.slices, path)
            numbers = None if array is None else TensorData(each.value, partial(array_slice, array))
        if numbers is None:
            continue
        found[name] = in_module_layout(numbers, table.layouts.get(name))
        if each.trainable or table.roles.is_statistic(name):
            needed.add(name)
    return found, needed


def _folded_data(parameter: Parameter, path: Path) -> TensorData | None:
    """Return a parameter that is computed from a tensor of the ONNX file `path`; None if the
    element type of the tensor cannot be read.
    """
    array = read_folded_data(parameter, path)
    return None if array is None else TensorData(parameter.value, partial(array_slice, array))


def module_layouts(model: Path) -> Mapping[str, Layout]:
    """Return, by name, the difference between the layouts in the PyTorch module and in the ONNX
    file `model`, for each parameter whose layouts differ.
    """
    source = load(model)
    table = Weights(source, roles_of(source), TrainingChoice())
    table.read_initializers()
    return table.layouts


def are_same_model(one: Source, other: Source) -> bool:
    """True if two ONNX files have equal nodes between equal inputs, outputs and initializers,
    except for training behaviour. So they compute equal outputs in inference if their weights are
    equal.

    Dropout and the training mode of BatchNormalization are ignored, and so are the names of nodes
    and of intermediate values.
    """
    if sorted(one.opsets) != sorted(other.opsets) or _interface(one) != _interface(other):
        return False
    return list(_computation(one)) == list(_computation(other))


def _interface(source: Source) -> tuple[list[str], list[str]]:
    """Return the names of the inputs and of the outputs of a file."""
    return [each.name for each in source.graph.input], [each.name for each in source.graph.output]


def _computation(source: Source) -> Iterator[object]:
    """Yield all that determines the outputs of a file in inference: its nodes with the sources of
    their operands, the sources of its outputs, and its initializers by name. A source is the
    (position, result) of a node, or the name of an input or initializer.
    """
    same: dict[str, str] = {}
    nodes = []
    for node in source.nodes:
        operands = [same.get(name, name) for name in node.input]
        if _is_operator(node, "Dropout") and not any(node.output[1:]):
            same[node.output[0]] = operands[0]
        else:
            nodes.append((node, operands))
    needed = {same.get(each.name, each.name) for each in source.graph.output}
    kept = []
    for node, operands in reversed(nodes):
        if not needed.isdisjoint(_inference_results(node)):
            needed.update(operands)
            kept.append((node, operands))
    places: dict[str, object] = {}
    for number, (node, operands) in enumerate(reversed(kept)):
        yield (
            node.op_type,
            node.domain,
            _attributes(node),
            [places.get(name, name) for name in operands],
        )
        places |= {name: (number, index) for index, name in enumerate(_inference_results(node))}
    yield [places.get(same.get(each.name, each.name), each.name) for each in source.graph.output]
    tensors = {each.name: each for each in source.graph.initializer if each.name in needed}
    # Large tensors were loaded without their data, so only their names, types and shapes are
    # compared. Their data are weights, which may differ between the two files.
    yield sorted(
        (name, each.SerializeToString(deterministic=True)) for name, each in tensors.items()
    )


def _is_operator(node: onnx.NodeProto, operator: str) -> bool:
    """True if the node has this operator of the standard ONNX domain."""
    return node.op_type == operator and node.domain in ("", "ai.onnx")


def _inference_results(node: onnx.NodeProto) -> list[str]:
    """Return the names of a node's results, without the updated statistics that BatchNormalization
    has in training.
    """
    return list(node.output[:1] if _is_operator(node, "BatchNormalization") else node.output)


def _attributes(node: onnx.NodeProto) -> list[bytes]:
    """Return the serialized attributes of a node, sorted, without the training mode of
    BatchNormalization.
    """
    ignored = {"training_mode"} if _is_operator(node, "BatchNormalization") else set()
    return sorted(
        each.SerializeToString(deterministic=True)
        for each in node.attribute
        if each.name not in ignored
    )
