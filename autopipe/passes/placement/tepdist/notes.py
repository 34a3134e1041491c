"""Notes of the outer search: a line for each factorisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autopipe.passes.placement.tepdist.search import MeshTrial


def search_notes(tried: Sequence[MeshTrial], best: MeshTrial, undivided: Mapping[str, str]) -> tuple[str, ...]:
    """A line a factorisation, the best first: its step, or what speaks against it."""
    by_mesh: dict[str, list[MeshTrial]] = {}
    for each in tried:
        by_mesh.setdefault(each.mesh.name, []).append(each)
    ranked = sorted(by_mesh.values(), key=lambda each: min(one.step_s for one in each))
    notes = [f"{each[0].mesh.name}: {_said(each, best)}" for each in ranked]
    reason = undivided.get(best.mesh.name)
    return tuple([*notes, f"the operators were divided in one line: {reason}"] if reason else notes)


def _said(tried: Sequence[MeshTrial], best: MeshTrial) -> str:
    fastest = min(tried, key=lambda each: each.step_s)
    if fastest is best:
        return f"{_ms(best.step_s)} with {_micro_batches(best)}, the best of {len(tried)} tried"
    if math.isfinite(fastest.step_s):
        return f"{_ms(fastest.step_s)} with {_micro_batches(fastest)}, {fastest.step_s / best.step_s:.2f} times that"
    beaten = [each for each in tried if each.least_s]
    if beaten:
        why = ", left out as time was up" if any(each.late for each in beaten) else ""
        return f"{_ms(min(each.least_s for each in beaten))} at least{why}"
    return str(next(each.refused for each in tried if each.refused)).partition("\n")[0]


def _micro_batches(tried: MeshTrial) -> str:
    return f"{tried.micro_batches} micro-batch{'es' if tried.micro_batches > 1 else ''}"


def _ms(seconds: float) -> str:
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1e3:.4g} ms"
