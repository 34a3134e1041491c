"""Addresses of this machine: where a launch listens, and on no other."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from autopipe.ir.errors import ConfigurationError

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
        raise ConfigurationError(f"the meeting point has no address: {error}", where=where) from error
    address = str(found[0])
    if ipaddress.ip_address(address).is_unspecified or _is_hidden(host, address):
        hint = "give the address of the interface that the nodes shall use"
        raise ConfigurationError(f"{host} is {address} here, where no other machine comes", hint=hint, where=where)
    return Endpoint(address, int(digits), _own_address(address, int(digits), where))


def _is_hidden(host: str, address: str) -> bool:
    """Whether a name of this machine stands for its loopback address here alone."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost" and ipaddress.ip_address(address).is_loopback
    return False


def _own_address(address: str, port: int, where: str) -> str:
    """Where packets to the address would come from; no packet is sent."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise ConfigurationError(f"there is no way to {address}: {error.strerror}", where=where) from error
        return str(probe.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def listener(address: str, port: int) -> socket.socket | None:
    """A socket that listens at this address and no other; port 0 stands for any. None where another process does."""
    made = socket.socket(_family(address), socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((address, port))
        made.listen(socket.SOMAXCONN)
    except OSError:
        made.close()
        return None
    return made


def interface_of(address: str) -> str:
    """The name of the interface with this address, the first of its addresses. Raises ConfigurationError."""
    wanted = ipaddress.ip_address(address)
    if wanted.is_loopback and wanted.version == 4:
        wanted = ipaddress.ip_address(LOOPBACK)
    for _, name in socket.if_nameindex():
        if wanted in (_first_address(name), *_long_addresses(name)):
            return name
    raise ConfigurationError(
        f"no interface has {address} as its first address",
        hint="GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the one that ranks shall use",
    )


def _first_address(interface: str) -> ipaddress.IPv4Address | None:
    request = struct.pack(f"{_REQUEST}s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError:
            return None
    return ipaddress.IPv4Address(answer[20:24])


def _long_addresses(interface: str) -> list[ipaddress.IPv6Address]:
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()]
    except OSError:
        return []
    return [ipaddress.IPv6Address(bytes.fromhex(row[0])) for row in rows if row[-1] == interface]
