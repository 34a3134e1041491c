"""Messages that are being sent, each held until it is gone and no longer."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue

from autopipe.backends.torch.runtime.pending import PendingSend

_HELD_BYTES = 4 * 2**20
"""A rank may hold so much of messages that are gone. To have a thread wait for a message takes up to 0.1 ms of the
rank's own time, which is more than small ones take themselves."""


class SendQueue:
    """All messages of a rank that are under way."""

    def __init__(self, watched: bool, most_bytes: int = _HELD_BYTES) -> None:
        """`watched`: only whoever waits for a message learns that it has been sent, as with gloo.

        All are then held until the step's end, up to `most_bytes`; beyond that a thread waits for the earliest.
        """
        self._watched = watched
        self._most_bytes = most_bytes
        self._under_way: deque[PendingSend] = deque()
        self._held_bytes = 0
        self._given: SimpleQueue[PendingSend | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._waiting = 0
        self._error: RuntimeError | None = None

    def add(self, departure: PendingSend) -> None:
        """Hold a message until it is gone. Raises what an earlier one ended with."""
        self._check()
        self._under_way.append(departure)
        self._held_bytes += departure.bytes
        if not self._watched:
            while self._under_way and self._under_way[0].is_gone():
                self._earliest()
            return
        while self._held_bytes > self._most_bytes:
            self._watch(self._earliest())

    def _earliest(self) -> PendingSend:
        earliest = self._under_way.popleft()
        self._held_bytes -= earliest.bytes
        return earliest

    def _watch(self, departure: PendingSend) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_each, name="departures", daemon=True)
            self._thread.start()
        with self._changed:
            self._waiting += 1
        self._given.put(departure)

    def finish(self) -> None:
        """Wait until all are gone. Raises what one ended with."""
        while self._under_way:
            self._earliest().wait()
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._error is not None)
        self._check()

    def close(self) -> None:
        """Wait for nothing any more."""
        if self._thread is not None:
            self._given.put(None)
            self._thread.join()
            self._thread = None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wait_for_each(self) -> None:
        while True:
            departure = self._given.get()
            if departure is None:
                return
            try:
                departure.wait()
            except RuntimeError as error:  # The rank's own thread shall end with it.
                self._error = error
            del departure
            with self._changed:
                self._waiting -= 1
                self._changed.notify()
