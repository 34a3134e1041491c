"""Weights from and to other files: safetensors, and the ONNX file of another model.

Tensors are read and written a piece at a time, under the names that the model's parameters have. Where a model was
exported twice, for training and for evaluation, the two files may differ in nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.files import TAGS, Progress, safetensors_header
from autopipe.ir.graph import DType, FileSlice, Parameter, Value
from autopipe.ir.layout import Box
from autopipe.ir.output_files import replacing
from autopipe.passes.export import Numbers, stored_tensor
from autopipe.passes.frontend.elements import dtype_of, external_slice, stored_numbers
from autopipe.passes.frontend.load import Source, load, opened
from autopipe.passes.frontend.parameters import Chosen, roles_of
from autopipe.passes.frontend.protobuf_scan import strip_weights
from autopipe.passes.frontend.weights import Weights

if TYPE_CHECKING:
    import onnx


_TYPES = {tag: dtype for dtype, tag in TAGS.items()}
_MOST_HEADER = 100_000_000
"""Bytes of a header that safetensors allows."""


@dataclass(frozen=True, slots=True)
class MatchedWeights:
    """`numbers` for the parameters of a model, the `missing` ones and what the file holds besides, `unused`."""

    numbers: Mapping[str, Numbers]
    missing: tuple[str, ...]
    unused: tuple[str, ...]


def matched_weights(weights: Path, model: Path) -> MatchedWeights:
    """The tensors of `weights` that are trained parameters of `model`, in the model's element types. Raises ModelError
    for one of another shape, ConfigurationError where a file cannot be read."""
    stored = _safetensors(weights) if weights.suffix == ".safetensors" else _onnx_tensors(weights)
    source = load(model)
    held = Weights(source, roles_of(source), Chosen()).initializers()
    wanted = {each.value.name: each.value for each in held.values() if isinstance(each, Parameter) and each.trainable}
    found = {}
    for name, value in wanted.items():
        if name in stored:
            if stored[name].value.shape != value.shape:
                there, here = (list(each.shape) for each in (stored[name].value, value))
                raise ModelError(f"{name!r} has shape {there}, the model's has {here}", where=str(weights))
            found[name] = _converted(stored[name], value)
    missing = tuple(name for name in wanted if name not in stored)
    return MatchedWeights(found, missing, tuple(name for name in stored if name not in wanted))


def _converted(numbers: Numbers, value: Value) -> Numbers:
    """The same numbers in the element type of `value`. Raises ModelError where one of the types is no float."""
    own = numbers.value.dtype
    if own is value.dtype:
        return replace(numbers, value=value)
    if not own.is_floating or not value.dtype.is_floating or value.dtype is DType.BFLOAT16:
        raise ModelError(f"{value.name!r} is {own.value}, the model's {value.dtype.value}: they are not converted")

    def read(box: Box) -> npt.NDArray[np.generic]:
        block = numbers.read(box)
        if own is DType.BFLOAT16:
            block = (block.astype(np.uint32) << 16).view(np.float32)
        return block.astype(value.dtype.stored)

    return Numbers(value, read)


def _safetensors(path: Path) -> dict[str, Numbers]:
    """All tensors of a file that anybody may have written."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(_MOST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes")
            entries = json.loads(file.read(length))
        return dict(_entries(path, entries, 8 + length, size))
    except OSError as error:
        raise ConfigurationError(f"cannot read the weights: {error.strerror}", where=str(path)) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigurationError(f"no safetensors file: {error}", where=str(path)) from error


def _entries(path: Path, entries: Any, start: int, size: int) -> Iterable[tuple[str, Numbers]]:
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _TYPES:
            raise ValueError(f"{name!r} has type {entry['dtype']!r}")
        value = Value(name, _TYPES[entry["dtype"]], tuple(map(_count, entry["shape"])))
        begin, end = map(_count, entry["data_offsets"])
        if end - begin != value.bytes or start + end > size:
            raise ValueError(f"{name!r} does not fit its place")
        yield name, stored_tensor(value, FileSlice("", start + begin, value.bytes), path)


def _count(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is no number of elements")
    return number


def _onnx_tensors(path: Path) -> dict[str, Numbers]:
    """All initializers of an ONNX file."""
    source = load(path)
    found: dict[str, Numbers] = {}
    _, slices = strip_weights(opened(path))
    for tensor in source.graph.initializer:
        value = Value(tensor.name, dtype_of(tensor.data_type, tensor.name), tuple(tensor.dims))
        external = tensor.data_location == tensor.EXTERNAL
        place = external_slice(tensor, path) if external else slices.get(tensor.name)
        if place is not None:
            found[tensor.name] = stored_tensor(value, place, path)
        elif (array := stored_numbers(tensor.name, tensor, slices, path)) is not None:
            found[tensor.name] = Numbers(value, partial(_block, array))
    return found


def _block(array: npt.NDArray[np.generic], box: Box) -> npt.NDArray[np.generic]:
    return array[box.slices].reshape(box.shape)


def write_safetensors(target: Path, tensors: Sequence[Numbers], progress: Progress = lambda _: None) -> int:
    """Write tensors under their names, whole or not at all. Returns their bytes. Raises ConfigurationError where the
    file cannot be written, or a type is not known to safetensors."""
    ordered = sorted(tensors, key=lambda each: -each.value.dtype.itemsize)  # So that each is aligned.
    for value in (each.value for each in ordered):
        if value.dtype not in TAGS:
            raise ConfigurationError(f"{value.name!r} is {value.dtype.value}, which safetensors does not know")
    listed = ((each.value.name, each.value.dtype, each.value.shape) for each in ordered)
    header, _, size = safetensors_header(listed, {"format": "pt"})
    try:
        with replacing(target) as file:
            file.write(header)
            for each in ordered:
                each.write(file, progress)
    except OSError as error:
        raise ConfigurationError(f"cannot write {target}: {error.strerror}", hint="choose another place") from error
    return size - len(header)


def are_one_model(one: Source, other: Source) -> bool:
    """True if two files compute the same where nothing is dropped and BatchNormalization reads running statistics, from
    tensors of the same names. What values in between and nodes are called does not count."""
    if sorted(one.opsets) != sorted(other.opsets) or _interface(one) != _interface(other):
        return False
    return list(_computed(one)) == list(_computed(other))


def _interface(source: Source) -> tuple[list[str], list[str]]:
    return [each.name for each in source.graph.input], [each.name for each in source.graph.output]


def _computed(source: Source) -> Iterator[object]:
    """All that decides on the outputs: nodes with their operands by where these come from, and tensors by name."""
    same: dict[str, str] = {}
    nodes = []
    for node in source.nodes:
        operands = [same.get(name, name) for name in node.input]
        if _is(node, "Dropout") and not any(node.output[1:]):
            same[node.output[0]] = operands[0]
        else:
            nodes.append((node, operands))
    needed = {same.get(each.name, each.name) for each in source.graph.output}
    kept = []
    for node, operands in reversed(nodes):
        if not needed.isdisjoint(_results(node)):
            needed.update(operands)
            kept.append((node, operands))
    places: dict[str, object] = {}
    for number, (node, operands) in enumerate(reversed(kept)):
        yield node.op_type, node.domain, _settings(node), [places.get(name, name) for name in operands]
        places |= {name: (number, index) for index, name in enumerate(_results(node))}
    yield [places.get(same.get(each.name, each.name), each.name) for each in source.graph.output]
    tensors = {each.name: each for each in source.graph.initializer if each.name in needed}
    # Large ones are read without their numbers, which may differ.
    yield sorted((name, each.SerializeToString(deterministic=True)) for name, each in tensors.items())


def _is(node: onnx.NodeProto, operator: str) -> bool:
    return node.op_type == operator and node.domain in ("", "ai.onnx")


def _results(node: onnx.NodeProto) -> list[str]:
    """Without the new statistics that a BatchNormalization gives in training."""
    return list(node.output[:1] if _is(node, "BatchNormalization") else node.output)


def _settings(node: onnx.NodeProto) -> list[bytes]:
    ignored = {"training_mode"} if _is(node, "BatchNormalization") else set()
    return sorted(each.SerializeToString(deterministic=True) for each in node.attribute if each.name not in ignored)
