"""Agreement of all ranks on the step after which they save a checkpoint or stop.

At one time, ranks are at different steps, and a step must not wait for an agreement. So each rank
has a thread that looks for requests in the store that all ranks share. Protocol of one round of
agreement:

1. A rank with a request writes the key of the round to the store.

2. When the thread of rank i finds the key, it sends s_i, the number of steps that rank i has done,
to all ranks. Until the round is complete, rank i completes at most one more step: then it waits in
`requests_after`.

3. All ranks act on the request after step max s_i + 1. No rank has returned from `requests_after`
for this step before.

There is no deadlock: a rank that has done fewer steps continues, while its thread takes part in the
round.
"""

from __future__ import annotations

import time
from threading import Condition, Thread

from autopipe.backends.torch.runtime.communication.transport import ControlGroup
from autopipe.backends.torch.torch_interfaces import Store

SAVE_REQUEST = "save"
STOP_REQUEST = "stop"
_POLL_INTERVAL_S = 0.5
"""Seconds between two looks for requests in the store."""
_CLOSING_POLL_INTERVAL_S = 0.02
"""Seconds between two looks for requests after the last step."""


class StepAgreement:
    """One rank's part in the agreements of a run. All ranks must create it and close it
    together.
    """

    def __init__(
        self, store: Store | None, control_group: ControlGroup, save_every_s: float = 0.0
    ) -> None:
        """Start the thread. `store` is the store that all ranks share, None in a world of one rank.
        `save_every_s` is the number of seconds after which rank 0 repeatedly requests
        `SAVE_REQUEST`; 0 for never.
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
        """Request `SAVE_REQUEST` or `STOP_REQUEST` from all ranks, which then agree on the step. A
        signal handler may call this, because it takes no lock.
        """
        self._wanted |= {what}

    def requests_after(self, steps: int) -> set[str]:
        """Return the requests on which all ranks act after `steps` steps. Must be called after each
        step. Waits while a round of agreement runs. Raise the error that ended the thread, if there
        is one.
        """
        with self._changed:
            self._steps = steps
            while self._agreeing:
                self._changed.wait(_POLL_INTERVAL_S)
            if self._failure is not None:
                raise self._failure
            return self._due.pop(steps, set())

    def close(self) -> None:
        """End the thread. Must be called on all ranks after the last step; the thread ends when all
        ranks have called it.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._store is not None:
            self._store.add("agreement/ended", 1)
        self._thread.join()

    def _run(self) -> None:
        """Run the thread; keep an error for `requests_after`."""
        try:
            self._poll_requests(time.monotonic())
        except BaseException as error:  # noqa: BLE001 - raised again by the rank's own thread
            with self._changed:
                self._failure = error
                self._agreeing = False
                self._changed.notify_all()

    def _poll_requests(self, saved: float) -> None:
        """Look for requests and take part in rounds, until all ranks have called `close`. `saved`
        is the time at which the interval of `save_every_s` begins, of the monotonic clock.
        """
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
        """Store key that a rank writes to start the current round, in which all ranks agree on a
        step.
        """
        return f"agreement/{self._round}"

    def _has_request(self) -> bool:
        """Return True if any rank has requested the current round of agreement, by writing its key
        to the store.
        """
        return (
            self._store is not None
            and self._store.check([self._key])
            and bool(self._store.get(self._key))
        )

    def _all_ended(self) -> bool:
        """Return True if all ranks have called `close`."""
        if self._store is None:
            return self._closing
        return self._closing and self._store.add("agreement/ended", 0) == self._group.world_size

    def _agree_on_step(self, mine: int) -> None:
        """Run one round: exchange the numbers of steps done and the requests, and determine the
        step after which all ranks act on the requests. `mine` is the number of steps that this rank
        has done. Collective over all ranks.
        """
        asked = self._wanted
        self._wanted = set()
        answers = self._group.run_collectively("agreement", lambda: [mine, sorted(asked)])
        with self._changed:
            last = max(steps for steps, _ in answers) + 1
            self._due.setdefault(last, set()).update(what for _, asked in answers for what in asked)
            self._round += 1
            self._agreeing = False
            self._changed.notify_all()
