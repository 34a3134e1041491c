"""The tensors of a file as constants and parameters, each with where its numbers lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autopipe.ir.dtype import DType
from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Constant, FileSlice, Initializer, Parameter, Storage, Value
from autopipe.passes.frontend.elements import array_of, dtype_of
from autopipe.passes.frontend.external import external_slice
from autopipe.passes.frontend.initial import default_initializer, stated_initializers
from autopipe.passes.frontend.parameters import Roles

if TYPE_CHECKING:
    import numpy as np
    import onnx

    from autopipe.passes.frontend.load import Source

SMALL = 1 << 16
"""Bytes up to which a floating-point constant is held rather than left in the file as a buffer."""


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
        dtype = dtype_of(tensor.data_type, where)
        size = math.prod(tensor.dims) * dtype.itemsize
        if not dtype.is_floating or size <= SMALL:
            return Constant(Value(name, dtype, tuple(tensor.dims)), self._array(name, tensor, where))
        return Parameter(
            Value(name, dtype, tuple(tensor.dims)),
            self._storage(name, tensor, dtype),
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
        shape = tuple(tensor.dims)
        if any(extent < 0 for extent in shape):
            raise ModelError(f"it has the shape {shape}", where=where)
        value = Value(name, dtype, shape)
        is_table = not dtype.is_floating and name not in self.source.slices
        is_number = dtype.is_floating and self.roles.is_constant(name, len(shape), value.elements)
        if is_table or (is_number and value.bytes <= SMALL):
            return Constant(value, self._array(name, tensor, where))
        return Parameter(
            value,
            self._storage(name, tensor, dtype),
            dtype.is_floating and not is_number and self.roles.is_trainable(name),
        )

    def _array(self, name: str, tensor: onnx.TensorProto, where: str) -> np.ndarray:
        place = self.source.slices.get(name)
        external = tensor.data_location == tensor.EXTERNAL
        if external:
            place = external_slice(tensor, self.source.path.parent)
            if place is None:
                raise ModelError("its numbers are needed to tell shapes, and their file is not there", where=where)
        if place is None:
            return array_of(tensor, where)
        file = self.source.path.parent / place.file if place.file else self.source.path
        return read_slice(file, place, tensor, where)

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


def read_slice(path: Path, place: FileSlice, tensor: onnx.TensorProto, where: str) -> np.ndarray:
    """The numbers of a small tensor, read from the file."""
    import onnx

    with path.open("rb") as file:
        file.seek(place.offset)
        data = file.read(place.length)
    return array_of(onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data), where)
