"""Write a copy of an ONNX file with trained parameter values, piece by piece.

A protobuf message starts with its length, so the length of all that follows must be known when the
message is begun. The fields of a message may be in any order
(https://protobuf.dev/programming-guides/encoding). So the data of a tensor is written last in its
message, the initializers last in the graph, and the graph last in the model.

Most parameters have the name of a tensor in the file. If an exporter applied operators to a
parameter and stored only the result, the result is computed again from the trained parameter.
Copies of a parameter get its values. A trained result of a Constant node is written as the value of
this node.
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
from autopipe.ir.files import INLINE_LIMIT, Progress, pad_to_alignment
from autopipe.ir.graph import DType, FileSlice, Value, VarintSlice
from autopipe.ir.layout import TensorSlice, full_slice
from autopipe.ir.output_files import open_replacement_file
from autopipe.ir.output_kinds import check_data_file
from autopipe.ir.state_names import is_for_state_only
from autopipe.passes.frontend.derivations import MOVES
from autopipe.passes.frontend.elements import (
    NUMBERS,
    has_data,
    locate_external_data,
    read_stored_data,
    read_varints,
    value_of,
)
from autopipe.passes.frontend.folding import Folded
from autopipe.passes.frontend.load import Source, add_path_to_error, load, map_file
from autopipe.passes.frontend.merged_parameters import NAMESAKE, untie_parameters
from autopipe.passes.frontend.parameters import TrainingChoice, roles_of
from autopipe.passes.frontend.protobuf_scan import (
    ATTRIBUTE_TENSOR,
    GRAPH_INITIALIZER,
    GRAPH_NODE,
    MODEL_GRAPH,
    NODE_ATTRIBUTE,
    TENSOR_RAW,
    field_header,
    frame_payload,
    strip_weights,
)
from autopipe.passes.frontend.weights import Weights

if TYPE_CHECKING:
    import onnx


PIECE: Final = 1 << 24
"""Approximate maximum number of bytes of a tensor that are in memory while the tensor is written.
"""


@dataclass(frozen=True, slots=True)
class TensorData:
    """The data of a tensor, which is read on demand.

    value: name, element type and shape of the tensor.
    read: function that returns a slice of the data, little-endian and in the shape of the slice.
    The elements of a bfloat16 tensor are returned as uint16 with their bits.
    """

    value: Value
    read: Callable[[TensorSlice], npt.NDArray[np.generic]]

    def write(self, file: IO[bytes], progress: Progress) -> None:
        """Write all bytes of the tensor in row-major order to `file`, in pieces of at most PIECE
        bytes. `progress` is called with the number of bytes of each piece.
        """
        for box in _row_major_slices(self.value.shape, PIECE // self.value.dtype.itemsize):
            piece = self.read(box).tobytes()
            file.write(piece)
            progress(len(piece))

    def computed(
        self, value: Value, folded: Folded, others: Mapping[str, TensorData] | None = None
    ) -> TensorData:
        """Return the tensor `value` that results from the operators `folded` on this parameter and
        on `others`, the other operands by name. An exporter stored this result in the file instead
        of the parameter.

        The result of a single transposition is read slice by slice. For all other operators the
        full tensor is computed and cached.
        """
        steps = [step.operator for step in folded.steps]
        if not steps:
            return TensorData(replace(self.value, name=value.name), self.read)
        if steps == ["Transpose"]:
            order = folded.steps[0].perm
            back = np.argsort(order)

            def transposed_slice(box: TensorSlice) -> npt.NDArray[np.generic]:
                """Return a slice of the transposed tensor."""
                bounds = (tuple(each[place] for place in back) for each in (box.starts, box.stops))
                return self.read(TensorSlice(*bounds)).transpose(order)

            return TensorData(value, transposed_slice)

        @functools.cache
        def full_result() -> npt.NDArray[np.generic]:
            """Return the full result of the operators, in the stored element type."""
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
            # NumPy does not support bfloat16. Round the bits of the fp32 result to the nearest
            # bfloat16, ties to even.
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(stored.dtype)

        return TensorData(value, lambda box: full_result()[box.slices].reshape(box.shape))


def _row_major_slices(shape: tuple[int, ...], limit: int) -> Iterator[TensorSlice]:
    """Yield slices of at most `limit` elements, each contiguous in row-major order, that together
    cover a tensor of shape `shape` in row-major order.
    """
    if not shape:
        yield full_slice(shape)
    elif (row := math.prod(shape[1:])) > limit:
        for at, box in (
            (at, box) for at in range(shape[0]) for box in _row_major_slices(shape[1:], limit)
        ):
            yield TensorSlice((at, *box.starts), (at + 1, *box.stops))
    elif row:
        for start in range(0, shape[0], limit // row):
            yield TensorSlice(
                (start, *(0 for _ in shape[1:])), (min(start + limit // row, shape[0]), *shape[1:])
            )


def untrained_tensors(
    graph: onnx.GraphProto, source: Source, trained: Collection[str]
) -> tuple[list[TensorData], list[TensorData]]:
    """Return (inside, outside): the initializers and results of Constant nodes of `graph` whose
    data must be copied, because the message `graph` does not contain it. `inside` are the tensors
    that the model file contains, `outside` those in external files.

    `graph` is the graph of the file of `source`, from which the data of large tensors was removed.
    The tensors named in `trained` are omitted.
    """
    tensors = [(tensor.name, tensor) for tensor in graph.initializer]
    constants = (node for node in graph.node if node.op_type == "Constant")
    tensors += (
        (node.output[0], each.t)
        for node in constants
        for each in node.attribute
        if each.name == "value"
    )
    inside: list[TensorData] = []
    beside: list[TensorData] = []
    for name, tensor in tensors:
        if name in trained or has_data(tensor):
            continue
        external = tensor.data_location == tensor.EXTERNAL
        place = locate_external_data(tensor, source.path) if external else source.slices.get(name)
        if place is not None:
            value = value_of(tensor, name, name)
            is_inside = isinstance(place, VarintSlice) or not place.file
            (inside if is_inside else beside).append(stored_tensor(value, place, source.path))
    return inside, beside


def stored_tensor(value: Value, place: FileSlice | VarintSlice, model: Path) -> TensorData:
    """Return the tensor `value` whose data is stored at `place`: in the file `model`, or in an
    external file in the same folder.
    """
    if isinstance(place, VarintSlice):
        listed = read_varints(place, model).view(value.dtype.storage_type).reshape(value.shape)
        return TensorData(value, lambda box: listed[box.slices].reshape(box.shape))
    path = model.parent / place.file if place.file else model

    def read(box: TensorSlice) -> npt.NDArray[np.generic]:
        """Return a slice of the tensor from the file."""
        stored = np.memmap(
            path, value.dtype.storage_type, mode="r", offset=place.offset, shape=value.shape or (1,)
        )
        return stored[box.slices].reshape(box.shape)

    return TensorData(value, read)


def write_model(
    file: IO[bytes],
    model: onnx.ModelProto,
    tensors: Sequence[TensorData],
    constants: Mapping[str, onnx.NodeProto],
    data: str,
    places: Mapping[str, int],
    progress: Progress,
) -> None:
    """Write `model` to `file`, with `tensors` added to its graph. The graph is removed from the
    message `model`.

    `constants` maps names of tensors to Constant nodes; such a tensor is written as the value of
    its node. Any other tensor is written as an initializer. `places` maps names of tensors to
    offsets in the external file `data`, which contains their data; only a reference to it is
    written here. `progress` is called with the number of bytes of each piece of data.
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
    file.write(model.SerializeToString() + field_header(MODEL_GRAPH, size))
    # ONNX requires that a node follows the nodes that compute its operands. Constant nodes lack
    # operands, so they can be first.
    for head, tensor in (*nodes, (graph, None), *initializers):
        file.write(head)
        if tensor and tensor.value.name not in places:
            tensor.write(file, progress)


def _tensor_head(value: Value) -> bytes:
    """Return the bytes of a serialized tensor up to its data."""
    import onnx

    head = onnx.TensorProto(name=value.name, data_type=NUMBERS[value.dtype], dims=value.shape)
    return bytes(head.SerializeToString()) + field_header(TENSOR_RAW, value.bytes)


def _initializer_head(value: Value, data: str, place: int | None) -> bytes:
    """Return the bytes of the initializer `value`, as a field of the graph, up to its data. If
    `place` is not None, return the complete initializer, whose data is at offset `place` of the
    external file `data`.
    """
    import onnx

    if place is None:
        head = _tensor_head(value)
        return field_header(GRAPH_INITIALIZER, len(head) + value.bytes) + head
    tensor = onnx.TensorProto(name=value.name, data_type=NUMBERS[value.dtype], dims=value.shape)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, entry in (("location", data), ("offset", place), ("length", value.bytes)):
        tensor.external_data.add(key=key, value=str(entry))
    return frame_payload(GRAPH_INITIALIZER, tensor.SerializeToString())


def _node_head(node: onnx.NodeProto, value: Value) -> bytes:
    """Return the bytes of the Constant node `node`, as a field of the graph, up to the data of its
    result `value`.
    """
    import onnx

    tensor = _tensor_head(value)
    attribute = onnx.AttributeProto(
        name="value", type=onnx.AttributeProto.TENSOR
    ).SerializeToString()
    attribute += field_header(ATTRIBUTE_TENSOR, len(tensor) + value.bytes) + tensor
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    del bare.attribute[:]
    head: bytes = bare.SerializeToString()
    head += field_header(NODE_ATTRIBUTE, len(attribute) + value.bytes) + attribute
    return field_header(GRAPH_NODE, len(head) + value.bytes) + head


FIXED: Final = frozenset({"Constant", "ConstantOfShape"})
"""Operators without operands, whose results can be parameters of the model."""


def file_tensors(
    source: Source, graph: onnx.GraphProto, trained: Mapping[str, TensorData]
) -> tuple[tuple[TensorData, ...], frozenset[str]]:
    """Return (tensors, lacking): the new data of the tensors of the file's `graph`, computed from
    the parameters `trained`, and the names of those parameters for which the file has no tensor.

    Nodes of `graph` read the name of a lacking parameter, but no initializer, node or input
    provides it. `source` is the loaded file, with its functions inlined. Raise ModelError, naming
    the parameter, if a parameter of `trained` corresponds neither to a tensor nor to such a name,
    or if its tensor has another type or shape.
    """
    held = Weights(source, roles_of(source), TrainingChoice()).read_initializers()
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
    found: dict[str, TensorData] = {}
    lacking: set[str] = set()
    for name, numbers in trained.items():
        stored = bases[name].value if name in bases else held[name].value if name in held else None
        if stored is None and name in unread:
            stored = value_of(unread[name], name, name)
        own = numbers.value
        where = f"parameter {name!r}"
        if stored is not None and (stored.dtype, stored.shape) != (own.dtype, own.shape):
            there, here = (f"{each.dtype.value}{list(each.shape)}" for each in (stored, own))
            raise ModelError(
                f"the parameter was trained as {here}, but the model file stores it as {there}",
                where=where,
            )
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
    # `folded` lists each tensor after its source, so that the source is already in `found`.
    for name, each in folded.items():
        if isinstance(each.source, str):
            base = found.get(each.source) or trained.get(each.source)
        else:
            base = trained.get(each.source.value.name)
        if base is not None and trained.keys() >= set(each.others):
            found[name] = base.computed(each.value, each, trained)
    return tuple(found.values()), frozenset(lacking)


SMALL: Final = 1024
"""Minimum bytes of a tensor that is written to the external data file. Smaller tensors are written
to the model file.
"""
FREE_INITIALIZERS: Final = 4
"""First ONNX IR version in which initializers need not be graph inputs."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """The files that an export wrote, and statistics of their tensors."""

    files: tuple[Path, ...]
    replaced: int
    """Number of tensors of the original file that have new values."""
    added: int
    """Number of tensors that the original file lacked."""
    bytes: int
    """Total bytes of all tensors written."""


def write_trained(
    model: Path,
    target: Path,
    trained: Mapping[str, TensorData],
    progress: Progress = lambda _: None,
    inline_limit: int = INLINE_LIMIT,
    force: bool = False,
) -> WrittenFiles:
    """Write a copy of the file `model` with the values of the parameters `trained`, by name, to
    `target`.

    The nodes stay unchanged, with two exceptions: a trained result of a ConstantOfShape node
    becomes an initializer, and parameters that the exporter had merged become separate
    initializers. If all tensors together have more than `inline_limit` bytes, some tensors of at
    least SMALL bytes are written to the external file `target`.data: trained initializers, and
    tensors that were in external files. Untrained tensors stored in the model file stay in the
    model file, because the frontend recognises masks only there.

    All files are written atomically, `target` last. `progress` is called with the number of bytes
    of each piece. Raise ModelError for a parameter that corresponds to no tensor of the file. Raise
    ConfigurationError if a file cannot be written or would replace a file of the model, or if
    `target`.data exists with other contents and `force` is not set.
    """
    import onnx

    source = load(model)
    stripped, slices = strip_weights(map_file(model))
    proto = onnx.ModelProto.FromString(stripped)
    untie_parameters(
        proto, source.metadata, lambda tensor: read_stored_data(tensor.name, tensor, slices, model)
    )
    try:
        numbers, lacking = file_tensors(source, proto.graph, trained)
    except ModelError as error:
        raise add_path_to_error(error, model) from error
    names = {each.value.name for each in numbers}
    inside, outside = untrained_tensors(proto.graph, source, names)
    tensors = (*numbers, *outside, *inside)
    constants = _remove_tensors(proto, {each.value.name for each in tensors})
    if lacking:
        proto.ir_version = max(proto.ir_version, FREE_INITIALIZERS)
    size = sum(each.value.bytes for each in tensors)
    movable = (each for each in (*numbers, *outside) if each.value.name not in constants)
    beside = [each for each in movable if size > inline_limit and each.value.bytes >= SMALL]
    data = target.with_name(target.name + ".data")
    files = (target, data) if beside else (target,)
    _check_output_files(source, files)
    if beside:
        check_data_file(target, data, force)
    places: dict[str, int] = {}
    try:
        with ExitStack() as stack:
            opened_files = {
                path: stack.enter_context(open_replacement_file(path)) for path in files
            }
            for each in beside:
                places[each.value.name] = pad_to_alignment(opened_files[data])
                each.write(opened_files[data], progress)
            write_model(
                opened_files[target], proto, tensors, constants, data.name, places, progress
            )
    except OSError as error:
        raise ConfigurationError(
            f"the file {error.filename or target} cannot be written: {error.strerror}",
            hint="choose another folder",
        ) from error
    return WrittenFiles(files, len(numbers) - len(lacking), len(lacking), size)


def _remove_tensors(proto: onnx.ModelProto, names: set[str]) -> dict[str, onnx.NodeProto]:
    """Remove from `proto` the tensors `names`: their initializers, their types, and the Constant
    and ConstantOfShape nodes that compute them. Return the removed Constant nodes by the name of
    their result.

    Also remove the Identity nodes whose results were other names of a merged parameter.
    """
    graph = proto.graph
    # The entry of a tensor in `value_info` contains its type and its metadata. Keep it if there is
    # metadata, which remains valid.
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


def _check_output_files(source: Source, files: tuple[Path, ...]) -> None:
    """Raise ConfigurationError if one of `files`, which are to be written, is the model file or one
    of its external files.
    """
    folder = source.path.parent
    entries = (entry for tensor in source.graph.initializer for entry in tensor.external_data)
    own = [source.path, *(folder / entry.value for entry in entries if entry.key == "location")]
    for path in files:
        if path.exists() and any(
            each.exists() and path.samefile(each) for each in dict.fromkeys(own)
        ):
            raise ConfigurationError(
                f"the output file {path} belongs to the model itself", hint="choose another file"
            )
