"""Interfaces of strategies and schedulers, and their registry.

A strategy or scheduler is a frozen dataclass with a class attribute `name`; its fields are its
options. Other packages register strategies and schedulers by entry points in the groups
`autopipe.strategies` and `autopipe.schedulers`. The name of the entry point is the name of the
strategy or scheduler, and its object is the class.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import warnings
from typing import Any, ClassVar, Protocol

from autopipe.ir.errors import ConfigurationError, RenamedWarning
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule
from autopipe.passes.batching import Division


class Strategy(Protocol):
    """Interface of a strategy, which chooses a placement: stages with their devices and splits."""

    name: ClassVar[str]

    def division(self, graph: Graph) -> Division:
        """Return how to divide the samples of a step into micro-batches if the user does not state
        the number or size of micro-batches.
        """

    def requires(self, problem: Problem) -> None:
        """Raise AutopipeError, with a message of one line, if this strategy does not support
        `problem`.
        """

    def run(self, problem: Problem) -> Placement:
        """Return a placement for `problem`. Raise InfeasibleError, with the violated limit, if no
        placement is possible.
        """


class Scheduler(Protocol):
    """Interface of a scheduler, which chooses the order of tasks on every device."""

    name: ClassVar[str]

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise AutopipeError, with a message of one line, if this scheduler does not support
        `placement`.
        """

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """Return a schedule of the tasks of `placement`."""


STRATEGIES = {
    "breadth_first": "autopipe.passes.placement.pase.strategy:BreadthFirst",
    "data_parallel": "autopipe.passes.placement.data_parallel:DataParallel",
    "explicit": "autopipe.passes.placement.explicit:Explicit",
    "graphpipe": "autopipe.passes.placement.graphpipe.strategy:GraphPipe",
    "grid": "autopipe.passes.placement.grid:Grid",
    "handcrafted": "autopipe.passes.placement.handcrafted:Handcrafted",
    "manual": "autopipe.passes.placement.manual:Manual",
    "mcmc": "autopipe.passes.placement.pase.strategy:Mcmc",
    "one_weird_trick": "autopipe.passes.placement.handcrafted:OneWeirdTrick",
    "pase": "autopipe.passes.placement.pase.strategy:Pase",
    "pipedream": "autopipe.passes.placement.pipedream:PipeDream",
    "piper": "autopipe.passes.placement.piper.strategy:Piper",
    "tepdist": "autopipe.passes.placement.tepdist.strategy:TePDist",
    "tessel_shapes": "autopipe.passes.placement.tessel_shapes:TesselShapes",
}
"""Built-in strategies by name, as `module:class`."""
FORMER_STRATEGIES = {"expert": "handcrafted", "given": "explicit"}
"""Present names of strategies that were renamed since the previous release, by former name."""

SCHEDULERS = {
    "1f1b": "autopipe.passes.schedule.published.one_f_one_b:OneForwardOneBackward",
    "1f1b_plus": "autopipe.passes.schedule.published.one_f_one_b:OneForwardOneBackwardPlus",
    "chimera": "autopipe.passes.schedule.published.one_f_one_b:Chimera",
    "csv": "autopipe.passes.schedule.csv_order:CsvOrder",
    "dualpipe": "autopipe.passes.schedule.published.zero_bubble:DualPipe",
    "dualpipe_v": "autopipe.passes.schedule.published.zero_bubble:DualPipeV",
    "gpipe": "autopipe.passes.schedule.published.base:GPipe",
    "hanayo": "autopipe.passes.schedule.published.one_f_one_b:Hanayo",
    "interleaved_1f1b": (
        "autopipe.passes.schedule.published.one_f_one_b:InterleavedOneForwardOneBackward"
    ),
    "kfkb": "autopipe.passes.schedule.published.one_f_one_b:KForwardsKBackwards",
    "looped_bfs": "autopipe.passes.schedule.published.one_f_one_b:LoopedBreadthFirst",
    "v_half": "autopipe.passes.schedule.published.zero_bubble:VHalf",
    "v_min": "autopipe.passes.schedule.published.zero_bubble:VMin",
    "zb_h1": "autopipe.passes.schedule.published.zero_bubble:ZeroBubbleH1",
    "zb_h2": "autopipe.passes.schedule.published.zero_bubble:ZeroBubbleH2",
    "zb_v": "autopipe.passes.schedule.published.zero_bubble:ZeroBubbleV",
    "tessel": "autopipe.passes.schedule.tessel.scheduler:Tessel",
}
"""Built-in schedulers by name, as `module:class`."""


def strategy_names() -> tuple[str, ...]:
    """Return the names of all built-in and registered strategies in alphabetical order."""
    return tuple(sorted({*STRATEGIES, *_entry_points("autopipe.strategies")}))


def scheduler_names() -> tuple[str, ...]:
    """Return the names of all built-in and registered schedulers in alphabetical order."""
    return tuple(sorted({*SCHEDULERS, *_entry_points("autopipe.schedulers")}))


def strategy_class(name: str, where: str = "") -> type[Any]:
    """Return the class of strategy `name`. The arguments of its constructor are the options.

    Emit a RenamedWarning for a name of the previous release. Raise ConfigurationError, with the
    nearest name, if there is no such strategy. `where` is the location of the name in the user's
    input, for messages.
    """
    present = FORMER_STRATEGIES.get(name)
    if present is not None:
        prefix = f"{where}: " if where else ""
        message = f"{prefix}strategy {name} is deprecated, write {present}"
        warnings.warn(message, RenamedWarning, stacklevel=2)
        name = present
    return _imported_class(
        "strategy", name, {**_entry_points("autopipe.strategies"), **STRATEGIES}, where
    )


def scheduler_class(name: str, where: str = "") -> type[Any]:
    """Return the class of scheduler `name`. The arguments of its constructor are the options.

    Raise ConfigurationError, with the nearest name, if there is no such scheduler. `where` is the
    location of the name in the user's input, for messages.
    """
    return _imported_class(
        "schedule", name, {**_entry_points("autopipe.schedulers"), **SCHEDULERS}, where
    )


@functools.cache
def _entry_points(group: str) -> dict[str, str]:
    """Return {name: "module:class"} of the entry points in `group`. The result is cached because
    reading the entry points of all packages takes milliseconds.
    """
    return {point.name: point.value for point in importlib.metadata.entry_points(group=group)}


def _imported_class(what: str, name: str, places: dict[str, str], where: str) -> type[Any]:
    """Import and return the class at `places[name]`, given as `module:class`.

    Raise ConfigurationError, with the nearest name, if there is no such name. `what` is the word
    for the class and `where` the location of the name in the user's input, both for messages.
    """
    if name not in places:
        near = difflib.get_close_matches(name, places, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(sorted(places))}"
        raise ConfigurationError(f"{what} {name!r} is unknown", hint, where)
    module, _, attribute = places[name].partition(":")
    found: type[Any] = getattr(importlib.import_module(module), attribute)
    return found
