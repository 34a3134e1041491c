"""What a launch lets in: nothing from outside its interface, nothing unpickled, no module of the
current folder; and nothing that it started outlives it.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopipe.backends.torch.child import python_command
from autopipe.backends.torch.fork_server import SWITCH_VARIABLE, rank_environment
from benchmarks.worker_pool import WorkerPool
from tests.distributed.support.attacking import attack, attack_store, doors
from tests.distributed.support.launching import (
    PATIENCE_S,
    ROOT,
    Ended,
    descendants,
    finish,
    runs,
    spell_data,
    start,
    wait_for,
    write_chain,
    write_key,
)
from tests.distributed.support.machines import machines

# All ranks are there, and rank 0 stays in its first step.
STAY = """(here / 'reached').write_text('')
        time.sleep(10**6)"""
MODULE = "from pathlib import Path\nPath(__file__).with_name('taken').touch()\n"


def _refused(ended: Ended) -> bool:
    """Whether a launch has ended as one does that finds strangers' values in its store."""
    lines = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    words = "a value in the rendezvous store lacks a valid signature of this run"
    return (
        ended.code == 5
        and len(lines) == 1
        and words in lines[0]
        and "Traceback" not in ended.stderr
    )


@pytest.mark.distributed
def test_one_machine_listens_to_itself_alone_and_unpickles_nothing(tmp_path: Path) -> None:
    program = write_chain(tmp_path / "program")
    for name in ("queue.py", "socket.py", "typing.py"):
        (tmp_path / name).write_text(MODULE)
    process = start(program, "--data", spell_data(tmp_path, STAY))
    wait_for((tmp_path / "reached").exists, process)
    found = doors(descendants(process.pid))
    assert len(found) >= 4, "two stores, and gloo on two ranks"
    assert all(ipaddress.ip_address(address).is_loopback for address, _ in found), found
    stores = doors([process.pid])
    assert len(stores) == 2
    assert all(attack(door, tmp_path / "owned") for door in found)
    for door in stores:
        attack_store(door, tmp_path / "owned")
    ended = finish(process)
    assert _refused(ended), ended
    assert not (tmp_path / "owned").exists()
    assert not (tmp_path / "taken").exists(), (
        "a module of the current folder has been taken for Python's own"
    )


@pytest.mark.distributed
def test_two_machines_listen_on_the_chosen_interface_alone_and_unpickle_nothing(
    tmp_path: Path,
) -> None:
    program = write_chain(tmp_path / "program")
    flags = (
        "--data",
        spell_data(tmp_path, STAY),
        "--nnodes",
        2,
        "--rdzv-endpoint",
        "10.77.0.1:29400",
    )
    with machines() as inside:
        key = write_key(tmp_path)
        nodes = {
            each: start(program, *flags, "--rdzv-key", key, within=inside[each]) for each in "ab"
        }
        try:
            for node in nodes.values():
                wait_for((tmp_path / "reached").exists, node)
            chosen = set()
            stores = set()
            other = set()
            for number, (each, node) in enumerate(nodes.items(), 1):
                found = doors(descendants(node.pid))
                assert {address for address, _ in found} == {f"10.77.0.{number}"}, found
                chosen |= found
                stores |= doors([node.pid])
                beside = "10.77.1.1" if each == "a" else "10.77.2.2"
                other |= {(beside, port) for _, port in found}
            command = [
                *inside["c"],
                sys.executable,
                "-m",
                "tests.distributed.support.attacking",
                str(tmp_path / "owned"),
            ]
            tried = [*other, *chosen]
            done = subprocess.run(
                [*command, json.dumps(tried), json.dumps(list(stores))],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=True,
                timeout=PATIENCE_S,
            )
            assert json.loads(done.stdout) == [False] * len(other) + [True] * len(chosen)
        finally:
            ended = [finish(node) for node in nodes.values()]
    # A node may notice first that the other, which has refused the value, has ended.
    assert any(_refused(each) for each in ended), ended
    assert all(each.code == 5 and "Traceback" not in each.stderr for each in ended), ended
    assert not (tmp_path / "owned").exists()


# The process stops where it would import torch, as on a machine that is short of memory.
STOPPED = """
import os, sys, time

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and {condition}:
            open({folder!r} + f"/importing_{{os.getpid()}}", "w").close()
            time.sleep(10**6)

sys.meta_path.insert(0, Stop())
"""


def _gone(pids: list[int]) -> bool:
    end = time.monotonic() + 60
    while any(map(runs, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(runs, pids))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fork_server", "condition", "importing"),
    [
        ("0", "'RANK' in os.environ", 2),
        ("1", "any('fork_server' in word for word in sys.orig_argv)", 1),
    ],
    ids=["an interpreter per rank", "a fork server"],
)
def test_processes_end_with_a_launcher_that_is_killed_while_they_import_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fork_server: str,
    condition: str,
    importing: int,
) -> None:
    monkeypatch.setenv(SWITCH_VARIABLE, fork_server)
    program = write_chain(tmp_path / "program")
    (tmp_path / "path").mkdir()
    stopped = STOPPED.format(condition=condition, folder=str(tmp_path))
    (tmp_path / "path" / "sitecustomize.py").write_text(stopped)
    process = start(program, path=(tmp_path / "path",))
    wait_for(lambda: len(list(tmp_path.glob("importing_*"))) == importing, process)
    pids = descendants(process.pid)
    assert {int(path.name.split("_")[1]) for path in tmp_path.glob("importing_*")} < set(pids)
    process.kill()
    finish(process)
    assert _gone(pids)


PARENT = """
import os, subprocess, sys, time
from autopipe.backends.torch.child import PARENT_VARIABLE, temporary_environment, python_command

os.chdir(sys.argv[2])
with temporary_environment({PARENT_VARIABLE: str(os.getpid())}):
    subprocess.Popen(python_command(*sys.argv[1:]))
time.sleep(10**6)
"""


def test_a_child_ends_with_its_parent_and_takes_no_module_of_the_current_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "queue.py").write_text(MODULE)
    child = tmp_path / "child.py"
    child.write_text("import queue, time\nopen('began', 'w').close()\ntime.sleep(10**6)\n")
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", PARENT, str(child), str(tmp_path)]
    parent = subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE)
    wait_for((tmp_path / "began").exists, parent)
    pids = descendants(parent.pid)
    assert len(pids) == 2
    parent.kill()
    parent.communicate()
    assert _gone(pids)
    assert not (tmp_path / "taken").exists()


def test_an_empty_entry_of_the_module_path_is_not_the_current_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("", "/somewhere", "")))
    with rank_environment():
        assert os.environ["PYTHONPATH"].split(os.pathsep) == ["/somewhere", str(ROOT)]
    assert os.environ["PYTHONPATH"] == ":/somewhere:"


def test_a_child_whose_parent_has_gone_already_ends() -> None:
    with rank_environment():
        environment = dict(os.environ) | {"AUTOPIPE_PARENT": "1"}
    assert (
        subprocess.run(
            python_command("this"), env=environment, check=False, capture_output=True
        ).returncode
        == 5
    )


@pytest.mark.distributed
def test_a_worker_pools_ranks_end_with_the_process_that_they_are_copies_of() -> None:
    with WorkerPool(2) as pool:
        pool._start()
        assert pool._process is not None
        pids = descendants(pool._process.pid)
        assert len(pids) == 3
        found = doors(pids)
        assert found and all(ipaddress.ip_address(address).is_loopback for address, _ in found), (
            found
        )
        pool._process.kill()
        # The ranks' ends stay open here: it is not those that tell them.
        pool._process.wait()
        assert _gone(pids)


def test_every_process_of_python_is_started_as_a_child() -> None:
    """The process of an integer program watches its parent itself: planning does not import the
    runtime.
    """
    users = [
        path
        for path in (ROOT / "autopipe").rglob("*.py")
        if "sys.executable" in path.read_text(encoding="utf-8")
    ]
    assert sorted(path.name for path in users) == ["child.py", "pulp_client.py"]
