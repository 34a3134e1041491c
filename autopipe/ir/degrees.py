"""Degrees of parallelism of a plan: the number of device groups in its pipeline, and the degrees
inside a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from autopipe.ir.codec import Count, Index, NonEmpty, OmitDefault
from autopipe.ir.words import plural

Interval = tuple[Count, Count]
"""Minimum and maximum of a degree over the stages of a plan and the matmuls in them."""

_MAX_LISTED_GROUPS = 6
"""Maximum number of groups of devices whose sizes `PlanDegrees.text` lists individually."""


@dataclass(frozen=True, slots=True)
class PlanDegrees:
    """Degrees of parallelism of a plan, derived from its placement.

    A group is a set of devices that run the same stages. Its size is `data` × `sequence` × `tensor`
    × `copies`. These four are degrees of matmuls, convolutions and recurrent operators, which are
    most of the computation. In each stage, operators with rare degrees that have at most 1% of its
    FLOPs together are not counted.
    """

    groups: Annotated[tuple[Count, ...], NonEmpty]
    """Number of devices of each group. A group is a set of devices that run the same stages. Groups
    are in the order of their first stages.
    """
    stages_per_group: Interval
    """Number of stages that a group of devices runs in each pipeline."""
    data: Interval
    """Degree of data parallelism: the number of shards into which the samples of a micro-batch are
    divided.
    """
    tensor: Interval
    """Degree of tensor parallelism: the number of shards into which the weights are divided."""
    sequence: Annotated[Interval, OmitDefault()] = (1, 1)
    """Number of shards into which the positions or pixels of a sample are divided. Each shard
    requires all weights.
    """
    copies: Annotated[Interval, OmitDefault()] = (1, 1)
    """Number of devices that perform equal computations."""
    pipelines: Annotated[Count, OmitDefault()] = 1
    """Number of pipelines, each with all layers, between which the micro-batches alternate."""
    depth: Annotated[Index, OmitDefault()] = 0
    """Number of stages on the longest path through the stage graph if it has parallel branches,
    otherwise 0.
    """
    overlapping: Annotated[bool, OmitDefault()] = False
    """True if some devices belong to several groups. A group is a set of devices that run the same
    stages.
    """
    zero_stage: Annotated[Index, OmitDefault()] = 0
    """1 if the optimizer state is sharded over replicas (ZeRO-1); otherwise 0."""
    stages: Count = 1
    recomputed_stages: Annotated[Index, OmitDefault()] = 0
    """Number of stages that recompute their forward in backward."""
    settled: Annotated[tuple[str, ...], OmitDefault()] = ()
    """Names of the options, such as `tensor`, that the user left open and whose values the strategy
    chose.
    """

    @property
    def pipeline(self) -> int:
        """Degree of pipeline parallelism: the number of groups of devices that run different
        stages.
        """
        return len(self.groups)

    @property
    def has_replicas(self) -> bool:
        """True if several devices hold equal parameters."""
        replicated = (self.data, self.sequence, self.copies)
        return self.pipelines > 1 or any(most > 1 for _, most in replicated)

    @property
    def options(self) -> dict[str, int]:
        """By name, the values in this plan of the options that the user left open and the strategy
        chose (`settled`).
        """
        width = max(self.groups)
        values = {
            "pipeline": self.pipeline,
            "data": width // self.tensor[1],
            "tensor": self.tensor[1],
        }
        return {name: values[name] for name in self.settled if name in values}

    @property
    def text(self) -> str:
        """Description of the degrees, such as `pipeline 8 (2 stages per rank) × data 4 × tensor 2,
        ZeRO-1`.
        """
        factors = [self._pipeline_text(), f"data {_interval_text(self.data)}"]
        factors += [f"sequence {_interval_text(self.sequence)}"] if self.sequence != (1, 1) else []
        factors.append(f"tensor {_interval_text(self.tensor)}")
        factors += [f"copies {_interval_text(self.copies)}"] if self.copies != (1, 1) else []
        told = [" × ".join(factors) if len(set(self.groups)) == 1 else ", ".join(factors)]
        if self.zero_stage:
            told.append(f"ZeRO-{self.zero_stage}")
        if self.recomputed_stages:
            told.append(
                f"recompute {self.recomputed_stages} of {self.stages} "
                f"{plural(self.stages, 'stage')}"
            )
        return ", ".join(told)

    def _pipeline_text(self) -> str:
        """Return the description of the groups of devices and their stages, such as `pipeline 8 (2
        stages per rank)`.
        """
        notes = []
        if self.stages_per_group != (1, 1):
            notes.append(f"{_interval_text(self.stages_per_group)} stages per rank")
        if self.pipelines > 1:
            notes.append(f"{self.pipelines} directions")
        if self.depth:
            notes.append(f"branches, {self.depth} {plural(self.depth, 'stage')} deep")
        if self.overlapping:
            notes.append("groups share devices")
        note = f" ({', '.join(notes)})" if notes else ""
        if len(set(self.groups)) == 1:
            return f"pipeline {self.pipeline}{note}"
        noun = "stages" if self.stages == self.pipeline else "groups"
        return f"pipeline {self.pipeline} {noun} of {_sizes_text(self.groups)} devices{note}"


def _is_single_value(interval: Interval) -> bool:
    """Return True if minimum and maximum are equal."""
    return interval[0] == interval[1]


def _interval_text(interval: Interval) -> str:
    """Return an interval as text: `2`, or `2–4` if minimum and maximum differ."""
    return str(interval[0]) if _is_single_value(interval) else f"{interval[0]}–{interval[1]}"


def _sizes_text(sizes: Sequence[int]) -> str:
    """Return the numbers of devices of several groups as text: all of them or, if there are many,
    their minimum and maximum.
    """
    if len(sizes) > _MAX_LISTED_GROUPS:
        return f"{min(sizes)} to {max(sizes)}"
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
