"""Breakdown of a step: the ideal, and all losses on top of it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


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
