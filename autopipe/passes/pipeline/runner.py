"""The execution of passes: times, errors with the name of the pass, callbacks, cached results."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TypeVar

from autopipe.ir.errors import AutopipeError, InternalError
from autopipe.ir.problem import NodeCost, Problem, Scores
from autopipe.passes.analysis.batch_forms import LossForm, Mixing
from autopipe.passes.frontend import Model

Result = TypeVar("Result")


class Observer:
    """Callbacks of a `Runner`. The base class does nothing; override the callbacks that you
    need.
    """

    def started(self, name: str) -> None:
        """Called before the pass `name` runs."""

    def finished(self, name: str, value: object, seconds: float) -> None:
        """Called after the pass `name` returned `value` and `value` was verified."""

    def improved(self, step_s: float, bound_s: float) -> None:
        """Called if a search found a plan with a shorter step than before. `bound_s` is a lower
        bound, in seconds, of the steps of all placements that were tried.
        """

    def failed(self, error: InternalError) -> None:
        """Called if one of several candidates raised an internal error. The search skips the
        candidate, unless this method raises an exception.
        """


class Runner:
    """Runs the passes of requests for one model on one cluster, and caches results that several
    requests use.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self.models: dict[int | None, Model] = {}
        """Models by number of samples of a forward pass. Under None: the model on the number of
        samples that the file fixes, or on one sample if the file fixes none.
        """
        self.totals: dict[tuple[int | None, Scores], Model] = {}
        """Models whose micro-batches return the dividend and the divisor of the loss, by number of
        samples and form of the losses.
        """
        self.work: dict[tuple[int | None, Scores, str], tuple[NodeCost, ...]] = {}
        """Costs of the nodes by number of samples, form of the losses, and name of the loss that is
        divided ("" if no loss is divided).
        """
        self.loss_forms: dict[str, LossForm | None] = {}
        """By name of the loss: how the loss of a batch depends on the losses of its parts."""
        self.mixed_output: Mixing | None = None
        """Why micro-batches may change an output of inference; None if it was not checked yet."""
        self.costed: dict[Hashable, tuple[Model, Problem]] = {}
        """Models and problems by every field that affects them. Equal requests share one problem
        object, so that caches with the problem as key return their entries.
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
        """Call `requires`, `compute` and `verify`, and return the result of `compute`. Errors name
        the pass, and the passes before it.
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
            error.where = error.where or self._place(name)
            if type(error) is AutopipeError:
                # The error comes from a solver, and neither the user nor the model is the cause.
                raise InternalError(
                    error.message, error.hint or "rerun with --debug", error.where
                ) from error
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise InternalError(
                f"internal error: {reason}", "rerun with --debug", self._place(name)
            ) from error
        seconds = time.perf_counter() - begin
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.observer.finished(name, result, seconds)
        return result

    def _place(self, name: str) -> str:
        done = ", ".join(each for each in self.seconds if each != name)
        return f"pass {name}" + (f", after {done}" if done else "")
