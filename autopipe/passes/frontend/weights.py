"""The tensors of a file as constants and parameters, each with where its numbers lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.dtype import DType
from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Constant, FileSlice, Initializer, Parameter, Storage, Value
from autopipe.passes.frontend.elements import array_of, dtype_of, shape_of
from autopipe.passes.frontend.external import external_slice
from autopipe.passes.frontend.initial import default_initializer, stated_initializers
from autopipe.passes.frontend.parameters import Roles

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.load import Source

SMALL = 1 << 16
"""Bytes up to which a floating-point constant is held rather than left in the file as a buffer."""
LARGEST_LOOK = 1 << 24
"""Bytes up to which the numbers of a tensor that may be no weight are looked at."""
ROW = "/row"
"""What the one row of an expanded parameter is called after it."""
HIDDEN = -1e4
"""Below this an added mask hides a position from a softmax."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one file."""

    source: Source
    roles: Roles
    stated: dict[str, Initializer]
    absent: list[str]
    """Filled with the names of parameters whose numbers are not there."""

    @classmethod
    def of(cls, source: Source, roles: Roles) -> Weights:
        """The tensors of `source`."""
        return cls(source, roles, stated_initializers(source.metadata), [])

    def initializers(self) -> dict[str, Constant | Parameter]:
        """Every initializer."""
        graph = self.source.graph
        found: dict[str, Constant | Parameter] = {}
        for tensor in graph.initializer:
            if tensor.name in found:
                raise ModelError(f"initializer {tensor.name!r} is defined twice")
            found[tensor.name] = self._held(tensor.name, tensor)
        return found

    def missing(self, value: Value) -> Parameter:
        """The parameter of this type, whose numbers the file does not hold."""
        shape_of(value.shape, f"parameter {value.name!r}")
        self.absent.append(value.name)
        trainable = value.dtype.is_floating and self.roles.is_trainable(value.name)
        return Parameter(value, self._initializer(value.name, value.shape), trainable)

    def warnings(self) -> tuple[str, ...]:
        """What to say of weights that are not there."""
        if not self.absent:
            return ()
        first = f"{self.absent[0]!r}" + (f" and {len(self.absent) - 1} more" if len(self.absent) > 1 else "")
        return (f"no numbers are there for parameter {first}: they are drawn at random",)

    def constant(self, name: str, tensor: onnx.TensorProto) -> Constant | Parameter:
        """The tensor of a Constant node, which is a number in the graph unless it is too large to be one."""
        where = f"constant {name!r}"
        value = Value(name, dtype_of(tensor.data_type, where), shape_of(tensor.dims, where))
        if not value.dtype.is_floating or value.bytes <= SMALL:
            return Constant(value, self._array(name, tensor, where))
        return Parameter(
            value,
            self._storage(name, tensor, value.dtype),
            self.roles.uses.is_weight(name) and self.roles.is_trainable(name),
        )

    def is_filled(self, node: onnx.NodeProto) -> bool:
        """Whether a ConstantOfShape node is a weight: floating-point and read where operators take weights."""
        number = node.attribute[0].t.data_type if node.attribute else 1
        if not dtype_of(number, f"ConstantOfShape {node.name!r}").is_floating:
            return False
        return self.roles.uses.is_weight(node.output[0]) or self._is_affine(node.output[0])

    def _is_affine(self, name: str) -> bool:
        """Whether a value is the scale or offset of a channel, as Unsqueeze and then Mul or Add spell it."""
        readers = self.roles.uses.readers.get(name, ())
        if not readers or any(node.op_type != "Unsqueeze" for node, _ in readers):
            return False
        return self.roles.uses.slots(name) <= {("Mul", 0), ("Mul", 1), ("Add", 0), ("Add", 1)}

    def _held(self, name: str, tensor: onnx.TensorProto) -> Constant | Parameter:
        where = f"initializer {name!r}"
        dtype = dtype_of(tensor.data_type, where)
        shape = shape_of(tensor.dims, where)
        if any(extent < 0 for extent in shape):
            raise ModelError(f"it has the shape {shape}", where=where)
        value = Value(name, dtype, shape)
        is_table = not dtype.is_floating and name not in self.source.slices
        is_number = dtype.is_floating and self.roles.is_constant(name, len(shape), value.elements)
        if is_table or (is_number and value.bytes <= SMALL) or self._is_mask(value, tensor, where):
            return Constant(value, self._array(name, tensor, where))
        storage = self._storage(name, tensor, dtype)
        trainable = dtype.is_floating and not is_number and self.roles.is_trainable(name)
        return Parameter(value, storage, trainable)

    def unexpanded(self, parameter: Parameter) -> Parameter | None:
        """The first row of a parameter whose rows, more than one, are all equal: an exporter has expanded it.

        Only for tensors that are not read where operators take weights: such a broadcast of a weight along the samples
        is one weight, not one a sample.
        """
        value, storage = parameter.value, parameter.storage
        if self._is_plain(value) or not isinstance(storage, FileSlice) or value.shape[0] < 2:
            return None
        numbers = self._bytes(storage)
        row = len(numbers) // value.shape[0]
        if any(numbers[start : start + row] != numbers[:row] for start in range(row, len(numbers), row)):
            return None
        first = Value(f"{value.name}{ROW}", value.dtype, (1, *value.shape[1:]))
        return Parameter(first, FileSlice(storage.file, storage.offset, row), parameter.trainable)

    def _is_plain(self, value: Value) -> bool:
        """Whether a tensor is a weight by its place, its size or the file's own word, without a look at its numbers."""
        if self.roles.stated is not None or len(value.shape) < 2 or not value.elements:
            return True
        return value.bytes > LARGEST_LOOK or not value.dtype.is_floating or self.roles.uses.is_weight(value.name)

    def _is_mask(self, value: Value, tensor: onnx.TensorProto, where: str) -> bool:
        """Whether a floating-point tensor holds nothing but zeros and numbers that hide from a softmax."""
        if self._is_plain(value) or not (tensor.raw_data or value.name in self.source.slices):
            return False
        array = self._array(value.name, tensor, where).astype(np.float32)
        hidden = array <= HIDDEN
        # Nothing but zeros may be a fresh weight, unless the exporter tells all weights by name.
        told = bool(self.roles.signed) and value.name not in self.roles.signed
        return bool(((array == 0) | hidden).all() and (told or hidden.any()))

    def _array(self, name: str, tensor: onnx.TensorProto, where: str) -> np.ndarray:
        import onnx

        place = self.source.slices.get(name)
        external = tensor.data_location == tensor.EXTERNAL
        if external:
            place = external_slice(tensor, self.source.path.parent)
            if place is None:
                raise ModelError("its numbers are needed to tell shapes, and their file is not there", where=where)
        if place is None:
            return array_of(tensor, where)
        data = self._bytes(place)
        return array_of(onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data), where)

    def _bytes(self, place: FileSlice) -> bytes:
        """A slice of the model's files."""
        path = self.source.path.parent / place.file if place.file else self.source.path
        with path.open("rb") as file:
            file.seek(place.offset)
            return file.read(place.length)

    def _storage(self, name: str, tensor: onnx.TensorProto, dtype: DType) -> Storage:
        shape = tuple(tensor.dims)
        size = math.prod(shape) * dtype.itemsize
        place: FileSlice | None = self.source.slices.get(name)
        if tensor.data_location == tensor.EXTERNAL:
            place = external_slice(tensor, self.source.path.parent)
        elif place is not None and place.length != size:
            raise ModelError(f"it has {place.length} bytes, its shape needs {size}", where=f"initializer {name!r}")
        elif place is None and (tensor.int32_data or tensor.float_data or tensor.double_data):
            raise ModelError(
                "its numbers are stored one by one",
                hint="save the model again with raw data",
                where=f"initializer {name!r}",
            )
        if place is None:
            self.absent.append(name)
            return self._initializer(name, shape)
        return place

    def _initializer(self, name: str, shape: tuple[int, ...]) -> Initializer:
        return self.stated.get(name) or default_initializer(name, shape, self.roles.uses)
