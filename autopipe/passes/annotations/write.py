"""A plan's annotations as a copy of the model's file."""

from __future__ import annotations

from pathlib import Path

from autopipe.ir.errors import ConfigurationError
from autopipe.passes.annotations.sharding import Configuration
from autopipe.passes.annotations.splice import spliced
from autopipe.passes.frontend.functions import inlined
from autopipe.passes.frontend.load import load, opened
from autopipe.passes.frontend.wire import fields_of
from autopipe.passes.replacing import replacing

MODEL_FUNCTION = 25


def write_annotated(model: Path, target: Path, configuration: Configuration) -> None:
    """Write the file `model` with the annotations of `configuration` to `target`, whole or not at all.

    Weights stay where they are: in the copy, or in files beside it. Functions of the file's own are inlined. Raises
    ConfigurationError where `target` cannot be written, is `model`, or is not beside the files with its weights.
    """
    _check_place(model, target)
    data = opened(model)
    if any(field.number == MODEL_FUNCTION for field in fields_of(data, 0, len(data))):
        data = _without_functions(data)
    try:
        with replacing(target) as file:
            for piece in spliced(data, configuration):
                file.write(piece)
    except OSError as error:
        raise ConfigurationError(f"cannot write {target}: {error.strerror}", hint="choose another place") from error


def _check_place(model: Path, target: Path) -> None:
    if target.exists() and target.samefile(model):
        raise ConfigurationError(f"{target} is the model itself", hint="name another file")
    graph = load(model).graph
    constants = (attribute.t for node in graph.node for attribute in node.attribute)
    if not any(tensor.external_data for tensors in (graph.initializer, constants) for tensor in tensors):
        return
    folder = model.absolute().parent
    if target.absolute().parent.resolve() != folder.resolve():
        raise ConfigurationError(
            f"{target} is not in the folder of the model, whose weights lie in files beside it",
            hint=f"name a file in {folder}",
        )


def _without_functions(data: memoryview) -> memoryview:
    import onnx

    return memoryview(inlined(onnx.ModelProto.FromString(bytes(data))).SerializeToString())
