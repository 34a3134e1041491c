"""Execution of passes: a runner measures their times, adds the name of the pass to errors, calls
callbacks, and caches results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TypeVar

from autopipe.ir.errors import AutopipeError, InternalError
from autopipe.ir.problem import NodeCost, Problem, Scores
from autopipe.passes.analysis.batch_forms import LossForm, SampleMixing
from autopipe.passes.frontend import Model

Result = TypeVar("Result")


class Observer:
    """Callbacks of a `Runner`. The methods of this class do nothing; a subclass overrides the
    callbacks that it needs.
    """

    def started(self, name: str) -> None:
        """Called before the pass `name` runs."""

    def finished(self, name: str, value: object, seconds: float) -> None:
        """Called after the pass `name` has returned `value` and `value` was verified. `seconds` is
        the wall-clock time of the pass.
        """

    def improved(self, step_s: float, bound_s: float) -> None:
        """Called when a search finds a plan with a shorter step (`step_s` seconds) than before.
        `bound_s` is a lower bound, in seconds, on the steps of all placements that were tried.
        """

    def failed(self, error: InternalError) -> None:
        """Called when one of several candidates raises an internal error. The search skips the
        candidate, unless this method raises an exception.
        """


class Runner:
    """Runs the passes of requests for one model on one cluster, and caches results that several
    requests use.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self.models: dict[int | None, Model] = {}
        """Models by the number of samples with which they were read. Key None: the model with the
        number of samples that the file fixes, or with one sample if the file fixes none.
        """
        self.totals: dict[tuple[int | None, Scores], Model] = {}
        """Models whose micro-batches return the dividend and the divisor of the loss separately, by
        number of samples and form of the losses (saved or recomputed logits).
        """
        self.work: dict[tuple[int | None, Scores, str], tuple[NodeCost, ...]] = {}
        """Costs of the nodes by number of samples, form of the losses, and name of the loss whose
        dividend and divisor are separate ("" if there is none).
        """
        self.loss_forms: dict[str, LossForm | None] = {}
        """By name of the loss: how the loss of a batch depends on the losses of its parts. None if
        this is unknown.
        """
        self.sample_mixing: SampleMixing | None = None
        """Why micro-batches may change an output of inference; None if this was not checked yet."""
        self.costed: dict[Hashable, tuple[Model, Problem]] = {}
        """Models and problems by all fields that affect them. Equal requests share one problem
        object, so that caches that are keyed by the problem's identity are hit.
        """
        self.failures = 0
        """Number of candidates that raised an internal error."""
        self.seconds: dict[str, float] = {}
        """Wall-clock seconds by pass, in the order in which the passes first ran."""

    def run(
        self,
        name: str,
        compute: Callable[[], Result],
        requires: Callable[[], None] | None = None,
        verify: Callable[[Result], None] | None = None,
    ) -> Result:
        """Run the pass `name`: call `requires`, `compute` and `verify`, and return the result of
        `compute`.

        `requires` raises an error if the pass cannot run, and `verify` raises one if the result is
        invalid. Errors get the name of the pass and of the passes before it. An exception that is
        not an AutopipeError becomes an InternalError.
        """
        self.observer.started(name)
        begin = time.perf_counter()
        try:
            if requires is not None:
                requires()
            result = compute()
            if verify is not None:
                verify(result)
        except AutopipeError as error:
            error.where = error.where or self._error_location(name)
            if type(error) is AutopipeError:
                # An AutopipeError that is not an instance of a subclass comes from a solver.
                # Neither the user nor the model caused it, so it is reported as an internal error.
                raise InternalError(
                    error.message, error.hint or "rerun with --debug", error.where
                ) from error
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InternalError(
                f"internal error: {reason}", "rerun with --debug", self._error_location(name)
            ) from error
        seconds = time.perf_counter() - begin
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.observer.finished(name, result, seconds)
        return result

    def _error_location(self, name: str) -> str:
        """Return a text for errors: the name of the pass, and of the passes that ran before it."""
        done = ", ".join(each for each in self.seconds if each != name)
        return f"pass {name}" + (f", after {done}" if done else "")
