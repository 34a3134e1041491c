"""Acting after the same step on all ranks, once any of them asks for it.

Ranks are at different steps at any one time, and a step must not wait for such an agreement. So a
thread of each rank looks for requests in the ranks' store. Once it has told the others how many
steps its rank has done, that rank begins no step after its next one before it knows theirs; all act
after the largest of them plus one. Nobody waits for a rank that waits: who is behind goes on, up to
that step, and its thread answers meanwhile.
"""

from __future__ import annotations

import time
from threading import Condition, Thread

from autopipe.backends.torch.runtime.communication.transport import ControlGroup
from autopipe.backends.torch.torch_interfaces import Store

SAVE = "save"
STOP = "stop"
_LOOK_S = 0.5
_CLOSING_LOOK_S = 0.02


class StepAgreement:
    """One rank's part. All ranks make one, and end it, together."""

    def __init__(
        self, store: Store | None, control_group: ControlGroup, save_every_s: float = 0.0
    ) -> None:
        """`store` may be None where the rank is the only one. With `save_every_s` the first rank
        asks for a save whenever that many seconds have gone by.
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
        """Ask for something, after a step that all will agree on. Safe in a signal handler: it
        takes no lock.
        """
        self._wanted |= {what}

    def reach(self, steps: int) -> set[str]:
        """To be called after every step with the number of steps done: what all ranks do now."""
        with self._changed:
            self._steps = steps
            while self._agreeing:
                self._changed.wait(_LOOK_S)
            if self._failure is not None:
                raise self._failure
            return self._due.pop(steps, set())

    def close(self) -> None:
        """After the last step: serve the requests of others until all ranks are here."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._store is not None:
            self._store.add("agreement/ended", 1)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._look(time.monotonic())
        except BaseException as error:  # noqa: BLE001 - raised again by the rank's own thread
            with self._changed:
                self._failure = error
                self._agreeing = False
                self._changed.notify_all()

    def _look(self, saved: float) -> None:
        while True:
            ended = self._all_ended()
            if self._every and self._group.rank == 0 and time.monotonic() - saved >= self._every:
                saved = time.monotonic()
                self.request(SAVE)
            with self._changed:
                requests = bool(self._wanted) and not self._closing
                if requests and self._store is not None:
                    self._store.set(self._key, "asked")
                self._agreeing = requests or self._has_request()
                mine = self._steps
            if self._agreeing:
                self._agree(mine)
            elif ended:
                return
            else:
                with self._changed:
                    self._changed.wait(_CLOSING_LOOK_S if self._closing else _LOOK_S)

    @property
    def _key(self) -> str:
        return f"agreement/{self._round}"

    def _has_request(self) -> bool:
        """Raises LaunchError where somebody else has written it."""
        return (
            self._store is not None
            and self._store.check([self._key])
            and bool(self._store.get(self._key))
        )

    def _all_ended(self) -> bool:
        if self._store is None:
            return self._closing
        return self._closing and self._store.add("agreement/ended", 0) == self._group.world_size

    def _agree(self, mine: int) -> None:
        asked = self._wanted
        self._wanted = set()
        answers = self._group.run_collectively("agreement", lambda: [mine, sorted(asked)])
        with self._changed:
            last = max(steps for steps, _ in answers) + 1
            self._due.setdefault(last, set()).update(what for _, asked in answers for what in asked)
            self._round += 1
            self._agreeing = False
            self._changed.notify_all()
