"""The ways to start a program, for real: torchrun, srun, a PyTorchJob and `autopipe launch` on each
machine.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.support.launching import Ended, finish, spell_data, write_chain, write_key
from tests.distributed.support.machines import STARTED, documented, machines, srun, start_on
from tests.distributed.support.pool import Pools

pytestmark = pytest.mark.distributed
ENDPOINT = "10.77.0.1:29400"
NODES = 2
HERE: tuple[str, ...] = ()
RUN = ("--device", "cpu", "--steps", 2)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks in two stages of two, and a key for several launches."""
    folder = tmp_path_factory.mktemp("job")
    write_key(folder)
    return write_chain(folder / "program", groups=((0, 1), (2, 3)))


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return tmp_path / "report.jsonl"


@pytest.fixture(scope="module")
def losses(pools: Pools, program: Path) -> list[float]:
    """Those of ranks on one machine."""
    path = program.parent / "report.jsonl"
    pools.of(4).run(program, *RUN, "--report", path)
    return reported(path)


def reported(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def all_well(ended: Sequence[Ended]) -> None:
    assert [each.code for each in ended] == [0] * len(ended), [each.stderr for each in ended]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.sweep
def test_a_bare_torchrun(program: Path, losses: list[float], report: Path) -> None:
    words = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        4,
        program / "run.py",
        *RUN,
    )
    all_well([finish(start_on(HERE, (*words, "--report", report)))])
    assert reported(report) == losses


@pytest.mark.parametrize("ranks", [3, 6])
def test_torchrun_with_the_wrong_number_of_ranks_says_so_in_one_line(
    program: Path, ranks: int
) -> None:
    words = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        ranks,
        program / "run.py",
        *RUN,
    )
    ended = finish(start_on(HERE, words))
    assert ended.code != 0
    start = f"torchrun --nproc-per-node 4 {program / 'run.py'}"
    lines = [line for line in ended.stderr.splitlines() if "ranks started" in line]
    assert lines == [f"error: ranks started: {ranks}, ranks of the program: 4; start it by {start}"]
    assert "FileNotFoundError" not in ended.stderr and "rank_" not in ended.stderr


def test_a_program_of_several_ranks_started_by_hand_says_how_to_start_it(program: Path) -> None:
    ended = finish(start_on(HERE, (program / "run.py", *RUN)))
    assert ended.code == 2
    start = f"torchrun --nproc-per-node 4 {program / 'run.py'}"
    assert (
        ended.stderr == f"error: ranks started: 1, ranks of the program: 4; start it by {start}\n"
    )


def test_a_bare_torchrun_on_two_machines(program: Path, losses: list[float], report: Path) -> None:
    torchrun, *words = documented("torchrun", program)
    node = words.index("--node-rank") + 1
    with machines() as inside:
        started = []
        for number, each in enumerate("ab"):
            words[node] = str(number)
            started.append(start_on(inside[each], (*STARTED[torchrun], *words, "--report", report)))
        all_well([finish(each) for each in started])
    assert reported(report) == losses


@pytest.mark.sweep
def test_srun_starts_every_rank_on_one_machine(
    program: Path, losses: list[float], report: Path
) -> None:
    words = ("srun", "--nodes=1", "--ntasks-per-node=4", "python", str(program / "run.py"))
    all_well(srun(words, [HERE], "localhost", (*RUN, "--report", report)))
    assert reported(report) == losses


@pytest.mark.parametrize("tasks", ["2", pytest.param("3,1", marks=pytest.mark.sweep)])
def test_srun_starts_every_rank_of_two_machines(
    program: Path, losses: list[float], tasks: str, report: Path
) -> None:
    words = documented("srun --nodes=2 --ntasks-per-node=2", program)
    words[words.index("--ntasks-per-node=2")] = f"--ntasks-per-node={tasks}"
    with machines() as inside:
        all_well(srun(words, [inside["a"], inside["b"]], "10.77.0.[1-2]", ("--report", report)))
    assert reported(report) == losses


def test_a_pod_for_each_rank(program: Path, losses: list[float], report: Path) -> None:
    """RANK and WORLD_SIZE without LOCAL_RANK, as a PyTorchJob's containers have them."""
    job = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    job |= {"WORLD_SIZE": 4}
    words = (program / "run.py", *RUN, "--report", report)
    all_well(
        [
            finish(each)
            for each in [start_on(HERE, words, job | {"RANK": rank}) for rank in range(4)]
        ]
    )
    assert reported(report) == losses


def launch_on(
    within: Sequence[str], program: Path, *words: object, **variables: object
) -> subprocess.Popen[str]:
    """`autopipe launch` on a machine, with a job manager's variables."""
    more = ("--rdzv-key", program.parent / "key", "--json", *words)
    command = (*STARTED["autopipe"], "launch", program, *RUN, *more)
    return start_on(within, command, variables, cwd=program.parent)


def test_a_launch_on_each_machine(tmp_path: Path) -> None:
    """As over ssh. Machine c is node 0: what is said of the network there holds on both, but for
    what is said on a. It reaches a's 10.77.0.1 through its link to another interface of a.
    """
    # A rank of each machine reads data.
    program = write_chain(tmp_path / "program", groups=((0, 2), (1, 3)))
    write_key(program.parent)
    seen = (
        "(here / f'rank{rank}').write_text(str([os.environ.get(each) for each in NAMES])) if step "
        "== 0 else None"
    )
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_HCA")
    data = spell_data(program.parent, seen.replace("NAMES", str(names)))
    flags = ("--nnodes", NODES, "--rdzv-endpoint", ENDPOINT, "--data", data, "--node-rank")
    with machines() as inside:
        one = launch_on(inside["c"], program, *flags, 0, NCCL_DEBUG="WARN", NCCL_IB_HCA="mlx5_0")
        two = launch_on(
            inside["a"], program, *flags, 1, "--local-addr", "10.77.1.1", NCCL_IB_HCA="mlx5_7"
        )
        ended = [finish(one), finish(two)]
    all_well(ended)
    assert len(ended[0].losses) == 2 and ended[1].losses == [], "rank 0 is on node 0"
    assert (tmp_path / "rank0").read_text() == "['ca', '=ca', 'WARN', 'mlx5_0']"
    assert (tmp_path / "rank2").read_text() == "['ac', '=ac', 'WARN', 'mlx5_7']"


def test_srun_starts_a_launch_on_each_machine(program: Path, losses: list[float]) -> None:
    words = documented("srun --nodes=2 --ntasks-per-node=1", program)
    with machines() as inside:
        ended = srun(words, [inside["a"], inside["b"]], "10.77.0.[1-2]", ("--json",))
    all_well(ended)
    assert [each.losses for each in ended] == [losses, []]
    assert "Slurm runs 2 nodes, which meet at 10.77.0.1:" in ended[1].stderr


def test_a_pod_for_each_machine(program: Path, losses: list[float]) -> None:
    address, port = ENDPOINT.split(":")
    job = {
        "PET_NNODES": NODES,
        "PET_NPROC_PER_NODE": 2,
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": port,
    }
    job |= {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}
    with machines() as inside:
        pods = [
            launch_on(inside[each], program, **job, PET_NODE_RANK=node)
            for node, each in enumerate("ab")
        ]
        ended = [finish(each) for each in pods]
    all_well(ended)
    assert [each.losses for each in ended] == [losses, []]


def test_a_node_that_never_comes_is_named(program: Path) -> None:
    job = {"SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_STEP_NUM_TASKS": 2, "SLURM_NODEID": 0}
    ended = finish(launch_on(HERE, program, "--start-timeout", 2, **job))
    assert ended.code == 5
    assert ended.result["error"]["message"].startswith(
        "node 1 (127.0.0.2) of 2 never came; there are: "
    )
    job["SLURM_NODEID"] = 1
    ended = finish(
        launch_on(
            HERE,
            program,
            "--start-timeout",
            2,
            "--rdzv-endpoint",
            f"127.0.0.3:{free_port()}",
            **job,
        )
    )
    assert ended.code == 5
    assert ended.result["error"]["message"].startswith(
        "the rendezvous node did not answer at 127.0.0.3:"
    )


def test_a_rank_whose_peer_died_on_another_machine_names_it(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program")
    write_key(tmp_path)
    data = spell_data(tmp_path, "if step == 1: os.kill(os.getpid(), signal.SIGKILL)")
    flags = ("--nnodes", NODES, "--rdzv-endpoint", ENDPOINT, "--data", data, "--node-rank")
    with machines() as inside:
        nodes = [launch_on(inside[each], program, *flags, node) for node, each in enumerate("ab")]
        killed, lost = [finish(each).result["error"] for each in nodes]
    assert killed["message"] == "killed by SIGKILL" and killed["where"] == "rank 0"
    host = socket.gethostname()
    assert re.match(r"lost rank 0 \(channel \d+\): ", lost["message"])
    # Rank 1 notices the loss while it posts the step's receives or while it waits for the first.
    assert lost["where"] in {f"rank 1 on {host}, task update", f"rank 1 on {host}, task 1F0"}
