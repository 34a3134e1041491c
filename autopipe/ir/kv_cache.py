"""Pairs of cache outputs and cache inputs of decoders that are exported with a key-value cache."""

from __future__ import annotations

from collections.abc import Iterable

TOKENS = "input_ids"
MASK = "attention_mask"
POSITIONS = "position_ids"
LOGITS = "logits"
"""Names of the other inputs and of the logits output of exported decoders."""
_PAST_PREFIX = "past"
_CACHE_NAME_PREFIXES = (
    ("past_key_values", "present"),
    (_PAST_PREFIX, "present"),
    ("past_key_values", "present_key_values"),
)
"""Pairs (start of an input name, start of the output name) of exporters. Optimum names the output
for `past_key_values.0.key` `present.0.key`; ONNX Runtime names the output for `past_0` `present_0`.
"""


def cache_pairs(inputs: Iterable[str], outputs: Iterable[str]) -> dict[str, str]:
    """Return {cache input: cache output}. The input has keys or values of earlier tokens; the
    output also has those of the current step. Return {} for a model without a cache.
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
    """True if `name` starts as the names of cache inputs do."""
    return name.startswith(_PAST_PREFIX)
