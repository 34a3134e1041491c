"""How a user follows the passes: a bar, timings with -v, and the values asked for by --dump-after."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.cli.dump import dumped
from autopipe.cli.figures import seconds_text
from autopipe.cli.output import Bar, Output
from autopipe.ir.errors import ConfigurationError, InternalError
from autopipe.passes.auto.choose import weighed_names
from autopipe.passes.pipeline import Request, pass_names


def names_of(request: Request) -> tuple[str, ...]:
    """The passes that a request goes through."""
    return pass_names(request) if request.strategy else weighed_names(request)


class Watcher:
    """An observer of the pipeline that shows what it hears."""

    def __init__(
        self, output: Output, bar: Bar, request: Request, dump_after: Sequence[str], debug: bool = False
    ) -> None:
        self._names = names_of(request)
        for name in dump_after:
            if name not in self._names:
                raise ConfigurationError(
                    f"there is no pass called {name!r}", hint=f"they are {', '.join(self._names)}", where="--dump-after"
                )
        self._output, self._bar, self._dump_after = output, bar, frozenset(dump_after)
        self._debug = debug
        """Whether a mistake of ours in something tried ends the command."""
        self._furthest = 0
        self._best = ""

    def started(self, name: str) -> None:
        """Show the pass beside the bar."""
        self._bar.advance(0, note=f"{name}{self._best}")

    def finished(self, name: str, value: object, seconds: float) -> None:
        """Move the bar, and print the value where it was asked for."""
        self._furthest = max(self._furthest, self._names.index(name) + 1)
        self._bar.reach(self._furthest)
        self._output.detail(f"{name}: {seconds:.2f} s")
        if name in self._dump_after:
            self._output.line(f"--- after {name}\n{dumped(value)}")

    def improved(self, step_s: float, bound_s: float) -> None:
        """Show the shortest step so far, and what none of what was tried can be below."""
        self._best = f", {seconds_text(step_s)} a step, at least {seconds_text(bound_s)}"
        self._output.detail(f"best so far: {seconds_text(step_s)} a step (bound {seconds_text(bound_s)})")

    def failed(self, error: InternalError) -> None:
        """Warn of what is left out for a mistake of ours; with --debug it is raised."""
        if self._debug:
            raise error
        self._output.warn(f"left out: {error.where}: {error.message}", error.hint)
