"""The variables in which Slurm and Kubernetes say where a process runs, for a launch on a node and
for a rank; and addresses and interfaces of this machine, without torch: where nodes find one
another, and on which network.

A rank that torchrun, `autopipe launch` or a PyTorchJob starts finds torch's own: RANK, WORLD_SIZE,
MASTER_ADDR. A task of `srun` finds Slurm's. Those of a batch script, which describe the job and no
step of it, are not looked at.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from autopipe.ir.errors import ConfigurationError
from autopipe.ir.words import plural

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
_REQUEST = 256
"""Bytes of the kernel's `struct ifreq`, and more."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where nodes meet, as this one sees it."""

    address: str
    port: int
    own: str
    """This machine's address on the way there."""


def endpoint_of(text: str) -> Endpoint:
    """The endpoint `HOST:PORT`, or `[HOST]:PORT`. Raises ConfigurationError where it is none."""
    host, _, digits = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    where = f"--rdzv-endpoint {text}"
    if not host or not digits.isdecimal() or int(digits) >= 2**16:
        raise ConfigurationError("the meeting point is not HOST:PORT", where=where)
    try:
        found = socket.getaddrinfo(host, int(digits), type=socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"the meeting point has no address: {error}", where=where
        ) from error
    address = str(found[0])
    meant = ipaddress.ip_address(address)
    # A name of this machine may stand for its loopback address here alone.
    if meant.is_unspecified or (
        meant.is_loopback and host != "localhost" and not _is_address(host)
    ):
        hint = "give the address of the interface that the nodes shall use"
        raise ConfigurationError(
            f"{host} is {address} here, where no other machine comes", hint=hint, where=where
        )
    # Where packets to the address would come from; no packet is sent.
    with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, int(digits)))
        except OSError as error:
            raise ConfigurationError(
                f"there is no way to {address}: {error.strerror}", where=where
            ) from error
        return Endpoint(address, int(digits), str(probe.getsockname()[0]))


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_of(address: str) -> str:
    """The name of the interface with this address, the first of its addresses. Raises
    ConfigurationError.
    """
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback and wanted.version == 4:
        wanted = ipaddress.ip_address(LOOPBACK)
    for _, name in socket.if_nameindex():
        if wanted in _addresses(name):
            return name
    hint = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the one that ranks shall use"
    raise ConfigurationError(f"no interface has {address} as its first address", hint=hint)


def _addresses(interface: str) -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The first address of version 4 of an interface, and all of version 6."""
    request = struct.pack(f"{_REQUEST}s", interface.encode()[:15])
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket,
    ):
        yield ipaddress.IPv4Address(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            row = line.split()
            if row[-1] == interface:
                yield ipaddress.IPv6Address(bytes.fromhex(row[0]))


# Below those that Linux gives to connections.
_FIRST_PORT = 20000
_PORTS = 10000
NETWORK_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_SOCKET_IFNAME",
)
"""Variables that all ranks of a program must agree on; docs/guides/multi-node.md says what each does."""


@dataclass(frozen=True, slots=True)
class Job:
    """A launch's place among a job's nodes."""

    manager: str
    nodes: str  # `2`, or fewest and most as in `1:4`.
    node: int | None  # This one's number.
    endpoint: str
    ranks_per_node: int | None = None
    name: str = ""
    hosts: tuple[str, ...] = ()  # By node, where the manager says.


def job_of(environment: Mapping[str, str]) -> Job | None:
    """The job whose manager started this launch; None where none of several nodes did. Raises
    ConfigurationError.
    """
    if "PET_NNODES" in environment:  # Kubernetes' training operator, in torchrun's words.
        return _pet_job(environment)
    if "SLURM_STEP_NODELIST" not in environment:
        return None
    hosts = hosts_of(environment["SLURM_STEP_NODELIST"])
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks > len(hosts):
        hint = (
            "srun --ntasks-per-node=1 autopipe launch PROGRAM, or srun python PROGRAM/run.py with "
            "a task for each rank"
        )
        raise ConfigurationError(
            (
                f"srun starts {tasks} {plural(tasks, 'launch')} on {len(hosts)} "
                f"{plural(len(hosts), 'node')}"
            ),
            hint=hint,
        )
    if len(hosts) == 1:
        return None
    name = f"slurm-{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    endpoint = f"{hosts[0]}:{_slurm_port(environment)}"
    return Job(
        "Slurm",
        str(len(hosts)),
        _number(environment, "SLURM_NODEID"),
        endpoint,
        name=name,
        hosts=hosts,
    )


def _pet_job(environment: Mapping[str, str]) -> Job:
    host, port = (
        environment.get(f"PET_MASTER_{name}", environment.get(f"MASTER_{name}"))
        for name in ("ADDR", "PORT")
    )
    ranks = environment.get("PET_NPROC_PER_NODE", "")  # Or `auto`, `gpu`.
    return Job(
        "Kubernetes",
        environment["PET_NNODES"],
        _number(environment, "PET_NODE_RANK") if "PET_NODE_RANK" in environment else None,
        environment.get("PET_RDZV_ENDPOINT") or (f"{host}:{port}" if host and port else ""),
        int(ranks) if ranks.isdecimal() else None,
        environment.get("PET_RDZV_ID", ""),
    )


def variables_of_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Torch's variables of a rank that has none, or not all: its place in the world, the address
    where ranks meet, and the interface on the way there. Raises ConfigurationError.
    """
    found: dict[str, str] = {}
    if "RANK" not in environment and "SLURM_STEP_NODELIST" in environment:
        hosts = hosts_of(environment["SLURM_STEP_NODELIST"])
        tasks = _tasks_of(environment)
        node = _number(environment, "SLURM_NODEID")
        if node >= len(tasks):
            raise ConfigurationError(f"there is no node {node}", where="SLURM_STEP_TASKS_PER_NODE")
        found = {
            "RANK": str(_number(environment, "SLURM_PROCID")),
            "WORLD_SIZE": str(sum(tasks)),
            "LOCAL_RANK": str(_number(environment, "SLURM_LOCALID")),
            "LOCAL_WORLD_SIZE": str(tasks[node]),
            "MASTER_ADDR": environment.get("MASTER_ADDR")
            or (hosts[0] if len(hosts) > 1 else LOOPBACK),
            "MASTER_PORT": environment.get("MASTER_PORT") or str(_slurm_port(environment)),
        }
    elif (
        "LOCAL_RANK" not in environment
        and "KUBERNETES_SERVICE_HOST" in environment
        and "RANK" in environment
    ):
        found = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # A pod for each rank.
    world = {**environment, **found}
    if (
        int(world.get("LOCAL_WORLD_SIZE", "1")) < int(world.get("WORLD_SIZE", "1"))
        and "MASTER_ADDR" in world
    ):
        # A machine's name often stands for its loopback address on itself, and gloo would listen
        # there. Where it does so here, torch is left to find an interface.
        with contextlib.suppress(ConfigurationError):
            endpoint = f"{world['MASTER_ADDR']}:{world.get('MASTER_PORT', '0')}"
            found |= interface_variables(world, lambda: endpoint_of(endpoint).own)
    return found


def interface_variables(
    environment: Mapping[str, str], address: Callable[[], str]
) -> dict[str, str]:
    """The interface that gloo and NCCL use: the one with the address, where the environment does
    not name it. Raises ConfigurationError.
    """
    names = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
    given = {name: environment[name] for name in names if environment.get(name)}
    if len(given) == len(names):
        return given
    interface = interface_of(address())
    return {name: form.format(interface) for name, form in names.items()} | given


def hosts_of(text: str) -> tuple[str, ...]:
    """The hosts of Slurm's list, such as `gpu[01-03,7],login1`. Raises ConfigurationError."""
    numbers = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
    entry = rf"(?:[^,\[\]]|{numbers})+"
    if not re.fullmatch(rf"{entry}(?:,{entry})*", text):
        raise ConfigurationError(f"{text!r} is no list of hosts", where="SLURM_STEP_NODELIST")
    found: list[str] = []
    for each in re.findall(entry, text):
        parts = re.split(r"\[([^\]]*)\]", each)  # Every second part is of numbers.
        choices = [numbers_of(part) if place % 2 else [part] for place, part in enumerate(parts)]
        found += map("".join, product(*choices))
    return tuple(found)


def numbers_of(text: str) -> list[str]:
    """`01-03,7` as its numbers, each as wide as it is written."""
    found = []
    for each in text.split(","):
        low, _, high = each.partition("-")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return found


def _tasks_of(environment: Mapping[str, str]) -> list[int]:
    """Tasks of each node, from Slurm's `2(x3),1`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    found: list[int] = []
    for each in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each)
        if match is None:
            raise ConfigurationError(
                f"{text!r} is no list of numbers of tasks", where="SLURM_STEP_TASKS_PER_NODE"
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _slurm_port(environment: Mapping[str, str]) -> int:
    """A port that all tasks of a step work out, and another for the next step or job on the same
    node.
    """
    job, step = (
        re.sub(r"\D", "", environment.get(f"SLURM_{name}_ID", "")) for name in ("JOB", "STEP")
    )
    return _FIRST_PORT + (int(job or 0) * 31 + int(step or 0)) % _PORTS


def _number(environment: Mapping[str, str], *names: str) -> int:
    """The first of the variables that is there."""
    text = next((environment[name] for name in names if name in environment), "")
    if not text.isdecimal():
        raise ConfigurationError(f"{text!r} is no number", where=names[0])
    return int(text)
