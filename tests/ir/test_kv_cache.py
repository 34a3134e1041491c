"""Outputs of a step are found that are inputs of the next."""

from __future__ import annotations

import pytest

from autopipe.ir.kv_cache import cache_pairs


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("past_key_values.0.key", "present.0.key"),
        ("past_key_values.11.value", "present_key_values.11.value"),
        ("past_3", "present_3"),
        ("past_key_0", "present_key_0"),
    ],
)
def test_names_of_exporters(past: str, present: str) -> None:
    assert cache_pairs(["input_ids", past], ["logits", present]) == {past: present}


def test_a_model_without_a_cache() -> None:
    assert cache_pairs(["input_ids", "past_key_values.0.key"], ["logits", "present.1.key"]) == {}
