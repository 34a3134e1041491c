"""The ways to start a program, for real: torchrun, srun, a PyTorchJob and `autopipe launch` on each machine."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.support.launching import Ended, finish, launch, write_chain
from tests.distributed.support.machines import machines, srun, start_on

pytestmark = pytest.mark.distributed
ENDPOINT = "10.77.0.1:29400"
NODES = 2
HERE: tuple[str, ...] = ()
RUN = ("--device", "cpu", "--steps", 2)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Four ranks in two stages of two."""
    return write_chain(tmp_path / "program", groups=((0, 1), (2, 3)))


@pytest.fixture
def losses(program: Path) -> list[float]:
    """Those of a launch on one machine."""
    return launch(program, "--steps", 2, "--json").losses


def reported(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def all_well(ended: Sequence[Ended]) -> None:
    assert [each.code for each in ended] == [0] * len(ended), [each.stderr for each in ended]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_a_bare_torchrun(program: Path, losses: list[float]) -> None:
    report = program.parent / "report.jsonl"
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, program / "run.py", *RUN)
    all_well([finish(start_on(HERE, (*words, "--report", report)))])
    assert reported(report) == losses


def test_a_bare_torchrun_on_two_machines(program: Path, losses: list[float]) -> None:
    report = program.parent / "report.jsonl"
    address, port = ENDPOINT.split(":")
    with machines() as inside:
        started = []
        for node, each in enumerate("ab"):
            words = ("-m", "torch.distributed.run", "--nnodes", NODES, "--nproc-per-node", 2, "--node-rank", node)
            words += ("--master-addr", address, "--master-port", port, program / "run.py", *RUN, "--report", report)
            started.append(start_on(inside[each], words))
        all_well([finish(each) for each in started])
    assert reported(report) == losses


def test_srun_starts_every_rank_on_one_machine(program: Path, losses: list[float]) -> None:
    report = program.parent / "report.jsonl"
    all_well(srun([HERE], [4], "localhost", (program / "run.py", *RUN, "--report", report)))
    assert reported(report) == losses


def test_srun_starts_every_rank_of_unequal_machines(program: Path, losses: list[float]) -> None:
    report = program.parent / "report.jsonl"
    with machines() as inside:
        nodes = [inside["a"], inside["b"]]
        all_well(srun(nodes, [3, 1], "10.77.0.[1-2]", (program / "run.py", *RUN, "--report", report)))
    assert reported(report) == losses


def test_a_pod_for_each_rank(program: Path, losses: list[float]) -> None:
    """RANK and WORLD_SIZE without LOCAL_RANK, as a PyTorchJob's containers have them."""
    report = program.parent / "report.jsonl"
    job = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    job |= {"WORLD_SIZE": 4}
    words = (program / "run.py", *RUN, "--report", report)
    all_well([finish(each) for each in [start_on(HERE, words, job | {"RANK": rank}) for rank in range(4)]])
    assert reported(report) == losses
