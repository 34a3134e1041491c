"""Which processors a machine's ranks keep to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopipe.backends.torch.runtime.communication.transport import pci_address
from autopipe.backends.torch.runtime.host import (
    cores_near_device,
    cores_of_rank,
    has_more_ranks_than_cores,
    pin_near_device,
    pin_to_cores,
)

BOUND = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone binds threads")
_RANK = """
import json
import os
import sys
import torch.distributed as dist
from autopipe.backends.torch.runtime.communication import transport as module
from autopipe.backends.torch.runtime.host import core_count_of_this_rank

os.environ["AUTOPIPE_ATTEMPT"] = "0"
module._connect_to_launcher_store = lambda patience, signed: dist.FileStore(sys.argv[1], int(os.environ["WORLD_SIZE"]))
transport = module.Transport("cpu")
transport.start()
threads = [sorted(os.sched_getaffinity(int(each))) for each in os.listdir("/proc/self/task")]
print(json.dumps({"threads": threads, "own": core_count_of_this_rank()}))
sys.stdout.flush()
transport.stop()
os._exit(0)
"""


@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 200), min_size=1, max_size=40, unique=True).map(sorted),
)
def test_ranks_have_neighbouring_processors_in_equal_shares_or_take_them_in_turn(ranks, processors):
    shares = [cores_of_rank(rank, ranks, processors) for rank in range(ranks)]
    if len(processors) >= ranks:
        assert [each for share in shares for each in sorted(share)] == processors
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert all(len(share) == 1 for share in shares)
        counts = Counter(each for share in shares for each in share)
        assert set(counts) == set(processors)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert all(first != second for first, second in pairwise(shares)) or len(processors) == 1


@BOUND
def test_all_threads_of_a_rank_keep_to_its_processors(tmp_path: Path) -> None:
    processors = sorted(os.sched_getaffinity(0))
    for rank, found in enumerate(_ranks(tmp_path, 2)):
        own = sorted(cores_of_rank(rank, 2, processors))
        # Some threads are there before the rank joins the others: those of numerical libraries,
        # which one uses not.
        assert found["threads"].count(own) >= 4, "the rank's own and gloo's"
        assert found["own"] == max(1, len(own))


@BOUND
def test_a_rank_that_was_given_processors_of_its_own_keeps_those(tmp_path: Path) -> None:
    processors = sorted(os.sched_getaffinity(0))
    if len(processors) < 2:
        pytest.skip("one processor")
    last = processors[-1]
    for found in _ranks(tmp_path, 2, lambda: os.sched_setaffinity(0, {last})):
        assert found["threads"].count([last]) >= 4
        assert found["own"] == 1


def machine(folder: Path, nodes: dict[str, int], cores: dict[int, str]) -> Path:
    """A /sys with the NUMA nodes of PCI devices, and the processors of each node."""
    for device, node in nodes.items():
        (folder / "bus/pci/devices" / device).mkdir(parents=True)
        (folder / "bus/pci/devices" / device / "numa_node").write_text(f"{node}\n")
    for node, text in cores.items():
        (folder / f"devices/system/node/node{node}").mkdir(parents=True)
        (folder / f"devices/system/node/node{node}/cpulist").write_text(f"{text}\n")
    return folder


def test_a_gpus_processors_are_those_of_its_numa_node(tmp_path: Path) -> None:
    devices = {"0000:19:00.0": 0, "0000:cd:00.0": 1, "0000:01:00.0": -1, "0000:02:00.0": 2}
    system = machine(tmp_path, devices, {0: "0-1,8-9", 1: "2-3,10", 2: ""})
    near = {
        device: sorted(cores_near_device(device, system)) for device in (*devices, "0000:ff:00.0")
    }
    assert list(near.values()) == [[0, 1, 8, 9], [2, 3, 10], [], [], []]


@BOUND
@pytest.mark.parametrize(
    ("own", "parents", "bound"),
    [
        ({0, 1, 2, 3}, {0, 1, 2, 3}, {2, 3}),
        ({1, 2}, {1, 2}, {2}),
        ({0, 1}, {0, 1}, None),
        ({2}, {0, 1, 2, 3}, None),
    ],
    ids=["all", "some", "none is near", "the job manager's"],
)
def test_a_rank_keeps_to_the_processors_near_its_gpu_of_those_that_it_may_use(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: set[int],
    parents: set[int],
    bound: set[int] | None,
) -> None:
    system = machine(tmp_path, {"0000:cd:00.0": 1}, {1: "2-3,10"})
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: parents if process else own)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: found.append(set(cores)))
    pin_near_device("0000:cd:00.0", system)
    assert found == ([] if bound is None else [bound])


def test_the_pci_address_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xCD, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert pci_address(torch.device("cuda", 0)) == "0000:cd:01.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert pci_address(torch.device("cuda", 0)) == "", "an older torch does not tell"


@BOUND
def test_nothing_is_bound_where_the_system_does_not_tell_where_others_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = os.sched_getaffinity

    def own_alone(process: int) -> set[int]:
        if process:
            raise PermissionError
        return told(0)

    monkeypatch.setattr(os, "sched_getaffinity", own_alone)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    pin_to_cores(0, 2)


def _ranks(folder: Path, count: int, before=None) -> list[dict]:
    """What so many ranks say, that meet in a file."""
    started = []
    for rank in range(count):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        env = os.environ | {name: str(each) for name, each in world.items()}
        command = [sys.executable, "-c", _RANK, str(folder / "store")]
        rank_of = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=before,  # noqa: PLW1509
        )
        started.append(rank_of)
    return [json.loads(each.communicate(timeout=120)[0].splitlines()[-1]) for each in started]


@BOUND
def test_ranks_take_turns_where_their_parent_has_fewer_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda process: {0, 1, 2} if process == os.getppid() else {0}
    )
    assert [has_more_ranks_than_cores(ranks) for ranks in (1, 3, 4)] == [False, False, True]
