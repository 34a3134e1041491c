"""Names of the inputs and outputs of decoders that are exported with a key-value cache."""

from __future__ import annotations

from collections.abc import Iterable

TOKENS = "input_ids"
MASK = "attention_mask"
POSITIONS = "position_ids"
LOGITS = "logits"
"""Name of the logits output of an exported decoder."""
_PAST_PREFIX = "past"
_CACHE_NAME_PREFIXES = (
    ("past_key_values", "present"),
    (_PAST_PREFIX, "present"),
    ("past_key_values", "present_key_values"),
)
"""Pairs (prefix of cache inputs, prefix of cache outputs) that exporters use. In files of Optimum,
the output for the input `past_key_values.0.key` is `present.0.key`; in files of ONNX Runtime, the
output for `past_0` is `present_0`.
"""


def cache_pairs(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, str]:
    """Return the cache output of each cache input, by name. The input has the keys or values of
    earlier tokens; the output also has those of the current step. Return an empty mapping for a
    model without a cache.
    """
    given = frozenset(outputs)
    found = {}
    for name in inputs:
        names = (
            name.replace(past, present, 1)
            for past, present in _CACHE_NAME_PREFIXES
            if name.startswith(past)
        )
        if (present := next((each for each in names if each in given), None)) is not None:
            found[name] = present
    return found


def is_cache_input(name: str) -> bool:
    """Return True if `name` begins like the name of a cache input."""
    return name.startswith(_PAST_PREFIX)
