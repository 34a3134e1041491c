"""The splits inside all stages of a placement; equal stages, layers that repeat, are searched
once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopipe.ir.errors import InfeasibleError
from autopipe.ir.placement import Placement, SplitProof, Stage
from autopipe.ir.problem import Problem
from autopipe.passes.analysis.constraints import required_splits, resolved_constraints
from autopipe.passes.analysis.gradients import differentiable_values
from autopipe.passes.analysis.operators import element_bytes, sample_axes
from autopipe.passes.cost.memory_check import device_memory, out_of_memory
from autopipe.passes.cost.stage_work import reach
from autopipe.passes.cost.stages import StageCost, stage_costs, step_seconds
from autopipe.passes.placement.tepdist.levels import Level
from autopipe.passes.schedule.limits import quick_step
from autopipe.passes.sharding.configurations import Splits
from autopipe.passes.sharding.node_costs import StageOptions
from autopipe.passes.sharding.search import SplitProblem, make_tables

# How often stages that are equal are fitted into memory again, because others have changed beside
# them.
_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class CostedPlacement:
    """A placement, what its stages cost, and by how much the fullest device of each is over its
    limit.
    """

    placement: Placement
    costs: tuple[StageCost, ...]
    excess: tuple[tuple[int, int], ...]
    """For each stage bytes (below zero where there is room) and the device."""

    @property
    def fits(self) -> bool:
        """True if memory holds it under 1F1B."""
        return all(excess <= 0 for excess, _ in self.excess)


class IntraStageSearch:
    """The search inside stages of one problem, which remembers what it found for stages that come
    again. `required` are the splits that constraints ask for, by node. Raises ConfigurationError
    for constraints that cannot be followed.
    """

    def __init__(self, problem: Problem, solver: Level) -> None:
        graph = problem.graph
        self.problem = problem
        self.solver = solver
        self.samples = sample_axes(graph)
        self.resolved = resolved_constraints(problem)
        self.required = required_splits(self.resolved, self.samples) if self.resolved else {}
        self._gradient = differentiable_values(graph) if problem.train else frozenset()
        self._widths = element_bytes(graph, problem.precision)
        self._found: dict[Hashable, tuple[tuple[Splits, ...], SplitProof]] = {}

    def key(self, nodes: Sequence[int], devices: Sequence[int], options: StageOptions) -> Hashable:
        """Equal for stages whose searches are equal, node by node in order; micro-batches in flight
        do not count.
        """
        graph = self.problem.graph
        known = dict[str, int]()

        def value(name: str, given: bool = False) -> Hashable:
            known[name] = len(known)
            own = graph.type_of(name)
            return own.dtype, own.shape, self._widths.get(name), name in self._gradient, given

        def read(name: str) -> Hashable:
            """A value by its number where it is known; what else it is where it is new."""
            if name in known:
                return known[name]
            if (constant := graph.constant(name)) is not None:
                return value(name), constant.array.tobytes()
            if (parameter := graph.parameter(name)) is not None:
                return value(name), parameter.trainable, name in options.whole
            return value(name)

        parts: list[Hashable] = [reach(self.problem.cluster, devices), options.recompute]
        for node in nodes:
            each = graph.nodes[node]
            inputs = tuple(read(name) if name else None for name in each.inputs)
            outputs = tuple(
                value(name, name in options.given) if name else None for name in each.outputs
            )
            splits = self.samples.axes[node], options.allowed.get(node)
            parts.append((each.op, each.domain, each.attributes, *splits, inputs, outputs))
        return tuple(parts)

    def placements(self, skeleton: Placement, limit_s: float) -> list[CostedPlacement]:
        """Placements with the stages of `skeleton` that memory holds under 1F1B, `required` nodes
        split as asked. Every stage is split as the solver finds it best, or by its samples, or the
        faster of both. Where memory is short for the first, stages recompute if they may, and
        splits are searched within memory, unless a step of it as it is would take `limit_s`
        already. Raises InfeasibleError where there is none, with the least excess.
        """
        plain = self._unlimited(skeleton)
        fitting = [each for each in plain if each.fits]
        if (
            plain[0].fits
            or quick_step(self.problem, plain[0].placement, plain[0].costs).end >= limit_s
        ):
            return fitting
        # A single stage fits in smaller micro-batches, too: a plan that recomputes would end the
        # search before these.
        if self.problem.train and self.problem.recompute == "auto" and len(skeleton.stages) > 1:
            fitting += self._recomputing(plain[0])
        try:
            fitting.append(self._within(plain[0], limit_s))
        except InfeasibleError:
            if not fitting:
                raise
        return fitting

    def proof(self, placement: Placement) -> SplitProof:
        """Proof of the splits of a single stage, from the solver's bound where memory is no
        limit.
        """
        inside = SplitProblem(self.problem, placement, self.required)
        _, proof = self._searched(inside, placement, 0)
        (cost,) = stage_costs(self.problem, placement)
        seconds = max(step_seconds(cost, self.problem.micro_batches), proof.lower_bound)
        return SplitProof(seconds, proof.lower_bound, seconds <= proof.lower_bound * (1 + 1e-9))

    def _unlimited(self, skeleton: Placement) -> list[CostedPlacement]:
        """Placements without regard to memory, as the solver finds it best first."""
        inside = SplitProblem(self.problem, skeleton, self.required)
        numbers = range(len(skeleton.stages))
        searched = self._weighed(
            skeleton, [self._searched(inside, skeleton, i)[0] for i in numbers]
        )
        by_samples = [self._by_samples(stage) for stage in skeleton.stages]
        others = [
            other or own for other, own in zip(by_samples, searched.placement.stages, strict=True)
        ]
        if others == list(searched.placement.stages):
            return [searched]
        sampled = self._weighed(skeleton, others)

        def rank(which: int, stage: int) -> tuple[bool, float]:
            seconds = step_seconds(
                (searched, sampled)[which].costs[stage], self.problem.micro_batches
            )
            return (searched, sampled)[which].excess[stage][0] > 0, seconds

        faster = [min(0, 1, key=partial(rank, stage=stage)) for stage in numbers]
        if len(set(faster)) == 1:
            return [searched, sampled]
        stages = [(searched, sampled)[which].placement.stages[i] for i, which in enumerate(faster)]
        return [searched, sampled, self._weighed(skeleton, stages)]

    def _searched(
        self, inside: SplitProblem, placement: Placement, index: int
    ) -> tuple[Stage, SplitProof]:
        """A stage as the solver finds it best without regard to memory."""
        stage = placement.stages[index]
        options = inside.options[index]
        nodes = [node for node, _ in inside.plans[index].nodes]
        key = self.key(nodes, stage.devices, options)
        if key not in self._found:
            tables = make_tables(self.problem, nodes, stage.devices, options)
            answer = self.solver(tables, None)
            chosen = dict(tables.splits(answer.choice))
            proof = SplitProof(float(answer.cost), float(answer.bound), answer.proven)
            self._found[key] = tuple(chosen.get(node, ()) for node in nodes), proof
        splits, proof = self._found[key]
        return replace(stage, splits=_of_nodes(nodes, splits)), proof

    def _by_samples(self, stage: Stage) -> Stage | None:
        """The stage with nothing but its samples shared; None where they cannot be, or something
        else is asked for.
        """
        width = len(stage.devices)
        if any(
            node in self.required or not self.samples.divides(node, width) for node in stage.nodes
        ):
            return None
        return replace(stage, splits=self.samples.splits(stage.nodes, width))

    def _recomputing(self, plain: CostedPlacement) -> list[CostedPlacement]:
        """The same with recomputation in the stages that memory does not hold, in all where that is
        not enough.
        """
        stages = plain.placement.stages
        full = [
            replace(stage, recompute=excess > 0)
            for stage, (excess, _) in zip(stages, plain.excess, strict=True)
        ]
        for some in (full, [replace(stage, recompute=True) for stage in stages]):
            bare = replace(
                plain.placement, stages=tuple(replace(stage, splits=()) for stage in some)
            )
            if fitting := [each for each in self._unlimited(bare) if each.fits]:
                return fitting
        return []

    def _within(self, plain: CostedPlacement, limit_s: float) -> CostedPlacement:
        """The placement with other splits in the stages that memory does not hold: in equal ones
        those of the fullest. Splits under which a stage alone takes `limit_s` a step are as good as
        any others that do. Raises InfeasibleError, with the least excess, where nothing fits.
        """
        inside = SplitProblem(self.problem, plain.placement, self.required)
        keys = [
            self.key([node for node, _ in plan.nodes], stage.devices, options)
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
                raise out_of_memory(self.problem, [worst], len(keys), device, need, least=True)
            self._check_least(inside, plain, worst)
            fitted = inside.split(
                plain.placement, worst, self.solver.below(limit_s), resized_problem=self.problem
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
                stages[stage] = replace(stages[stage], splits=_of_nodes(nodes[stage], splits))
            plain = self._weighed(plain.placement, stages)
        return plain

    def _check_least(self, inside: SplitProblem, plain: CostedPlacement, index: int) -> None:
        """Raise InfeasibleError where a stage needs more than there is however each node is split
        by itself.
        """
        nodes = [node for node, _ in inside.plans[index].nodes]
        tables = make_tables(
            self.problem, nodes, plain.placement.stages[index].devices, inside.options[index]
        )
        stays = sum(int(each.min()) for each in tables.model.memory or ())
        least = stays + max(int(each.min()) for each in tables.passing)
        device = plain.excess[index][1]
        if least > self.problem.memory_of(device):
            raise out_of_memory(self.problem, [index], len(inside.plans), device, least, least=True)

    def _weighed(self, placement: Placement, stages: Sequence[Stage]) -> CostedPlacement:
        """The placement with other stages, and its costs."""
        placement = replace(placement, stages=tuple(stages))
        costs = stage_costs(self.problem, placement)
        used = device_memory(self.problem, placement, costs)
        excess = tuple(
            max((used[device] - self.problem.memory_of(device), device) for device in stage.devices)
            for stage in placement.stages
        )
        return CostedPlacement(placement, costs, excess)


def _of_nodes(nodes: Sequence[int], splits: Sequence[Splits]) -> tuple[tuple[int, Splits], ...]:
    """As `Stage.splits` has them."""
    return tuple((node, own) for node, own in zip(nodes, splits, strict=True) if own)
