"""Parameters that an exporter merged because their numbers were equal, told apart again.

A new model's biases are all zero and its scales all one, so exporters keep one tensor for many parameters. Trained as
one they would drift together. Torch's newer exporter says in each node's metadata which parameter it reads; its older
one leaves an Identity named after each; of other files' tensors, those all of whose numbers are equal and that stand
where scales and offsets do are one parameter a use.

Tables that a model computes from positions alone, known by their numbers: they are no parameters.

An exporter computes cosines, positions and masks while it traces, and writes them beside the weights. A trained tensor
never looks like one of them; a fresh one may be all ones or zeros, which therefore says nothing by itself.

What torch's exporter says of a model: which tensors are parameters, and which were folded from them.

Its graph carries the signature of the traced program, its tensors what they were folded from, and its nodes the traced
call that they spell, whose arguments name the parameters.

Who reads each value of a file, and where operators take weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autopipe.ir.ops import OPERATORS

if TYPE_CHECKING:
    import onnx


SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
"""The graph's metadata in which torch's exporter tells parameters from buffers."""
FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""A value's metadata: the values that a computed constant depends on."""
KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""A value's metadata: PARAMETER or BUFFER."""
CALL = "pkg.torch.onnx.fx_node"
"""A node's metadata: the call of the traced program that it is a part of."""
SIGNED = re.compile(r"^(\w+): (PARAMETER|BUFFER) target='([^'\n]+)'", re.MULTILINE)
ARGUMENT = re.compile(r"%([A-Za-z_]\w*)")
TEXT = re.compile(r"'([^']*)'")
NUMBERED = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True)
class Signature:
    """The exporter's word on a file's tensors."""

    parameters: frozenset[str] = frozenset()
    buffers: frozenset[str] = frozenset()
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Parameters and buffers by the traced program's names for them."""
    folded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each computed constant the values that it was folded from."""

    @classmethod
    def of(cls, graph: onnx.GraphProto, metadata: Mapping[str, str]) -> Signature:
        """The signature of a file; an empty one where there is none, or where it names none of the file's tensors."""
        found = SIGNED.findall(metadata.get(SIGNATURE, ""))
        if not found:
            return cls()
        said = [(info.name, entry) for info in graph.value_info for entry in info.metadata_props]
        kinds = {name: entry.value for name, entry in said if entry.key == KIND}
        signature = cls(
            parameters=frozenset(target for _, kind, target in found if kind == "PARAMETER")
            | {name for name, kind in kinds.items() if kind == "PARAMETER"},
            buffers=frozenset(target for _, kind, target in found if kind == "BUFFER"),
            arguments={argument: target for argument, _, target in found},
            folded={name: tuple(TEXT.findall(entry.value)) for name, entry in said if entry.key == FOLDED},
        )
        names = {tensor.name for tensor in graph.initializer} | {name for node in graph.node for name in node.input}
        return signature if any(signature.trains(name) for name in names) else cls()

    def __bool__(self) -> bool:
        return bool(self.parameters)

    def origins(self, name: str) -> tuple[str, ...]:
        """The parameters that a tensor is, or was folded from."""
        if name in self.parameters:
            return (name,)
        return tuple(each for each in self.folded.get(name, ()) if each in self.parameters)

    def operators(self, name: str) -> frozenset[str]:
        """The traced operators that were folded into a tensor, as far as values are named after them."""
        names = (name, *self.folded.get(name, ()))
        return frozenset(NUMBERED.sub("", each) for each in names if each not in self.parameters)

    def multiplied(self, name: str) -> bool:
        """True if a tensor is a product of parameters, or of one and a table, which cannot be taken apart again."""
        return name not in self.parameters and not PRODUCTS.isdisjoint(self.operators(name))

    def left_out(self, graph: onnx.GraphProto) -> list[str]:
        """The parameters that a traced call names and its nodes do not read: zeros that the exporter does not add."""
        held = {tensor.name for tensor in graph.initializer}
        found = {origin for name in held for origin in self.origins(name)}
        reads: dict[str, set[str]] = {}
        names: dict[str, set[str]] = {}
        for node in graph.node:
            call, arguments = arguments_of(node)
            reads.setdefault(call, set()).update(name for name in node.input if self.trains(name))
            names.setdefault(call, {self.arguments[each] for each in arguments if each in self.arguments})
        few = (named & self.parameters for call, named in names.items() if len(reads[call]) < len(named))
        return sorted(set[str]().union(*few) - found)

    def names(self, name: str) -> bool:
        """True if a tensor is called as a parameter or a buffer is."""
        return name in self.parameters or name in self.buffers

    def trains(self, name: str) -> bool:
        """True if a tensor is a parameter, perhaps in a folded form."""
        return bool(self.origins(name))

    def stated(self, tensor: onnx.TensorProto, merged: str) -> onnx.ValueInfoProto:
        """The exporter's word that `tensor`, told apart from `merged`, is a parameter, folded as that is."""
        import onnx.helper

        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        info.metadata_props.add(key=KIND, value="PARAMETER")
        folded = [each for each in (merged, *self.folded.get(merged, ())) if each not in self.parameters]
        if merged in self.folded:
            info.metadata_props.add(key=FOLDED, value=str(folded))
        return info


def arguments_of(node: onnx.NodeProto) -> tuple[str, tuple[str, ...]]:
    """The traced call that a node is a part of, and the values that it reads there; "" where it is not said."""
    call = next((entry.value for entry in node.metadata_props if entry.key == CALL), "")
    return call, tuple(ARGUMENT.findall(call.partition("](args")[2]))


HIDDEN = -1e4
"""Below this an added mask hides a position from a softmax."""
SURE = 16
"""Numbers of which most are different only where they were drawn."""
LEAST = 4
"""Places from which a regular series is no accident."""
STEEPEST = 512
"""Places of a table that are looked at: enough to tell it from numbers that were drawn."""


def is_uniform(array: np.ndarray) -> bool:
    """True if all numbers are equal."""
    if array.size == 0:
        return True
    flat = array.reshape(-1)
    return bool(flat[0] == flat[-1]) and bool((flat == flat[0]).all())


def is_drawn(array: np.ndarray) -> bool:
    """True if a matrix's numbers were drawn at random or trained: hardly any stands twice, so that no two tensors have
    the same by accident.
    """
    wide = sum(extent > 1 for extent in array.shape)
    return wide > 1 and array.size >= SURE and len(np.unique(array)) >= 0.9 * array.size


def table_of(array: np.ndarray, named: bool) -> str:
    """Kind of table that the numbers are, "" where they may be a weight's.

    A tensor that the module names (`named`) may hold a series: modules begin so (RWKV's decays).
    """
    if array.size < 2 or is_uniform(array):
        return ""
    numbers = np.asarray(array[:STEEPEST] if array.ndim == 1 else array, dtype=np.float64)
    if _is_mask(numbers):
        return "a mask"
    if bool((numbers == np.round(numbers)).all()):
        return "whole numbers, such as positions"
    places = _by_place(numbers)
    if places is None:
        return ""
    if places.shape[1] > 1:
        if are_waves(places) or (not named and _begins_as_angles(places)):
            return "a table of sines and cosines"
    elif not named and _is_series(places[:, 0]):
        return "a series of positions or frequencies"
    return ""


def are_waves(places: np.ndarray) -> bool:
    """True if each column is a sampled sine: x[i-1] + x[i+1] is the same multiple of x[i] everywhere."""
    if len(places) < LEAST:
        return False
    middle, around = places[1:-1], places[:-2] + places[2:]
    square = (middle * middle).sum(axis=0)
    factor = np.divide((middle * around).sum(axis=0), square, out=np.full(len(square), 2.0), where=square > 0)
    if not bool((np.abs(factor) <= 2 + 1e-3).all()):
        return False
    size = np.abs(places).max(axis=0)
    steps = np.abs(np.diff(places, axis=0)).max(axis=0)
    # A column that hardly moves says nothing; some must turn visibly.
    turning = steps > 0.05 * size
    close = np.abs(around - factor * middle).max(axis=0) <= 2e-3 * size + 1e-12
    return bool(close.all()) and bool(turning.any())


def _is_mask(numbers: np.ndarray) -> bool:
    hidden = numbers <= HIDDEN
    rest = numbers[~hidden]
    if hidden.any():
        return bool(np.isin(rest, (0.0, 1.0)).all())
    return bool(np.isin(numbers, (0.0, 1.0)).all())


def _by_place(numbers: np.ndarray) -> np.ndarray | None:
    """The numbers as [places, columns] where only the last two axes, or one, are more than 1 wide."""
    shape = [extent for extent in numbers.shape if extent > 1]
    if not 1 <= len(shape) <= 2:
        return None
    places = numbers.reshape(shape[0], -1)
    return places[:STEEPEST]


def _begins_as_angles(places: np.ndarray) -> bool:
    """True if the numbers are sines or cosines that begin at position 0."""
    first = places[0]
    begins = bool((first == 1).all()) or bool((first == 0).all())
    return begins and len(places) >= LEAST and float(np.abs(places).max()) <= 1 + 1e-6


def _is_series(numbers: np.ndarray) -> bool:
    """True if numbers grow by the same step or by the same factor."""
    if len(numbers) < LEAST:
        return False
    steps = np.diff(numbers)
    size = float(np.abs(steps).max())
    if math.isfinite(size) and float(np.abs(steps - steps[0]).max()) <= 1e-5 * size:
        return True
    if not (numbers > 0).all():
        return False
    factors = np.diff(np.log(numbers))
    return float(np.abs(factors - factors[0]).max()) <= 1e-5 * float(np.abs(factors).max())


WEIGHT_SLOTS: dict[str, frozenset[int]] = {
    "Conv": frozenset({1, 2}),
    "ConvTranspose": frozenset({1, 2}),
    "Gemm": frozenset({0, 1, 2}),
    "MatMul": frozenset({0, 1}),
    "Einsum": frozenset({0, 1}),
    "BatchNormalization": frozenset({1, 2, 3, 4}),
    "InstanceNormalization": frozenset({1, 2}),
    "GroupNormalization": frozenset({1, 2}),
    "LayerNormalization": frozenset({1, 2}),
    "RMSNormalization": frozenset({1}),
    "PRelu": frozenset({1}),
    "LSTM": frozenset({1, 2, 3, 7}),
    "GRU": frozenset({1, 2, 3}),
    "RNN": frozenset({1, 2, 3}),
    "Gather": frozenset({0}),
}
"""Operands that are weights where they do not depend on the inputs."""
AFFINE_SLOTS = frozenset(
    {("Conv", 2), ("ConvTranspose", 2), ("Gemm", 2), ("BatchNormalization", 1), ("BatchNormalization", 2)}
    | {(f"{kind}Normalization", slot) for kind in ("Instance", "Group", "Layer", "RMS") for slot in (1, 2)}
    | {("PRelu", 1)}
)
"""Operands that hold scales, offsets and slopes: equal numbers there are those of a new layer."""
ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div"})
"""Operators that spell such a scale or offset where a layer has no operator of its own."""
VIEWS = frozenset({"Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Cast"})
"""Operators through which a weight may pass on its way."""


@dataclass(frozen=True, slots=True)
class Uses:
    """Who reads each value of a file."""

    readers: Mapping[str, tuple[tuple[onnx.NodeProto, int], ...]]

    @classmethod
    def of(cls, nodes: Iterable[onnx.NodeProto]) -> Uses:
        """Collect the readers: node and position of the operand."""
        readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in nodes:
            for slot, name in enumerate(node.input):
                if name:
                    readers.setdefault(name, []).append((node, slot))
        return cls({name: tuple(found) for name, found in readers.items()})

    def slots(self, name: str, through: frozenset[str] = VIEWS) -> frozenset[tuple[str, int]]:
        """(operator, operand) of every use of a value, seen through the operators `through`."""
        found: set[tuple[str, int]] = set()
        seen, waiting = {name}, [name]
        while waiting:
            for node, slot in self.readers.get(waiting.pop(), ()):
                if node.op_type in through:
                    results = [result for result in node.output if result and result not in seen]
                    seen.update(results)
                    waiting.extend(results)
                else:
                    found.add((node.op_type, slot))
        return frozenset(found)

    def is_weight(self, name: str) -> bool:
        """True if a value is read where operators take weights."""
        return any(slot in WEIGHT_SLOTS.get(operator, frozenset()) for operator, slot in self.slots(name))

    def is_static(self, name: str) -> bool:
        """True if an operator must know the value while compiling: Resize its scales."""
        return any(operator in OPERATORS and slot in OPERATORS[operator].static for operator, slot in self.slots(name))


LIFTED = re.compile(r"_?val_\d+|onnx::\w+|(c_)?lifted_tensor\w*|_tensor_constant\d*")
"""Names that torch's exporters give to constants and to what they folded, weights included."""
FLOATING = frozenset({1, 10, 11, 16})
"""TensorProto's numbers for float32, float16, float64 and bfloat16."""
LOOKUPS = frozenset({"embedding", "index", "index_select", "select"})
"""Traced operators that take rows of a table."""
PRODUCTS = frozenset({"einsum", "linear", "matmul", "mm", "bmm", "addmm", "convolution", "conv2d"})
"""Traced operators that multiply and add up."""
SAME = frozenset({"alias", "clone", "contiguous", "detach", "_to_copy", "lift_fresh_copy", "view", "expand"})
"""Traced operators that give a parameter another name."""
PRODUCER = "pytorch"
CONSTANT = "/constant"
"""Added to the name of a parameter for uses of its numbers that are none of it."""
NAMESAKE = "/merged"
"""Added to the result of an Identity whose readers read a tensor of their own instead."""

Read = tuple[int, int]
"""Position of a node in the graph, and of an operand of it."""
Numbers = Callable[["onnx.TensorProto"], "np.ndarray | None"]


@dataclass(frozen=True, slots=True)
class Apart:
    """Tensors of their own for uses of merged ones."""

    copies: Mapping[str, str] = field(default_factory=dict)
    """By the name of the new tensor the merged one, whose numbers it begins with."""
    doubtful: tuple[str, ...] = ()
    """Tensors told apart although nothing in the file says that they are several."""


def take_apart(model: onnx.ModelProto, metadata: Mapping[str, str], numbers: Numbers) -> Apart:
    """Give each parameter of `model` a tensor of its own, in place. `numbers` reads a tensor's, None where it cannot.

    Nodes keep their places; an Identity that named a parameter is left without a reader.
    """
    graph = model.graph
    if model.functions or "autopipe.parameters" in metadata:
        return Apart()
    held = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type in FLOATING and tensor.dims}
    signature = Signature.of(graph, metadata)
    if signature:
        wanted = list(_signed(graph, held, signature, numbers))
    else:
        wanted = list((_named if model.producer_name == PRODUCER else _used)(graph, held, numbers))
    taken = {each.name for each in (*graph.initializer, *graph.input)}
    taken.update(name for node in graph.node for name in node.output)
    copies: dict[str, str] = {}
    doubtful: list[str] = []
    for read, merged, name in wanted:
        own = copies.get(name)
        if own is None and name in taken:
            name = f"{merged}/{name}"
        if name not in copies and name not in taken:
            copies[name] = merged
            copy = graph.initializer.add()
            copy.CopyFrom(held[merged])
            copy.name = name
            if signature and not (signature.names(name) or name.endswith(CONSTANT)):
                graph.value_info.append(signature.stated(copy, merged))
            if not signature and _is_doubtful(model, name, held[merged], numbers):
                doubtful.append(name)
        if copies.get(name) == merged:
            graph.node[read[0]].input[read[1]] = name
    return Apart(copies, tuple(doubtful))


def _is_doubtful(model: onnx.ModelProto, name: str, merged: onnx.TensorProto, numbers: Numbers) -> bool:
    """True if a tensor was told apart on no better evidence than its place."""
    if model.producer_name != PRODUCER:
        return True
    array = numbers(merged) if LIFTED.fullmatch(name) else None
    return array is not None and not is_uniform(array)


def _readers(graph: onnx.GraphProto, names: Mapping[str, object]) -> dict[str, list[Read]]:
    found: dict[str, list[Read]] = {}
    for position, node in enumerate(graph.node):
        for slot, name in enumerate(node.input):
            if name in names:
                found.setdefault(name, []).append((position, slot))
    return found


def _signed(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], signature: Signature, numbers: Numbers
) -> Iterator[tuple[Read, str, str]]:
    """Uses of tensors that are for another parameter than the tensor is, as the nodes' calls say."""
    known = {name: held[name] for name in held if signature.trains(name)}
    readers = _readers(graph, known)
    calls: dict[str, list[Read]] = {}
    for reads in readers.values():
        for read in reads:
            calls.setdefault(arguments_of(graph.node[read[0]])[0], []).append(read)
    made = {name for node in graph.node for name in node.output} | {each.name for each in graph.input}
    for name, reads in readers.items():
        if len(reads) < 2:
            continue
        own = set(signature.origins(name)) | {name}
        plain: bool | None = None
        for read in reads:
            meant = _meant(graph, read, sorted(calls[arguments_of(graph.node[read[0]])[0]]), signature, made)
            if meant is not None and (not meant or meant in own):
                continue
            if meant is None or NUMBERED.sub("", meant) in LOOKUPS:
                # Equal rows of a table, unless all numbers are one, are the same rows looked up twice.
                if plain is None:
                    array = numbers(known[name])
                    plain = array is not None and is_uniform(array)
                if not plain:
                    continue
            yield read, name, f"{name}{CONSTANT}" if meant is None else meant


def _meant(
    graph: onnx.GraphProto, read: Read, together: list[Read], signature: Signature, made: set[str]
) -> str | None:
    """The parameter that a node's call names for an operand; "" where it does not tell, None where it is no parameter.

    `together` are all such operands of the same call.
    """
    node = graph.node[read[0]]
    call, arguments = arguments_of(node)
    if not call:
        return ""
    named = [signature.arguments[each] for each in arguments if each in signature.arguments]
    if named:
        return _claimed(graph, read, together, signature, named)
    if len(together) == 1 and len(arguments) == sum(bool(each) for each in node.input):
        found = arguments[sum(bool(each) for each in node.input[: read[1]])]
        return "" if found in made or NUMBERED.sub("", found) in SAME else found
    return None if node.op_type.endswith("Normalization") else ""


def _claimed(
    graph: onnx.GraphProto, read: Read, together: list[Read], signature: Signature, named: list[str]
) -> str | None:
    """Which of the parameters that a call names an operand is for.

    Operands that are, by their own names, one of them are for that; the others follow in the order of the arguments,
    behind what a normalization is given where it has no scale.
    """
    left = list(named)
    others: list[Read] = []
    for at, slot in together:
        own = next((each for each in signature.origins(graph.node[at].input[slot]) if each in left), None)
        if own is None:
            others.append((at, slot))
            continue
        left.remove(own)
        if (at, slot) == read:
            return own
    place = others.index(read) - (len(others) - len(left))
    if len(left) > len(others):
        return ""
    if place >= 0:
        return left[place]
    return None if graph.node[read[0]].op_type.endswith("Normalization") else ""


def _named(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], numbers: Numbers
) -> Iterator[tuple[Read, str, str]]:
    """Parameter that an Identity of a tensor names, which the older exporter found to be equal."""
    names = {node.output[0]: node.input[0] for node in graph.node if _is_name(node, held)}
    outputs = {info.name for info in graph.output}
    readers = _readers(graph, {**held, **names})
    looked: dict[str, tuple[bool, bool]] = {}
    for node in graph.node:
        if not _is_name(node, held) or node.output[0] in outputs:
            continue
        name, merged = node.output[0], node.input[0]
        if LIFTED.fullmatch(name):
            if merged not in looked:
                array = numbers(held[merged])
                looked[merged] = (True, False) if array is None else (is_uniform(array), is_drawn(array))
            plain, drawn = looked[merged]
            scopes = {scope_of(graph.node[position]) for position, _ in readers.get(merged, ())} - {""}
            own = {scope_of(graph.node[position]) for position, _ in readers.get(name, ())}
            # Layers that were copied begin with equal weights, second operands; the first are given to them.
            outer = drawn and all(slot == 0 for _, slot in readers.get(name, ()))
            if not plain and (own <= scopes or outer):
                continue  # The same module, called again, or a tensor that several modules are given.
        node.output[0] = f"{name}{NAMESAKE}"
        for read in readers.get(name, ()):
            yield read, merged, name


def _is_name(node: onnx.NodeProto, held: Mapping[str, onnx.TensorProto]) -> bool:
    return node.op_type == "Identity" and not node.domain and len(node.input) == 1 and node.input[0] in held


def scope_of(node: onnx.NodeProto) -> str:
    """The module that a node of the older exporter is a part of; "" for an Identity, which is in none."""
    return "/".join(NUMBERED.sub("", each) for each in node.name.split("/")[:-1])


def _used(
    graph: onnx.GraphProto, held: Mapping[str, onnx.TensorProto], numbers: Numbers
) -> Iterator[tuple[Read, str, str]]:
    """Every use but the first of a scale or offset all of whose numbers are equal."""
    for name, reads in _readers(graph, held).items():
        if len(reads) < 2 or not all((graph.node[at].op_type, slot) in AFFINE_SLOTS for at, slot in reads):
            continue
        array = numbers(held[name])
        if array is not None and array.size > 1 and is_uniform(array):
            for at, slot in reads[1:]:
                node = graph.node[at]
                yield (at, slot), name, f"{name}/{node.name or node.output[0]}"
