"""`autopipe export`: exports a PyTorch module as an ONNX file that computes the same results and
trains in the same way.
"""

from __future__ import annotations

from pathlib import Path

import click

from autopipe.api.exporting import export_module, factory_arguments
from autopipe.cli.options import FORCE, PATH, standard_options
from autopipe.cli.output import Output
from autopipe.ir.words import plural


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
    "--check/--no-check",
    default=True,
    help="Compare the loss and gradients of the file with those of the module [yes].",
)
@FORCE
@standard_options
def export(output: Output, factory: str, path: Path, check: bool, force: bool) -> None:
    """Write the PyTorch module that FACTORY returns as an ONNX file.

    MODULE is a Python file, or a module on the Python path; its code is executed. FACTORY is a
    function without arguments. It returns (module, example), (module, example, loss, labels), or a
    dictionary with these keys. The entries are the arguments of `autopipe.export`.

    \b
    Example:
      autopipe export classifier.py:factory -o classifier.onnx
    """
    arguments = factory_arguments(factory)
    found = export_module(**arguments, path=path, check=check, force=force, events=output)
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
