"""Messages that are being sent, each held until it is gone and no longer."""

from __future__ import annotations

import threading
from collections import deque
from queue import SimpleQueue

from autopipe.backends.torch.runtime.pending import Departure


class Departures:
    """All messages of a rank that are under way."""

    def __init__(self, watched: bool) -> None:
        """`watched` where only who waits for a message learns that it is gone: a thread does that then.

        Gloo is like that: without it all that a step sends would stay until the step's end.
        """
        self._watched = watched
        self._under_way: deque[Departure] = deque()
        self._given: SimpleQueue[Departure | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._waiting = 0
        self._error: RuntimeError | None = None

    def add(self, departure: Departure) -> None:
        """Hold a message until it is gone. Raises what an earlier one ended with."""
        if not self._watched:
            self._under_way.append(departure)
            while self._under_way and self._under_way[0].is_gone():
                self._under_way.popleft()
            return
        self._check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_each, name="departures", daemon=True)
            self._thread.start()
        with self._changed:
            self._waiting += 1
        self._given.put(departure)

    def finish(self) -> None:
        """Wait until all are gone. Raises what one ended with."""
        while self._under_way:
            self._under_way.popleft().wait()
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
