"""A copy of an ONNX file with trained numbers, streamed: no tensor is ever whole in memory.

A message's fields may stand in any order (https://protobuf.dev/programming-guides/encoding): a
tensor's numbers come last in it, the tensors last in the graph, and the graph last in the model, so
that all lengths are known beforehand.

Most parameters have the name of a tensor in the file. Of the others, those into which an exporter
folded operators are computed from a parameter again, copies follow their parameter, and a constant
amid the graph is a node's result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.ir.files import INLINE_LIMIT, Progress, aligned
from autopipe.ir.graph import DType, FileSlice, Value, VarintSlice
from autopipe.ir.layout import TensorSlice, full_slice
from autopipe.ir.output_files import replacing
from autopipe.ir.output_kinds import check_data_file
from autopipe.ir.state_names import is_for_state_only
from autopipe.passes.frontend.derivations import MOVES
from autopipe.passes.frontend.elements import (
    NUMBERS,
    external_slice,
    has_numbers,
    listed_numbers,
    stored_numbers,
    value_of,
)
from autopipe.passes.frontend.folding import Folded
from autopipe.passes.frontend.load import Source, load, located, opened
from autopipe.passes.frontend.merged_parameters import NAMESAKE, take_apart
from autopipe.passes.frontend.parameters import Chosen, roles_of
from autopipe.passes.frontend.protobuf_scan import (
    ATTRIBUTE_TENSOR,
    GRAPH_INITIALIZER,
    GRAPH_NODE,
    MODEL_GRAPH,
    NODE_ATTRIBUTE,
    TENSOR_RAW,
    framed,
    header,
    strip_weights,
)
from autopipe.passes.frontend.weights import Weights

if TYPE_CHECKING:
    import onnx


PIECE: Final = 1 << 24
"""Bytes held at a time."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """A tensor by name, element type and shape, and how to read a block of it. `read` gives
    little-endian elements in the block's shape; of bfloat16, the bits.
    """

    value: Value
    read: Callable[[TensorSlice], npt.NDArray[np.generic]]

    def write(self, file: IO[bytes], progress: Progress) -> None:
        """Write all of the tensor's bytes, row by row, no more than about PIECE at a time."""
        for box in _boxes(self.value.shape, PIECE // self.value.dtype.itemsize):
            piece = self.read(box).tobytes()
            file.write(piece)
            progress(len(piece))

    def computed(
        self, value: Value, folded: Folded, others: Mapping[str, Numbers] | None = None
    ) -> Numbers:
        """Return the tensor into which an exporter had folded operators, from the data of the
        parameter and of `others` that are operands. A tensor that is only moved is read a block at
        a time, all else at once.
        """
        steps = [step.operator for step in folded.steps]
        if not steps:
            return Numbers(replace(self.value, name=value.name), self.read)
        if steps == ["Transpose"]:
            order = folded.steps[0].perm
            back = np.argsort(order)

            def moved(box: TensorSlice) -> npt.NDArray[np.generic]:
                bounds = (tuple(each[place] for place in back) for each in (box.starts, box.stops))
                return self.read(TensorSlice(*bounds)).transpose(order)

            return Numbers(value, moved)

        @functools.cache
        def applied() -> npt.NDArray[np.generic]:
            stored = self.read(full_slice(self.value.shape))
            if MOVES.issuperset(steps):
                return folded.apply(stored)
            if value.dtype is not DType.BFLOAT16:
                arrays = {name: (others or {})[name] for name in folded.others}
                read = {
                    name: each.read(full_slice(each.value.shape)) for name, each in arrays.items()
                }
                return folded.apply(stored, read).astype(stored.dtype)
            bits = (
                folded.apply((stored.astype(np.uint32) << 16).view(np.float32))
                .astype(np.float32)
                .view(np.uint32)
            )
            # Rounded to the nearest, ties to even.
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(stored.dtype)

        return Numbers(value, lambda box: applied()[box.slices].reshape(box.shape))


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[TensorSlice]:
    """Blocks of at most `limit` elements which, one after the other, are the tensor row by row."""
    if not shape:
        yield full_slice(shape)
    elif (row := math.prod(shape[1:])) > limit:
        for at, box in ((at, box) for at in range(shape[0]) for box in _boxes(shape[1:], limit)):
            yield TensorSlice((at, *box.starts), (at + 1, *box.stops))
    elif row:
        for start in range(0, shape[0], limit // row):
            yield TensorSlice(
                (start, *(0 for _ in shape[1:])), (min(start + limit // row, shape[0]), *shape[1:])
            )


def kept_tensors(
    graph: onnx.GraphProto, source: Source, trained: Collection[str]
) -> tuple[list[Numbers], list[Numbers]]:
    """Initializers and constants of `graph` without numbers there, but for those that are
    `trained`. First those whose numbers lie in the file itself, then those in files beside it.
    `graph` is that of the file of `source` without the numbers of its large tensors.
    """
    tensors = [(tensor.name, tensor) for tensor in graph.initializer]
    constants = (node for node in graph.node if node.op_type == "Constant")
    tensors += (
        (node.output[0], each.t)
        for node in constants
        for each in node.attribute
        if each.name == "value"
    )
    inside: list[Numbers] = []
    beside: list[Numbers] = []
    for name, tensor in tensors:
        if name in trained or has_numbers(tensor):
            continue
        external = tensor.data_location == tensor.EXTERNAL
        place = external_slice(tensor, source.path) if external else source.slices.get(name)
        if place is not None:
            value = value_of(tensor, name, name)
            is_inside = isinstance(place, VarintSlice) or not place.file
            (inside if is_inside else beside).append(stored_tensor(value, place, source.path))
    return inside, beside


def stored_tensor(value: Value, place: FileSlice | VarintSlice, model: Path) -> Numbers:
    """A tensor that lies at a place of the file `model`, or of a file beside it."""
    if isinstance(place, VarintSlice):
        listed = listed_numbers(place, model).view(value.dtype.stored).reshape(value.shape)
        return Numbers(value, lambda box: listed[box.slices].reshape(box.shape))
    path = model.parent / place.file if place.file else model

    def read(box: TensorSlice) -> npt.NDArray[np.generic]:
        stored = np.memmap(
            path, value.dtype.stored, mode="r", offset=place.offset, shape=value.shape or (1,)
        )
        return stored[box.slices].reshape(box.shape)

    return Numbers(value, read)


def write_model(
    file: IO[bytes],
    model: onnx.ModelProto,
    tensors: Sequence[Numbers],
    constants: Mapping[str, onnx.NodeProto],
    data: str,
    places: Mapping[str, int],
    progress: Progress,
) -> None:
    """Write the model with these tensors besides its own; those that have `places` lie there in the
    file `data`. A tensor is the value of the node that `constants` has for it, else an initializer.
    `model` loses its graph.
    """
    graph = model.graph.SerializeToString()
    model.ClearField("graph")
    nodes = []
    initializers = []
    for each in tensors:
        if node := constants.get(each.value.name):
            nodes.append((_node_head(node, each.value), each))
        else:
            initializers.append(
                (_initializer_head(each.value, data, places.get(each.value.name)), each)
            )
    streamed = sum(each.value.bytes for each in tensors if each.value.name not in places)
    size = len(graph) + sum(len(head) for head, _ in (*nodes, *initializers)) + streamed
    file.write(model.SerializeToString() + header(MODEL_GRAPH, size))
    # Nodes stand before all others, since these read nothing.
    for head, tensor in (*nodes, (graph, None), *initializers):
        file.write(head)
        if tensor and tensor.value.name not in places:
            tensor.write(file, progress)


def _tensor_head(value: Value) -> bytes:
    import onnx

    head = onnx.TensorProto(name=value.name, data_type=NUMBERS[value.dtype], dims=value.shape)
    return bytes(head.SerializeToString()) + header(TENSOR_RAW, value.bytes)


def _initializer_head(value: Value, data: str, place: int | None) -> bytes:
    """An initializer up to its numbers, or all of it where they lie in the file `data`."""
    import onnx

    if place is None:
        head = _tensor_head(value)
        return header(GRAPH_INITIALIZER, len(head) + value.bytes) + head
    tensor = onnx.TensorProto(name=value.name, data_type=NUMBERS[value.dtype], dims=value.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, entry in (("location", data), ("offset", place), ("length", value.bytes)):
        tensor.external_data.add(key=key, value=str(entry))
    return framed(GRAPH_INITIALIZER, tensor.SerializeToString())


def _node_head(node: onnx.NodeProto, value: Value) -> bytes:
    """A Constant node up to its numbers."""
    import onnx

    tensor = _tensor_head(value)
    attribute = onnx.AttributeProto(
        name="value", type=onnx.AttributeProto.TENSOR
    ).SerializeToString()
    attribute += header(ATTRIBUTE_TENSOR, len(tensor) + value.bytes) + tensor
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    del bare.attribute[:]
    head: bytes = bare.SerializeToString()
    head += header(NODE_ATTRIBUTE, len(attribute) + value.bytes) + attribute
    return header(GRAPH_NODE, len(head) + value.bytes) + head


FIXED: Final = frozenset({"Constant", "ConstantOfShape"})
"""Operators whose results can be parameters."""


def file_tensors(
    source: Source, graph: onnx.GraphProto, trained: Mapping[str, Numbers]
) -> tuple[tuple[Numbers, ...], frozenset[str]]:
    """New values of the tensors of file `graph` from the parameters `trained`, and the names of
    those it lacks. A tensor it lacks is a name that nothing writes. `source` is the same file, its
    functions inlined. Raises ModelError, naming the parameter, for one that no tensor of the file
    is, or one of another type or shape.
    """
    held = Weights(source, roles_of(source), Chosen()).initializers()
    folded = {name: each for name, each in held.items() if isinstance(each, Folded)}
    bases = {
        each.source.value.name: each.source
        for each in folded.values()
        if not isinstance(each.source, str)
    }
    results = {name: node.op_type for node in graph.node for name in node.output if name}
    given = {info.name for info in graph.input}
    read = {name for node in graph.node for name in node.input}
    unread = {each.name: each for each in graph.initializer if is_for_state_only(each.name)}
    found: dict[str, Numbers] = {}
    lacking: set[str] = set()
    for name, numbers in trained.items():
        stored = bases[name].value if name in bases else held[name].value if name in held else None
        if stored is None and name in unread:
            stored = value_of(unread[name], name, name)
        own = numbers.value
        where = f"parameter {name!r}"
        if stored is not None and (stored.dtype, stored.shape) != (own.dtype, own.shape):
            there, here = (f"{each.dtype.value}{list(each.shape)}" for each in (stored, own))
            raise ModelError(f"it was trained as {here}, the file has {there}", where=where)
        if name in bases:
            continue
        if stored is None and results.get(name) not in FIXED:
            if name not in read or name in results or name in given:
                message = (
                    "no tensor of the file holds this parameter: it was made while the model was "
                    "read"
                )
                raise ModelError(message, where=where)
            lacking.add(name)
        found[name] = numbers
    for name, each in folded.items():  # What is computed from another tensor stands behind it.
        if isinstance(each.source, str):
            base = found.get(each.source) or trained.get(each.source)
        else:
            base = trained.get(each.source.value.name)
        if base is not None and trained.keys() >= set(each.others):
            found[name] = base.computed(each.value, each, trained)
    return tuple(found.values()), frozenset(lacking)


SMALL: Final = 1024
"""Bytes below which a tensor stands in the file however large the others are."""
FREE_INITIALIZERS: Final = 4
"""IR version from which initializers need not be inputs of the graph."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    files: tuple[Path, ...]
    replaced: int
    """Tensors of the file with new numbers."""
    added: int
    """Tensors that the file lacked."""
    bytes: int
    """Of all tensors written."""


def write_trained(
    model: Path,
    target: Path,
    trained: Mapping[str, Numbers],
    progress: Progress = lambda _: None,
    inline_limit: int = INLINE_LIMIT,
    force: bool = False,
) -> WrittenFiles:
    """Write the file `model` with the numbers of the parameters `trained`, by name, to `target`.

    Its nodes stay as they are, but for a ConstantOfShape that was trained: it becomes an
    initializer, as what the exporter had merged become several. Where tensors have more than
    `inline_limit` bytes in all, trained initializers lie in `target`.data; what else stands in the
    file stays there: only so are masks known for what they are. Files appear whole or not at all,
    `target` last. `progress` is told the bytes of every piece. Raises ModelError for a parameter
    that no tensor of the file is, ConfigurationError where a file cannot be written or would take
    the place of the model's own, or, without `force`, `target`.data that of a file of something
    else.
    """
    import onnx

    source = load(model)
    stripped, slices = strip_weights(opened(model))
    proto = onnx.ModelProto.FromString(stripped)
    take_apart(
        proto, source.metadata, lambda tensor: stored_numbers(tensor.name, tensor, slices, model)
    )
    try:
        numbers, lacking = file_tensors(source, proto.graph, trained)
    except ModelError as error:
        raise located(error, model) from error
    names = {each.value.name for each in numbers}
    inside, outside = kept_tensors(proto.graph, source, names)
    tensors = (*numbers, *outside, *inside)
    constants = _take_out(proto, {each.value.name for each in tensors})
    if lacking:
        proto.ir_version = max(proto.ir_version, FREE_INITIALIZERS)
    size = sum(each.value.bytes for each in tensors)
    movable = (each for each in (*numbers, *outside) if each.value.name not in constants)
    beside = [each for each in movable if size > inline_limit and each.value.bytes >= SMALL]
    data = target.with_name(target.name + ".data")
    files = (target, data) if beside else (target,)
    _check_places(source, files)
    if beside:
        check_data_file(target, data, force)
    places: dict[str, int] = {}
    try:
        with ExitStack() as stack:
            opened_files = {path: stack.enter_context(replacing(path)) for path in files}
            for each in beside:
                places[each.value.name] = aligned(opened_files[data])
                each.write(opened_files[data], progress)
            write_model(
                opened_files[target], proto, tensors, constants, data.name, places, progress
            )
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {error.filename or target}: {error.strerror}",
            hint="choose another place",
        ) from error
    return WrittenFiles(files, len(numbers) - len(lacking), len(lacking), size)


def _take_out(proto: onnx.ModelProto, names: set[str]) -> dict[str, onnx.NodeProto]:
    """Remove what says these tensors in the file: initializers, types, and nodes. Those of
    constants are returned.
    """
    graph = proto.graph
    # What an exporter says of a tensor besides its type stays true.
    infos = [each for each in graph.value_info if each.name not in names or each.metadata_props]
    others = [each for each in graph.initializer if each.name not in names]
    kept: list[onnx.NodeProto] = []
    taken: list[onnx.NodeProto] = []
    for node in graph.node:
        namesake = node.op_type == "Identity" and node.output[0].endswith(NAMESAKE)
        (taken if namesake or (node.op_type in FIXED and node.output[0] in names) else kept).append(
            node
        )
    constants = {node.output[0]: node for node in taken if node.op_type == "Constant"}
    if len(constants) < len(taken):
        proto.ir_version = max(proto.ir_version, FREE_INITIALIZERS)
    del graph.value_info[:], graph.initializer[:], graph.node[:]
    graph.value_info.extend(infos)
    graph.initializer.extend(others)
    graph.node.extend(kept)
    return constants


def _check_places(source: Source, files: tuple[Path, ...]) -> None:
    """The files to write are none of the model's."""
    folder = source.path.parent
    entries = (entry for tensor in source.graph.initializer for entry in tensor.external_data)
    own = [source.path, *(folder / entry.value for entry in entries if entry.key == "location")]
    for path in files:
        if path.exists() and any(
            each.exists() and path.samefile(each) for each in dict.fromkeys(own)
        ):
            raise ConfigurationError(
                f"{path} belongs to the model itself", hint="name another file"
            )
