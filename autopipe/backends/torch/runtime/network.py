"""Addresses and interfaces of this machine, without torch: where nodes find one another, and on which network."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
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
    meant = ipaddress.ip_address(address)
    # A name of this machine may stand for its loopback address here alone.
    if meant.is_unspecified or (meant.is_loopback and host != "localhost" and not _is_address(host)):
        hint = "give the address of the interface that the nodes shall use"
        raise ConfigurationError(f"{host} is {address} here, where no other machine comes", hint=hint, where=where)
    # Where packets to the address would come from; no packet is sent.
    with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, int(digits)))
        except OSError as error:
            raise ConfigurationError(f"there is no way to {address}: {error.strerror}", where=where) from error
        return Endpoint(address, int(digits), str(probe.getsockname()[0]))


def _is_address(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_of(address: str) -> str:
    """The name of the interface with this address, the first of its addresses. Raises ConfigurationError."""
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
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        yield ipaddress.IPv4Address(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            row = line.split()
            if row[-1] == interface:
                yield ipaddress.IPv6Address(bytes.fromhex(row[0]))
