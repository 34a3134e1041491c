"""Translation of the tensors of a file into constants and parameters. Each parameter has the
location of its data in the file, or an initializer if the file has no data.

The shape of a weight without data and type is inferred from the operators that read it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.errors import ModelError
from autopipe.ir.graph import (
    Attribute,
    Constant,
    DType,
    FileSlice,
    Fill,
    Initializer,
    Parameter,
    Storage,
    Value,
    VarintSlice,
)
from autopipe.ir.ops import operators_with
from autopipe.ir.state_names import is_for_state_only
from autopipe.ir.words import plural
from autopipe.passes.frontend.elements import (
    array_of,
    attributes_of,
    checked_shape,
    dtype_of,
    has_data,
    locate_external_data,
    read_stored_data,
    read_varints,
    stored_bytes,
)
from autopipe.passes.frontend.fold_numbers import FoldNumbers
from autopipe.passes.frontend.folding import Folded, Layout, find_folds
from autopipe.passes.frontend.parameters import (
    SIGNED,
    Role,
    Roles,
    TrainingChoice,
    computed_role,
    quote_names,
)
from autopipe.passes.frontend.protobuf_scan import BYTES, LARGE_FLOATS, LARGE_TABLE
from autopipe.passes.frontend.tables import is_uniform
from autopipe.passes.frontend.uses import GATES, LOOKUP_SLOTS, Uses

if TYPE_CHECKING:
    import onnx

    from autopipe.passes.frontend.load import Source

SPREAD = 0.02
"""Standard deviation with which embeddings, and weights that no matmul reads, are initialised
(Radford et al. 2018, GPT, section 4.1).
"""
MATMULS = operators_with(lambda row: row.kind == "matmul" and row.layer_weights)
"""Matmul operators with a weight."""
CONVOLUTIONS = operators_with(lambda row: row.kind == "convolution" and row.layer_weights)
"""Convolution operators with a weight."""
SCALES = frozenset(
    {
        (f"{kind}Normalization", 1)
        for kind in ("Batch", "Instance", "Group", "Layer", "RMS", "SimplifiedLayer")
    }
    | {("BatchNormalization", 4), ("Mul", 0), ("Mul", 1)}
)
"""(operator, operand index) of vectors that are initialised with ones."""


def declared_initializers(metadata: Mapping[str, str]) -> dict[str, Initializer]:
    """Return the initializers that the file's metadata entry `autopipe.init` declares, by parameter
    name. The entry is JSON: {name: {"scheme": …, "std" or "bound": …}}. Raises ModelError if it is
    malformed.
    """
    found = {}
    try:
        for name, entry in json.loads(metadata.get("autopipe.init", "{}")).items():
            scheme = entry["scheme"]
            scale = float(str(entry.get("std", entry.get("bound", 0.0))))
            if scheme not in ("normal", "uniform", "zeros", "ones") or not (
                math.isfinite(scale) and scale >= 0
            ):
                raise ValueError(entry)
            found[str(name)] = Initializer(str(scheme), scale)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(
            "the model's metadata entry 'autopipe.init' is invalid, expected {name: {scheme: "
            "..., std: ...}}"
        ) from error
    return found


def default_initializer(name: str, shape: tuple[int, ...], uses: Uses) -> Initializer:
    """Return the usual initializer for the parameter `name`, from its shape and from the operators
    that read it according to `uses`.

    - Scales: ones. Other vectors, and initial states of recurrent layers: zeros.
    - Convolutions: normal, He et al. (2015).
    - Matmuls: normal, Glorot and Bengio (2010), which is symmetric in the two dimensions.
    - Recurrent layers with h hidden units: uniform in [-1/√h, 1/√h], as in PyTorch.
    - Other tensors: normal with standard deviation `SPREAD`.
    """
    slots = uses.slots(name)
    operators = {operator for operator, _ in slots}
    if recurrent := [(GATES[operator], slot) for operator, slot in slots if operator in GATES]:
        gates, slot = min(recurrent)
        if (
            slot > 3 or len(shape) < 2
            # Operands 1 to 3 are weights, recurrence weights and biases. Later operands are states.
        ):
            return Initializer("zeros")
        hidden = shape[1] // (gates * (2 if slot == 3 else 1))
        return Initializer("uniform", 1.0 / math.sqrt(max(hidden, 1)))
    if len(shape) <= 1:
        return Initializer("ones") if slots & SCALES else Initializer("zeros")
    if operators & CONVOLUTIONS:
        return Initializer("normal", math.sqrt(2.0 / max(math.prod(shape[1:]), 1)))
    if operators & MATMULS and LOOKUP_SLOTS.isdisjoint(slots):
        return Initializer("normal", math.sqrt(2.0 / max(shape[-2] + shape[-1], 1)))
    return Initializer("normal", SPREAD)


SMALL = 1 << 16
"""Maximum bytes of a floating-point constant whose data the graph holds. The data of a larger
constant stay in the file, as those of a buffer.
"""
Held = Constant | Parameter | Folded
"""A tensor of the file, or the derivation of a tensor that the exporter computed from
parameters.
"""


class Weights:
    """Creates the constants and parameters of one model file. It infers which parameters are
    trained, and applies the user's choice.
    """

    def __init__(self, source: Source, roles: Roles, chosen: TrainingChoice) -> None:
        self.source = source
        self.roles = roles
        self.chosen = chosen
        self.stated = declared_initializers(source.metadata)
        self.absent: list[str] = []
        """Names of parameters whose data the file lacks."""
        self.found: dict[str, Role] = {}
        """Role (trained or not, and why) of each floating-point tensor, by its name in the
        graph.
        """
        self.unknown_detached: tuple[str, ...] = ()
        """Operators and names of nodes for which the file declares that an operand is detached, but
        not which operand.
        """
        self.layouts: dict[str, Layout] = {}
        """Changes of layout of the parameters that the file stores in another layout than the
        PyTorch module, by name. Filled by `read_initializers`.
        """

    def read_initializers(self) -> dict[str, Held]:
        """Return the constant, parameter or derivation of each initializer of the file, by name. A
        derived tensor comes after the tensors from which it is computed.
        """
        graph = self.source.graph
        found: dict[str, Held] = {}
        for tensor in graph.initializer:
            if tensor.name in found:
                raise ModelError(f"two initializers have the name {tensor.name!r}")
            if is_for_state_only(tensor.name) and tensor.name not in self.roles.uses.readers:
                # No node reads this tensor. Only the `state_dict` of the PyTorch module requires
                # it, so the graph does not contain it.
                continue
            found[tensor.name] = self._read_tensor(
                tensor.name, tensor, f"initializer {tensor.name!r}"
            )
        parameters = {name: each for name, each in found.items() if isinstance(each, Parameter)}
        taken = found.keys() | {
            name for node in self.source.nodes for name in (*node.input, *node.output)
        }
        numbers = FoldNumbers(self.source.nodes, found.keys(), len(graph.input))
        unfolding = find_folds(parameters, self.roles, self.source.path, taken, numbers)
        self.layouts.update(unfolding.layouts)
        for name, origins in unfolding.refused.items():
            self.found[name] = computed_role(origins, legacy=not self.roles.signature)
        for name in unfolding.doubtful:
            self.found[name] = replace(self.found[name], doubtful=True)
        for name, origins in unfolding.detached.items():
            self.found[name] = Role(False, f"detached from {quote_names(origins)}")
            found[name] = replace(parameters[name], trainable=False)
        folded = unfolding.folded
        # Derived tensors come last, because their sources are read first.
        plain = {name: each for name, each in found.items() if name not in folded}
        return {name: self._apply_choice(name, each) for name, each in (plain | folded).items()}

    def make_missing(self, value: Value) -> Parameter:
        """Return a parameter of type `value` whose data the file lacks, with an initializer
        instead.
        """
        checked_shape(value.shape, f"parameter {value.name!r}")
        self.absent.append(value.name)
        return self._apply_role(Parameter(value, self._choose_initializer(value)))

    def make_filled(self, value: Value, number: float) -> Parameter:
        """Return the parameter that a ConstantOfShape node creates, whose elements all are
        `number`.
        """
        return self._apply_role(Parameter(value, Fill(number)))

    def _apply_role(self, parameter: Parameter) -> Parameter:
        """Return the parameter with `trainable` set from its inferred role and the user's choice.
        Its data are not examined.
        """
        value = parameter.value
        role = (
            self.roles.infer_role(value, lambda: None)
            if value.dtype.is_floating
            else Role(False, "not floating-point")
        )
        self.found[value.name] = role
        chosen = self._apply_choice(value.name, replace(parameter, trainable=role.trained))
        assert isinstance(chosen, Parameter)
        return chosen

    def warnings(self) -> tuple[str, ...]:
        """Return a warning if the file lacks the data of parameters, otherwise ()."""
        if not self.absent:
            return ()
        first = f"{self.absent[0]!r}" + (
            f" and {len(self.absent) - 1} more" if len(self.absent) > 1 else ""
        )
        return (f"no numbers are there for parameter {first}: they are drawn at random",)

    def read_constant(self, name: str, tensor: onnx.TensorProto) -> Constant | Parameter:
        """Return the tensor of a Constant node as a constant, or as a parameter if it is trained or
        large.
        """
        held = self._apply_choice(
            name, self._read_tensor(name, tensor, f"constant {name!r}", in_node=True)
        )
        assert not isinstance(held, Folded)
        return held

    def is_filled(self, node: onnx.NodeProto) -> bool:
        """True if a ConstantOfShape node creates a weight: its type is floating-point, and
        operators read it as weight, scale or offset.
        """
        number = node.attribute[0].t.data_type if node.attribute else 1
        floating = dtype_of(number, f"ConstantOfShape {node.name!r}").is_floating
        return floating and self.roles.is_filled_weight(node.output[0])

    def _read_tensor(
        self, name: str, tensor: onnx.TensorProto, where: str, in_node: bool = False
    ) -> Constant | Parameter:
        """Return a tensor of the file as a constant or parameter, with `trainable` set from its
        inferred role. `in_node` is True for the tensor of a Constant node.
        """
        dtype = dtype_of(tensor.data_type, where)
        shape = checked_shape(tensor.dims, where)
        if any(extent < 0 for extent in shape):
            raise ModelError(
                f"the tensor has the shape {shape}, expected sizes of at least 0", where=where
            )
        value = Value(name, dtype, shape)
        if not dtype.is_floating:
            apart = tensor.data_location == tensor.EXTERNAL or not (
                tensor.raw_data or tensor.int32_data
            )
            least = LARGE_FLOATS if tensor.data_type in BYTES else LARGE_TABLE
            if in_node or not (
                name in self.source.slices or (apart and stored_bytes(dtype, shape) >= least)
            ):
                return Constant(value, self._load_array(name, tensor, where))
            return Parameter(value, self._find_storage(name, tensor, dtype), trainable=False)
        role = self.roles.infer_role(value, lambda: self._stored_data(name, tensor), in_node)
        self.found[name] = role
        if not role.trained and role.constant and value.bytes <= SMALL:
            return Constant(value, self._load_array(name, tensor, where))
        if in_node and not role.trained and role.constant:
            array = self._stored_data(name, tensor)
            if array is not None and array.size and is_uniform(array):
                return Parameter(value, Fill(float(array.flat[0])), trainable=False)
        return Parameter(value, self._find_storage(name, tensor, dtype), role.trained)

    def _stored_data(self, name: str, tensor: onnx.TensorProto) -> np.ndarray | None:
        """Return the data of a floating-point tensor; None if they are not available."""
        return read_stored_data(name, tensor, self.source.slices, self.source.path)

    def _apply_choice(self, name: str, held: Held, other: str = "") -> Held:
        """Return the tensor `held` with `trainable` set from the user's choice for `name` or,
        without such a choice, for the name `other`. Without either choice, return `held` unchanged.
        For a derivation, its source is returned with the choice applied.
        """
        if isinstance(held, Folded):
            if isinstance(held.source, str):
                return held
            known = held.source.value.name
            role = self.found[name]
            # If PyTorch's signature contains the name of the source, the source is a parameter of
            # the module itself, and its layout is known. Its role is then `SIGNED`.
            is_used_in_place = (
                role.trained and not role.refused and known in self.roles.signature.parameters
            )
            self.found[known] = SIGNED if is_used_in_place else role
            parameter = self._apply_choice(held.source.value.name, held.source, name)
            assert isinstance(parameter, Parameter)
            return replace(held, source=parameter)
        trained = self.chosen.is_trained(name)
        if trained is None and other:
            trained = self.chosen.is_trained(other)
        if trained is None or not held.value.dtype.is_floating or self.roles.is_statistic(name):
            return held
        self.found[name] = Role(
            trained, "model.trainable says so" if trained else "model.frozen says so"
        )
        if isinstance(held, Parameter):
            return replace(held, trainable=trained)
        place = self.source.slices.get(name)
        if not trained or place is None:
            return held
        return Parameter(held.value, place)

    def _locate_data(self, name: str, tensor: onnx.TensorProto) -> FileSlice | VarintSlice | None:
        """Return the location of a tensor's data; None if the tensor message has the data or the
        data file is missing.
        """
        if tensor.data_location == tensor.EXTERNAL:
            return locate_external_data(tensor, self.source.path)
        return self.source.slices.get(name)

    def _load_array(self, name: str, tensor: onnx.TensorProto, where: str) -> np.ndarray:
        """Return the data of a tensor that the graph holds. Raises ModelError if they are missing
        or malformed.
        """
        import onnx

        place = self._locate_data(name, tensor)
        if place is None:
            if tensor.data_location == tensor.EXTERNAL:
                raise ModelError(
                    "the values of the tensor determine shapes, but its external data file is "
                    "missing",
                    where=where,
                )
            return array_of(tensor, where)
        path = self.source.path
        if isinstance(place, VarintSlice):
            data = read_varints(place, path).tobytes()
        else:
            with (path.parent / place.file if place.file else path).open("rb") as file:
                file.seek(place.offset)
                data = file.read(place.length)
        return array_of(
            onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=data), where
        )

    def _find_storage(self, name: str, tensor: onnx.TensorProto, dtype: DType) -> Storage:
        """Return the location of a parameter's data, or an initializer if the file lacks them.
        Raises ModelError if their size does not fit the shape.
        """
        shape = tuple(tensor.dims)
        where = f"initializer {name!r}"
        if not math.prod(shape):
            return Fill(0.0)
        size = stored_bytes(dtype, shape)
        place = self._locate_data(name, tensor)
        if place is None:
            if tensor.data_location != tensor.EXTERNAL and has_data(tensor):
                raise ModelError(
                    "the tensor stores its values as a list of numbers, expected raw bytes",
                    hint="save the model again with raw_data",
                    where=where,
                )
            self.absent.append(name)
            return self._choose_initializer(Value(name, dtype, shape))
        if isinstance(place, VarintSlice):
            count = read_varints(place, self.source.path).size
            if count != math.prod(shape):
                raise ModelError(
                    f"the tensor has {count} {plural(count, 'number')}, and its shape requires "
                    f"{math.prod(shape)}",
                    where=where,
                )
            return place
        if place.length != size:
            raise ModelError(
                f"the tensor has {place.length} {plural(place.length, 'byte')}, and its shape "
                f"requires {size}",
                where=where,
            )
        return place

    def _choose_initializer(self, value: Value) -> Initializer:
        """Return the initializer that the file declares for a parameter; otherwise the default for
        its uses. The default of 8-bit integers is uniform.
        """
        drawn = default_initializer(value.name, value.shape, self.roles.uses)
        if value.dtype.is_integer and value.dtype.itemsize == 1:
            drawn = Initializer("uniform", 128.0)
        return self.stated.get(value.name) or drawn


MOST_STEPS = 32
"""Maximum number of transpositions and casts between a weight and the operator that determines the
type of the weight.
"""


@dataclass(frozen=True, slots=True)
class MissingWeightTypes:
    """Infers the types of weights that nodes read although the file has neither their data nor
    their types.
    """

    uses: Uses
    type_of: Callable[[str], Value | None]
    outputs: tuple[str, ...]

    def infer_type(self, name: str) -> Value:
        """Return the type of the weight `name`, inferred from the first of its uses that determines
        it. Raises ModelError if none does.
        """
        readers = self.uses.readers[name]
        for node, slot in readers:
            found = self._infer_from_reader(node, slot)
            if found is not None:
                return Value(name, found.dtype, found.shape)
        node = readers[0][0]
        raise ModelError(
            f"the node reads {name!r}, which no node writes and whose shape is unknown",
            hint="export the model with the types of weights in value_info",
            where=f"{node.op_type} {node.name!r}",
        )

    def _infer_from_reader(
        self, node: onnx.NodeProto, slot: int, steps: int = MOST_STEPS
    ) -> Value | None:
        """Return the type of operand `slot` of a node, inferred from the node's other types; its
        name is arbitrary. Returns None if the type is not determined. At most `steps` operators are
        followed.
        """
        if not steps:
            return None
        result = self.type_of(node.output[0])
        match node.op_type, slot:
            case "Transpose", 0:
                return self._infer_from_transpose(node, steps - 1)
            case (("Identity" | "Cast"), 0):
                if result is not None:
                    return result
                found = (
                    self._infer_from_reader(reader, at, steps - 1)
                    for reader, at in self.uses.readers.get(node.output[0], ())
                )
                return next((type_ for type_ in found if type_ is not None), None)
            case _ if result is None:
                return None
            case (("Mul" | "Add" | "Div" | "Sub"), _):
                return Value("", result.dtype, result.shape[-1:])
            case (("LayerNormalization" | "RMSNormalization"), (1 | 2)):
                axis = _integer_attribute(dict(attributes_of(node)), "axis", -1)
                return Value("", result.dtype, result.shape[axis:])
            case (("MatMul" | "Gemm" | "Conv"), _):
                return self._infer_factor(node, slot, result)
            case "Gather", 0:
                return self._infer_table(node, result)
        return None

    def _infer_from_transpose(self, node: onnx.NodeProto, steps: int) -> Value | None:
        """Return the type of the operand of a Transpose, inferred from the uses of its result; None
        if they do not determine it.
        """
        for reader, slot in self.uses.readers.get(node.output[0], ()):
            found = self._infer_from_reader(reader, slot, steps)
            if found is not None:
                reverse = tuple(reversed(range(len(found.shape))))
                order = next(
                    (tuple(each.ints) for each in node.attribute if each.name == "perm"), reverse
                )
                extents = dict(zip(order, found.shape, strict=False))
                return Value(
                    "", found.dtype, tuple(extents.get(axis, 0) for axis in range(len(found.shape)))
                )
        return None

    def _infer_factor(self, node: onnx.NodeProto, slot: int, result: Value) -> Value | None:
        """Return the type of the weight or bias that is operand `slot` of a matmul or convolution,
        inferred from the other operand and the result. Returns None if they do not determine it.
        """
        stated = dict(attributes_of(node))
        if slot == 2:
            return Value("", result.dtype, (result.shape[1 if node.op_type == "Conv" else -1],))
        other = self.type_of(node.input[0])
        if slot != 1 or other is None:
            return None
        if node.op_type == "MatMul":
            return Value("", result.dtype, (other.shape[-1], result.shape[-1]))
        if node.op_type == "Gemm":
            inner = other.shape[0 if stated.get("transA") else 1]
            shape = (inner, result.shape[1])
            return Value("", result.dtype, shape[::-1] if stated.get("transB") else shape)
        kernel = stated.get("kernel_shape")
        if not isinstance(kernel, tuple):
            return None
        window = tuple(int(extent) for extent in kernel)
        return Value(
            "",
            result.dtype,
            (result.shape[1], other.shape[1] // _integer_attribute(stated, "group", 1), *window),
        )

    def _infer_table(self, node: onnx.NodeProto, result: Value) -> Value | None:
        """Return the type of the embedding table that a Gather reads; None if it is not determined.
        The number of rows is assumed to be the number of classes of the first output that can be
        logits.
        """
        indices = self.type_of(node.input[1])
        if indices is None or _integer_attribute(dict(attributes_of(node)), "axis", 0):
            return None
        for name in self.outputs:
            logits = self.type_of(name)
            if logits is not None and logits.dtype.is_floating and len(logits.shape) >= 2:
                return Value(
                    "", result.dtype, (logits.shape[-1], *result.shape[len(indices.shape) :])
                )
        return None


def _integer_attribute(stated: dict[str, Attribute], name: str, default: int) -> int:
    """Return the integer attribute `name`; `default` if it is absent or no integer."""
    found = stated.get(name, default)
    return found if isinstance(found, int) else default
