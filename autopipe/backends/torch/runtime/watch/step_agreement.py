"""Agreement of all ranks on the step after which they save a checkpoint or stop.

At one time the ranks are at different steps, and a step must not wait for an agreement. So a thread
of each rank watches the ranks' store for requests. Protocol of one round:

1. A rank with a request writes the round's key into the store.

2. When a rank's thread sees the key, it sends s_i, the number of steps that rank i has done, to all
ranks. Rank i then completes at most one more step before the round is complete: it waits in
`reach`.

3. All ranks act after step max s_i + 1. No rank has returned from `reach` for this step yet.

There is no deadlock: a rank with fewer steps continues, while its thread takes part in the round.
"""

from __future__ import annotations

import time
from threading import Condition, Thread

from autopipe.backends.torch.runtime.communication.transport import ControlGroup
from autopipe.backends.torch.torch_interfaces import Store

SAVE_REQUEST = "save"
STOP_REQUEST = "stop"
_POLL_INTERVAL_S = 0.5
"""Seconds between looks for requests in the store."""
_CLOSING_POLL_INTERVAL_S = 0.02
"""Seconds between looks after the last step."""


class StepAgreement:
    """One rank's part in the agreement. All ranks create and close it together."""

    def __init__(
        self, store: Store | None, control_group: ControlGroup, save_every_s: float = 0.0
    ) -> None:
        """`store` is None in a world of one rank. With `save_every_s`, rank 0 requests
        `SAVE_REQUEST` whenever this number of seconds has passed; 0 for never.
        """
        self._store = store
        self._group = control_group
        self._every = save_every_s
        self._changed = Condition()
        self._wanted: set[str] = set()
        self._due: dict[int, set[str]] = {}
        self._steps = 0
        self._agreeing = self._closing = False
        self._round = 0
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run, name="agreement", daemon=True)
        self._thread.start()

    def request(self, what: str) -> None:
        """Request `SAVE_REQUEST` or `STOP_REQUEST`. All ranks then agree on the step. Takes no
        lock, so a signal handler may call it.
        """
        self._wanted |= {what}

    def reach(self, steps: int) -> set[str]:
        """Return the requests that all ranks act on after `steps` steps. Must be called after every
        step. Raises an error of the thread.
        """
        with self._changed:
            self._steps = steps
            while self._agreeing:
                self._changed.wait(_POLL_INTERVAL_S)
            if self._failure is not None:
                raise self._failure
            return self._due.pop(steps, set())

    def close(self) -> None:
        """End the thread after the last step, when all ranks have called this."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._store is not None:
            self._store.add("agreement/ended", 1)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._poll_requests(time.monotonic())
        except BaseException as error:  # noqa: BLE001 - raised again by the rank's own thread
            with self._changed:
                self._failure = error
                self._agreeing = False
                self._changed.notify_all()

    def _poll_requests(self, saved: float) -> None:
        while True:
            ended = self._all_ended()
            if self._every and self._group.rank == 0 and time.monotonic() - saved >= self._every:
                saved = time.monotonic()
                self.request(SAVE_REQUEST)
            with self._changed:
                requests = bool(self._wanted) and not self._closing
                if requests and self._store is not None:
                    self._store.set(self._key, "asked")
                self._agreeing = requests or self._has_request()
                mine = self._steps
            if self._agreeing:
                self._agree_on_step(mine)
            elif ended:
                return
            else:
                with self._changed:
                    self._changed.wait(
                        _CLOSING_POLL_INTERVAL_S if self._closing else _POLL_INTERVAL_S
                    )

    @property
    def _key(self) -> str:
        return f"agreement/{self._round}"

    def _has_request(self) -> bool:
        """Return True if a rank has written the key of the current round."""
        return (
            self._store is not None
            and self._store.check([self._key])
            and bool(self._store.get(self._key))
        )

    def _all_ended(self) -> bool:
        if self._store is None:
            return self._closing
        return self._closing and self._store.add("agreement/ended", 0) == self._group.world_size

    def _agree_on_step(self, mine: int) -> None:
        asked = self._wanted
        self._wanted = set()
        answers = self._group.run_collectively("agreement", lambda: [mine, sorted(asked)])
        with self._changed:
            last = max(steps for steps, _ in answers) + 1
            self._due.setdefault(last, set()).update(what for _, asked in answers for what in asked)
            self._round += 1
            self._agreeing = False
            self._changed.notify_all()
