"""Which stages of a rank run as CUDA graphs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from autopipe.backends.torch.runtime.compiled import said_of_stages
from autopipe.backends.torch.runtime.cuda_graphs import StaticGradients
from autopipe.backends.torch.runtime.stage import RankContext, Stage

_NOT_ASKED = "the plan is not bound by the host"


def capture_stages(rank: RankContext) -> str:
    """Capture CUDA graphs of this rank's stages, all ranks together, between two steps: of all stages if
    `--cuda-graphs` is given, otherwise of those that the host bounds. Return a line that says which stages of all ranks
    are captured, and why others are not."""
    gradients = StaticGradients()
    asked = rank.options.cuda_graphs

    def capture(stage: Stage) -> str:
        if not (asked or rank.manifest.stages[stage.number].host_bound):
            return _NOT_ASKED
        return stage.capture(gradients, lambda: _free_bytes(rank))

    said = dict(said_of_stages(rank.stages, rank.transport, capture))
    return summary(len(rank.manifest.stages), said)


def summary(stages: int, said: dict[int, str]) -> str:
    """Return one line about the stages of a program, of which `said` are not captured, by reason."""
    if said and set(said.values()) == {_NOT_ASKED} and len(said) == stages:
        return f"no CUDA graphs: {_NOT_ASKED} (--cuda-graphs captures its stages nevertheless)"
    by_reason = defaultdict[str, list[int]](list)
    for number, reason in sorted(said.items()):
        by_reason[reason].append(number)
    eager = "; ".join(f"{_stages(numbers)} eager: {reason}" for reason, numbers in by_reason.items())
    captured = f"CUDA graphs: {stages - len(said)} of {stages} stages captured"
    return f"{captured}; {eager}" if eager else captured


def _stages(numbers: Iterable[int]) -> str:
    """Return `stage 3`, or `stages 1, 2, 3`."""
    texts = [str(number) for number in numbers]
    return f"stage{'s' if len(texts) > 1 else ''} {', '.join(texts)}"


def _free_bytes(rank: RankContext) -> int:
    """Return how much memory of the device is free for this rank."""
    free: int = torch.cuda.mem_get_info(rank.device)[0]
    if rank.manifest.memory_limits:
        limit = rank.manifest.memory_limits[rank.number]
        free = min(free, limit - torch.cuda.memory_reserved(rank.device))
    return free
