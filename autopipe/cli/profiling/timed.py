"""Programs of the model that run to be timed."""

from __future__ import annotations

from pathlib import Path

from autopipe.backends.torch.emission.program import ProgramFiles, Provenance, write_program
from autopipe.cli.profiling.samples import bytes_of, samples_of
from autopipe.ir.problem import Optimizer
from autopipe.ir.program import Program
from autopipe.passes.frontend import Model

_MOST_BYTES = 2**32
"""Of the model with all that it holds: a larger one is not run as a whole."""
_STANDSTILL = Optimizer(lr=0.0)
"""Some models diverge where they train on random samples for long."""


def is_small(model: Model, precision: str) -> bool:
    """True if the model may run as a whole."""
    return sum(map(bytes_of, samples_of(model, precision))) <= _MOST_BYTES


def write_timed(model: Model, precision: str, program: Program, folder: Path) -> None:
    """Write the files of a program that trains the model, and leaves it as it is."""
    titles = [("The model.",) * count for count in (len(program.stages), len(program.ranks))]
    file = Provenance(str(model.path.absolute()), model.digest, "", _STANDSTILL, precision, 0, 0.0, 0.0)
    write_program([ProgramFiles("", program, *titles)], file, folder)
