"""The tensors of a file as constants and parameters, each with where its numbers lie."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import Constant, DType, FileSlice, Fill, Initializer, Parameter, Storage, Value
from autopipe.passes.frontend.chosen import Chosen
from autopipe.passes.frontend.elements import array_of, dtype_of, shape_of
from autopipe.passes.frontend.external import external_slice
from autopipe.passes.frontend.folding import Folded, unfolded
from autopipe.passes.frontend.initial import default_initializer, stated_initializers
from autopipe.passes.frontend.parameters import Role, Roles
from autopipe.passes.frontend.stored import stored_numbers

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.load import Source

SMALL = 1 << 16
"""Bytes up to which a floating-point constant is held rather than left in the file as a buffer."""

Held = Constant | Parameter | Folded


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one file."""

    source: Source
    roles: Roles
    stated: dict[str, Initializer]
    chosen: Chosen
    """What the user says of names."""
    absent: list[str]
    """Filled with the names of parameters whose numbers are not there."""
    found: dict[str, Role]
    """Filled with the role of every floating-point tensor, by the name that the graph has for it."""

    @classmethod
    def of(cls, source: Source, roles: Roles, chosen: Chosen) -> Weights:
        """The tensors of `source`."""
        return cls(source, roles, stated_initializers(source.metadata), chosen, [], {})

    def initializers(self) -> dict[str, Held]:
        """Every initializer, as what it is."""
        graph = self.source.graph
        found: dict[str, Held] = {}
        for tensor in graph.initializer:
            if tensor.name in found:
                raise ModelError(f"initializer {tensor.name!r} is defined twice")
            found[tensor.name] = self._held(tensor.name, tensor)
        parameters = {name: each for name, each in found.items() if isinstance(each, Parameter)}
        taken = found.keys() | {name for node in self.source.nodes for name in (*node.input, *node.output)}
        folded = unfolded(parameters, self.roles, self.source.path, taken)
        # What is computed stands behind what it is computed from.
        plain = {name: each for name, each in found.items() if name not in folded}
        return {name: self._as_chosen(name, each) for name, each in (plain | folded).items()}

    def missing(self, value: Value) -> Parameter:
        """The parameter of this type, whose numbers the file does not hold."""
        shape_of(value.shape, f"parameter {value.name!r}")
        self.absent.append(value.name)
        return self._parameter(Parameter(value, self._initializer(value.name, value.shape)))

    def filled(self, value: Value, number: float) -> Parameter:
        """The parameter that a ConstantOfShape node makes."""
        return self._parameter(Parameter(value, Fill(number)))

    def _parameter(self, parameter: Parameter) -> Parameter:
        """The parameter, trained or not; its numbers say nothing."""
        value = parameter.value
        role = self.roles.role(value, lambda: None) if value.dtype.is_floating else Role(False, "not floating-point")
        self.found[value.name] = role
        chosen = self._as_chosen(value.name, replace(parameter, trainable=role.trained))
        assert isinstance(chosen, Parameter)
        return chosen

    def warnings(self) -> tuple[str, ...]:
        """Warnings about missing weights."""
        if not self.absent:
            return ()
        first = f"{self.absent[0]!r}" + (f" and {len(self.absent) - 1} more" if len(self.absent) > 1 else "")
        return (f"no numbers are there for parameter {first}: they are drawn at random",)

    def constant(self, name: str, tensor: onnx.TensorProto) -> Constant | Parameter:
        """The tensor of a Constant node: a number in the graph, or a parameter."""
        held = self._as_chosen(name, self._tensor(name, tensor, f"constant {name!r}", in_node=True))
        assert not isinstance(held, Folded)
        return held

    def is_filled(self, node: onnx.NodeProto) -> bool:
        """True if a ConstantOfShape node is a weight: floating-point and read where operators take weights."""
        number = node.attribute[0].t.data_type if node.attribute else 1
        floating = dtype_of(number, f"ConstantOfShape {node.name!r}").is_floating
        return floating and self.roles.fills(node.output[0])

    def _held(self, name: str, tensor: onnx.TensorProto) -> Constant | Parameter:
        return self._tensor(name, tensor, f"initializer {name!r}")

    def _tensor(self, name: str, tensor: onnx.TensorProto, where: str, in_node: bool = False) -> Constant | Parameter:
        dtype = dtype_of(tensor.data_type, where)
        shape = shape_of(tensor.dims, where)
        if any(extent < 0 for extent in shape):
            raise ModelError(f"it has the shape {shape}", where=where)
        value = Value(name, dtype, shape)
        if not dtype.is_floating:
            if in_node or name not in self.source.slices:
                return Constant(value, self._array(name, tensor, where))
            return Parameter(value, self._storage(name, tensor, dtype), trainable=False)
        role = self.roles.role(value, lambda: self._numbers(name, tensor), in_node)
        self.found[name] = role
        if not role.trained and role.constant and value.bytes <= SMALL:
            return Constant(value, self._array(name, tensor, where))
        return Parameter(value, self._storage(name, tensor, dtype), role.trained)

    def _numbers(self, name: str, tensor: onnx.TensorProto) -> np.ndarray | None:
        return stored_numbers(name, tensor, self.source.slices, self.source.path)

    def _as_chosen(self, name: str, held: Held, other: str = "") -> Held:
        """What is held under a name, trained or not as the user says of it or of its `other` name."""
        if isinstance(held, Folded):
            if isinstance(held.source, str):
                return held
            self.found[held.source.value.name] = self.found[name]
            parameter = self._as_chosen(held.source.value.name, held.source, name)
            assert isinstance(parameter, Parameter)
            return replace(held, source=parameter)
        trained = self.chosen.trained(name)
        if trained is None and other:
            trained = self.chosen.trained(other)
        if trained is None or not held.value.dtype.is_floating or self.roles.is_statistic(name):
            return held
        self.found[name] = Role(trained, "model.trainable says so" if trained else "model.frozen says so")
        if isinstance(held, Parameter):
            return replace(held, trainable=trained)
        place = self.source.slices.get(name)
        if not trained or place is None:
            return held
        return Parameter(held.value, place)

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
