"""`--cuda-graphs`: decides which stages of a rank, and whether the update of parameters, are
captured as CUDA graphs. "Eager" means not captured.
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
    """Capture stages of this rank as CUDA graphs, between two steps: all stages if `--cuda-graphs`
    is given, otherwise the stages for which the plan predicts that launching operators takes longer
    than running them. In training, if at least one stage of this rank is captured, also call
    `capture_update`, which captures the update; it returns the reason if it cannot, otherwise "".
    Collective over all ranks.

    Return a line for the user that says which stages are captured on all ranks, and why the others
    are not.
    """

    def capture() -> dict[str, str]:
        """Capture on this rank. Return, by stage number or "update", the reason why it stays eager,
        "" if it is captured.
        """
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
    """Return True if the device supports CUDA graphs and further steps follow that can replay
    them.
    """
    return has_cuda_graphs(rank.device) and rank.steps_done < rank.options.steps


def _capture_stage(rank: RankContext, stage: Stage, resources: CaptureResources) -> str:
    """Capture a stage if `--cuda-graphs` is given or the plan predicts a gain. Return the reason
    why it stays eager, "" if it is captured.
    """
    if not (rank.options.cuda_graphs or rank.manifest.stages[stage.number].host_bound):
        return _NOT_HOST_BOUND
    return stage.capture(resources)


def capture_summary(stages: int, by_rank: Iterable[Mapping[str, str]]) -> str:
    """Return a line for the user about the capture of a program with `stages` stages and of its
    update. `by_rank` has, for each rank, the reason why a stage or the update stays eager, by stage
    number or "update"; "" if it is captured. A stage counts as captured if it is captured on all
    its ranks.
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
    """Return the stage numbers as text: `stage 3`, or `stages 1, 2, 3`."""
    texts = [str(number) for number in numbers]
    return f"{plural(len(texts), 'stage')} {', '.join(texts)}"


def _free_bytes(rank: RankContext) -> int:
    """Return the number of bytes on this rank's GPU that the rank can still allocate: free memory,
    up to the rank's memory limit if it has one.
    """
    free: int = torch.cuda.mem_get_info(rank.device)[0]
    if rank.manifest.memory_limits:
        limit = rank.manifest.memory_limits[rank.number]
        free = min(free, limit - torch.cuda.memory_reserved(rank.device))
    return free
