"""One job at a time beside the steps, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread


class Background:
    """Runs jobs one after the other. What a job raises comes out of `end`."""

    def __init__(self) -> None:
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Start a job; the one before must have been ended."""
        assert self._job is None
        self._job = future = Future[None]()

        def run() -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                future.set_exception(error)
            else:
                future.set_result(None)

        # Never waited for by the interpreter: a rank that fails must not hang on a job whose peers are gone.
        Thread(target=run, name="checkpoint", daemon=True).start()

    def end(self, timeout_s: float | None = None) -> bool:
        """Wait for the job, if there is one; whether it has ended. Raises what the job raised."""
        if self._job is None:
            return True
        if not wait([self._job], timeout_s).done:
            return False
        job, self._job = self._job, None
        job.result()
        return True
