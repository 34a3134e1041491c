"""Progress of the compiler passes: a bar, the time of each pass with -v, and the values requested
with --dump-after.
"""

from __future__ import annotations

import pprint
from collections.abc import Iterator, Sequence

from autopipe.api.events import Progress
from autopipe.cli.output import Output
from autopipe.ir.errors import ConfigurationError, InternalError
from autopipe.ir.placement import Placement, node_ranges
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule
from autopipe.ir.words import seconds_text
from autopipe.passes.auto.choose import search_pass_names
from autopipe.passes.frontend import Model
from autopipe.passes.pipeline import Observer, Request, pass_names


def dump_lines(value: object) -> Iterator[str]:
    """Yield the lines of --dump-after for the result of a pass. A graph is listed node by node, a
    placement stage by stage, and a schedule as a table of its tasks (`Schedule.grid`). Other values
    are pretty-printed.
    """
    match value:
        case Model(graph=graph):
            yield f"graph {graph.name!r}, opset {graph.opset}"
            yield from (
                f"input {each.name!r} {each.dtype.value} {list(each.shape)}"
                for each in graph.inputs
            )
            for index, node in enumerate(graph.nodes):
                shapes = ", ".join(
                    str(list(graph.type_of(name).shape)) for name in node.outputs if name
                )
                yield (
                    f"{index:5} {node.op} {node.name!r} ({', '.join(map(repr, node.inputs))}) -> "
                    f"{shapes}"
                )
            yield f"outputs {', '.join(map(repr, graph.outputs))}"
        case Problem():
            yield "  node  class          forward GFLOP  backward GFLOP  forward MB  kept MB"
            for index, work in enumerate(value.work):
                flops = f"{work.forward_flops / 1e9:13.4f}  {work.backward_flops / 1e9:14.4f}"
                sizes = f"{work.forward_bytes / 1e6:10.3f}  {work.kept_bytes / 1e6:7.3f}"
                yield f"{index:6}  {work.kind:13}  {flops}  {sizes}"
        case Placement():
            for index, stage in enumerate(value.stages):
                ranges = " ".join(f"{first}-{last - 1}" for first, last in node_ranges(stage.nodes))
                yield f"stage {index}: devices {list(stage.devices)}, nodes {ranges}"
                yield from (
                    f"  node {node}: {' '.join(map(str, splits))}" for node, splits in stage.splits
                )
        case Schedule():
            yield value.grid()
        case _:
            yield pprint.pformat(value, width=120, compact=True)


def pass_names_of_request(request: Request) -> tuple[str, ...]:
    return pass_names(request) if request.strategy else search_pass_names(request)


class ProgressObserver(Observer):
    """A pipeline observer that shows the progress of the passes in the terminal."""

    def __init__(
        self,
        output: Output,
        bar: Progress,
        request: Request,
        dump_after: Sequence[str],
        debug: bool = False,
    ) -> None:
        self._names = pass_names_of_request(request)
        for name in dump_after:
            if name not in self._names:
                hint = f"use one of {', '.join(self._names)}"
                raise ConfigurationError(f"the pass {name!r} is unknown", hint, "--dump-after")
        self._output = output
        self._bar = bar
        self._dump_after = frozenset(dump_after)
        self._debug = debug
        """True if an internal error in a candidate ends the command."""
        self._furthest = 0
        self._best = ""

    def started(self, name: str) -> None:
        self._bar.advance(0, note=f"{name}{self._best}")

    def finished(self, name: str, value: object, seconds: float) -> None:
        self._furthest = max(self._furthest, self._names.index(name) + 1)
        self._bar.reach(self._furthest)
        self._output.detail(f"{name}: {seconds:.2f} s")
        if name in self._dump_after:
            self._output.line("\n".join([f"--- after {name}", *dump_lines(value)]))

    def improved(self, step_s: float, bound_s: float) -> None:
        step = seconds_text(step_s)
        bound = seconds_text(bound_s)
        self._best = f", {step} a step, at least {bound} in all placements tried"
        self._output.detail(
            f"best so far: {step} a step (lower bound {bound} for all placements tried)"
        )

    def failed(self, error: InternalError) -> None:
        """Warn that a candidate is skipped because of an internal error. With --debug, raise the
        error.
        """
        if self._debug:
            raise error
        self._output.warn(f"skipped: {error.where}: {error.message}", error.hint)
