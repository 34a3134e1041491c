"""Slurm's and Kubernetes' variables as a launch and a rank take them."""

from __future__ import annotations

import os

import pytest
import torch

from autopipe.backends.torch.runtime.communication import transport
from autopipe.backends.torch.runtime.job import (
    ManagedJob,
    detect_job,
    parse_hosts,
    variables_of_rank,
)
from autopipe.ir.errors import ConfigurationError

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[09-10]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "GLOO_SOCKET_IFNAME": "ib0",
    "NCCL_SOCKET_IFNAME": "ib0",
}
PORT = 20000 + (4711 * 31 + 2) % 10000
POD = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[1-2]", ["gpu1", "gpu2"]),
        ("gpu[08-10,12],login", ["gpu08", "gpu09", "gpu10", "gpu12", "login"]),
        ("r[1-2]-n[3,5]x", ["r1-n3x", "r1-n5x", "r2-n3x", "r2-n5x"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_hosts_of_slurms_list(text: str, hosts: list[str]) -> None:
    assert list(parse_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["", "gpu[a-b]", "gpu[1-]x]", "gpu[]"])
def test_a_list_that_is_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="SLURM_STEP_NODELIST"):
        parse_hosts(text)


def test_a_task_of_srun_has_torchs_variables() -> None:
    found = variables_of_rank(STEP)
    world = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    networks = {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    assert found == world | networks | {"MASTER_ADDR": "gpu09", "MASTER_PORT": str(PORT)}


def test_tasks_are_counted_by_node() -> None:
    many = STEP | {
        "SLURM_STEP_NODELIST": "n[1-4]",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),1,3",
        "SLURM_NODEID": "3",
    }
    found = variables_of_rank(many | {"SLURM_PROCID": "11", "SLURM_LOCALID": "2"})
    assert [found[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == [
        "11",
        "2",
        "12",
        "3",
    ]
    with pytest.raises(ConfigurationError, match="SLURM_NODEID is 4"):
        variables_of_rank(many | {"SLURM_NODEID": "4"})


def test_one_node_meets_on_itself_and_a_given_address_is_kept() -> None:
    alone = STEP | {
        "SLURM_STEP_NODELIST": "gpu9",
        "SLURM_STEP_TASKS_PER_NODE": "3",
        "SLURM_NODEID": "0",
    }
    assert variables_of_rank(alone)["MASTER_ADDR"] == "127.0.0.1"
    given = {"MASTER_ADDR": "gpu9-ib", "MASTER_PORT": "1234"}
    found = variables_of_rank(STEP | given)
    assert {name: found[name] for name in given} == given


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        STEP | {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        {"RANK": "1", "WORLD_SIZE": "2"},
    ],
    ids=["nothing", "a batch script", "a rank of a launch in a step", "by hand"],
)
def test_what_has_torchs_variables_or_no_manager_is_left_as_it_is(
    environment: dict[str, str],
) -> None:
    assert variables_of_rank(environment) == {}


def test_a_pod_has_one_rank_of_its_own() -> None:
    pod = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "no.such.host.invalid",
    }
    assert variables_of_rank(pod) == {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert variables_of_rank(pod | {"MASTER_ADDR": "127.0.0.1"})["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_job_of_a_launch() -> None:
    assert detect_job({}) is None
    launch = STEP | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert detect_job(launch) == ManagedJob(
        "Slurm", "2", 1, f"gpu09:{PORT}", name="slurm-4711.2", hosts=("gpu09", "gpu10")
    )
    assert detect_job(launch | {"SLURM_STEP_NODELIST": "gpu9", "SLURM_STEP_NUM_TASKS": "1"}) is None
    assert detect_job(POD) == ManagedJob("Kubernetes", "2", 1, "job-master-0:23456")
    elastic = {
        "PET_NNODES": "1:4",
        "PET_RDZV_ENDPOINT": "w-0:1",
        "PET_RDZV_ID": "w",
        "PET_NPROC_PER_NODE": "8",
    }
    assert detect_job(elastic) == ManagedJob("Kubernetes", "1:4", None, "w-0:1", 8, "w")
    assert detect_job(POD | {"PET_NPROC_PER_NODE": "gpu"}) == detect_job(POD)


def test_a_launch_for_each_task_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="srun starts 3 launches on 2 nodes") as found:
        detect_job(STEP)
    assert "--ntasks-per-node=1" in found.value.hint


@pytest.mark.parametrize(("visible", "device"), [(4, 3), (1, 0), (8, 3)])
def test_a_task_takes_its_gpu_of_those_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, device: int
) -> None:
    """Where CUDA_VISIBLE_DEVICES shows one GPU to each, that one is number 0."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert transport._choose_device("cuda") == torch.device("cuda", device)
    assert chosen == [device]


@pytest.mark.parametrize(
    ("ranks", "given", "found"), [("1", None, None), ("4", None, "EAGER"), ("4", "LAZY", "LAZY")]
)
def test_several_ranks_load_their_kernels_when_cuda_starts(
    monkeypatch: pytest.MonkeyPatch, ranks: str, given: str | None, found: str | None
) -> None:
    """A kernel that is loaded later may wait for a receive that is posted already."""
    monkeypatch.setattr(
        os,
        "environ",
        {"WORLD_SIZE": ranks} | ({} if given is None else {"CUDA_MODULE_LOADING": given}),
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    transport._choose_device("auto")
    assert os.environ.get("CUDA_MODULE_LOADING") == found
