"""Optima of the integer programs of plans, by several solvers.

    python benchmarks/integer_programs.py tepdist division suite --folder /tmp/programs

- `tepdist`: programs of the cases of `python -m benchmarks tepdist`.
- `division`: programs of `tepdist_division.py`.
- `suite`: programs of the tests that plan with strategy `tepdist` or partition a model.

Programs are recorded while the default solver solves them. If a folder already contains programs of
a part, the part is not recorded again. Then each solver solves each program with a gap of 0. The
output has a line per part and pair of solvers: the number of programs for which both prove an
optimum or infeasibility, and the number whose optima differ by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from command_line import parse_arguments

from benchmarks.recorded_programs import (
    FOLDER_VARIABLE,
    Optima,
    find_optima,
    program_paths,
    read_program,
    recording,
)

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/passes/placement/tepdist",
    "tests/passes/solvers/milp",
    "tests/benchmarks/test_tepdist.py",
    "tests/benchmarks/test_auto.py",
    "tests/passes/auto",
    "tests/cli/explanation",
    "tests/cli/test_graphs_without_work.py",
    "tests/cli/test_nccl.py",
    "tests/cli/test_plan.py",
    "tests/cli/test_plan_from.py",
    "tests/configs/test_presets.py",
)
"""Tests that solve integer programs."""


def record_tepdist(folder: Path, only: Sequence[str] = ()) -> None:
    """Run the cases of `python -m benchmarks tepdist`, or those whose names begin with one of
    `only`.
    """
    from benchmarks.table import select
    from benchmarks.tepdist import cases

    with recording(folder):
        for case in select(cases(), only):
            print(
                f"{case.part}, {case.name}: {sum(1 for _ in case.run())} rows",
                file=sys.stderr,
                flush=True,
            )


def record_division(folder: Path) -> None:
    """Partition the models of `tepdist_division.py`."""
    from tepdist_division import MODELS, rows

    with recording(folder):
        for name in MODELS:
            for row in rows(name, 0.08, 30.0):
                print(*row, file=sys.stderr, flush=True)


def record_suite(folder: Path) -> None:
    """Run `TESTS` in a process that records programs; tests may fail. Raise CalledProcessError if
    pytest cannot run them.
    """
    words = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "benchmarks.recorded_programs",
        "-n",
        "2",
        "--timeout",
        "900",
        *TESTS,
    ]
    environment = os.environ | {FOLDER_VARIABLE: str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, stdout=sys.stderr, check=False
    )
    if done.returncode not in (0, 1):
        done.check_returncode()


def record_tiny(folder: Path) -> None:
    """Plan two small models."""
    record_tepdist(folder, ["moe-690m/p=2", "unet-paper/p=2"])


RECORD: dict[str, Callable[[Path], None]] = {
    "tepdist": record_tepdist,
    "division": record_division,
    "suite": record_suite,
    "tiny": record_tiny,
}


def compare(part: str, folder: Path, solvers: list[str], seconds: float, tolerance: float) -> int:
    """Print the optima that the solvers prove for the programs in `folder`. Return the number of
    pairs of proven optima that differ.
    """
    found: list[Optima] = []
    for path in program_paths(folder):
        model = read_program(path)
        optima = find_optima(model, solvers, seconds)
        found.append(optima)
        proven = ", ".join(f"{name} {value!r}" for name, value in optima.proven.items())
        print(
            f"{path.stem}: {model.variables} variables, proven: {proven or 'none'}",
            file=sys.stderr,
            flush=True,
        )
    differing = 0
    counts = ", ".join(f"{name} {sum(name in each.proven for each in found)}" for name in solvers)
    print(f"{part}: {len(found)} programs, proven by {counts}", flush=True)
    for first, second in itertools.combinations(solvers, 2):
        differences = [
            each for optima in found if (each := optima.difference(first, second)) is not None
        ]
        unequal = sum(each > tolerance for each in differences)
        differing += unequal
        largest = max(differences, default=0.0)
        print(
            f"  {first} and {second}: {len(differences)} proven by both, {unequal} differ, at most "
            f"by {largest:.1e}"
        )
    return differing


def main() -> None:
    """Record the programs, compare the solvers and print the result. Raise SystemExit if two
    solvers prove different optima.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", default=["tepdist", "division", "suite"], metavar="PART"
    )
    parser.add_argument(
        "--folder", type=Path, help="folder for recorded programs; existing programs are used"
    )
    parser.add_argument("--solvers", nargs="+", default=["auto", "highs", "cbc"], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit per program and solver")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-7,
        help=(
            "maximum relative difference of equal optima (default: %(default)s, because CBC writes "
            "eight digits)"
        ),
    )
    arguments = parse_arguments(parser, parts=["tiny"], seconds=30.0)
    differing = 0
    with tempfile.TemporaryDirectory() as scratch:
        for part in arguments.parts:
            folder = (arguments.folder or Path(scratch)) / part
            if not folder.is_dir():
                folder.mkdir(parents=True)
                RECORD[part](folder)
            differing += compare(
                part, folder, arguments.solvers, arguments.seconds, arguments.tolerance
            )
    if differing:
        raise SystemExit(f"{differing} pairs of proven optima differ")


if __name__ == "__main__":
    main()
