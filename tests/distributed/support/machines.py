"""Machines and job managers: network namespaces, and processes started with the variables of srun
or a PyTorchJob.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.distributed.support.launching import ROOT, Ended, finish

SLURM = (
    "SLURM",
    "PMI",
    "RANK",
    "LOCAL",
    "WORLD",
    "MASTER",
    "PET_",
    "TORCHELASTIC",
    "GLOO",
    "NCCL",
    "AUTOPIPE",
)
"""Beginnings of variables that say where a process runs; those of the tests' own process are not
handed on.
"""


@contextlib.contextmanager
def machines() -> Iterator[dict[str, tuple[str, ...]]]:
    """Three machines as namespaces: nodes a and b share 10.77.0.0/24; c has a link to another
    interface of each, and sends what is for their addresses in 10.77.0.0/24 there, too. The command
    that runs another one on each.
    """
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2's ip")
    names = {each: f"autopipe{os.getpid()}{each}" for each in "abc"}
    commands = [f"netns add {name}" for name in names.values()]
    for number, (one, two) in enumerate(("ab", "ac", "bc")):
        commands.append(
            f"link add {one}{two} netns {names[one]} type veth peer name {two}{one} netns "
            f"{names[two]}"
        )
        for this, other in ((one, two), (two, one)):
            address = f"10.77.{number}.{'abc'.index(this) + 1}/24"
            commands.append(f"-n {names[this]} addr add {address} dev {this}{other}")
            commands.append(f"-n {names[this]} link set {this}{other} up")
    commands += [f"-n {name} link set lo up" for name in names.values()]
    commands += [
        f"-n {names['c']} route add 10.77.0.{number} via 10.77.{number}.{number}"
        for number in (1, 2)
    ]
    commands.append(f"netns exec {names['a']} true")
    try:
        for each in commands:
            done = subprocess.run(
                ["ip", *each.split()], capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(
                    f"network namespaces cannot be made here: ip {each}: {done.stderr.strip()}"
                )
        yield {each: ("ip", "netns", "exec", name) for each, name in names.items()}
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def start_on(
    within: Sequence[str],
    words: Sequence[object],
    variables: Mapping[str, object] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[str]:
    """Start Python with `words` on a machine of `machines` ((): this one), with `variables` alone
    of a job manager.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SLURM)}
    given = {name: str(value) for name, value in (variables or {}).items()}
    environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | given
    command = [*within, sys.executable, *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=cwd, env=environment, text=True, **pipes)


STARTED = {
    "autopipe": ("-m", "autopipe"),
    "torchrun": ("-m", "torch.distributed.run"),
    "python": (),
}
"""Words for Python by the command that stands for them."""


def documented(start: str, program: Path) -> list[str]:
    """Words of the command in docs/guides/multi-node.md that starts so, for a program beside its key, on the
    CPU.
    """
    page = (ROOT / "docs" / "guides" / "multi-node.md").read_text(encoding="utf-8")
    (line,) = [line for line in page.splitlines() if line.startswith(start)]
    meant = {
        "gpt.plan/program": str(program),
        "run.key": str(program.parent / "key"),
        "10.0.0.1": "10.77.0.1",
        "--steps 100": "--steps 2 --device cpu",
    }
    for part, here in meant.items():
        line = line.replace(part, here)
    return shlex.split(line)


def srun(
    words: Sequence[str], nodes: Sequence[Sequence[str]], hosts: str, more: Sequence[object] = ()
) -> list[Ended]:
    """Run a command of srun, `words`, and `more` behind it, on machines: as many tasks on each as
    it says, or that many by node as in `--ntasks-per-node=3,1`, all with Slurm's variables. How
    each ended.
    """
    assert words[0] == "srun"
    options = dict(
        word.removeprefix("--").split("=") for word in words if re.match("--n[a-z-]*=", word)
    )
    assert len(nodes) == int(options["nodes"])
    command = [word for word in words[1:] if not re.match("--[a-z-]*=", word)]
    per_node = [int(count) for count in options["ntasks-per-node"].split(",")]
    tasks = per_node * (len(nodes) if len(per_node) == 1 else 1)
    step = {
        "SLURM_JOB_ID": os.getpid(),
        "SLURM_STEP_ID": 0,
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_NNODES": len(nodes),
        "SLURM_NTASKS": sum(tasks),
        "SLURM_STEP_NUM_TASKS": sum(tasks),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, tasks)),
    }
    started = []
    for node, within in enumerate(nodes):
        for local in range(tasks[node]):
            place = {"SLURM_PROCID": len(started), "SLURM_LOCALID": local, "SLURM_NODEID": node}
            started.append(
                start_on(within, (*STARTED[command[0]], *command[1:], *more), step | place)
            )
    return [finish(each) for each in started]
