"""Tests of strategies mcmc and breadth_first on the tables of pase."""

from __future__ import annotations

import pytest

from autopipe.ir.errors import ConfigurationError, InfeasibleError
from autopipe.ir.placement import Placement, Split
from autopipe.ir.problem import Constraint, Problem
from autopipe.passes.cost.stages import stage_costs
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.pase.strategy import BreadthFirst, Mcmc, Pase
from tests.passes.cost.graphs import cluster, perceptron, problem
from tests.passes.placement.pase.paper.models import model_graph, problem_of


def seconds(given: Problem, placement: Placement) -> float:
    (cost,) = stage_costs(given, placement)
    return (
        given.micro_batches * (cost.forward_s + cost.backward_s) + cost.gradient_s + cost.update_s
    )


@pytest.fixture
def wide() -> Problem:
    """Layers whose parameters are too many for data parallelism to be best."""
    return problem(perceptron([512, 2048, 512, 2048]), cluster(4))


def test_a_walk_is_between_data_parallelism_and_the_best(wide: Problem) -> None:
    best = seconds(wide, Pase().run(wide))
    walked = seconds(wide, Mcmc().run(wide))
    apart = seconds(wide, DataParallel().run(wide))
    assert best <= walked < apart
    assert seconds(wide, Mcmc(iterations=0).run(wide)) == apart


def test_a_walk_depends_on_the_seed_only(wide: Problem) -> None:
    assert Mcmc(iterations=50).run(wide) == Mcmc(iterations=50).run(wide)


def test_breadth_first_and_pase_find_equal_costs(wide: Problem) -> None:
    assert seconds(wide, BreadthFirst().run(wide)) == pytest.approx(
        seconds(wide, Pase().run(wide)), rel=1e-12
    )


def test_breadth_first_reports_the_size_of_its_tables() -> None:
    given = problem_of(model_graph("transformer", 8), 8)
    with pytest.raises(
        InfeasibleError,
        match=r"breadth_first cannot search this model: elimination requires .* GiB",
    ):
        BreadthFirst().run(given)


@pytest.mark.parametrize("strategy", [Mcmc(), BreadthFirst()])
def test_unsupported_requests_are_rejected(strategy: Mcmc | BreadthFirst) -> None:
    graph = perceptron([512, 512])
    odd = problem(graph, cluster(4), constraints=(Constraint("matmul0", split=(("n", 3),)),))
    with pytest.raises(ConfigurationError, match="'matmul0'"):
        strategy.run(odd)
    with pytest.raises(InfeasibleError, match="over the limit"):
        strategy.run(problem(graph, cluster(4, memory=1000)))


@pytest.mark.parametrize("strategy", [Mcmc(), BreadthFirst()])
def test_constraints_are_followed(strategy: Mcmc | BreadthFirst) -> None:
    wish = Constraint("matmul0", split=(("k", 2),))
    given = problem(perceptron([512, 512]), cluster(4), constraints=(wish,))
    (stage,) = strategy.run(given).stages
    assert stage.splits_of(0) == (Split("k", 2),)


def test_options_out_of_range_are_refused(wide: Problem) -> None:
    for strategy in (Mcmc(iterations=-1), Mcmc(temperature=-0.5)):
        with pytest.raises(ConfigurationError, match="expected at least 0"):
            strategy.requires(wide)
