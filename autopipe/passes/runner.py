"""Runs passes one by one: requirements, the pass, the check of its result; times them and names them in failures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar, cast

from autopipe.ir.errors import AutopipeError, InternalError

Result = TypeVar("Result")


class Observer(Protocol):
    """Hears what the runner does."""

    def started(self, name: str) -> None:
        """A pass begins."""

    def finished(self, name: str, value: object, seconds: float) -> None:
        """A pass gave `value`, which has been checked."""

    def improved(self, step_s: float, bound_s: float) -> None:
        """There is a plan with a shorter step than any before; no placement so far can have one below `bound_s`."""

    def failed(self, error: InternalError) -> None:
        """A candidate, one of several, ended with an internal error, and is left out unless this raises."""


class NullObserver:
    """An observer that does nothing."""

    def started(self, name: str) -> None:
        """Say nothing."""

    def finished(self, name: str, value: object, seconds: float) -> None:
        """Say nothing."""

    def improved(self, step_s: float, bound_s: float) -> None:
        """Say nothing."""

    def failed(self, error: InternalError) -> None:
        """Say nothing."""


class Runner:
    """One run of a sequence of passes."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._seconds: dict[str, float] = {}
        self._known: dict[object, object] = {}
        self.failures = 0
        """How much of what was tried ended with a mistake of ours."""

    def silenced(self) -> Runner:
        """A runner that knows what this one does, and tells nobody."""
        quiet = Runner(NullObserver())
        quiet._known = self._known
        return quiet

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """Wall-clock seconds by pass, in the order in which they first ran."""
        return tuple(self._seconds.items())

    def improved(self, step_s: float, bound_s: float) -> None:
        """Tell of a plan with a shorter step than any before, and of what none so far can be below."""
        self._observer.improved(step_s, bound_s)

    def failed(self, error: InternalError) -> None:
        """Tell of something tried, one of several, that ended with a mistake of ours."""
        self.failures += 1
        self._observer.failed(error)

    def once(self, name: str, key: object, compute: Callable[[], Result]) -> Result:
        """`compute()` as a pass, the first time that it is asked for under `key`; the same result again after that."""
        return self.known((name, key), lambda: self.run(name, compute))

    def known(self, key: object, compute: Callable[[], Result]) -> Result:
        """`compute()`, the first time that it is asked for under `key`; the same result again after that."""
        if key not in self._known:
            self._known[key] = compute()
        return cast(Result, self._known[key])

    def run(
        self,
        name: str,
        compute: Callable[[], Result],
        requires: Callable[[], None] | None = None,
        verify: Callable[[Result], None] | None = None,
    ) -> Result:
        """`compute()` between its requirements and the check of its result.

        A failure is told with the name of the pass and of those before it.
        """
        self._observer.started(name)
        begin = time.perf_counter()
        try:
            if requires is not None:
                requires()
            result = compute()
            if verify is not None:
                verify(result)
        except AutopipeError as error:
            if not error.where:
                error.where = self._place(name)
            if type(error) is AutopipeError:  # of a solver: nobody's choice and no fault of the model
                raise InternalError(error.message, error.hint or "rerun with --debug", error.where) from error
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InternalError(f"internal error: {reason}", "rerun with --debug", self._place(name)) from error
        seconds = time.perf_counter() - begin
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._observer.finished(name, result, seconds)
        return result

    def _place(self, name: str) -> str:
        done = [each for each in self._seconds if each != name]
        return f"pass {name}" + (f", after {', '.join(done)}" if done else "")
