"""The next token of each sequence from its logits: the likeliest, or drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopipe.backends.torch.runtime.decoder import GenerationRequest
from autopipe.backends.torch.runtime.philox import as_uniform, words

_STREAM = 3


def choose_tokens(logits: torch.Tensor, request: GenerationRequest, draws: Sequence[tuple[int, int]]) -> list[int]:
    """A token for each row of logits [rows, vocabulary] in host memory, as the request says. `draws` names each row's
    draw by its sequence and the number of its new token: a draw is the same whoever makes it, beside whatever others.
    """
    if request.temperature == 0.0:
        return [int(token) for token in logits.argmax(-1)]
    scaled, order = (logits.double() / request.temperature).sort(dim=-1, descending=True, stable=True)
    if request.top_k is not None:
        scaled[:, request.top_k :] = -torch.inf
    shares = scaled.softmax(-1)
    if request.top_p is not None:
        shares[shares.cumsum(-1) - shares >= request.top_p] = 0.0  # The first that reaches it counts too.
    sums = shares.cumsum(-1)
    drawn = [float(as_uniform(words(request.seed, (_STREAM, sequence), number, 1))[0]) for sequence, number in draws]
    below = torch.tensor(drawn, dtype=torch.float64)[:, None] * sums[:, -1:]
    places = (sums <= below).sum(-1, keepdim=True)
    places = places.clamp(max=(shares > 0).sum(-1, keepdim=True) - 1)  # Sums are rounded, at their end too.
    return [int(token) for token in order.gather(-1, places)[:, 0]]
