"""A copy of an ONNX file with trained numbers, streamed: no tensor is ever whole in memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from autopipe.ir.errors import ConfigurationError, ModelError
from autopipe.passes.export.kept import kept_tensors
from autopipe.passes.export.numbers import Numbers
from autopipe.passes.export.stream import Progress, write_beside, write_model
from autopipe.passes.export.tensors import FIXED, file_tensors
from autopipe.passes.frontend.elements import stored_numbers
from autopipe.passes.frontend.load import Source, load, located, opened
from autopipe.passes.frontend.merged_parameters import NAMESAKE, take_apart
from autopipe.passes.frontend.protobuf_scan import strip_weights
from autopipe.passes.replacing import replacing

if TYPE_CHECKING:
    import onnx

INLINE_LIMIT: Final = 3 << 29
"""Bytes of tensors (1.5 GiB) up to which they stand in the file itself; protobuf cannot hold 2 GiB."""
SMALL: Final = 1024
"""Bytes below which a tensor stands in the file however large the others are."""
FREE_INITIALIZERS: Final = 4
"""IR version from which initializers need not be inputs of the graph."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """Files that were written."""

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
) -> WrittenFiles:
    """Write the file `model` with the numbers of the parameters `trained`, by name, to `target`.

    Its nodes stay as they are, but for a ConstantOfShape that was trained: it becomes an initializer, as what the
    exporter had merged become several. Where tensors
    have more than `inline_limit` bytes in all, trained initializers lie in `target`.data; what else stands in the file
    stays there: only so are masks known for what they are. Files appear whole or not at all, `target` last. `progress`
    is told the bytes of every piece. Raises ModelError for a parameter that no tensor of the file is,
    ConfigurationError where a file cannot be written or would take the place of the model's own.
    """
    import onnx

    source = load(model)
    stripped = strip_weights(opened(model))
    proto = onnx.ModelProto.FromString(stripped.model)
    take_apart(proto, source.metadata, lambda tensor: stored_numbers(tensor.name, tensor, stripped.slices, model))
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
    try:
        with ExitStack() as stack:
            opened_files = {path: stack.enter_context(replacing(path)) for path in files}
            places = write_beside(opened_files[data], beside, progress) if beside else {}
            write_model(opened_files[target], proto, tensors, constants, data.name, places, progress)
    except OSError as error:
        raise ConfigurationError(f"cannot write {target}: {error.strerror}", hint="choose another place") from error
    return WrittenFiles(files, len(numbers) - len(lacking), len(lacking), size)


def _take_out(proto: onnx.ModelProto, names: set[str]) -> dict[str, onnx.NodeProto]:
    """Remove what says these tensors in the file: initializers, types, and nodes. Those of constants are returned."""
    graph = proto.graph
    # What an exporter says of a tensor besides its type stays true.
    infos = [each for each in graph.value_info if each.name not in names or each.metadata_props]
    others = [each for each in graph.initializer if each.name not in names]
    del graph.value_info[:], graph.initializer[:]
    graph.value_info.extend(infos)
    graph.initializer.extend(others)
    kept: list[onnx.NodeProto] = []
    taken: list[onnx.NodeProto] = []
    for node in graph.node:
        namesake = node.op_type == "Identity" and node.output[0].endswith(NAMESAKE)
        (taken if namesake or (node.op_type in FIXED and node.output[0] in names) else kept).append(node)
    constants = {node.output[0]: node for node in taken if node.op_type == "Constant"}
    if len(constants) < len(taken):
        proto.ir_version = max(proto.ir_version, FREE_INITIALIZERS)
    del graph.node[:]
    graph.node.extend(kept)
    return constants


def _check_places(source: Source, files: tuple[Path, ...]) -> None:
    """The files to write are none of the model's."""
    folder = source.path.parent
    entries = (entry for tensor in source.graph.initializer for entry in tensor.external_data)
    own = [source.path, *(folder / entry.value for entry in entries if entry.key == "location")]
    for path in files:
        if path.exists() and any(each.exists() and path.samefile(each) for each in dict.fromkeys(own)):
            raise ConfigurationError(f"{path} belongs to the model itself", hint="name another file")
