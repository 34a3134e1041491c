"""A finished plan: what was decided, for which graph, and what it is expected to take.

Candidates of a plan's search, each with its result.

Breakdown of a step: the ideal, and all losses on top of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from autopipe.ir.placement import Placement, SplitProof
from autopipe.ir.schedule import Schedule
from autopipe.ir.timeline import Prediction


@dataclass(frozen=True, slots=True)
class Choice:
    """All that is decided before a placement and a schedule follow: naming it gives the same plan again."""

    strategy: str
    options: tuple[tuple[str, str], ...] = ()
    """The strategy's options that are not its defaults, as a configuration spells them."""
    schedule: str | None = None
    """None where no schedule was looked at."""
    micro_batches: int | None = None
    """None where they are left to the strategy, or to what it wants."""
    recompute: str = "none"
    shard: bool = False
    """True if replicas hold the optimizer's state in shares."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A choice and what came of it."""

    choice: Choice
    step_time_s: float | None = None
    """Of the simulated step; None where there is none."""
    lower_bound_s: float | None = None
    """No schedule of its placement takes less; None where there is no placement."""
    micro_batches: int | None = None
    """Micro-batches of its placement."""
    stages: int | None = None
    bubble_rate: float | None = None
    peak_memory_bytes: int | None = None
    """The most on any device."""
    refused: str | None = None
    """Why there is no step: in one line."""
    same_as: str | None = None
    """The strategy that came to the same placement before; the step is that one's."""

    @property
    def rank(self) -> tuple[float, float]:
        """Seconds of the step, infinite where there is none; of those without, then those of the bound."""
        if self.step_time_s is not None:
            return self.step_time_s, 0.0
        return math.inf, math.inf if self.lower_bound_s is None else self.lower_bound_s

    @property
    def is_bounded(self) -> bool:
        """True if it was left out because no schedule of its placement could be the shortest."""
        return self.choice.schedule is None and self.lower_bound_s is not None


def best_of_each(alternatives: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Of each strategy the alternative with the shortest step, the first of equals; the best strategy first.

    Of several that came to the same placement it is the one that did so first.
    """
    found: dict[str, Alternative] = {}
    for each in alternatives:
        best = found.setdefault(each.choice.strategy, each)
        if each.rank < best.rank:
            found[each.choice.strategy] = each
    return tuple(sorted(found.values(), key=lambda each: (*each.rank, each.same_as is not None)))


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of a step that add up to all of it, on average over the devices.

    The ideal is linear speed-up at the roofline: what one device would take for the batch, whatever its memory and
    without launches, divided by the number of devices. Devices of different kinds share the work in proportion to how
    fast each would do it alone, and count in averages by that share.
    """

    ideal_s: float
    bubble_s: float = 0.0
    """The busiest device waits for others, though messages took no time."""
    imbalance_s: float = 0.0
    """Devices have less to do than the busiest."""
    messages_s: float = 0.0
    """Messages between stages, as far as no computation hides them."""
    collectives_s: float = 0.0
    """Exchanges inside stages, where operators are split."""
    gradients_s: float = 0.0
    """Gradients summed over devices at the step's end, parameters gathered again where the optimizer's state is
    shared."""
    recomputation_s: float = 0.0
    """Forwards that are run again for backwards."""
    repetition_s: float = 0.0
    """Operators that several devices compute for the same samples, since they are not split, or not as often."""
    update_s: float = 0.0
    """The optimizer's update, above a device's share of it: its launch, and that devices update the same parameters."""
    launches_s: float = 0.0
    """Launches, starts of tasks, posts of messages, and what else work takes longer in small pieces. Less than nothing
    where devices of different kinds each do what they do best."""

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return math.fsum(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """Losses on top of the ideal, by name, the largest first."""
        found = ((field.name.removesuffix("_s"), getattr(self, field.name)) for field in dataclasses.fields(self)[1:])
        return tuple(sorted(found, key=lambda each: -each[1]))

    @property
    def communication_s(self) -> float:
        """Messages, collectives and gradients."""
        return self.messages_s + self.collectives_s + self.gradients_s


@dataclass(frozen=True, slots=True)
class CostCoverage:
    """For how many nodes a plan went by measured costs."""

    measured: int
    """Nodes whose own operation was measured."""
    judged: int
    """Nodes that take what the roofline says, times how much longer than that the measured ones took."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a plan that users compare; the keys of `summary` in `plan.json`."""

    strategy: str
    schedule: str
    devices: int
    stages: int
    micro_batches: int
    micro_batch_size: int
    depth: int
    """Stages on the longest path of the stage graph."""
    step_time_s: float
    samples_per_s: float
    bubble_rate: float
    peak_memory_bytes: tuple[int, ...]
    search_time_s: tuple[tuple[str, float], ...]
    """Wall-clock seconds by pass."""
    lower_bound_s: float
    """No schedule of this placement can take less."""
    optimal: bool
    """True if the schedule is proven the best for the placement: in its period, where a search found a steady state
    (but for the rounding it states), in its step otherwise.
    """
    gap: float | None
    """Share of the period, or the step, that lies above what is proven; 0 where it is optimal."""
    communication_bytes: tuple[tuple[str, int], ...] | None
    """Bytes that a step's exchanges move over all devices, by kind (`ir/program.py`); None where the placement cannot
    be executed.
    """
    splits: SplitProof | None = None
    """Proof of the splits, where they were searched."""
    costs: CostCoverage | None = None
    """How far measured costs went, where the plan was made with some."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement and a schedule for one graph. `graph_digest` says for which."""

    model: str
    """Path of the ONNX file."""
    graph_digest: str
    mode: str
    batch_size: int
    placement: Placement
    schedule: Schedule
    summary: Summary
    prediction: Prediction = field(default_factory=Prediction)
    """Prediction that the summary was simulated from."""
    memory_limits: tuple[int, ...] = ()
    """Bytes that may be used on each device."""
    device_names: tuple[str, ...] = ()
    """The name of each device's kind, in a cluster of groups of devices."""
    alternatives: tuple[Alternative, ...] = ()
    """Candidates of the search and their results; () where the strategy was named."""
    breakdown: Breakdown | None = None
    """Breakdown of the step."""

    @property
    def has_own_sizes(self) -> bool:
        """True if stages have micro-batches of their own, other than the step's."""
        return any(stage.micro_batch_size != self.summary.micro_batch_size for stage in self.placement.stages)
