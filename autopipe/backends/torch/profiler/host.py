"""Measurement of the host time per operator of an eager program: the time to dispatch an operator
and launch its kernels if the device does not limit the speed.
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
"""Number of rows and of columns of the tensors. It is so small that a device computes an operator
faster than the host launches the next one.
"""


def measure_host_launch(device: torch.device, precision: str) -> float:
    """Return the host's seconds per operator: the median over `_TIMED_RUNS` forwards and backwards
    of a chain of layers, divided by the number of operators.

    A layer has the operators of transformers: a matmul with a bias, an activation, an addition, a
    normalization and two views. The host waits for the device between runs only, so the time of a
    run is host time. If the device is the CPU, the result includes the computation of the
    operators.
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
    # The first run does not count, because the device loads kernels in it.
    return statistics.median(seconds[1:]) / operators


def _run_layers(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the result of `_TIMED_LAYERS` layers. Each layer is `_OPERATORS_PER_LAYER` statements
    of one operator each, like the lines of generated code.
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
    """Wait until a GPU has finished all launched work. Do nothing for a CPU, whose operators are
    finished when they return.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
