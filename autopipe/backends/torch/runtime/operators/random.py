"""Operators that draw numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopipe.backends.torch.runtime.random_streams import Stream, Words

_WORDS = 1 << 32


def dropout(data: Tensor, ratio: float | Tensor, stream: Stream, training: Tensor | None = None) -> Tensor:
    """Elements dropped with probability `ratio`, the others scaled up; none where `training` is there and false."""
    return dropout_and_mask(data, ratio, stream, training)[0]


def dropout_and_mask(
    data: Tensor,
    ratio: float | Tensor,
    stream: Stream,
    training: Tensor | None = None,
    mask: torch.dtype = torch.bool,
) -> tuple[Tensor, Tensor]:
    """The same, and the mask of those that stay."""
    if training is not None:
        ratio = training.reshape(()) * ratio
    threshold: int | Tensor
    scale: float | Tensor
    if isinstance(ratio, Tensor):
        ratio = ratio.reshape(())
        threshold = (ratio.double() * _WORDS).round().long()
        scale = torch.where(ratio < 1, 1 / (1 - ratio), 0).to(data.dtype)
    else:
        threshold = round(ratio * _WORDS)
        scale = 1 / (1 - ratio) if ratio < 1 else 0.0
    kept = stream.draw(data.shape, lambda words: _at_least(words, threshold), torch.bool)
    return torch.where(kept, data * scale, 0.0), kept.to(mask)


def bernoulli(probability: Tensor, stream: Stream, dtype: torch.dtype) -> Tensor:
    """One with the probability that stands at an element's place, else zero."""
    return (_words(stream, probability.shape) < probability.double() * _WORDS).to(dtype)


def uniform(shape: tuple[int, ...], low: float, high: float, stream: Stream, dtype: torch.dtype) -> Tensor:
    """Numbers between `low` and `high`."""
    return (_uniform(stream, shape) * (high - low) + low).to(dtype)


def normal(shape: tuple[int, ...], mean: float, scale: float, stream: Stream, dtype: torch.dtype) -> Tensor:
    """Normal numbers, made of two words each two (Box and Muller, 1958)."""

    def pair(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        radius = ((first + 1).double() / _WORDS).log().mul(-2).sqrt() * scale
        angle = second.double() * (2 * math.pi / _WORDS)
        return radius * angle.cos() + mean, radius * angle.sin() + mean

    def made(words: Words) -> Words:
        return (*pair(words[0], words[1]), *pair(words[2], words[3]))

    return stream.draw(shape, made, dtype)


def multinomial(logarithms: Tensor, count: int, stream: Stream, dtype: torch.dtype) -> Tensor:
    """Of each row `count` classes, drawn with probabilities of which it has the logarithms, up to a constant."""
    below = logarithms.double().softmax(1).cumsum(1)
    drawn = _uniform(stream, (len(logarithms), count)) * below[:, -1:]
    return torch.searchsorted(below, drawn, right=True).clamp_(max=logarithms.shape[1] - 1).to(dtype)


def _words(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    return stream.draw(shape, lambda words: words, torch.int64)


def _uniform(stream: Stream, shape: tuple[int, ...]) -> Tensor:
    return _words(stream, shape).double() / _WORDS


def _at_least(words: Words, threshold: int | Tensor) -> Words:
    first, second, third, fourth = words
    return first >= threshold, second >= threshold, third >= threshold, fourth >= threshold
