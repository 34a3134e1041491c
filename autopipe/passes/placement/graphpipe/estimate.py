"""A step of stages under 1F1B, from the search's own prices."""

from __future__ import annotations

from collections.abc import Sequence

from autopipe.passes.placement.graphpipe.stages import DraftStage

_PERIODS = 3
"""Micro-batches, times the stages' depth, after which a step goes on as it did."""


def stage_depths(before: Sequence[Sequence[int]]) -> list[int]:
    """For each stage the stages on the longest way from it to the end; `before` are the stages that each reads from."""
    depths = [1] * len(before)
    for stage, sources in reversed(list(enumerate(before))):
        for source in sources:
            depths[source] = max(depths[source], depths[stage] + 1)
    return depths


def step_seconds(
    drafts: Sequence[DraftStage], before: Sequence[Sequence[int]], micro_batches: int, train: bool
) -> float:
    """Seconds of a step. Of many micro-batches the first are looked at; others take as long as the last of those."""
    depth = max(stage_depths(before))
    enough = _PERIODS * depth + 2
    if micro_batches <= enough + depth:
        return _simulated(drafts, before, micro_batches, train)
    first, second = (_simulated(drafts, before, count, train) for count in (enough, enough + depth))
    return second + (second - first) / depth * (micro_batches - enough - depth)


def _simulated(drafts: Sequence[DraftStage], before: Sequence[Sequence[int]], count: int, train: bool) -> float:
    """Tasks start when their stage is free and all messages are there; F(s, m) is in turn 2m - depth(s) and B(s, m) in
    2m + depth(s) - 1, which is 1F1B's order on each stage and comes after all that a task waits for."""
    depths = stage_depths(before)
    after: list[list[int]] = [[] for _ in drafts]
    for stage, sources in enumerate(before):
        for source in sources:
            after[source].append(stage)
    turns = [(2 * m - depth, 0, stage, m) for stage, depth in enumerate(depths) for m in range(count)]
    if train:
        turns += [(2 * m + depth - 1, 1, stage, m) for stage, depth in enumerate(depths) for m in range(count)]
    free = [0.0] * len(drafts)
    done = [[[0.0] * count for _ in drafts] for _ in range(2)]
    for _, phase, stage, m in sorted(turns):
        draft = drafts[stage]
        message, seconds = (draft.returning, draft.backward) if phase else (draft.arriving, draft.forward)
        start = free[stage]
        for other in (after if phase else before)[stage]:
            start = max(start, done[phase][other][m] + message)
        free[stage] = done[phase][stage][m] = start + seconds
    return max(end + draft.end for end, draft in zip(free, drafts, strict=True))
