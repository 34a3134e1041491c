"""Tokens are drawn from the distribution that temperature, top-k and top-p leave."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from autopipe.backends.torch.runtime.modes.decoder import GenerationRequest
from autopipe.backends.torch.runtime.modes.generation import choose_tokens

SHARES = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
COUNT = 4000


def frequencies(**settings: float | None) -> dict[int, float]:
    request = GenerationRequest(
        (), 1, temperature=settings.pop("temperature", 1.0), seed=5, **settings
    )  # type: ignore[arg-type]
    tokens = choose_tokens(
        SHARES.log().expand(COUNT, -1), request, [(number, 0) for number in range(COUNT)]
    )
    return {token: count / COUNT for token, count in Counter(tokens).items()}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {0: 0.1, 1: 0.4, 2: 0.05, 3: 0.3, 4: 0.15}),
        ({"top_k": 2}, {1: 4 / 7, 3: 3 / 7}),
        ({"top_p": 0.75}, {1: 0.4 / 0.85, 3: 0.3 / 0.85, 4: 0.15 / 0.85}),
        ({"top_p": 0.01}, {1: 1.0}),
        ({"temperature": 0.5, "top_k": 2}, {1: 16 / 25, 3: 9 / 25}),
        ({"temperature": 0.0}, {1: 1.0}),
    ],
)
def test_frequencies(settings: dict[str, float], expected: dict[int, float]) -> None:
    found = frequencies(**settings)
    assert found.keys() == expected.keys()
    assert all(abs(found[token] - share) < 0.03 for token, share in expected.items())


def test_a_draw_belongs_to_its_sequence_and_place() -> None:
    request = GenerationRequest((), 1, temperature=1.0, seed=3)
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    draws = [(sequence, number) for sequence in range(2) for number in range(3)]
    together = choose_tokens(logits, request, draws)
    assert [
        choose_tokens(logits[row : row + 1], request, [draw])[0] for row, draw in enumerate(draws)
    ] == together
