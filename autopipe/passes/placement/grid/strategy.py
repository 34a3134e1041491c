"""The grid: the strategy and its options."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import required_sizes, wishes_of
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_operators, describe_kinds, equal_device_runs, may_share
from autopipe.passes.placement.grid.degrees import factorisations
from autopipe.passes.placement.grid.search import GridSearch
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.sharding.regions import check_wishes


@dataclass(frozen=True, slots=True)
class Grid:
    """Multiplies pipeline, data and tensor parallelism, as experts run large models: the product is all devices.

    The operators, in a line, are cut into even stages. Inside a stage, replicas share the samples, and the devices of
    a replica share heads, columns and vocabulary (Narayanan et al., "Efficient Large-Scale Language Model Training on
    GPU Clusters Using Megatron-LM", 2021). Degrees that are open, and the size of micro-batches, are those with
    the shortest simulated step under 1F1B.
    """

    pipeline: int | None = None
    """Groups of devices in a line, each with a part of the layers."""
    data: int | None = None
    """Replicas in each group, which share samples."""
    tensor: int | None = None
    """Devices that share each layer; those of one node at most where it is open."""
    chunks: int = 1
    """Stages of each group, which the line passes again and again, as interleaved schedules want it."""
    wave: bool = False
    """True if it passes the groups back and forth instead, as V-shaped schedules want it."""

    name: ClassVar[str] = "grid"

    def division(self, graph: Graph) -> Division:
        """It chooses the size of micro-batches."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise ConfigurationError for options out of range or at odds, InfeasibleError for an empty model."""
        for option in ("pipeline", "data", "tensor", "chunks"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise ConfigurationError(f"{option} is {value}", hint="it must be at least 1", where="strategy")
        if self.wave and self.chunks < 2:
            raise ConfigurationError("wave is for chunks: 2 or more", hint="set chunks to 2", where="strategy.wave")
        self._check_product(problem.cluster.size)
        check_operators(problem)

    def _check_product(self, devices: int) -> None:
        given = {name: value for name in ("pipeline", "data", "tensor") if (value := getattr(self, name)) is not None}
        product = math.prod(given.values())
        if devices % product or (len(given) == 3 and product != devices):
            named = " x ".join(f"{name} {value}" for name, value in given.items())
            wanted = "make" if len(given) == 3 else "divide"
            raise ConfigurationError(
                f"{named} is {product}, which does not {wanted} the {devices} devices",
                hint="leave one of pipeline, data and tensor open",
                where="strategy",
            )

    def run(self, problem: Problem) -> Placement:
        """The placement with the shortest step.

        Raises InfeasibleError where memory holds none, ConfigurationError for constraints that it does not fulfil.
        """
        return best_order(problem, self._placed)

    def _placed(self, problem: Problem) -> Placement:
        wishes = wishes_of(problem)
        degrees = tuple(factorisations(problem.cluster, self.pipeline, self.data, self.tensor))
        if len(equal_device_runs(problem.cluster)) > 1:
            degrees = tuple(each for each in degrees if all(may_share(problem, group) for group in each.groups()))
            if not degrees:
                raise InfeasibleError(
                    "grid's groups are equal, and with these degrees one would have devices of different kinds: "
                    f"{describe_kinds(problem.cluster, range(problem.cluster.size))}",
                    hint="set cluster.straddle to true, or take other degrees",
                )
        placement = GridSearch(problem, self.chunks, self.wave).run(degrees, required_sizes(problem, wishes))
        check_wishes(problem, placement, self.name)
        return placement
