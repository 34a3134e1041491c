"""Compute the `state_dict` of a PyTorch module from its ONNX file and trained weights.

A file written by `autopipe export` contains a record of all entries (`ir/state_names.py`). In other
files of PyTorch's newer exporter, the signature of the traced program names parameters and buffers,
but a tied parameter has only one of its names there. Files of PyTorch's older exporter name only
the tensors that their nodes read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import FileSlice, Value, VarintSlice
from autopipe.ir.layout import TensorSlice
from autopipe.ir.state_names import StateNames, is_for_state_only
from autopipe.ir.words import plural
from autopipe.passes.export import TensorData, stored_tensor
from autopipe.passes.frontend.elements import array_of, has_data, locate_external_data, value_of
from autopipe.passes.frontend.folding import Folded, Layout
from autopipe.passes.frontend.load import Source, load
from autopipe.passes.frontend.parameters import TrainingChoice, roles_of
from autopipe.passes.frontend.weights import Held, Weights

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class ModuleState:
    """The `state_dict` of a module after training."""

    tensors: tuple[TensorData, ...]
    """The entries with their data, in the layouts that they have in the module. The tensors named
    in `others` are included.
    """
    absent: tuple[str, ...] = ()
    """Names of entries of the `state_dict` for which the file contains no data."""
    others: tuple[str, ...] = ()
    """Names of trained tensors in `tensors` that are not entries of the module's `state_dict`, for
    example parameters of its loss.
    """


def module_state(
    model: Path, trained: Mapping[str, TensorData], trainable: Collection[str], forwards: int | None
) -> ModuleState:
    """Return the `state_dict` of the module from which the ONNX file `model` was exported, with the
    weights `trained`.

    `trained` contains weights by the names of the graph's parameters, and `trainable` the names of
    those that were trained. Batch counters (`num_batches_tracked` of BatchNorm) are increased by
    the number of micro-batches `forwards`, or left unchanged if it is None. Raise ModelError if the
    file's record of the module does not match the file.
    """
    source = load(model)
    table = Weights(source, roles_of(source), TrainingChoice())
    held = table.read_initializers()
    tensors = initializers_of(source)
    state = StateNames.of(source.metadata, tensors)
    plain = {
        name: in_module_layout(each, table.layouts.get(name)) for name, each in trained.items()
    }
    if state is None:
        return _state_by_signature(source, table, plain, trainable)
    counted = batch_counters(source, state, forwards)
    found: list[TensorData] = []
    absent: list[str] = []
    covered: set[str] = set()
    for name, tensor in state.names.items():
        known = graph_name(tensor, held)
        covered.add(known)
        numbers = (
            plain.get(known) or counted.get(tensor) or initializer_data(tensors[tensor], source)
        )
        if numbers is None:
            absent.append(name)
        else:
            found.append(with_name(numbers, name))
    others = tuple(name for name in plain if name in trainable and name not in covered)
    return ModuleState((*found, *(plain[name] for name in others)), tuple(absent), others)


def _state_by_signature(
    source: Source, table: Weights, trained: Mapping[str, TensorData], trainable: Collection[str]
) -> ModuleState:
    """Return the `state_dict` of a file without a record, by the signature of the traced program.

    Buffers that are not part of the module's `state_dict` are omitted. Persistent buffers that are
    in the file, but not in the graph, are included. `trained` and `trainable` are those of
    `module_state`, in the module's layouts.
    """
    signature = table.roles.signature
    found = {
        name: each
        for name, each in trained.items()
        if name in trainable or name not in signature.temporary
    }
    for name, tensor in initializers_of(source).items():
        if name in signature.buffers and name not in signature.temporary and name not in found:
            numbers = initializer_data(tensor, source)
            if numbers is not None:
                found[name] = numbers
    expected = signature.arguments.values()
    absent = tuple(
        name for name in expected if name not in found and name not in signature.temporary
    )
    return ModuleState(tuple(found.values()), absent)


def initializers_of(source: Source) -> dict[str, onnx.TensorProto]:
    """Return the initializers of a file by name."""
    return {tensor.name: tensor for tensor in source.graph.initializer}


def graph_name(tensor: str, held: Mapping[str, Held]) -> str:
    """Return the name of the graph's parameter that corresponds to the initializer `tensor`; its
    own name if there is none. `held` contains the parameters and constants of the file by
    initializer.
    """
    each = held.get(tensor)
    while isinstance(each, Folded) and isinstance(each.source, str):
        tensor = each.source
        each = held.get(tensor)
    if isinstance(each, Folded) and not isinstance(each.source, str):
        return each.source.value.name
    return tensor


def initializer_data(tensor: onnx.TensorProto, source: Source) -> TensorData | None:
    """Return the initializer `tensor` of a file with its data; None if the file does not contain
    the data. Raise ModelError if the data does not fill the shape of the tensor.
    """
    where = f"initializer {tensor.name!r}"
    value = value_of(tensor, tensor.name, where)
    place: FileSlice | VarintSlice | None = source.slices.get(tensor.name)
    if tensor.data_location == tensor.EXTERNAL:
        place = locate_external_data(tensor, source.path)
    if place is None:
        if value.elements and not has_data(tensor):
            return None
        return TensorData(
            value, partial(array_slice, array_of(tensor, where).view(value.dtype.storage_type))
        )
    if not isinstance(place, VarintSlice) and place.length != value.bytes:
        size = f"{place.length} {plural(place.length, 'byte')}"
        raise ModelError(
            f"the tensor has {size} of data, but its shape requires {value.bytes}", where=where
        )
    return stored_tensor(value, place, source.path)


def batch_counters(
    source: Source, state: StateNames, forwards: int | None
) -> dict[str, TensorData]:
    """Return the batch counters of a file, increased by `forwards` micro-batches of training, by
    the name of their initializer; empty if `forwards` is None. `state` is the record of the file.
    """
    if forwards is None:
        return {}
    tensors = initializers_of(source)
    found: dict[str, TensorData] = {}
    for name, count in state.counts.items():
        numbers = initializer_data(tensors[name], source)
        if numbers is not None and numbers.value.dtype.is_integer:
            found[name] = TensorData(numbers.value, partial(_increased, numbers, count * forwards))
    return found


def batch_counters_of_file(model: Path, forwards: int | None) -> dict[str, TensorData]:
    """Return the batch counters of the ONNX file `model`, increased by `forwards` micro-batches of
    training, by the name of their initializer. Empty if `forwards` is None or if the file contains
    no record of the module's `state_dict`.
    """
    source = load(model)
    state = StateNames.of(source.metadata, initializers_of(source))
    return {} if state is None else batch_counters(source, state, forwards)


def _increased(numbers: TensorData, amount: int, box: TensorSlice) -> npt.NDArray[np.generic]:
    """Return the slice `box` of an integer tensor, with each element increased by `amount`. An
    overflow wraps around, as in PyTorch.
    """
    stored = np.asarray(numbers.read(box))
    bits = 8 * stored.dtype.itemsize
    unsigned = stored.view(f"<u{stored.dtype.itemsize}")
    with np.errstate(over="ignore"):
        increased = np.asarray(unsigned + np.array(amount % (1 << bits), unsigned.dtype))
    return increased.astype(unsigned.dtype).view(stored.dtype)


def in_module_layout(numbers: TensorData, layout: Layout | None) -> TensorData:
    """Return a parameter of a graph in the layout that it has in the PyTorch module. `layout` is
    the difference between both layouts; None if they are equal.
    """
    if layout is None:
        return numbers
    value = replace(numbers.value, shape=layout.shape)
    return numbers.computed(value, Folded(value, value.name, layout.inverse))


def with_name(numbers: TensorData, name: str) -> TensorData:
    """Return the tensor with the name `name`."""
    return replace(numbers, value=replace(numbers.value, name=name))


def array_slice(array: npt.NDArray[np.generic], box: TensorSlice) -> npt.NDArray[np.generic]:
    """Return the slice `box` of an array, in the shape of the slice."""
    return array[box.slices].reshape(box.shape)


@dataclass(frozen=True, slots=True)
class RecordedEntries:
    """Tensors of a weights file, divided by whether they are entries of a model's `state_dict`."""

    by_tensor: Mapping[str, TensorData]
    """Tensors that are entries, by the name of the model's initializer that stores the entry."""
    rest: Mapping[str, TensorData]
    """Tensors that are not entries, by their own names."""


def recorded_entries(
    stored: Mapping[str, TensorData], state: StateNames, weights: Path
) -> RecordedEntries:
    """Return the tensors `stored` of the file `weights`, divided by the record `state` of a model's
    `state_dict`. Raise ModelError if the model stores two entries as one tensor and their data
    differs.
    """
    by_tensor: dict[str, TensorData] = {}
    for name, tensor in state.names.items():
        numbers = stored.get(name)
        if numbers is None:
            continue
        first = by_tensor.setdefault(tensor, numbers)
        if first is not numbers and not _are_equal(first, numbers):
            raise ModelError(
                (
                    f"entries {first.value.name!r} and {name!r} have different data, but the "
                    "model stores one tensor for both"
                ),
                where=str(weights),
            )
    rest = {name: each for name, each in stored.items() if name not in state.names}
    return RecordedEntries(by_tensor, rest)


def _are_equal(one: TensorData, other: TensorData) -> bool:
    """True if two tensors have equal types, shapes and bytes."""
    if (one.value.shape, one.value.dtype) != (other.value.shape, other.value.dtype):
        return False
    everything = TensorSlice((0,) * len(one.value.shape), one.value.shape)
    return one.read(everything).tobytes() == other.read(everything).tobytes()


def state_only_tensors(source: Source) -> Iterator[tuple[str, Value]]:
    """Yield (name, type and shape) of each initializer of a file that no node reads and that is in
    the file only because the module's `state_dict` contains it.
    """
    for name, tensor in initializers_of(source).items():
        if is_for_state_only(name):
            yield name, value_of(tensor, name, name)
