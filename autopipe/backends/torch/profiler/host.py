"""Measurement of the host: the time that it takes to start an operator of an eager program while
the device is behind.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F

from autopipe.backends.torch.runtime.step.precision import autocast
from autopipe.ir.problem import BACKWARD_OPERATORS

_TIMED_LAYERS = 40
_OPERATORS_PER_LAYER = 6
_TIMED_RUNS = 20
_TENSOR_SIZE = 8
"""Rows and columns of the tensors. They are so small that a device computes an operator in less
time than a host takes to start one.
"""


def measure_host_launch(device: torch.device, precision: str) -> float:
    """Return the host's seconds per operator: the median over `_TIMED_RUNS` forwards and backwards
    of a chain of layers.

    A layer has a product with a bias, an activation, a sum, a normalization and two views, as
    transformers have them. The host waits for the device between runs only, so a run's time is the
    host's alone. On a CPU, it is the operators' time.
    """
    weight = torch.full((_TENSOR_SIZE, _TENSOR_SIZE), 0.1, device=device, requires_grad=True)
    bias = torch.zeros(_TENSOR_SIZE, device=device, requires_grad=True)
    inputs = torch.ones(_TENSOR_SIZE, _TENSOR_SIZE, device=device)
    seconds = []
    for _ in range(_TIMED_RUNS + 1):
        _synchronize(device)
        started = time.perf_counter()
        with autocast(precision, device):
            result = _run_layers(inputs, weight, bias)
        result.backward(torch.ones_like(result))
        seconds.append(time.perf_counter() - started)
        weight.grad = bias.grad = None
    _synchronize(device)
    operators = _TIMED_LAYERS * _OPERATORS_PER_LAYER * (1 + BACKWARD_OPERATORS)
    return statistics.median(seconds[1:]) / operators  # The first run loads kernels.


def _run_layers(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the result of `_TIMED_LAYERS` layers, each of `_OPERATORS_PER_LAYER` statements as
    generated code has them.
    """
    for _ in range(_TIMED_LAYERS):
        product = F.linear(values, weight.t(), bias)
        activated = F.gelu(product)
        added = activated + values
        columns = added.transpose(0, 1)
        normalized = F.layer_norm(columns, (_TENSOR_SIZE,), bias, bias)
        values = normalized.reshape(_TENSOR_SIZE, _TENSOR_SIZE)
    return values


def _synchronize(device: torch.device) -> None:
    """Wait until the device has computed all that was started."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
