"""Hooks of a rank's run, which the modes of verification and generation override."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.step.rank_context import RankContext


class Mode:
    """Hooks of a rank's run. The hooks of the base class change nothing; a mode overrides the hooks
    that it needs. A rank has any number of modes and calls the same hook of each in turn.
    """

    probes = False
    """True if the run inspects a few steps. Such a run has no validation and reads no data ahead,
    and captures CUDA graphs only if `--cuda-graphs` is given.
    """
    exact_matmuls = False
    """True if matmuls of fp32 tensors must have IEEE precision, whatever the plan's precision."""

    def on_parameters(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Called once with the rank's shards of parameters, by parameter index."""

    def on_constants(self, constants: dict[str, torch.Tensor]) -> None:
        """Called once per program with the constants of its stages, by name."""

    def on_stages(self, rank: RankContext) -> None:
        """Called once when the rank's stages have their parameters."""

    def on_input(self, tensor: torch.Tensor, sample: int) -> torch.Tensor:
        """Return the tensor that a stage uses instead of `tensor`, a slice of a graph input for one
        micro-batch. `sample` is the number of the micro-batch's first sample.
        """
        return tensor

    def computes_step(self, step: int) -> bool:
        """Return False if the forward and backward passes of this step are to be skipped."""
        return True

    def on_gradients(self, rank: RankContext) -> None:
        """Called in training when the gradients of a step are reduced, before the update."""

    def on_update(self, rank: RankContext) -> None:
        """Called in training after the update of a step."""

    def repeats_step(self, rank: RankContext) -> bool:
        """Return True if the step that has just ended is to run again with the same data."""
        return False

    def run(self, rank: RankContext, step: Callable[[], None]) -> bool:
        """Run `step` as often as the mode needs, in place of training or inference on data. Return
        False if the mode leaves the steps to the rank.
        """
        return False
