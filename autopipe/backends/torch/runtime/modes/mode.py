"""Hooks of a rank's run, which the modes of verification and generation override."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from autopipe.backends.torch.runtime.step.rank_context import RankContext


class Mode:
    """Hooks of a rank's run. The hooks of the base class change nothing; a mode overrides some of
    them. A rank has a tuple of modes, and calls a hook on each of them in order.
    """

    probes = False
    """True if the run inspects a few steps. The run then has no validation and no prefetching of
    data, and captures CUDA graphs only if `--cuda-graphs` is given.
    """
    exact_matmuls = False
    """True if matmuls of fp32 tensors have IEEE precision in this mode, also in a plan with TF32.
    """

    def on_parameters(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Called once with the rank's shards of parameters, by parameter index."""

    def on_constants(self, constants: dict[str, torch.Tensor]) -> None:
        """Called once per program with the constants of its stages, by name."""

    def on_stages(self, rank: RankContext) -> None:
        """Called once when the rank's stages have their parameters."""

    def on_input(self, tensor: torch.Tensor, sample: int) -> torch.Tensor:
        """Return the replacement of `tensor`, a slice of a graph input for one micro-batch.
        `sample` is the number of the micro-batch's first sample.
        """
        return tensor

    def computes_step(self, step: int) -> bool:
        """Return False to skip the forward and backward passes of this step."""
        return True

    def on_gradients(self, rank: RankContext) -> None:
        """Called in training after the gradient reduction of a step, before its update."""

    def on_update(self, rank: RankContext) -> None:
        """Called in training after the update of a step."""

    def repeats_step(self, rank: RankContext) -> bool:
        """Return True to run the step that has just ended again with the same data."""
        return False

    def run(self, rank: RankContext, step: Callable[[], None]) -> bool:
        """Run the whole generation or other work of this mode with `step`. Return False, without
        effect, if the rank itself runs the steps.
        """
        return False
