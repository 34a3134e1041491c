"""Integer programs that planning builds, recorded while it runs, and their optima by several
solvers.

As a plugin of pytest (`-p benchmarks.recorded_programs`), this module records the programs of a
test run into the folder that the environment variable `AUTOPIPE_RECORD_PROGRAMS` names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from scipy.sparse import csr_array

from autopipe.ir.errors import AutopipeError, ConfigurationError
from autopipe.passes.solvers import milp

FOLDER_VARIABLE = "AUTOPIPE_RECORD_PROGRAMS"
"""Environment variable that names the folder of the programs that a test run records."""
_MATRIX = "matrix"
_plugin = ExitStack()


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Write every integer program that the default solver is given to `folder`, equal programs
    once.

    The solver still solves each program: only its call is observed.
    """
    solve_with_highs = milp.solve_with_highs

    def observed(model: milp.Model, *limits: Any) -> milp.MilpResult | None:
        write_program(model, folder)
        return solve_with_highs(model, *limits)

    with patch.object(milp, "solve_with_highs", observed):
        yield


def write_program(model: milp.Model, folder: Path) -> None:
    """Write the program to `folder`, under a name that its content decides."""
    arrays = {
        each.name: getattr(model, each.name) for each in fields(model) if each.name != _MATRIX
    }
    arrays |= {name: getattr(model.matrix, name) for name in ("indptr", "indices", "data")}
    digest = hashlib.sha256()
    for name in sorted(arrays):
        # The type of indices depends on the version of scipy, and does not change the program.
        digest.update(name.encode() + np.asarray(arrays[name], dtype=np.float64).tobytes())
    path = folder / f"{digest.hexdigest()[:20]}.npz"
    if not path.exists():
        partial = folder / f"{path.stem}.{os.getpid()}.partial"
        with partial.open("wb") as file:
            np.savez_compressed(file, **arrays)
        partial.rename(path)


def read_program(path: Path) -> milp.Model:
    """Return a program that `write_program` wrote."""
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    shape = len(arrays["row_lower"]), len(arrays["cost"])
    matrix = csr_array(
        (arrays.pop("data"), arrays.pop("indices"), arrays.pop("indptr")), shape=shape
    )
    return milp.Model(**arrays, matrix=matrix)


def program_paths(folder: Path) -> list[Path]:
    """Return the files of recorded programs, the smallest file first."""
    return sorted(folder.glob("*.npz"), key=lambda path: (path.stat().st_size, path.name))


@dataclass(frozen=True, slots=True)
class Optima:
    """The results of several solvers for one integer program."""

    results: dict[str, milp.MilpResult]
    """By the name of the solver."""

    @property
    def proven(self) -> dict[str, float]:
        """The optimum of each solver that proves one; infinite if it proves that there are no
        values.
        """
        decided = (milp.Status.OPTIMAL, milp.Status.INFEASIBLE)
        return {
            name: result.objective
            for name, result in self.results.items()
            if result.status in decided
        }

    def difference(self, one: str, other: str) -> float | None:
        """Return the difference of two solvers' optima over the larger of them, or None unless both
        prove theirs.

        It is infinite if only one of them proves that there are no values.
        """
        if one not in self.proven or other not in self.proven:
            return None
        first = self.proven[one]
        second = self.proven[other]
        if first == second:
            return 0.0
        if np.isinf(first) or np.isinf(second):
            return np.inf
        return abs(first - second) / max(abs(first), abs(second))


def find_optima(model: milp.Model, solvers: Sequence[str], seconds: float) -> Optima:
    """Solve the program by each of `solvers`, at most `seconds` each.

    The optimum of a program without a minimum is minus infinity.
    """
    results = {}
    for solver in solvers:
        try:
            results[solver] = milp.solve(model, seconds, solver=solver)
        except ConfigurationError:
            raise
        except AutopipeError:
            results[solver] = milp.MilpResult(milp.Status.OPTIMAL, objective=-np.inf)
    return Optima(results)


def pytest_configure() -> None:
    """Record from now on if the environment names a folder."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        Path(folder).mkdir(parents=True, exist_ok=True)
        _plugin.enter_context(recording(Path(folder)))


def pytest_unconfigure() -> None:
    """Stop recording."""
    _plugin.close()
