"""JSON objects, a line each, over a socket between a worker pool and its workers."""

from __future__ import annotations

import json
import socket
from typing import Any


class JsonSocket:
    """One end of such a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rb")

    def fileno(self) -> int:
        """File descriptor for `select`."""
        return self._end.fileno()

    def send(self, form: dict[str, Any]) -> None:
        """Say it; a form has lists, dicts and scalars."""
        self._end.sendall(json.dumps(form).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Read the next object. Raises EOFError where the other end has closed."""
        text = self._file.readline()
        if not text.endswith(b"\n"):
            raise EOFError
        found: dict[str, Any] = json.loads(text)
        return found

    def close(self) -> None:
        """Say no more."""
        self._file.close()
        self._end.close()
