"""Command `export`: from a PyTorch module to an ONNX file that computes the same results and trains
in the same way.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autopipe.api.events import Events, SilentEvents
from autopipe.api.export_check import compare, reject_changes
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.files import INLINE_LIMIT
from autopipe.ir.output_files import open_replacement_file, scratch_folder
from autopipe.ir.output_kinds import ONNX, OutputFile, check_data_file

if TYPE_CHECKING:
    import torch

    from autopipe.backends.torch.exporter import Example

_ARGUMENTS: Final = ("module", "example", "loss", "labels")
"""Values that a factory returns, in order: arguments of `export_module`."""


def factory_arguments(factory: str) -> dict[str, Any]:
    """Return arguments of `export_module`, by parameter name, from the user's function FILE.py:NAME
    or MODULE:NAME: the module, the example and, optionally, the loss and the labels. Raises
    ConfigurationError if there is no such function, if it does not return such arguments, or if it
    raises an exception other than AutopipeError.
    """
    source, _, name = factory.rpartition(":")
    if not source:
        raise ConfigurationError(
            f"{factory!r} is not the name of a function", "use FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    try:
        module = _file_module(Path(source)) if source.endswith(".py") else _path_module(source)
        function = getattr(module, name, None)
        if not callable(function):
            raise ConfigurationError(f"{source} does not define a function {name!r}")
        found = function()
    except AutopipeError:
        raise
    except (
        Exception
    ) as error:  # The factory is code of the user, which may raise an exception of any class.
        first = next(iter(str(error).splitlines()), "")
        message = f"{factory} raises {type(error).__name__}: {first}"
        raise ConfigurationError(message, "show the traceback with --debug") from error
    if isinstance(found, Mapping):
        if not {"module", "example"} <= found.keys() <= set(_ARGUMENTS):
            raise ConfigurationError(
                f"{factory} returns a mapping with the keys {sorted(found)}",
                f"use the keys {_ARGUMENTS}",
            )
        return dict(found)
    if not isinstance(found, tuple) or len(found) not in (2, 4):
        raise ConfigurationError(
            f"{factory} returns a value of type {type(found).__name__}, expected a tuple of 2 or "
            "4 values",
            "return (module, example) or (module, example, loss, labels)",
        )
    return dict(zip(_ARGUMENTS, found, strict=False))


def _file_module(path: Path) -> Any:
    """Run a Python file as a module. Its folder is appended to the module search path for its
    imports. Python writes no compiled copies of the user's files next to them.
    """
    if not path.is_file():
        raise ConfigurationError(f"the file {path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    before = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def _path_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise
        raise ConfigurationError(
            f"the module {name!r} does not exist", "name a file as FILE.py:FUNCTION"
        ) from error


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported file, and a description of the comparison with its PyTorch module."""

    path: Path
    inputs: tuple[str, ...]
    parameters: int
    frozen: tuple[str, ...]
    compared: str
    """Description of the comparison with the PyTorch module; "" if nothing was compared."""
    notes: tuple[str, ...]
    """Reasons why something could not be compared."""


def export_module(
    module: torch.nn.Module,
    example: Example,
    loss: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
    labels: torch.Tensor | None = None,
    *,
    path: Path,
    check: bool = True,
    force: bool = False,
    events: Events | None = None,
) -> Exported:
    """Write a module as the ONNX file `path`. With `check`, compare the loss and the gradients of
    the file with those of the module before the file is written.

    `force` replaces a file at `path` that is not an ONNX model. `autopipe.export` describes the
    other arguments and the errors.
    """
    from autopipe.backends.torch.exporter import export_to_onnx, make_subject

    events = events or SilentEvents()
    with events.progress("exporting", total=2) as bar:
        OutputFile(path, ONNX, force=force).check()
        subject = make_subject(module, example, loss, labels)
        made = export_to_onnx(subject)
        program = made.program
        bar.advance()
        compared = ""
        notes = [f"the file has no record of the state_dict's {each}" for each in made.left_out]
        if check:
            reject_changes(made.changed)
            with scratch_folder("export") as scratch:
                file = scratch / "model.onnx"
                program.save(file)
                compared = compare(subject, file, made.moved, notes)
        elif made.changed:
            notes.append(
                f"training does not change {', '.join(made.changed)}, which the forward of the "
                "module changes"
            )
        bar.advance()
        _write(program, path, force)
    parameters = subject.parameters()
    return Exported(
        path=path,
        inputs=subject.names,
        parameters=len(parameters),
        frozen=tuple(name for name, each in parameters.items() if not each.requires_grad),
        compared=compared,
        notes=tuple(notes),
    )


def _write(program: torch.onnx.ONNXProgram, path: Path, force: bool) -> None:
    """Write the ONNX file, and a file `path`.data next to it if the weights are too large for one
    file.
    """
    size = sum(
        value.const_value.nbytes
        for value in program.model.graph.initializers.values()
        if value.const_value
    )
    if size > INLINE_LIMIT:
        check_data_file(path, path.with_name(path.name + ".data"), force)
        program.save(path, external_data=True)
        return
    with open_replacement_file(path) as file:
        file.write(program.model_proto.SerializeToString())
