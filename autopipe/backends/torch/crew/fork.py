"""`autopipe.backends.torch.crew.fork STORE END...`: a rank for each end of a socket, copies of one process.

Torch is imported once, which takes seconds, and all ranks have it.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys

from autopipe.backends.torch.child import end_with
from autopipe.backends.torch.crew.line import JsonSocket
from autopipe.backends.torch.crew.member import serve

_IMPORTED = ("torch", "torch.distributed", "torch._dynamo", "autopipe.backends.torch.runtime")
"""Modules that every rank needs; optimizers import torch._dynamo, a second each."""


def main() -> None:
    """Make the ranks, and end with the last of them."""
    store, ends = sys.argv[1], [int(end) for end in sys.argv[2:]]
    for name in _IMPORTED:
        importlib.import_module(name)
    parent = os.getpid()
    for rank, end in enumerate(ends):
        if os.fork() == 0:
            end_with(parent)
            for other in ends:
                if other != end:  # Held open here, it would hide the other rank's death.
                    os.close(other)
            serve(rank, len(ends), store, JsonSocket(socket.socket(fileno=end)))
    for end in ends:
        os.close(end)
    for _ in ends:
        os.wait()


if __name__ == "__main__":
    main()
