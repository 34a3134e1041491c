"""Search for the splits of the nodes inside all stages of a placement. Equal stages, such as
repeated layers, are searched once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopipe.ir.equality import node_labels, subgraph_key
from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, SplitProof, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import required_splits, resolve_constraints
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.operators import element_bytes, sample_axes
from autopipe.passes.cost.memory_check import device_memory, out_of_memory_error
from autopipe.passes.cost.stage_work import device_group_key
from autopipe.passes.cost.stages import StageCost, stage_costs, step_seconds
from autopipe.passes.placement.tepdist.levels import Level
from autopipe.passes.schedule.limits import quick_step
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.node_costs import StageOptions
from autopipe.passes.sharding.search import SplitProblem, make_split_tables

_ROUNDS = 2
"""Maximum number of times that stages with equal keys are fitted into memory. After the first time,
changes of other stages can make it necessary again.
"""


@dataclass(frozen=True, slots=True)
class CostedPlacement:
    """A placement with the costs of its stages and the bytes by which they exceed the memory."""

    placement: Placement
    costs: tuple[StageCost, ...]
    excess: tuple[tuple[int, int], ...]
    """For each stage: (excess, device) of the device with the largest excess, which is the number
    of bytes by which it exceeds its memory limit. A negative excess is free memory.
    """

    @property
    def fits(self) -> bool:
        """True if all stages fit into memory under schedule 1F1B."""
        return all(excess <= 0 for excess, _ in self.excess)


class IntraStageSearch:
    """Search for splits inside the stages of one problem. Results are cached for equal stages.

    `required` contains the splits that constraints require, by node. The constructor raises
    ConfigurationError for constraints that contradict the problem.
    """

    def __init__(self, problem: Problem, solver: Level) -> None:
        graph = problem.graph
        self.problem = problem
        self.solver = solver
        self.samples = sample_axes(graph)
        self._labels = node_labels(graph)
        self.resolved = resolve_constraints(problem)
        self.required = required_splits(self.resolved, self.samples) if self.resolved else {}
        self._gradient = differentiable_values(graph) if problem.train else frozenset()
        self._widths = element_bytes(graph, problem.precision)
        self._found: dict[Hashable, tuple[tuple[Splits, ...], SplitProof]] = {}

    def stage_key(
        self, nodes: Sequence[int], devices: Sequence[int], options: StageOptions
    ) -> Hashable:
        """Return a key that is equal for stages whose searches give equal results: equal subgraphs
        (`subgraph_key`) on devices with equal links, with equal options.

        The number of micro-batches in flight is not part of the key.
        """
        graph = self.problem.graph

        def describe(name: str) -> Hashable:
            """Return the properties of the value `name` that affect the search."""
            return (
                self._widths.get(name),
                name in self._gradient,
                name in options.given,
                name in options.whole,
            )

        def label(node: int) -> Hashable:
            """Return the properties of a node that affect the search."""
            return self._labels[node], self.samples.axes[node], options.allowed.get(node)

        return (
            device_group_key(self.problem.cluster, devices),
            options.recompute,
            subgraph_key(
                (
                    (label(node), (*graph.nodes[node].inputs, *graph.nodes[node].outputs))
                    for node in nodes
                ),
                describe,
            ),
        )

    def search_placements(self, skeleton: Placement, limit_s: float) -> list[CostedPlacement]:
        """Return placements that fit into memory under 1F1B, with the nodes and devices of the
        stages of `skeleton`. Nodes in `required` have the required splits.

        Up to three candidates split all stages: as the solver proposes; by samples; and each stage
        by the faster of both. If the first candidate does not fit into memory, further candidates
        are added: with recomputation, if it is permitted and there are several stages, and with
        splits searched within the memory limit. They are not added if a step of the first candidate
        already takes `limit_s` seconds. Raise InfeasibleError with the minimum excess if the search
        within the memory limit finds no splits and no other candidate fits.
        """
        plain = self._placements_without_limit(skeleton)
        fitting = [each for each in plain if each.fits]
        if (
            plain[0].fits
            or quick_step(self.problem, plain[0].placement, plain[0].costs).end >= limit_s
        ):
            return fitting
        # A single stage can also save memory by smaller micro-batches. It is not recomputed here,
        # because a plan with recomputation would end the search before smaller micro-batches are
        # tried.
        if self.problem.train and self.problem.recompute == "auto" and len(skeleton.stages) > 1:
            fitting += self._recompute_to_fit(plain[0])
        try:
            fitting.append(self._split_within_memory(plain[0], limit_s))
        except InfeasibleError:
            if not fitting:
                raise
        return fitting

    def split_proof(self, placement: Placement) -> SplitProof:
        """Return the proof for the splits of a placement with a single stage: its seconds per step,
        and the solver's lower bound without a memory limit.
        """
        inside = SplitProblem(self.problem, placement, self.required)
        _, proof = self._search_stage(inside, placement, 0)
        (cost,) = stage_costs(self.problem, placement)
        seconds = max(step_seconds(cost, self.problem.micro_batches), proof.lower_bound)
        return SplitProof(seconds, proof.lower_bound, seconds <= proof.lower_bound * (1 + 1e-9))

    def _placements_without_limit(self, skeleton: Placement) -> list[CostedPlacement]:
        """Return placements that ignore the memory limit. The first one has the splits that the
        solver proposes.
        """
        inside = SplitProblem(self.problem, skeleton, self.required)
        numbers = range(len(skeleton.stages))
        searched = self._cost_stages(
            skeleton, [self._search_stage(inside, skeleton, i)[0] for i in numbers]
        )
        by_samples = [self._split_by_samples(stage) for stage in skeleton.stages]
        others = [
            other or own for other, own in zip(by_samples, searched.placement.stages, strict=True)
        ]
        if others == list(searched.placement.stages):
            return [searched]
        sampled = self._cost_stages(skeleton, others)

        def rank(which: int, stage: int) -> tuple[bool, float]:
            """Return the sort key of stage `stage` in one of the two placements (`which`: 0 for
            searched splits, 1 for splits by samples): whether it exceeds the memory, then its
            seconds per step.
            """
            seconds = step_seconds(
                (searched, sampled)[which].costs[stage], self.problem.micro_batches
            )
            return (searched, sampled)[which].excess[stage][0] > 0, seconds

        faster = [min(0, 1, key=partial(rank, stage=stage)) for stage in numbers]
        if len(set(faster)) == 1:
            return [searched, sampled]
        stages = [(searched, sampled)[which].placement.stages[i] for i, which in enumerate(faster)]
        return [searched, sampled, self._cost_stages(skeleton, stages)]

    def _search_stage(
        self, inside: SplitProblem, placement: Placement, index: int
    ) -> tuple[Stage, SplitProof]:
        """Return (stage, proof): stage `index` with the splits that the solver proposes without a
        memory limit, and the solver's lower bound as their proof.
        """
        stage = placement.stages[index]
        options = inside.options[index]
        nodes = [node for node, _ in inside.plans[index].nodes]
        key = self.stage_key(nodes, stage.devices, options)
        if key not in self._found:
            tables = make_split_tables(self.problem, nodes, stage.devices, options)
            answer = self.solver(tables, None)
            chosen = dict(tables.splits(answer.choice))
            proof = SplitProof(float(answer.cost), float(answer.bound), answer.proven)
            self._found[key] = tuple(chosen.get(node, ()) for node in nodes), proof
        splits, proof = self._found[key]
        return replace(stage, splits=_node_splits(nodes, splits)), proof

    def _split_by_samples(self, stage: Stage) -> Stage | None:
        """Return the stage with its nodes split by samples only. Return None if the samples cannot
        be divided evenly, or if constraints require splits of its nodes.
        """
        width = len(stage.devices)
        if any(
            node in self.required or not self.samples.can_divide(node, width)
            for node in stage.nodes
        ):
            return None
        return replace(stage, splits=self.samples.splits(stage.nodes, width))

    def _recompute_to_fit(self, plain: CostedPlacement) -> list[CostedPlacement]:
        """Return placements that fit into memory by recomputing the forward in the stages that
        exceed it.

        If none fits, all stages recompute. Return [] if no placement fits then either.
        """
        stages = plain.placement.stages
        overfull = [
            replace(stage, recompute=excess > 0)
            for stage, (excess, _) in zip(stages, plain.excess, strict=True)
        ]
        for stages_to_try in (overfull, [replace(stage, recompute=True) for stage in stages]):
            unsplit = replace(
                plain.placement, stages=tuple(replace(stage, splits=()) for stage in stages_to_try)
            )
            if fitting := [each for each in self._placements_without_limit(unsplit) if each.fits]:
                return fitting
        return []

    def _split_within_memory(self, plain: CostedPlacement, limit_s: float) -> CostedPlacement:
        """Return `plain` with other splits in the stages that exceed memory. These splits are
        searched within the memory limit.

        In each round, the stage with the largest excess is searched, and equal stages that exceed
        memory get the same splits. Splits with which the stage alone takes at least `limit_s`
        seconds per step are of no interest, so the search for them ends early. Raise
        InfeasibleError with the minimum excess if the stages do not fit.
        """
        inside = SplitProblem(self.problem, plain.placement, self.required)
        keys = [
            self.stage_key([node for node, _ in plan.nodes], stage.devices, options)
            for plan, stage, options in zip(
                inside.plans, plain.placement.stages, inside.options, strict=True
            )
        ]
        rounds: Counter[Hashable] = Counter()
        while not plain.fits:
            worst = max(range(len(keys)), key=lambda stage: plain.excess[stage][0])
            rounds[keys[worst]] += 1
            if rounds[keys[worst]] > _ROUNDS:
                device = plain.excess[worst][1]
                need = self.problem.memory_of(device) + plain.excess[worst][0]
                raise out_of_memory_error(
                    self.problem, [worst], len(keys), device, need, least=True
                )
            self._check_minimum_memory(inside, plain, worst)
            fitted = inside.split(
                plain.placement,
                worst,
                self.solver.stopping_below(limit_s),
                resized_problem=self.problem,
            ).placement
            nodes = [[node for node, _ in plan.nodes] for plan in inside.plans]
            splits = [fitted.stages[worst].splits_of(node) for node in nodes[worst]]
            same = [
                stage
                for stage, key in enumerate(keys)
                if key == keys[worst] and plain.excess[stage][0] > 0
            ]
            stages = list(plain.placement.stages)
            for stage in same:
                stages[stage] = replace(stages[stage], splits=_node_splits(nodes[stage], splits))
            plain = self._cost_stages(plain.placement, stages)
        return plain

    def _check_minimum_memory(
        self, inside: SplitProblem, plain: CostedPlacement, index: int
    ) -> None:
        """Raise InfeasibleError if stage `index` exceeds the memory even if each node has the
        configuration with the least memory.
        """
        nodes = [node for node, _ in inside.plans[index].nodes]
        tables = make_split_tables(
            self.problem, nodes, plain.placement.stages[index].devices, inside.options[index]
        )
        persistent = sum(int(each.min()) for each in tables.model.memory or ())
        minimum = persistent + max(int(each.min()) for each in tables.passing)
        device = plain.excess[index][1]
        if minimum > self.problem.memory_of(device):
            raise out_of_memory_error(
                self.problem, [index], len(inside.plans), device, minimum, least=True
            )

    def _cost_stages(self, placement: Placement, stages: Sequence[Stage]) -> CostedPlacement:
        """Return `placement` with the stages replaced by `stages`, the costs of these stages, and
        their excess of memory.
        """
        placement = replace(placement, stages=tuple(stages))
        costs = stage_costs(self.problem, placement)
        used = device_memory(self.problem, placement, costs)
        excess = tuple(
            max((used[device] - self.problem.memory_of(device), device) for device in stage.devices)
            for stage in placement.stages
        )
        return CostedPlacement(placement, costs, excess)


def _node_splits(nodes: Sequence[int], splits: Sequence[Splits]) -> tuple[tuple[int, Splits], ...]:
    """Return (node, splits) pairs, as in `Stage.splits`, for the nodes that are split."""
    return tuple((node, own) for node, own in zip(nodes, splits, strict=True) if own)
