"""A model as a graph of values with element types and static shapes.

Grammar::

    Graph     = name, opset, inputs, parameters, constants, nodes, outputs
    Node      = operator, attributes, names of the values that it reads and writes
    Value     = name, element type, static shape
    Parameter = value, and the location of its data in the ONNX file
    Constant  = value, and its data (small, known at planning time)

Nodes are in topological order. The name of an absent optional operand is "". The graph does not
contain the data of parameters. Each value is written once. Names come from the model. They are
untrusted text, so they are used only as keys and in messages.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from autopipe.ir.codec import AtLeast, CustomCodec, Index, Inline, Record, decode, encode
from autopipe.ir.errors import ModelError
from autopipe.ir.memo import MAX_CACHED_GRAPHS, memoize


class DType(enum.Enum):
    """Element type of a tensor. The value of a member is its name in files and messages."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT64 = "float64"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    FLOAT8E4M3FN = "float8_e4m3fn"
    FLOAT8E4M3FNUZ = "float8_e4m3fnuz"
    FLOAT8E5M2 = "float8_e5m2"
    FLOAT8E5M2FNUZ = "float8_e5m2fnuz"
    FLOAT8E8M0 = "float8_e8m0fnu"
    FLOAT4E2M1 = "float4_e2m1fn"
    INT4 = "int4"
    UINT4 = "uint4"
    INT2 = "int2"
    UINT2 = "uint2"

    @property
    def itemsize(self) -> int:
        """Bytes per element in memory."""
        return _ITEMSIZE[self]

    @property
    def storage_type(self) -> np.dtype:
        """Little-endian NumPy type in which elements are stored. For bfloat16 and 8-bit
        floating-point types, it is an unsigned integer type of equal size.
        """
        bits = (
            "uint16" if self is DType.BFLOAT16 else "uint8" if self.is_float8 else self.torch_name
        )
        return np.dtype(bits).newbyteorder("<")

    @property
    def packed_bits(self) -> int:
        """Bits per element of a type of which a byte in a file holds several elements; otherwise
        0.
        """
        return _BITS_OF_PACKED_TYPES.get(self, 0)

    @property
    def torch_name(self) -> str:
        """Name of the torch type that holds elements in memory. An element of less than a byte is
        held in a byte: int8 for signed integers, uint8 for unsigned integers and for the codes of
        float4.
        """
        if not self.packed_bits:
            return self.value
        return "int8" if self.value.startswith("int") else "uint8"

    @property
    def is_float8(self) -> bool:
        """True for 8-bit floating-point types, which are only stored; no operator computes with
        them.
        """
        return self.value.startswith("float8")

    @property
    def is_floating(self) -> bool:
        """True for floating-point types of 16 bits or more."""
        return self in _FLOATING_TYPES

    @property
    def is_integer(self) -> bool:
        """True for signed and unsigned integer types, but not for bool."""
        return self.value.startswith(("int", "uint"))


_BITS_PER_ELEMENT = {
    each: int("0" + "".join(filter(str.isdigit, each.value.partition("_")[0]))) for each in DType
}
_ITEMSIZE = {each: max(8, bits) // 8 for each, bits in _BITS_PER_ELEMENT.items()}
_BITS_OF_PACKED_TYPES = {each: bits for each, bits in _BITS_PER_ELEMENT.items() if 0 < bits < 8}
_FLOATING_TYPES = frozenset(
    each for each, bits in _BITS_PER_ELEMENT.items() if "float" in each.value and bits > 8
)


COUNTED_LABELS = "autopipe/counted_labels"
"""Name of the graph output with the number of labels that are not ignored. The loss of a step is
divided by the sum of this output over its micro-batches.
"""

Int64 = Annotated[int, AtLeast(-(2**63))]
Attribute = Int64 | float | str | tuple[Int64, ...] | tuple[float, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: unique name, element type and static shape."""

    name: str
    dtype: DType
    shape: tuple[Index, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes in memory."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Data in a file, little-endian and row-major: `length` bytes from byte `offset` on. `file` is
    a path relative to the folder of the ONNX file, or "" for the ONNX file itself.
    """

    file: str
    offset: Index
    length: Index


@dataclass(frozen=True, slots=True)
class VarintSlice:
    """16-bit data in the ONNX file, stored as packed protobuf varints: `length` bytes from byte
    `offset` on.
    """

    offset: Index
    length: Index


@dataclass(frozen=True, slots=True)
class FoldedSlice(FileSlice):
    """Data in a file that an exporter computed from a parameter. The fields say how the parameter
    is recovered from the data.
    """

    rows: tuple[Index, ...] = ()
    """For a parameter that is a matrix, the offset of each of its rows in elements; () if the
    elements are stored in order.
    """
    step: int = 1
    """Distance, in stored elements, between consecutive elements of a row."""
    form: str = ""
    """Function by which an element of the parameter is computed from a stored element: "" for the
    identity, `log`, or `log of the negative`.
    """


@dataclass(frozen=True, slots=True)
class Fill:
    """A parameter all of whose elements have one value."""

    value: float


@dataclass(frozen=True, slots=True)
class Initializer:
    """Random or constant initial values of a parameter whose data no file contains. `scheme` is
    `normal` (mean 0, standard deviation `scale`), `uniform` (in [-scale, scale]), `zeros` or
    `ones`.
    """

    scheme: str
    scale: float = 0.0


Storage = FileSlice | VarintSlice | Fill | Initializer


def _write_storage(storage: Storage) -> dict[str, Any]:
    """Return the location of a parameter's data as a JSON object."""
    kinds = {
        FileSlice: "file",
        FoldedSlice: "file",
        VarintSlice: "varints",
        Fill: "fill",
        Initializer: "draw",
    }
    return {"kind": kinds[type(storage)]} | encode(storage)


def _read_storage(record: Record) -> Storage:
    """Return the location of a parameter's data from a JSON object."""
    kind = record.get("kind", Literal["file", "varints", "fill", "draw"])
    if kind == "fill":
        # The type is Any, because the value may be infinite or NaN, which the codec rejects for the
        # type `float`.
        value = record.get("value", Any)
        try:
            return Fill(float(value))
        except (TypeError, ValueError, OverflowError):
            record.at("value").reject("a number")
    folded = FoldedSlice if record.has("rows") else FileSlice
    classes = {"file": folded, "varints": VarintSlice, "draw": Initializer}
    storage: Storage = decode(record, classes[kind])
    return storage


@dataclass(frozen=True, slots=True)
class Parameter:
    """A value that persists between steps: a trained weight, or a buffer such as a running mean.
    `storage` is the location of its data.
    """

    value: Annotated[Value, Inline()]
    storage: Annotated[Storage, CustomCodec(_write_storage, _read_storage)]
    trainable: bool = True
    written: ClassVar = ("value", "trainable", "storage")


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value whose data are known at planning time. `array` has the data and is read-only."""

    value: Value
    array: np.ndarray

    def __post_init__(self) -> None:
        self.array.setflags(write=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Constant):
            return NotImplemented
        return self.value == other.value and self.array.tobytes() == other.array.tobytes()

    def __hash__(self) -> int:
        return hash(self.value)


@dataclass(frozen=True, slots=True)
class Node:
    """One use of an operator in the graph.

    `inputs` and `outputs` are names of values. "" stands for an absent optional operand; absent
    operands at the end are removed. `attributes` are pairs (name, value) as in the file, without
    default values, sorted by name. `domain` is "" for operators of ONNX, and for others a name such
    as "com.microsoft". `body` is the body of a loop.
    """

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()
    domain: str = ""
    body: Graph | None = field(default=None, repr=False)

    def integer(self, name: str, default: int = 0) -> int:
        """Return the integer attribute `name`, or `default` if it is absent. Raise ModelError if
        the attribute has another type.
        """
        return int(self._attribute(name, int, default))

    def number(self, name: str, default: float = 0.0) -> float:
        """Return the number attribute `name`, or `default` if it is absent."""
        return float(self._attribute(name, (int, float), default))

    def text(self, name: str, default: str = "") -> str:
        """Return the text attribute `name`, or `default` if it is absent."""
        return str(self._attribute(name, str, default))

    def integers(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the attribute `name`, a list of integers, or `default` if it is absent."""
        return tuple(self._attribute(name, tuple, default))

    def numbers(self, name: str, default: tuple[float, ...] = ()) -> tuple[float, ...]:
        """Return the attribute `name`, a list of numbers, or `default` if it is absent."""
        return tuple(self._attribute(name, tuple, default))

    def texts(self, name: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return the attribute `name`, a list of texts, or `default` if it is absent."""
        return tuple(self._attribute(name, tuple, default))

    def has(self, name: str) -> bool:
        """Return True if the node has the attribute `name`."""
        return any(key == name for key, _ in self.attributes)

    def _attribute(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Return the attribute `name`, or `default` if it is absent. Raise ModelError if its type
        is not `kind`.
        """
        for key, value in self.attributes:
            if key == name:
                if not isinstance(value, kind):
                    raise ModelError(
                        f"attribute {name!r} of {self.op} has the type {type(value).__name__}, "
                        "which is not supported",
                        where=repr(self.name),
                    )
                return value
        return default


def tokens_per_sample(inputs: Iterable[tuple[Value, int | None]]) -> int | None:
    """Return the number of tokens of a sample: the maximum length of the rows of its
    two-dimensional integer inputs. `inputs` are pairs of a value and its batch axis, which is None
    for an input without samples.

    Return None if an input with samples has floating-point elements, or if no row has two or more
    integers.
    """
    with_samples = [(value, axis) for value, axis in inputs if axis is not None]
    if any(value.dtype.is_floating for value, _ in with_samples):
        return None
    lengths = [
        value.shape[1] for value, axis in with_samples if axis == 0 and len(value.shape) == 2
    ]
    return max((length for length in lengths if length > 1), default=None)


@dataclass(frozen=True, slots=True)
class Graph:
    """A model, with the shapes of one forward pass. The module docstring describes its parts."""

    name: str
    opset: int
    """Version of the operators of ONNX's default domain."""
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    constants: tuple[Constant, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    values: tuple[Value, ...]
    """Types of the values that nodes write, in the order in which they are written."""
    batch_axes: tuple[tuple[str, int], ...] = ()
    """Pairs (input, axis of the batch) for the inputs with a batch dimension."""
    _types: dict[str, Value] = field(init=False, repr=False, compare=False)
    _producers: dict[str, int] = field(init=False, repr=False, compare=False)
    _held: dict[str, Parameter | Constant] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        types: dict[str, Value] = {}
        kept: tuple[Parameter | Constant, ...] = (*self.parameters, *self.constants)
        for value in itertools.chain(self.inputs, (each.value for each in kept), self.values):
            if types.setdefault(value.name, value) is not value:
                raise ModelError(f"value {value.name!r} is defined twice", where=repr(self.name))
        producers = {
            name: index for index, node in enumerate(self.nodes) for name in node.outputs if name
        }
        object.__setattr__(self, "_types", types)
        object.__setattr__(self, "_producers", producers)
        object.__setattr__(self, "_held", {each.value.name: each for each in kept})

    def type_of(self, name: str) -> Value:
        """Return the value called `name`. Raise KeyError if there is none."""
        return self._types[name]

    def has(self, name: str) -> bool:
        """Return True if the graph has a value called `name`."""
        return name in self._types

    def producer(self, name: str) -> int | None:
        """Return the index of the node that writes the value `name`; None for inputs, parameters
        and constants.
        """
        return self._producers.get(name)

    def parameter(self, name: str) -> Parameter | None:
        """Return the parameter called `name`, or None if there is none."""
        found = self._held.get(name)
        return found if isinstance(found, Parameter) else None

    def constant(self, name: str) -> Constant | None:
        """Return the constant called `name`, or None if there is none."""
        found = self._held.get(name)
        return found if isinstance(found, Constant) else None

    @memoize(MAX_CACHED_GRAPHS)
    def consumers(self) -> dict[str, tuple[int, ...]]:
        """Return the ascending indices of the nodes that read a value, by the name of the value.
        Values that no node reads are missing.
        """
        found: dict[str, list[int]] = {}
        for index, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.inputs):
                if name:
                    found.setdefault(name, []).append(index)
        return {name: tuple(indices) for name, indices in found.items()}

    @memoize(MAX_CACHED_GRAPHS)
    def sources(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """Return, for each node, pairs (value, index of the node that writes it) for the values
        that it reads and that nodes write. A value that the node reads twice occurs once.
        """
        made = self._producers
        return tuple(
            tuple((name, made[name]) for name in dict.fromkeys(node.inputs) if name in made)
            for node in self.nodes
        )

    def verify(self) -> None:
        """Raise ModelError unless each value is written once, before it is read, and each output of
        the graph exists.
        """
        known = {value.name for value in self.inputs} | self._held.keys()
        for node in self.nodes:
            for name in node.inputs:
                if name and name not in known:
                    raise ModelError(
                        f"{node.op} reads {name!r} before a node writes it", where=repr(node.name)
                    )
            for name in node.outputs:
                if name and name not in self._types:
                    raise ModelError(
                        f"{node.op} writes {name!r}, whose type is unknown", where=repr(node.name)
                    )
                if name and name in known:
                    raise ModelError(
                        f"{node.op} writes {name!r}, which another node already writes",
                        where=repr(node.name),
                    )
                known.add(name)
            known.discard("")
        for name in self.outputs:
            if name not in known:
                raise ModelError(f"no node writes the output {name!r}", where=repr(self.name))

    @memoize(MAX_CACHED_GRAPHS)
    def digest(self) -> str:
        """Return the SHA-256 of the graph: its structure, types, constants, and the locations of
        its parameters' data.
        """
        digest = hashlib.sha256()
        for part in (
            self.opset,
            self.inputs,
            self.parameters,
            self.nodes,
            self.outputs,
            self.values,
            self.batch_axes,
        ):
            digest.update(repr(part).encode())
        for constant in self.constants:
            digest.update(repr(constant.value).encode())
            digest.update(constant.array.tobytes())
        for node in self.nodes:
            digest.update(b"" if node.body is None else node.body.digest().encode())
        return digest.hexdigest()
