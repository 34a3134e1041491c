"""A finished plan: what was decided, for which graph, what it is expected to take, and what else was tried."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from autopipe.ir.codec import At, Count, Fits, Index, Sparse
from autopipe.ir.placement import Placement, SplitProof
from autopipe.ir.schedule import Schedule
from autopipe.ir.timeline import Prediction


@dataclass(frozen=True, slots=True)
class Choice:
    """All that is decided before a placement and a schedule follow: naming it gives the same plan again. `options` are
    the strategy's that are not its defaults, as a configuration spells them; `schedule` is None where none was looked
    at, `micro_batches` where they are left to the strategy; `shard` as `Optimizer.shard`."""

    strategy: str
    options: tuple[tuple[str, str], ...] = ()
    schedule: str | None = None
    micro_batches: Count | None = None
    recompute: str = "none"
    shard: bool = False


@dataclass(frozen=True, slots=True)
class Alternative:
    """A choice and what came of it: figures of its placement and its simulated step, None where there is none.
    `lower_bound_s` is what no schedule of its placement is shorter than, `refused` why there is no step, and `same_as`
    the strategy that came to the same placement before: the step is that one's."""

    choice: Choice
    step_time_s: Annotated[float | None, Sparse()] = None
    lower_bound_s: Annotated[float | None, Sparse()] = None
    micro_batches: Annotated[Index | None, Sparse()] = None
    stages: Annotated[Index | None, Sparse()] = None
    bubble_rate: Annotated[float | None, Sparse()] = None
    peak_memory_bytes: Annotated[Index | None, Sparse()] = None
    refused: Annotated[str | None, Sparse()] = None
    same_as: Annotated[str | None, Sparse()] = None

    @property
    def rank(self) -> tuple[float, float]:
        """Seconds of the step, infinite where there is none; of those without, then those of the bound."""
        if self.step_time_s is not None:
            return self.step_time_s, 0.0
        return math.inf, math.inf if self.lower_bound_s is None else self.lower_bound_s


def best_of_each(alternatives: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """Of each strategy the alternative with the shortest step, the first of equals; the best strategy first. Of several
    that came to the same placement it is the one that did so first."""
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
        return math.fsum(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def losses(self) -> tuple[tuple[str, float], ...]:
        """Losses on top of the ideal, by name, the largest first."""
        found = ((field.name.removesuffix("_s"), getattr(self, field.name)) for field in dataclasses.fields(self)[1:])
        return tuple(sorted(found, key=lambda each: -each[1]))


@dataclass(frozen=True, slots=True)
class CostCoverage:
    """How many nodes' own operations were `measured`; those `judged` take what the roofline says, times how much longer
    than that the measured ones took."""

    measured: Index
    judged: Index


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a plan that users compare; the keys of `summary` in `plan.json`."""

    strategy: str
    schedule: str
    devices: Count
    stages: Count
    micro_batches: Count
    micro_batch_size: Count
    depth: Count
    """Stages on the longest path of the stage graph."""
    step_time_s: float
    samples_per_s: float
    bubble_rate: float
    peak_memory_bytes: tuple[Index, ...]
    search_time_s: tuple[tuple[str, float], ...]
    lower_bound_s: float
    """No schedule of this placement can take less."""
    optimal: bool
    """True if the schedule is proven the best for the placement: in its period, where a search found a steady state
    (but for the rounding it states), in its step otherwise."""
    gap: float | None
    """Share of the period, or the step, that lies above what is proven; 0 where it is optimal."""
    communication_bytes: tuple[tuple[str, Index], ...] | None
    """Bytes that a step's exchanges move over all devices, by kind (`ir/program.py`); None where the placement cannot
    be executed."""
    splits: SplitProof | None = None
    costs: Annotated[CostCoverage | None, Sparse()] = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement and a schedule for one graph. `graph_digest` says for which, `model` is its ONNX file's path.
    `device_names` are kinds of devices, in a cluster of groups, and `alternatives` the candidates of the search and
    their results, () where the strategy was named. The schedule has a file of its own."""

    written: ClassVar = (
        "model", "graph_digest", "mode", "batch_size", "summary", "memory_limits", "device_names", "placement",
        "prediction", "breakdown", "alternatives",
    )  # fmt: skip
    model: str
    graph_digest: str
    mode: Annotated[str, Fits(("train", "infer").__contains__, "train or infer")]
    batch_size: Count
    placement: Placement
    schedule: Schedule
    summary: Summary
    prediction: Annotated[Prediction, At("predictions")] = field(default_factory=Prediction)
    memory_limits: tuple[Index, ...] = ()
    device_names: Annotated[tuple[str, ...], Sparse()] = ()
    alternatives: Annotated[tuple[Alternative, ...], Sparse()] = ()
    breakdown: Breakdown | None = None

    @property
    def has_own_sizes(self) -> bool:
        """True if stages have micro-batches of their own, other than the step's."""
        return any(stage.micro_batch_size != self.summary.micro_batch_size for stage in self.placement.stages)
