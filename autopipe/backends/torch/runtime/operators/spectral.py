"""Fourier transforms, windows and mel filters. Complex numbers are pairs in a last dimension of two, as in ONNX."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def dft(data: Tensor, dim: int, *, length: int | None = None, inverse: bool = False, onesided: bool = False) -> Tensor:
    """Discrete Fourier transform along `dim` of real (last extent 1) or complex (2) numbers, cut or zero-padded.

    One-sided and inverse together take one half of a spectrum back to real numbers.
    """
    signal = torch.view_as_complex(data.contiguous()) if data.shape[-1] == 2 else data.squeeze(-1)
    if inverse and onesided:
        real: Tensor = torch.fft.irfft(signal, n=length, dim=dim)
        return real.unsqueeze(-1)
    if inverse:
        return torch.view_as_real(torch.fft.ifft(signal, n=length, dim=dim))
    if onesided:
        return torch.view_as_real(torch.fft.rfft(signal, n=length, dim=dim))
    return torch.view_as_real(torch.fft.fft(signal, n=length, dim=dim))


def stft(signal: Tensor, step: int, window: Tensor | None, length: int, *, onesided: bool) -> Tensor:
    """Transforms of windows of `length` samples taken every `step`: `[batch, frames, bins, 2]`."""
    samples = torch.view_as_complex(signal.contiguous()) if signal.shape[-1] == 2 else signal.squeeze(-1)
    frames = samples.unfold(1, length, step)
    if window is not None:
        frames = frames * window
    return torch.view_as_real(torch.fft.rfft(frames) if onesided else torch.fft.fft(frames))


def hamming_window(length: int, *, periodic: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Hamming's window with the exact coefficients 25/46 and 21/46 that ONNX takes."""
    return torch.hamming_window(length, periodic, alpha=25 / 46, beta=21 / 46, dtype=dtype, device=device)


def mel_weights(
    bins: int, length: int, rate: int, low: float, high: float, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Triangular filters `[length // 2 + 1, bins]` on the mel scale, 2595 log10(1 + f / 700)."""
    ends = [2595 * math.log10(1 + frequency / 700) for frequency in (low, high)]
    mels = torch.arange(bins + 2, dtype=torch.float64) * (ends[1] - ends[0]) / (bins + 2) + ends[0]
    places = ((length + 1) * 700 * (10 ** (mels / 2595) - 1) / rate).floor().to(torch.int64).tolist()
    weights = torch.zeros(length // 2 + 1, bins, dtype=torch.float64)
    for column in range(bins):
        lower, center, upper = places[column : column + 3]
        if center == lower:
            weights[center, column] = 1
        for row in range(lower, center + 1):
            if center != lower:
                weights[row, column] = (row - lower) / (center - lower)
        for row in range(center, upper):
            weights[row, column] = (upper - row) / (upper - center)
    return weights.to(dtype).to(device)
