"""A finished plan: what was decided, for which graph, and what it is expected to take."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopipe.ir.alternatives import Alternative
from autopipe.ir.breakdown import Breakdown
from autopipe.ir.placement import Placement, SplitProof
from autopipe.ir.prediction import Prediction
from autopipe.ir.schedule import Schedule


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
    """Bytes that a step's exchanges move over all devices, by kind (`ir/traffic.py`); None where the placement cannot
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
