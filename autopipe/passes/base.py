"""Interfaces of strategies and schedulers, and how they are run.

Each is a frozen dataclass with a `name` whose other fields are its options: the YAML key, the command line's help and
the documentation come from that one declaration.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.ir.schedule import Schedule
from autopipe.passes.batching import Division


class Strategy(Protocol):
    """Chooses a placement."""

    name: ClassVar[str]

    def division(self, graph: Graph) -> Division:
        """How it wants the samples of a step divided, where the user leaves it open."""

    def requires(self, problem: Problem) -> None:
        """Raise AutopipeError, in one line, where the problem cannot be taken."""

    def run(self, problem: Problem) -> Placement:
        """The placement. Raises InfeasibleError naming the limit and by how much it is missed."""


class Scheduler(Protocol):
    """Chooses the order of tasks on every device."""

    name: ClassVar[str]

    def requires(self, problem: Problem, placement: Placement) -> None:
        """Raise AutopipeError, in one line, where the placement cannot be taken."""

    def run(self, problem: Problem, placement: Placement) -> Schedule:
        """The schedule."""
