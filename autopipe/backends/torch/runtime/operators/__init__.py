"""Operators that torch spells with more than one expression. Generated code calls them by name."""

from __future__ import annotations

from autopipe.backends.torch.runtime.operators.elementwise import dropout, shrink
from autopipe.backends.torch.runtime.operators.indexing import (
    gather_elements,
    gather_nd,
    one_hot,
    scatter_elements,
    scatter_nd,
    tensor_scatter,
)
from autopipe.backends.torch.runtime.operators.movement import col2im, compress, pad, reverse_sequence
from autopipe.backends.torch.runtime.operators.reduction import cumprod, cumsum, hardmax, top_k
from autopipe.backends.torch.runtime.operators.spectral import dft, hamming_window, mel_weights, stft

__all__ = [
    "col2im",
    "compress",
    "cumprod",
    "cumsum",
    "dft",
    "dropout",
    "gather_elements",
    "gather_nd",
    "hamming_window",
    "hardmax",
    "mel_weights",
    "one_hot",
    "pad",
    "reverse_sequence",
    "scatter_elements",
    "scatter_nd",
    "shrink",
    "stft",
    "tensor_scatter",
    "top_k",
]
