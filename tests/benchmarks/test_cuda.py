"""The run on one GPU: in the smallest sizes it runs on the CPU, from a prepared folder and without
solvers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import ConfigurationError
from benchmarks.cuda.fork_server import ForkServer
from benchmarks.cuda.parts import idle_fraction
from benchmarks.cuda.processes import (
    Command,
    Failed,
    Processes,
    Runner,
    descendants,
    environment_of_python,
    python,
)
from benchmarks.cuda.programs import PlannedProgram, open_prepared, prepare
from benchmarks.cuda.rows import Rows
from benchmarks.cuda.session import Group, Row, Session
from benchmarks.small_models import SIZES
from tests.conformance.adapter import EmissionBackend

ROOT = Path(__file__).parents[2]
BLOCKED = ("ortools", "pulp", "scipy", "onnxscript")
"""Packages that planning needs and a node need not have."""
BLOCKER = f"""
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)


sys.meta_path.insert(0, Blocker())
"""
WITHIN = 0.1
"""How far a predicted step and peak may be from what a GPU measures, relative."""


def cuda(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks cuda` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "cuda", *map(str, words)]
    changed = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    return subprocess.run(
        command, cwd=ROOT, env=changed, capture_output=True, text=True, check=False
    )


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in json.loads(file.read_text(encoding="utf-8"))["rows"]}


@pytest.mark.distributed
@pytest.mark.timeout(1800)
@pytest.mark.sweep  # Twenty rows, one after the other, take minutes.
def test_all_rows_run_from_a_prepared_folder_without_solvers(tmp_path: Path) -> None:
    made = cuda("--prepare", tmp_path / "made", "--tiny", "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["failures"] == {}
    (tmp_path / "made").rename(tmp_path / "moved")
    (tmp_path / "sitecustomize.py").write_text(BLOCKER, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    blocked = subprocess.run(
        [sys.executable, "-c", "import ortools"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        check=False,
    )
    assert blocked.returncode == 1
    file = tmp_path / "cuda.json"
    words = (
        "--prepared",
        tmp_path / "moved",
        "--tiny",
        "--device",
        "cpu",
        "--minutes",
        25,
        "--write",
        file,
    )
    done = cuda(*words, PYTHONPATH=paths)
    assert done.returncode == 0, done.stderr
    found = rows_of(file)
    groups = {row["group"] for row in found.values()}
    assert groups == {"describe", "launch", "nccl", "steps", "hand", "four", "conformance"}
    assert {name: row for name, row in found.items() if "error" in row or "left_out" in row} == {}
    assert all(row.get("equal", True) for row in found.values())


@pytest.mark.cuda
@pytest.mark.timeout(700)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_figures_of_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "cuda.json"
    assert cuda("--write", file, "--minutes", 10).returncode == 0
    found = rows_of(file)
    assert {
        name: row for name, row in found.items() if "error" in row or not row.get("equal", True)
    } == {}
    for row in found.values():
        for figure in ("predicted_over_step", "predicted_over_peak"):
            if figure in row:
                assert row[figure] == pytest.approx(1, abs=WITHIN), row


def test_a_device_is_idle_while_nothing_runs_on_any_of_its_streams() -> None:
    assert idle_fraction([(0, 2), (1, 5), (2, 3), (6, 7), (9, 10)]) == 0.3


@pytest.mark.parametrize("tiny", [True, False])
def test_programs_have_names_of_their_own_and_sizes_that_the_zoo_takes(tiny: bool) -> None:
    programs = Rows("cuda", tiny).programs()
    names = [each.name for each in programs]
    assert len(names) == len(set(names))
    for each in programs:
        configure(each.zoo, dict(each.settings))
    models = {each.model: (each.zoo, each.settings) for each in programs}
    assert all(models[each.model] == (each.zoo, each.settings) for each in programs)


def test_lists_among_the_sizes_are_kept(tmp_path: Path) -> None:
    """A list was once written as text, `1,1`, which the zoo rejects."""
    planned = PlannedProgram(
        "resnet", "wide-resnet", tuple(SIZES["wide-resnet"].items()), 4, ("--micro-batches", "1")
    )
    made = prepare(tmp_path, [planned], True, lambda text: None)
    assert made.failures == {}
    depth = sum(
        node.op_type == "Conv" for node in onnx.load(tmp_path / "models" / planned.model).graph.node
    )
    whole = build(
        configure("wide-resnet", {**SIZES["wide-resnet"], "loss": True, "weights": "none"})
    )
    whole.save(tmp_path / "whole.onnx")
    assert (
        depth
        == sum(node.op_type == "Conv" for node in onnx.load(tmp_path / "whole.onnx").graph.node)
        > 0
    )


def test_a_program_that_cannot_be_made_is_the_error_of_its_rows_alone(tmp_path: Path) -> None:
    good = PlannedProgram("good", "gpt", tuple(SIZES["gpt"].items()), 4, ("--micro-batches", "1"))
    bad = PlannedProgram("bad", "gpt", tuple(SIZES["gpt"].items()), 4, ("--strategy", "none such"))
    told: list[str] = []
    prepare(tmp_path, [bad, good], True, told.append)
    assert [text.partition(":")[0] for text in told] == ["bad", "good"]
    made = open_prepared(tmp_path, True)
    assert (made.program(good) / "run.py").is_file()
    with pytest.raises(Failed, match="none such"):
        made.program(bad)
    with pytest.raises(ConfigurationError, match="prepared for --tiny"):
        open_prepared(tmp_path, False)


def test_products_of_conformance_cases_are_exact_as_in_programs() -> None:
    torch.backends.cudnn.allow_tf32 = True
    EmissionBackend.prepare(onnx.ModelProto(), "CUDA")
    assert torch.backends.cudnn.allow_tf32 is False


# Time limits. The limits are so short, and the sleeps so long, that only a kill ends the processes.

SLEEPS = "import time; print('begun', flush=True); time.sleep(3600)"
LEAVES_A_CHILD = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEPS!r}], start_new_session=True)
print(child.pid, file=sys.stderr, flush=True)
time.sleep(3600)
"""


def test_a_row_over_its_time_is_killed_with_children_in_sessions_of_their_own(
    tmp_path: Path,
) -> None:
    def measure(run: Runner) -> dict[str, Any]:
        return {"printed": run.run("-c", LEAVES_A_CHILD)}

    file = tmp_path / "rows.json"
    rows = [
        Row("hangs", measure, 6.0),
        Row("after", lambda run: {"printed": run.run("-c", "print(7)")}, 60.0),
    ]
    with Session(3600.0, file, {"card": "none"}) as session:
        session.run([[Group("all", rows, 1)]])
    found = rows_of(file)
    assert "the time limit is over" in found["hangs"]["error"]
    assert found["after"]["printed"] == "7\n"
    child = int(found["hangs"]["error"].rpartition(" ")[2])
    assert (
        not Path(f"/proc/{child}/stat").exists() or " Z " in Path(f"/proc/{child}/stat").read_text()
    )
    assert json.loads(file.read_text(encoding="utf-8"))["card"] == "none"


def test_a_run_without_time_leaves_its_rows_out(tmp_path: Path) -> None:
    with Session(9.0, tmp_path / "rows.json", {}) as session:
        session.run(
            [
                [
                    Group(
                        "all",
                        [Row("late", lambda run: {"printed": run.run("-c", "print(7)")}, 60.0)],
                        2,
                    )
                ]
            ]
        )
    assert rows_of(tmp_path / "rows.json")["late"]["left_out"] == "there was no time"


def test_processes_together_end_when_one_fails() -> None:
    processes = Processes()
    words = (python("-c", SLEEPS), python("-c", "raise SystemExit('it broke')"))
    before = set(descendants(os.getpid()))
    with pytest.raises(Failed, match="it broke"):
        processes.run_together(words, time.monotonic() + 3600)
    assert set(descendants(os.getpid())) <= before


def test_nothing_starts_in_closed_processes() -> None:
    processes = Processes()
    processes.close()
    with pytest.raises(Failed, match="has ended"):
        processes.run_together(
            [Command((sys.executable, "-c", "pass"), {})], time.monotonic() + 3600
        )


def test_ports_differ() -> None:
    processes = Processes()
    ports = [processes.free_port() for _ in range(20)]
    assert len(set(ports)) == 20


# The server whose forks have imported torch.

SCRIPT = """
import json, os, sys

found = {"torch": "torch" in sys.modules, "words": sys.argv[1:], "kind": os.environ["KIND"], "name": __name__}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    made = ForkServer.start(environment_of_python(), tmp_path_factory.mktemp("server"))
    yield made
    made.close()


def forked(path: Path, *words: object, **environment: object) -> Command:
    return replace(python(path, *words, **environment), forked=True)


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_forked_script_finds_torch_imported(server: ForkServer, tmp_path: Path) -> None:
    path = script(tmp_path, SCRIPT)
    commands = [forked(path, number, KIND=f"k{number}") for number in range(3)]
    printed = Processes(server).run_together(commands, time.monotonic() + 3600)
    for number, text in enumerate(printed):
        assert json.loads(text) == {
            "torch": True,
            "words": [str(number)],
            "kind": f"k{number}",
            "name": "__main__",
        }


def test_a_forked_script_that_fails_ends_the_others(server: ForkServer, tmp_path: Path) -> None:
    before = set(descendants(server.process.pid))
    bad = forked(script(tmp_path, "raise RuntimeError('it broke')"))
    (tmp_path / "other").mkdir()
    sleeping = forked(script(tmp_path / "other", SLEEPS))
    with pytest.raises(Failed, match="RuntimeError: it broke"):
        Processes(server).run_together([sleeping, bad], time.monotonic() + 3600)
    assert set(descendants(server.process.pid)) <= before


def test_a_forked_script_over_its_time_is_killed_with_its_children(
    server: ForkServer, tmp_path: Path
) -> None:
    before = set(descendants(server.process.pid))
    with pytest.raises(Failed, match="the time limit is over"):
        Processes(server).run_together(
            [forked(script(tmp_path, LEAVES_A_CHILD))], time.monotonic() + 4
        )
    assert set(descendants(server.process.pid)) <= before


def test_without_a_server_a_script_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    lost = ForkServer.start(environment_of_python(), tmp_path)
    lost.close()
    processes = Processes(lost)
    (printed,) = processes.run_together(
        [forked(script(tmp_path, SCRIPT), KIND="own")], time.monotonic() + 3600
    )
    assert json.loads(printed)["torch"] is False
    assert processes.server is None
