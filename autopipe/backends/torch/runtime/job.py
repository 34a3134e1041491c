"""The environment variables in which Slurm and Kubernetes describe a job, for `autopipe launch` on
a node and for a rank; and addresses and network interfaces of this machine. The module does not
import torch.

A rank that torchrun, `autopipe launch` or a PyTorchJob has started finds torch's variables: RANK,
WORLD_SIZE, MASTER_ADDR. A task that Slurm's `srun` has started finds Slurm's variables of the job
step. Variables that Slurm sets for a batch script are not used, because they describe the job and
not a job step.
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
"""The loopback address of IPv4."""
_SIOCGIFADDR = 0x8915
_IFREQ_BYTES = 256
"""Size of a buffer for the kernel's `struct ifreq`, with room to spare."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and port of the rendezvous, the store through which the launches of several nodes
    find each other, as this machine resolves them.
    """

    address: str
    port: int
    own: str
    """Address of this machine's network interface on the route to `address`."""


def parse_endpoint(text: str) -> Endpoint:
    """Return the endpoint in `text`, which has the form `HOST:PORT` or `[HOST]:PORT`. Raise
    ConfigurationError if the text has another form, if the host has no address or this machine no
    route to it, or if the host name resolves to an address that other machines cannot reach.
    """
    host, _, digits = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    where = f"--rdzv-endpoint {text}"
    if not host or not digits.isdecimal() or int(digits) >= 2**16:
        raise ConfigurationError(
            f"the rendezvous endpoint is {text!r}, expected HOST:PORT", where=where
        )
    try:
        found = socket.getaddrinfo(host, int(digits), type=socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError) as error:
        raise ConfigurationError(
            f"the address of rendezvous host {host!r} is unknown: {error}", where=where
        ) from error
    address = str(found[0])
    meant = ipaddress.ip_address(address)
    # A loopback address is accepted only if the user wrote it, because the hostname of this machine
    # may resolve to one by accident.
    if meant.is_unspecified or (
        meant.is_loopback and host != "localhost" and not _is_address(host)
    ):
        hint = "use the address of a network interface that all nodes can reach"
        raise ConfigurationError(
            f"{host} is {address} on this machine, which other machines cannot reach",
            hint=hint,
            where=where,
        )
    # The connection of a UDP socket sends no packet. It only makes the system choose the local
    # address of the route to the host.
    with socket.socket(socket_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, int(digits)))
        except OSError as error:
            raise ConfigurationError(
                f"this machine has no route to {address}: {error.strerror}", where=where
            ) from error
        return Endpoint(address, int(digits), str(probe.getsockname()[0]))


def _is_address(host: str) -> bool:
    """Return True if `host` is an IPv4 or IPv6 address, not a name."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def socket_family(address: str) -> socket.AddressFamily:
    """Return the socket family of `address`, an IPv4 or IPv6 address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_of(address: str) -> str:
    """Return the name of the network interface of this machine that has the address `address`. Of
    an interface's IPv4 addresses, only the first is considered. Any IPv4 loopback address matches
    the loopback interface. Raise ConfigurationError if no interface has the address.
    """
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback and wanted.version == 4:
        wanted = ipaddress.ip_address(LOOPBACK)
    for _, name in socket.if_nameindex():
        if wanted in _addresses_of_interface(name):
            return name
    hint = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the ranks"
    raise ConfigurationError(
        f"{address} is not the first address of a network interface", hint=hint
    )


def _addresses_of_interface(
    interface: str,
) -> Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Yield the first IPv4 address and all IPv6 addresses of a network interface of this
    machine.
    """
    request = struct.pack(f"{_IFREQ_BYTES}s", interface.encode()[:15])
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


_FIRST_PORT = 20000
"""First port that a Slurm job step may use for its rendezvous."""
_PORT_COUNT = 10000
"""Number of ports that Slurm job steps may use for their rendezvous. All of them are below the
range in which Linux by default chooses ports for outgoing connections.
"""
NETWORK_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_SOCKET_IFNAME",
)
"""Environment variables of gloo, NCCL and CUDA that must be equal on all ranks.
docs/guides/multi-node.md describes each of them.
"""


@dataclass(frozen=True, slots=True)
class ManagedJob:
    """The job of a job manager (Slurm or Kubernetes) to which this launch, one per node,
    belongs.
    """

    manager: str
    nodes: str
    """Number of nodes, such as `2`, or minimum and maximum number, such as `1:4`."""
    node: int | None
    """Index of this node in the job; None if unknown."""
    endpoint: str
    """The rendezvous as HOST:PORT; "" if unknown."""
    ranks_per_node: int | None = None
    name: str = ""
    hosts: tuple[str, ...] = ()
    """Host names by index of the node; () if unknown."""


def detect_job(environment: Mapping[str, str]) -> ManagedJob | None:
    """Return the job of the job manager that started this launch on several nodes, as described by
    `environment`. Return None without a job manager, or if Slurm started one launch on a single
    node. Raise ConfigurationError if a variable is invalid, or if Slurm started more than one
    launch per node.
    """
    # Kubernetes' training operator sets the PET_ variables, which configure torchrun.
    if "PET_NNODES" in environment:
        return _job_from_pet_variables(environment)
    if "SLURM_STEP_NODELIST" not in environment:
        return None
    hosts = parse_hosts(environment["SLURM_STEP_NODELIST"])
    tasks = _integer_variable(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if tasks > len(hosts):
        hint = (
            "use srun --ntasks-per-node=1 autopipe launch PROGRAM, or srun python "
            "PROGRAM/run.py with one task per rank"
        )
        raise ConfigurationError(
            (
                f"srun starts {tasks} {plural(tasks, 'launch')} on {len(hosts)} "
                f"{plural(len(hosts), 'node')}, expected one per node"
            ),
            hint=hint,
        )
    if len(hosts) == 1:
        return None
    name = f"slurm-{environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    endpoint = f"{hosts[0]}:{_slurm_port(environment)}"
    return ManagedJob(
        "Slurm",
        str(len(hosts)),
        _integer_variable(environment, "SLURM_NODEID"),
        endpoint,
        name=name,
        hosts=hosts,
    )


def _job_from_pet_variables(environment: Mapping[str, str]) -> ManagedJob:
    """Return the job that the PET_ variables of Kubernetes' training operator describe."""
    host, port = (
        environment.get(f"PET_MASTER_{name}", environment.get(f"MASTER_{name}"))
        for name in ("ADDR", "PORT")
    )
    # PET_NPROC_PER_NODE may also be a word such as `auto` or `gpu`. The number of ranks is unknown
    # in this case.
    ranks = environment.get("PET_NPROC_PER_NODE", "")
    return ManagedJob(
        "Kubernetes",
        environment["PET_NNODES"],
        _integer_variable(environment, "PET_NODE_RANK") if "PET_NODE_RANK" in environment else None,
        environment.get("PET_RDZV_ENDPOINT") or (f"{host}:{port}" if host and port else ""),
        int(ranks) if ranks.isdecimal() else None,
        environment.get("PET_RDZV_ID", ""),
    )


def variables_of_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of torch that this rank lacks, derived from the variables of
    the job manager: rank, world size, rendezvous address, and network interface. Empty if nothing
    is missing. Raise ConfigurationError if the job manager's variables are invalid.
    """
    found: dict[str, str] = {}
    if "RANK" not in environment and "SLURM_STEP_NODELIST" in environment:
        hosts = parse_hosts(environment["SLURM_STEP_NODELIST"])
        tasks = _tasks_per_node(environment)
        node = _integer_variable(environment, "SLURM_NODEID")
        if node >= len(tasks):
            raise ConfigurationError(
                f"SLURM_NODEID is {node}, but the job step has {len(tasks)} "
                f"{plural(len(tasks), 'node')}",
                where="SLURM_STEP_TASKS_PER_NODE",
            )
        found = {
            "RANK": str(_integer_variable(environment, "SLURM_PROCID")),
            "WORLD_SIZE": str(sum(tasks)),
            "LOCAL_RANK": str(_integer_variable(environment, "SLURM_LOCALID")),
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
        # A PyTorchJob starts one pod per rank, so each rank is alone on its machine.
        found = {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }
    world = {**environment, **found}
    if (
        int(world.get("LOCAL_WORLD_SIZE", "1")) < int(world.get("WORLD_SIZE", "1"))
        and "MASTER_ADDR" in world
    ):
        # By default, gloo listens on the address of the hostname, which is often the loopback
        # address. So the variables select the interface towards the rendezvous. If this interface
        # is unknown, torch chooses one.
        with contextlib.suppress(ConfigurationError):
            endpoint = f"{world['MASTER_ADDR']}:{world.get('MASTER_PORT', '0')}"
            found |= interface_variables(world, lambda: parse_endpoint(endpoint).own)
    return found


def interface_variables(
    environment: Mapping[str, str], address: Callable[[], str]
) -> dict[str, str]:
    """Return the variables that select the network interface of gloo and of NCCL. A variable that
    is set in `environment` keeps its value; otherwise the value is the interface that has the
    address `address()`. `address` is called only if a variable is missing. Raise ConfigurationError
    if no interface has the address.
    """
    names = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
    given = {name: environment[name] for name in names if environment.get(name)}
    if len(given) == len(names):
        return given
    interface = interface_of(address())
    return {name: form.format(interface) for name, form in names.items()} | given


def parse_hosts(text: str) -> tuple[str, ...]:
    """Return the host names in a list in Slurm's notation, such as `gpu[01-03,7],login1`. Raise
    ConfigurationError if the text is invalid.
    """
    numbers = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
    entry = rf"(?:[^,\[\]]|{numbers})+"
    if not re.fullmatch(rf"{entry}(?:,{entry})*", text):
        raise ConfigurationError(
            f"the list of hosts {text!r} is invalid", where="SLURM_STEP_NODELIST"
        )
    found: list[str] = []
    for each in re.findall(entry, text):
        # The pattern has a group, so `re.split` returns the texts that were in brackets at odd
        # indices.
        parts = re.split(r"\[([^\]]*)\]", each)
        choices = [
            parse_number_ranges(part) if index % 2 else [part] for index, part in enumerate(parts)
        ]
        found += map("".join, product(*choices))
    return tuple(found)


def parse_number_ranges(text: str) -> list[str]:
    """Return the numbers in a list such as `01-03,7`, as strings: `01`, `02`, `03`, `7`. The
    numbers of a range are padded with zeros to the width of its first number.
    """
    found = []
    for each in text.split(","):
        low, _, high = each.partition("-")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high or low) + 1)]
    return found


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """Return the number of tasks on each node of a Slurm job step, parsed from Slurm's notation:
    `2(x3),1` means 2, 2, 2, 1. Raise ConfigurationError if the variable is invalid.
    """
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", ""))
    found: list[int] = []
    for each in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", each)
        if match is None:
            raise ConfigurationError(
                f"the list of tasks per node {text!r} is invalid", where="SLURM_STEP_TASKS_PER_NODE"
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _slurm_port(environment: Mapping[str, str]) -> int:
    """Return the rendezvous port of a Slurm job step, computed from the ids of job and step. All
    tasks of the step get the same port. Consecutive steps and jobs get different ports, so that
    they do not collide on a node.
    """
    job, step = (
        re.sub(r"\D", "", environment.get(f"SLURM_{name}_ID", "")) for name in ("JOB", "STEP")
    )
    return _FIRST_PORT + (int(job or 0) * 31 + int(step or 0)) % _PORT_COUNT


def _integer_variable(environment: Mapping[str, str], *names: str) -> int:
    """Return the integer value of the first variable in `names` that is set. Raise
    ConfigurationError if none is set, or if the value is not a decimal number.
    """
    text = next((environment[name] for name in names if name in environment), "")
    if not text.isdecimal():
        raise ConfigurationError(f"the variable is {text!r}, expected a number", where=names[0])
    return int(text)
