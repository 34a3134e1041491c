"""`--cuda-graphs`: which stages of a rank are captured as CUDA graphs, and whether the update
is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch

from autopipe.backends.torch.runtime.step.cuda_graphs import CaptureResources, has_cuda_graphs
from autopipe.backends.torch.runtime.step.stage import RankContext, Stage
from autopipe.ir.words import plural

_NOT_HOST_BOUND = "the plan is not bound by the host"
_UPDATE_KEY = "update"


def capture_stages(rank: RankContext, capture_update: Callable[[CaptureResources], str]) -> str:
    """Capture CUDA graphs of this rank's stages between two steps: of all stages if `--cuda-graphs`
    is given, otherwise of stages whose speed the plan predicts to be bound by the host. If a stage
    is captured, `capture_update` captures the update; it returns the reason if it cannot.
    Collective over all ranks.

    Return a line that says which stages of all ranks are captured, and why the others are not.
    """

    def capture() -> dict[str, str]:
        if not has_cuda_graphs(rank.device):
            return {str(number): f"{rank.device.type} devices have none" for number in rank.stages}
        resources = CaptureResources(partial(_free_bytes, rank))
        said = {
            str(number): _capture_stage(rank, stage, resources)
            for number, stage in sorted(rank.stages.items())
        }
        if rank.train and not all(said.values()):
            said[_UPDATE_KEY] = capture_update(resources)
        return said

    control_group = rank.transport.make_control_group()
    by_rank = control_group.run_collectively("capture", capture)
    control_group.close()
    return capture_summary(len(rank.manifest.stages), by_rank)


def captures_by_default(rank: RankContext) -> bool:
    """Return True if the device has CUDA graphs and the run has further steps to replay them."""
    return has_cuda_graphs(rank.device) and rank.steps_done < rank.options.steps


def _capture_stage(rank: RankContext, stage: Stage, resources: CaptureResources) -> str:
    """Capture a stage if it should be captured. Return the reason why it stays eager, "" if it is
    captured.
    """
    if not (rank.options.cuda_graphs or rank.manifest.stages[stage.number].host_bound):
        return _NOT_HOST_BOUND
    return stage.capture(resources)


def capture_summary(stages: int, by_rank: Iterable[Mapping[str, str]]) -> str:
    """Return one line about the stages of a program and its update. Each rank gives, by stage
    number or `update`, the reason why it stays eager, "" if it is captured.
    """
    reasons: dict[str, str] = {}
    for own in by_rank:
        for name, reason in own.items():
            reasons[name] = reasons.get(name) or reason
    eager = {name: reason for name, reason in reasons.items() if reason}
    if set(eager.values()) == {_NOT_HOST_BOUND} and len(eager) == stages:
        return f"no CUDA graphs: {_NOT_HOST_BOUND} (--cuda-graphs captures its stages nevertheless)"
    update = eager.pop(_UPDATE_KEY, "")
    by_reason = defaultdict[str, list[int]](list)
    for name in sorted(eager, key=int):
        by_reason[eager[name]].append(int(name))
    parts = [f"CUDA graphs: {stages - len(eager)} of {stages} {plural(stages, 'stage')} captured"]
    if _UPDATE_KEY in reasons and not update:
        parts[0] += ", and the update"
    parts += [f"{_stages_text(numbers)} eager: {reason}" for reason, numbers in by_reason.items()]
    if update:
        parts.append(f"the update eager: {update}")
    return "; ".join(parts)


def _stages_text(numbers: Iterable[int]) -> str:
    """Return `stage 3`, or `stages 1, 2, 3`."""
    texts = [str(number) for number in numbers]
    return f"{plural(len(texts), 'stage')} {', '.join(texts)}"


def _free_bytes(rank: RankContext) -> int:
    """Return the free memory of the device that this rank may use, in bytes."""
    free: int = torch.cuda.mem_get_info(rank.device)[0]
    if rank.manifest.memory_limits:
        limit = rank.manifest.memory_limits[rank.number]
        free = min(free, limit - torch.cuda.memory_reserved(rank.device))
    return free
