"""`autopipe export`: exports a PyTorch module as an ONNX file that computes the same results and
trains in the same way.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from autopipe.cli.export_check import compare, reject_changes
from autopipe.cli.options import FORCE, PATH, standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.ir.files import INLINE_LIMIT
from autopipe.ir.output_files import replacing, scratch_folder
from autopipe.ir.output_kinds import ONNX, OutputFile, check_data_file
from autopipe.ir.words import plural

if TYPE_CHECKING:
    import torch

    from autopipe.backends.torch.exporter import Example

_FIELDS: Final = ("module", "example", "loss", "labels")
"""Results of a factory, in order."""


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option(
    "-o",
    "--output",
    "path",
    type=PATH,
    default=Path("model.onnx"),
    help="File to write [model.onnx].",
)
@click.option(
    "--check/--no-check", default=True, help="Compare loss and gradients with the module's [yes]."
)
@FORCE
@standard_options
def export(output: Output, factory: str, path: Path, check: bool, force: bool) -> None:
    """Write the PyTorch module that FACTORY returns as an ONNX file.

    FACTORY is a function of no arguments in a Python file, or in a module on the path, whose code
    runs. It returns (module, example) or (module, example, loss, labels), or a mapping of these
    names: arguments of `autopipe.export`.

    \b
    Example:
      autopipe export classifier.py:factory -o classifier.onnx
    """
    made = made_by(factory)
    with output.progress("exporting", total=2) as bar:
        found = export_module(**made, path=path, check=check, force=force, advance=bar.advance)
    data = {
        "path": path,
        "inputs": found.inputs,
        "parameters": found.parameters,
        "frozen": found.frozen,
        "compared": found.compared,
        "notes": found.notes,
    }
    for note in found.notes:
        output.warn(note)
    frozen = f", {len(found.frozen)} frozen" if found.frozen else ""
    compared = f"; {found.compared}" if found.compared else ""
    output.report(
        data,
        f"{path}: {found.parameters} {plural(found.parameters, 'parameter')}{frozen}{compared}",
        f"next: autopipe plan {path}",
    )


def made_by(factory: str) -> dict[str, Any]:
    """Return the arguments of `autopipe.export` that the function FILE.py:NAME or MODULE:NAME
    returns. Raise ConfigurationError if there is no such function, or if it returns something else.
    """
    place, _, name = factory.rpartition(":")
    if not place:
        raise ConfigurationError(
            f"{factory!r} names no function", "give FILE.py:FUNCTION or MODULE:FUNCTION"
        )
    try:
        module = _file_module(Path(place)) if place.endswith(".py") else _path_module(place)
        function = getattr(module, name, None)
        if not callable(function):
            raise ConfigurationError(f"{place} has no function {name!r}")
        found = function()
    except AutopipeError:
        raise
    except Exception as error:  # The user's code may raise anything.
        first = next(iter(str(error).splitlines()), "")
        message = f"{factory} raises {type(error).__name__}: {first}"
        raise ConfigurationError(message, "--debug shows the traceback") from error
    if isinstance(found, Mapping):
        if not {"module", "example"} <= found.keys() <= set(_FIELDS):
            raise ConfigurationError(
                f"{factory} returns a mapping of {sorted(found)}", f"its keys are {_FIELDS}"
            )
        return dict(found)
    if not isinstance(found, tuple) or len(found) not in (2, 4):
        raise ConfigurationError(
            f"{factory} returns a {type(found).__name__}",
            "return (module, example) or (module, example, loss, labels)",
        )
    return dict(zip(_FIELDS, found, strict=False))


def _file_module(path: Path) -> Any:
    """Run a Python file as a module. Its folder is appended to the module search path for its
    imports. Python writes no compiled copies of the user's files next to them.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path} does not exist")
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
            f"there is no module {name!r}", "a file is given as FILE.py:FUNCTION"
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
    advance: Callable[[], None] = lambda: None,
) -> Exported:
    """Write a module as an ONNX file, and check that its loss and gradients equal the module's; see
    `autopipe.export`.
    """
    from autopipe.backends.torch.exporter import exported, subject_of

    OutputFile(path, ONNX, force=force).check()
    subject = subject_of(module, example, loss, labels)
    made = exported(subject)
    program = made.program
    advance()
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
    advance()
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
    with replacing(path) as file:
        file.write(program.model_proto.SerializeToString())
