"""Degrees of parallelism of a plan: its pipeline of device groups, and the degrees in a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from autopipe.ir.codec import Count, Index, NonEmpty, OmitDefault
from autopipe.ir.words import plural

Interval = tuple[Count, Count]
"""Minimum and maximum of a degree over the stages and their products."""

_MAX_LISTED_GROUPS = 6
"""Maximum number of groups whose sizes the text lists one by one."""


@dataclass(frozen=True, slots=True)
class PlanDegrees:
    """Degrees of a plan, derived from its placement.

    A group is a set of devices that run the same stages. In a group, `data` × `sequence` × `tensor`
    × `copies` is the number of devices. The four are degrees of products (matrix products,
    convolutions, recurrent operators), which are most of the work; a product counts if it belongs
    to the 99% of its stage's FLOPs with the most frequent degrees.
    """

    groups: Annotated[tuple[Count, ...], NonEmpty]
    """Number of devices of each group, in the order of the first stages."""
    stages_per_group: Interval
    """Number of stages of a group in one pipeline."""
    data: Interval
    """Degree of data parallelism: shards of the samples of a micro-batch."""
    tensor: Interval
    """Degree of tensor parallelism: shards of the weights."""
    sequence: Annotated[Interval, OmitDefault()] = (1, 1)
    """Shards of the positions or pixels of a sample; each shard reads all weights."""
    copies: Annotated[Interval, OmitDefault()] = (1, 1)
    """Devices with equal computations (replicated compute)."""
    pipelines: Annotated[Count, OmitDefault()] = 1
    """Pipelines that take micro-batches in turn, each with all layers."""
    depth: Annotated[Index, OmitDefault()] = 0
    """Number of stages on the longest path if there are parallel branches; otherwise 0."""
    overlapping: Annotated[bool, OmitDefault()] = False
    """True if some devices belong to several groups."""
    zero_stage: Annotated[Index, OmitDefault()] = 0
    """1 if the optimizer state is sharded over replicas (ZeRO-1); otherwise 0."""
    stages: Count = 1
    recomputed_stages: Annotated[Index, OmitDefault()] = 0
    """Number of stages that recompute their forward in backward."""
    settled: Annotated[tuple[str, ...], OmitDefault()] = ()
    """Names of open options of the strategy, such as `tensor`."""

    @property
    def pipeline(self) -> int:
        """Number of device groups."""
        return len(self.groups)

    @property
    def has_replicas(self) -> bool:
        """True if several devices have equal parameters."""
        replicated = (self.data, self.sequence, self.copies)
        return self.pipelines > 1 or any(most > 1 for _, most in replicated)

    @property
    def options(self) -> dict[str, int]:
        """Values of the strategy's open options in this plan."""
        width = max(self.groups)
        values = {
            "pipeline": self.pipeline,
            "data": width // self.tensor[1],
            "tensor": self.tensor[1],
        }
        return {name: values[name] for name in self.settled if name in values}

    @property
    def text(self) -> str:
        """Text such as `pipeline 8 (2 stages per rank) × data 4 × tensor 2, ZeRO-1`."""
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


def _is_one(interval: Interval) -> bool:
    return interval[0] == interval[1]


def _interval_text(interval: Interval) -> str:
    return str(interval[0]) if _is_one(interval) else f"{interval[0]}–{interval[1]}"


def _sizes_text(sizes: Sequence[int]) -> str:
    if len(sizes) > _MAX_LISTED_GROUPS:
        return f"{min(sizes)} to {max(sizes)}"
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
