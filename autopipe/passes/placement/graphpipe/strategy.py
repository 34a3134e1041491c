"""GraphPipe: the strategy and its options."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.graph import Graph
from autopipe.ir.memo import remembered
from autopipe.ir.placement import Placement
from autopipe.ir.problem import Problem
from autopipe.passes.batching import Division
from autopipe.passes.cost.memory_check import check_operators
from autopipe.passes.cost.roofline import mean_seconds
from autopipe.passes.placement.graphpipe.check import check_stages
from autopipe.passes.placement.graphpipe.notes import region_notes
from autopipe.passes.placement.graphpipe.orders import other_orders
from autopipe.passes.placement.graphpipe.own_sizes import with_own_sizes
from autopipe.passes.placement.graphpipe.sizes import MicroBatchSearch
from autopipe.passes.placement.graphpipe.tree import decompose
from autopipe.passes.placement.graphpipe.units import make_units
from autopipe.passes.schedule.device_order import best_order
from autopipe.passes.sharding.regions import check_wishes
from autopipe.passes.sharding.search import split_further


@dataclass(frozen=True, slots=True)
class GraphPipe:
    """Cuts the model's series-parallel graph into stages that take equally long, branches beside one another."""

    intra: Literal["data_parallel", "pase"] = "data_parallel"
    """How the devices of a stage share its work: by samples, or as the search for splits makes a step shorter."""

    per_stage_micro_batch: bool = False
    """True if stages get micro-batches of their own sizes where a step by kFkB is shorter with them."""

    name: ClassVar[str] = "graphpipe"

    def division(self, graph: Graph) -> Division:
        """It chooses the size of micro-batches."""
        return Division.OWN

    def requires(self, problem: Problem) -> None:
        """Raise InfeasibleError where there is nothing to place."""
        check_operators(problem)

    def run(self, problem: Problem) -> Placement:
        """The placement with the least expected step time.

        It uses all devices that make the slowest stage faster; others have no stage. Raises InfeasibleError where
        memory holds no stages, saying by how much those that need least exceed it, ConfigurationError for a constraint
        that the stages do not fulfil.
        """
        return best_order(problem, self._placed, parts=False)

    def _placed(self, problem: Problem) -> Placement:
        """The placement with the cluster's devices in the order in which they are."""
        placement = _in_stages(problem)
        if isinstance(placement, InfeasibleError):
            raise placement
        if self.per_stage_micro_batch:
            placement = with_own_sizes(problem, placement)
        if self.intra == "pase":
            placement = split_further(problem, placement)
        check_wishes(problem, placement, self.name)
        return placement


@remembered(2)
def _in_stages(problem: Problem) -> Placement | InfeasibleError:
    """The stages with which all forms begin, or why there are none, which takes as long to find."""
    units = make_units(problem.graph)
    forward, backward = mean_seconds(problem)
    weights = [float((forward + backward)[list(nodes)].sum()) for nodes in units.nodes]
    found = decompose(units.needs, weights)
    trees = itertools.chain((found.tree,), other_orders(found.tree, units.needs, weights))
    try:
        best = MicroBatchSearch(problem, units, forward + backward).best(trees)
    except InfeasibleError as error:
        return error
    placement = replace(best, notes=region_notes(problem.graph, units, found.regions))
    check_stages(problem.graph, placement)
    return placement
