"""Loading of an ONNX file. The result has checked nodes in topological order. The file is
untrusted, and the data of its weights are not loaded.

Functions that the file defines are inlined up to a limit, because a few functions that call each
other can expand to a huge graph.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autopipe.ir.errors import ModelError
from autopipe.ir.files import lfs_error
from autopipe.ir.graph import FileSlice, VarintSlice
from autopipe.passes.frontend.control_flow import hoist_from_bodies, nodes_within, read_names
from autopipe.passes.frontend.device_annotations import (
    Configuration,
    annotation_names,
    configurations_of,
)
from autopipe.passes.frontend.elements import read_stored_data
from autopipe.passes.frontend.merged_parameters import UntiedParameters, untie_parameters
from autopipe.passes.frontend.protobuf_scan import strip_annotations, strip_weights

if TYPE_CHECKING:
    import onnx

Key = tuple[str, str, str]
"""Domain, name and overload, which identify a function."""
MOST_NODES = 100_000
"""Maximum number of nodes that inlining of functions may add. It is several times the size of a
large export.
"""
MOST_BYTES = 1 << 28
"""Maximum bytes that the nodes added by inlining may take as protobuf messages."""
DEEPEST = 64
"""Maximum depth of nested calls of the file's functions."""


class CallSize(NamedTuple):
    """Size of a function call: the nodes and bytes that it becomes if all calls in it are inlined,
    and the depth of its nested calls.
    """

    nodes: int
    bytes: int
    depth: int


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with calls of its own functions replaced by the nodes of the functions.
    Raises ModelError if that fails or if the result would be too large.
    """
    import onnx.checker
    import onnx.inliner

    _require_bounded_inlining(model)
    _add_default_attributes(model)
    try:
        return onnx.inliner.inline_local_functions(model)
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError(
            f"the model's functions cannot be inlined: {str(error).splitlines()[0]}"
        ) from error


def _add_default_attributes(model: onnx.ModelProto) -> None:
    """Add the default attributes of functions to calls that omit them. onnx's inliner would lose
    the defaults.
    """
    defaults = {_function_key(function): function.attribute_proto for function in model.functions}
    graphs = (model.graph.node, *(function.node for function in model.functions))
    for call in nodes_within(itertools.chain.from_iterable(graphs)):
        stated = {each.name for each in call.attribute}
        call.attribute.extend(
            each for each in defaults.get(_call_key(call), ()) if each.name not in stated
        )


def _function_key(function: onnx.FunctionProto) -> Key:
    """Return the domain, name and overload of a function."""
    return function.domain, function.name, function.overload


def _require_bounded_inlining(model: onnx.ModelProto) -> None:
    """Raise ModelError, naming the call, if calls of functions are recursive or nested too deeply,
    or if inlining would produce too many nodes or bytes.
    """
    functions = {_function_key(function): function for function in model.functions}
    extents: dict[Key, CallSize] = {}

    def extent(key: Key, callers: tuple[Key, ...], where: str) -> CallSize:
        """Return the size of a call of the function `key`. `callers` are the functions around the
        call, outermost first; `where` names the outermost call in errors.
        """
        if key in callers:
            raise ModelError(
                f"the model's functions cannot be inlined because {f'{key[0]}::{key[1]}'!r} "
                "calls itself",
                where=where,
            )
        if len(callers) + (extents[key].depth if key in extents else 1) > DEEPEST:
            raise ModelError(
                f"calls of the model's functions are nested more than {DEEPEST} deep, which is "
                "not supported",
                where=where,
            )
        if key not in extents:
            function = functions[key]
            nodes = list(nodes_within(functions[key].node))
            called = [
                extent(each, (*callers, key), where)
                for each in map(_call_key, nodes)
                if each in functions
            ]
            extents[key] = CallSize(
                len(nodes) + sum(each.nodes for each in called),
                # At each level of calls, inlining adds a prefix to the names of the called
                # function's values. The estimate adds the length of the prefix for two names per
                # node.
                function.ByteSize()
                + sum(each.bytes + each.nodes * 2 * len(function.name) for each in called),
                1 + max((each.depth for each in called), default=0),
            )
        return extents[key]

    nodes = size = 0
    for call in nodes_within(model.graph.node):
        if _call_key(call) not in functions:
            continue
        where = f"{call.op_type} {call.name!r}"
        found = extent(_call_key(call), (), where)
        nodes = nodes + found.nodes
        size = size + found.bytes
        if nodes > MOST_NODES or size > MOST_BYTES:
            raise ModelError(
                (
                    f"inlining the model's functions results in more than {MOST_NODES} nodes or "
                    f"{MOST_BYTES >> 20} MiB"
                ),
                where=where,
            )


def _call_key(node: onnx.NodeProto) -> Key:
    """Return the domain, name and overload of the function that a node may call."""
    return node.domain, node.op_type, node.overload


OLDEST_OPSET = 7
"""Oldest supported opset. Before opset 7, operators declared broadcasting in an attribute."""
MOST_DOMAINS = 1000
"""Maximum number of operator sets that a file may import. The limit is needed because the list is
passed to type inference for each node.
"""
LARGEST_OPSET = 2**31 - 1
"""Maximum version of an operator set, because onnx stores the version as int32."""
MOST_NAMED = 5
"""Maximum number of .onnx files that an error message lists if the model path is a folder."""


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed file. Its nodes are in topological order, its functions are inlined, and the data of
    large tensors are not loaded.
    """

    path: Path
    digest: str
    """SHA-256 of the file without the data of its large tensors, its annotations and its format
    version.
    """
    graph: onnx.GraphProto
    nodes: tuple[onnx.NodeProto, ...]
    positions: tuple[int, ...]
    """For each of `nodes`, its position among the nodes of `graph`."""
    opsets: tuple[tuple[str, int], ...]
    """(domain, version) of each imported operator set. The domain "" is ONNX's default domain."""
    slices: dict[str, FileSlice | VarintSlice]
    """Location in the file of the data that were not loaded, by tensor name."""
    metadata: dict[str, str]
    producer: str
    apart: UntiedParameters
    """The separate tensors that were added to `graph` for parameters that the exporter merged."""
    configurations: tuple[Configuration, ...]
    warnings: tuple[str, ...]

    @property
    def opset(self) -> int:
        """Version of ONNX's default operator set."""
        return dict(self.opsets)[""]


def load(path: Path) -> Source:
    """Parse the ONNX file at `path`. Raises ModelError, naming the file, if it is no ONNX model,
    its graph is invalid, or a limit is exceeded.
    """
    try:
        return _load(path)
    except ModelError as error:
        raise add_path_to_error(error, path) from error


def add_path_to_error(error: ModelError, path: Path) -> ModelError:
    """Return a copy of the error whose location begins with the file's path."""
    return ModelError(
        error.message, hint=error.hint, where=f"{path}: {error.where}" if error.where else str(path)
    )


def _load(path: Path) -> Source:
    """Parse the file; errors do not name it."""
    import google.protobuf.message  # type: ignore[import-untyped]
    import onnx

    stripped, slices = strip_weights(map_file(path))
    try:
        model = onnx.ModelProto.FromString(stripped)
    except google.protobuf.message.DecodeError as error:
        raise ModelError("the file is not an ONNX model: its protobuf cannot be parsed") from error
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise ModelError("the file is not an ONNX model: its graph is missing or empty")
    if not all(isinstance(text, str) for text in _texts_to_check(model)):
        raise ModelError("the file is not a valid ONNX model: a name in it is not text")
    ignored = "multi-device annotations of and inside the file's functions are ignored"
    warnings = (ignored,) if _remove_call_annotations(model) else ()
    if model.graph.sparse_initializer:
        raise ModelError(
            "the model has sparse weights, which are not supported: "
            f"{model.graph.sparse_initializer[0].values.name!r}"
        )
    opsets = _checked_opsets(model)
    metadata = {
        entry.key: entry.value for entry in (*model.graph.metadata_props, *model.metadata_props)
    }
    apart = untie_parameters(
        model, metadata, lambda tensor: read_stored_data(tensor.name, tensor, slices, path)
    )
    hoist_from_bodies(model.graph, slices)
    if model.functions:
        model = inline_functions(model)
        hoist_from_bodies(model.graph, slices)
    positions = topological_positions(model.graph)
    return Source(
        path=path,
        digest=_digest(stripped),
        graph=model.graph,
        nodes=tuple(model.graph.node[position] for position in positions),
        positions=positions,
        opsets=opsets,
        slices=slices
        | {own: slices[merged] for own, merged in apart.copies.items() if merged in slices},
        metadata=metadata,
        producer=model.producer_name,
        apart=apart,
        configurations=configurations_of(model),
        warnings=warnings,
    )


def file_digest(path: Path) -> str:
    """Return `Source.digest` of a file without parsing its graph. Raises ModelError, naming the
    file, if it cannot be read.
    """
    try:
        return _digest(strip_weights(map_file(path))[0])
    except ModelError as error:
        raise add_path_to_error(error, path) from error


def _digest(stripped: bytes) -> str:
    """Return the SHA-256 of a serialized model without its annotations and its format version."""
    return hashlib.sha256(b"".join(strip_annotations(memoryview(stripped)))).hexdigest()


def _texts_to_check(model: onnx.ModelProto) -> Iterator[object]:
    """Yield every text of the model that autopipe reads, so that the caller can check the encoding.
    Protobuf returns bytes for a text that is not UTF-8.
    """
    graph = model.graph
    yield graph.name
    for opset in model.opset_import:
        yield opset.domain
    for function in model.functions:
        yield from (function.name, function.domain)
    for entry in (*model.metadata_props, *graph.metadata_props):
        yield from (entry.key, entry.value)
    for info in (*graph.input, *graph.output, *graph.value_info):
        yield info.name
        yield from (dimension.dim_param for dimension in info.type.tensor_type.shape.dim)
    for tensor in graph.initializer:
        yield tensor.name
        yield from itertools.chain.from_iterable(
            (entry.key, entry.value) for entry in tensor.external_data
        )
    for node in nodes_within(
        itertools.chain(graph.node, *(function.node for function in model.functions))
    ):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        yield from (attribute.name for attribute in node.attribute)
    yield from annotation_names(model)


def map_file(path: Path) -> memoryview:
    """Return the bytes of a file, memory-mapped. Raises ModelError if the file is missing, is
    empty, is a Git LFS pointer, or cannot be read.
    """
    if not path.exists():
        raise ModelError("the model file does not exist")
    if not path.is_file():
        held = ", ".join(sorted(repr(each.name) for each in path.glob("*.onnx"))[:MOST_NAMED])
        raise ModelError(
            "the model path is not a file",
            hint="name the .onnx file" + (f": {held}" if held else ""),
        )
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise ModelError("the model file is empty")
            if pointer := lfs_error(path):
                raise ModelError(*pointer)
            # The map is not closed, because the traceback of an error may still refer to its views.
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ModelError(f"the model file cannot be read: {error.strerror}") from error


def _checked_opsets(model: onnx.ModelProto) -> tuple[tuple[str, int], ...]:
    """Return (domain, version) of the imported operator sets, sorted by domain. Raises ModelError
    if a version is not supported or if there are too many sets.
    """
    import onnx.defs

    if len(model.opset_import) > MOST_DOMAINS:
        raise ModelError(
            f"the model imports {len(model.opset_import)} operator sets, expected at most "
            f"{MOST_DOMAINS}"
        )
    opsets = {
        entry.domain if entry.domain != "ai.onnx" else "": entry.version
        for entry in model.opset_import
    }
    imports = itertools.chain(
        model.opset_import, *(function.opset_import for function in model.functions)
    )
    for entry in imports:
        if entry.domain not in ("", "ai.onnx") and abs(entry.version) > LARGEST_OPSET:
            raise ModelError(
                f"opset {entry.version} of domain {entry.domain!r} is out of range, expected at "
                f"most {LARGEST_OPSET}"
            )
    version = opsets.setdefault("", 1)
    newest = onnx.defs.onnx_opset_version()
    if not OLDEST_OPSET <= version <= newest:
        raise ModelError(
            f"the model uses opset {version}, expected {OLDEST_OPSET} to {newest}",
            hint="convert the model with onnx.version_converter"
            if version < OLDEST_OPSET
            else "upgrade the onnx package",
        )
    return tuple(sorted(opsets.items()))


def _remove_call_annotations(model: onnx.ModelProto) -> bool:
    """Remove device annotations of function calls and of nodes inside of functions, because
    inlining removes or renames the tensors that they name. Return True if there were any.
    """
    functions = {(function.domain, function.name) for function in model.functions}
    calls = [
        node for node in model.graph.node if functions and (node.domain, node.op_type) in functions
    ]
    inside = [node for function in model.functions for node in function.node]
    annotated = [node for node in (*calls, *inside) if node.device_configurations]
    for node in annotated:
        node.ClearField("device_configurations")
    return bool(annotated)


def topological_positions(graph: onnx.GraphProto) -> tuple[int, ...]:
    """Return the positions of a graph's nodes in topological order. If several nodes can be next,
    the first in the file is.

    Raises ModelError for a cycle and for a value that is written twice.
    """
    writer: dict[str, int] = {}
    sources = {each.name for each in graph.input} | {each.name for each in graph.initializer}
    for index, node in enumerate(graph.node):
        for name in node.output:
            if name and (name in writer or name in sources):
                raise ModelError(
                    f"two nodes write the value {name!r}, expected one",
                    where=f"{node.op_type} {node.name!r}",
                )
            writer[name] = index
    waits: list[set[int]] = [
        {writer[name] for name in read_names(node) if name in writer} for node in graph.node
    ]
    readers: dict[int, list[int]] = {}
    for index, needed in enumerate(waits):
        for source in needed:
            readers.setdefault(source, []).append(index)
    ready = [index for index, needed in enumerate(waits) if not needed]
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers.get(index, ()):
            waits[reader].discard(index)
            if not waits[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(graph.node):
        stuck = graph.node[next(index for index, needed in enumerate(waits) if needed)]
        raise ModelError(
            "the graph has a cycle through the node", where=f"{stuck.op_type} {stuck.name!r}"
        )
    return tuple(order)
