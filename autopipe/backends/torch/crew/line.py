"""What a crew's processes and the one that leads them say to each other: JSON objects, a line each, over a socket."""

from __future__ import annotations

import json
import socket
from typing import Any


class Line:
    """One end of such a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rb")

    def fileno(self) -> int:
        """What `select` waits on."""
        return self._end.fileno()

    def send(self, form: dict[str, Any]) -> None:
        """Say it; a form has lists, dicts and scalars."""
        self._end.sendall(json.dumps(form).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """What the other end says next. Raises EOFError where it has closed."""
        text = self._file.readline()
        if not text.endswith(b"\n"):
            raise EOFError
        found: dict[str, Any] = json.loads(text)
        return found

    def close(self) -> None:
        """Say no more."""
        self._file.close()
        self._end.close()
