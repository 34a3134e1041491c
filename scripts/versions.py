"""Runs tests with other versions of the dependencies, and writes the results to
docs/reference/versions.md.

    python scripts/versions.py
        every environment and every set of tests (hours)
    python scripts/versions.py --only torch-2.11
        the environment `torch-2.11.0` only
    python scripts/versions.py --sets launcher,planning
        these sets of tests only
    python scripts/versions.py --folder /tmp/venvs
        keep the environments in this folder, and use the ones that it already has
    python scripts/versions.py --list
        only print the requirements and the commands

Each environment is a virtual environment, about 5 GB with a torch for CUDA, which runs on a CPU. It
is deleted after its tests unless `--folder` is given. The last column of the table is written by
hand and kept.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "reference" / "versions.md"
PACKAGES = (
    "torch",
    "click",
    "numpy",
    "onnx",
    "onnxruntime",
    "ortools",
    "PuLP",
    "PyYAML",
    "rich",
    "scipy",
    "pyarrow",
)
"""Packages whose versions the table names."""
TORCH = ("2.9.1", "2.11.0")
"""Versions of torch that run with the other versions of constraints.txt: one below the lower bound,
and the lower bound, which is that of the GPU that measured docs/results.md. The environment
`newest` has the newest torch.
"""
TEST_SETS = {
    "launcher": (
        "tests/backends/torch/test_torch_interfaces.py",
        "tests/backends/torch/test_elastic_agent.py",
        "tests/backends/torch/test_rendezvous.py",
        "tests/distributed/test_launch.py",
    ),
    "distributed": (
        "tests/distributed/test_by_hand.py",
        "tests/distributed/test_communicators.py",
        "tests/distributed/test_compiled.py",
        "tests/distributed/test_generation.py",
        "tests/distributed/test_loss_scaling.py",
        "tests/fake_cuda/test_library.py",
    ),
    "backends": ("tests/backends",),
    "checkpoint": (
        "tests/backends/torch/checkpoint",
        "tests/backends/torch/runtime/state/checkpointing",
        "tests/cli/test_checkpoint.py",
        "tests/cli/test_module_state.py",
        "tests/distributed/test_launch_checkpoint.py",
    ),
    "conformance": ("tests/conformance/test_onnx_backend.py",),
    "planning": (
        "tests/cli/test_inspect.py",
        "tests/cli/test_plan.py",
        "tests/configs",
        "tests/passes/frontend/test_folding.py",
        "tests/passes/frontend/test_loops.py",
        "tests/passes/schedule",
        "tests/passes/solvers",
    ),
}
"""Files and folders of tests by the name of their set."""
SMALLEST = "tests/backends/torch/test_elastic_agent.py"
CURRENT_ENVIRONMENT = "this one"
"""Name of the environment that runs this script."""
HEADER = ("environment", "versions", "tests", "run", "failures", "notes")
TEXT = """# Versions

This page lists the versions of dependencies with which the tests of autopipe were run, and the
results. `pyproject.toml` contains the lower bound of each dependency, and `constraints.txt` the
versions with which all tests run. `python scripts/versions.py` repeats the tests of this page. Its
flag `--list` prints the tests of each set and the versions of each environment.

autopipe uses some private interfaces of torch, which can change with each version: the elastic
agent, stores, fake tensors and compiler options. Only the module
`autopipe/backends/torch/torch_interfaces.py` imports them, and
`tests/backends/torch/test_torch_interfaces.py` checks their names and signatures.

These versions of torch are not supported:

- torch 2.6 cannot launch, because its `TCPStore` does not accept a socket that already listens.
- torch 2.9 launches, but the losses of a compiled program with random numbers differ by 0.02% from
  the eager program.
- torch 2.7, 2.8 and 2.10 were not tested.

Each row of the following table is one set of tests in one environment, with {python}. The column
`run` contains the number of tests that ran, without skipped tests. The environments are:

- `lowest`: the lower bounds of `pyproject.toml`. transformers is not installed, because it needs
  click 8.4.2, so tests that export its models are skipped.
- `newest`: the newest release of each dependency.
- All others: the versions of `constraints.txt`, except for torch, whose version is in the name.

"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one set of tests in one environment."""

    run: int
    failed: tuple[str, ...]
    """Names of the tests that failed."""
    broken: str = ""
    """Last line of pytest if it ran no test, otherwise empty."""

    def cells(self) -> list[str]:
        failures = self.broken or (
            f"{len(self.failed)}: {', '.join(self.failed)}" if self.failed else "0"
        )
        return [f"{self.run:,}", failures.replace("|", "/")]


def main() -> int:
    """Run the tests and write the table; 1 if a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="run environments with PATTERN in their name"
    )
    parser.add_argument(
        "--sets",
        default=",".join(TEST_SETS),
        metavar="NAME,...",
        help="sets of tests (default: %(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="keep the environments in FOLDER"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="tests at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--table", type=Path, default=TABLE, metavar="FILE", help="the page with the table"
    )
    parser.add_argument(
        "--list", action="store_true", help="only print the requirements and the commands"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="one file of tests in this environment: checks this script",
    )
    arguments = parser.parse_args()
    if arguments.tiny:
        outcome = run_tests(Path(sys.executable), (SMALLEST,), arguments.jobs)
        print(CURRENT_ENVIRONMENT, *outcome.cells())
        write_table(
            {
                (CURRENT_ENVIRONMENT, "launcher"): row_of(
                    CURRENT_ENVIRONMENT, "launcher", Path(sys.executable), outcome
                )
            },
            arguments.table,
        )
        return 1 if outcome.failed or outcome.broken else 0
    chosen = {name: wanted for name, wanted in environments().items() if arguments.only in name}
    sets = {name: TEST_SETS[name] for name in arguments.sets.split(",")}
    if arguments.list:
        print(*list_commands(chosen, sets), sep="\n")
        return 0
    failures = 0
    for name, requirements in chosen.items():
        with tempfile.TemporaryDirectory(prefix="autopipe-versions-") as scratch:
            python = make_environment((arguments.folder or Path(scratch)) / name, requirements)
            for tests, paths in sets.items():
                outcome = run_tests(python, paths, arguments.jobs)
                failures += len(outcome.failed) + bool(outcome.broken)
                print(name, tests, *outcome.cells(), flush=True)
                rows = former_rows(arguments.table)
                rows[name, tests] = row_of(name, tests, python, outcome, rows.get((name, tests)))
                write_table(rows, arguments.table)
    return 1 if failures else 0


def environments() -> dict[str, tuple[str, ...]]:
    """Return the requirements of each environment, as pip takes them, by its name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["run"], *extras["data"]]
    tools = [each for each in extras["test"] if not each.startswith("autopipe")]
    found = {
        f"torch-{version}": (*_pinned_requirements([*needed, *tools], {"torch": version}),)
        for version in TORCH
    }
    # transformers needs a newer click: tests that export its models are skipped.
    others = [each for each in tools if not each.startswith("transformers")]
    found["lowest"] = (*(each.replace(">=", "==") for each in needed), *others)
    found["newest"] = (*(each.split(">=")[0] + _marker_of(each) for each in needed), *tools)
    return found


def _pinned_requirements(requirements: list[str], changed: dict[str, str]) -> Iterator[str]:
    """Yield requirements at the versions of constraints.txt, except `changed`, versions by
    package.
    """
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = {
        name.lower(): version
        for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    }
    for each in requirements:
        name = re.match(r"[\w.-]+", each)[0]  # type: ignore[index]
        yield f"{name}=={changed.get(name.lower()) or pins[name.lower()]}{_marker_of(each)}"


def _marker_of(requirement: str) -> str:
    """Return the condition of a requirement, such as `; sys_platform == 'linux'`; "" if it has
    none.
    """
    _, semicolon, condition = requirement.partition(";")
    return semicolon + condition


def make_environment(folder: Path, requirements: tuple[str, ...]) -> Path:
    """Return the interpreter of the virtual environment in `folder`, which is made if it is
    missing.
    """
    python = folder / "bin" / "python"
    stamp = folder / "requirements"
    wanted = "\n".join(requirements)
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--prefer-binary", *requirements],
            check=True,
        )
        stamp.write_text(wanted, encoding="utf-8")
    return python


def command(python: Path, paths: tuple[str, ...], jobs: int) -> list[str]:
    """Return the command that runs tests, without the option of its report."""
    words = ["-m", "pytest", "-q", "-n", str(jobs), "--timeout", "900", "-p", "no:cacheprovider"]
    return [str(python), *words, *paths]


def run_tests(python: Path, paths: tuple[str, ...], jobs: int) -> Outcome:
    """Run tests with an interpreter, and read pytest's report."""
    with tempfile.TemporaryDirectory(prefix="autopipe-versions-") as scratch:
        report = Path(scratch) / "report.xml"
        words = [*command(python, paths, jobs), "--junit-xml", str(report)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        cases = (
            list(ElementTree.parse(report).getroot().iter("testcase")) if report.is_file() else []
        )
    if not cases:
        lines = (done.stdout + done.stderr).strip().splitlines()
        return Outcome(0, (), broken=lines[-1] if lines else f"exit code {done.returncode}")
    failed = tuple(
        each.get("name", "") for each in cases if {"failure", "error"} & {part.tag for part in each}
    )
    return Outcome(sum(each.find("skipped") is None for each in cases), failed)


def row_of(
    name: str, tests: str, python: Path, outcome: Outcome, former: list[str] | None = None
) -> list[str]:
    """Return the row of a set of tests, with the last cell of its former row."""
    script = (
        "import importlib.metadata as m, sys\n"
        "known = {each.metadata['Name'].lower(): each.version for each in m.distributions()}\n"
        "known['onnxruntime'] = known.get('onnxruntime') or known.get('onnxruntime-gpu')\n"
        "print(*(f'{name} {known[name.lower()]}' for name in sys.argv[1:] if "
        "known.get(name.lower())), sep=', ')"
    )
    done = subprocess.run(
        [python, "-c", script, *PACKAGES], capture_output=True, text=True, check=True
    )
    return [name, done.stdout.strip(), tests, *outcome.cells(), former[-1] if former else ""]


def former_rows(table: Path) -> dict[tuple[str, str], list[str]]:
    """Return the rows of the table by environment and set of tests."""
    if not table.is_file():
        return {}
    lines = [
        line for line in table.read_text(encoding="utf-8").splitlines() if line.startswith("| ")
    ][1:]
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    return {(row[0], row[2]): row for row in rows}


def write_table(rows: dict[tuple[str, str], list[str]], table: Path) -> None:
    """Write the page, with rows in the order of environments and sets."""
    order = [*environments(), CURRENT_ENVIRONMENT]
    known = [key for key in rows if key[0] in order and key[1] in TEST_SETS]
    ordered = sorted(known, key=lambda key: (order.index(key[0]), list(TEST_SETS).index(key[1])))
    lines = [HEADER, ["---"] * len(HEADER), *(rows[key] for key in ordered)]
    text = TEXT.format(python=f"Python {sys.version_info.major}.{sys.version_info.minor}")
    table.write_text(
        text + "".join(f"| {' | '.join(line)} |\n" for line in lines), encoding="utf-8"
    )


def list_commands(
    chosen: dict[str, tuple[str, ...]], sets: dict[str, tuple[str, ...]]
) -> Iterator[str]:
    """Yield the requirements of environments, then the command of each set of tests, as lines."""
    for name, requirements in chosen.items():
        yield f"{name}: {', '.join(requirements)}"
    for name, paths in sets.items():
        yield f"{name}: {shlex.join(command(Path('python'), paths, 1))}"


if __name__ == "__main__":
    sys.exit(main())
