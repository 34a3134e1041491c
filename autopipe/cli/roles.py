"""What a person reads about what is trained: three lines, or every tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from autopipe.passes.frontend.model import Tensor

REASONS = 4
"""Reasons named in a line before the rest is only counted."""


def trained_lines(tensors: Sequence[Tensor], every: bool) -> Iterator[tuple[str, str]]:
    """A word and a text each: what is trained, what is not, what is doubtful, with the reasons; then `every` tensor."""
    for word, chosen in (("trained", True), ("not trained", False)):
        found = [each for each in tensors if each.trained is chosen]
        if found or chosen:
            yield word, _summary(found)
    doubtful = [each for each in tensors if each.doubtful]
    if doubtful:
        names = ", ".join(repr(each.value.name) for each in doubtful[:REASONS])
        more = f" and {len(doubtful) - REASONS} more" if len(doubtful) > REASONS else ""
        yield "doubtful", f"{names}{more}"
    for each in tensors if every else ():
        shape = "×".join(map(str, each.value.shape)) or "scalar"
        word = "trained" if each.trained else "not trained"
        yield word, f"{each.value.name!r} {shape}, {each.value.elements:,}: {each.why}"


def tensors_form(tensors: Sequence[Tensor]) -> list[dict[str, object]]:
    """The same for programs to read."""
    return [
        {
            "name": each.value.name,
            "shape": each.value.shape,
            "elements": each.value.elements,
            "trained": each.trained,
            "why": each.why,
            "doubtful": each.doubtful,
        }
        for each in tensors
    ]


def _summary(tensors: Sequence[Tensor]) -> str:
    if not tensors:
        return "nothing"
    reasons: Counter[str] = Counter()
    for each in tensors:
        reasons[each.why] += each.value.elements
    told = reasons.most_common()
    texts = [f"{count:,} {why}" for why, count in told[:REASONS]]
    if len(told) > REASONS:
        texts.append(f"{sum(count for _, count in told[REASONS:]):,} for other reasons")
    total = f"{sum(reasons.values()):,} elements in {len(tensors):,} tensor{'s' if len(tensors) > 1 else ''}"
    return f"{total}: {', '.join(texts)}"
