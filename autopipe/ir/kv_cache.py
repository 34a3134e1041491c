"""Decoders that are exported with a cache of keys and values: which output of a step is which input
of the next.
"""

from __future__ import annotations

from collections.abc import Iterable

TOKENS = "input_ids"
MASK = "attention_mask"
POSITIONS = "position_ids"
LOGITS = "logits"
"""Names that decoders' other inputs and outputs have."""
_PAST = "past"
_PRESENTS = (
    ("past_key_values", "present"),
    (_PAST, "present"),
    ("past_key_values", "present_key_values"),
)
"""How exporters name outputs after inputs: `past_key_values.0.key` is `present.0.key` in Optimum's
files, `past_0` is `present_0` in ONNX Runtime's.
"""


def cache_pairs(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, str]:
    """By the name of each input that holds a layer's keys or values of earlier tokens, the output
    that holds them with those of this step's; {} for a model without a cache.
    """
    given = frozenset(outputs)
    found = {}
    for name in inputs:
        names = (
            name.replace(past, present, 1) for past, present in _PRESENTS if name.startswith(past)
        )
        if (present := next((each for each in names if each in given), None)) is not None:
            found[name] = present
    return found


def is_cache_input(name: str) -> bool:
    """True for names that a cache's inputs have."""
    return name.startswith(_PAST)
