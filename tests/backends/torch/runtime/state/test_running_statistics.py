"""Running statistics move as ONNX says, by each micro-batch once and in their order."""

from __future__ import annotations

import numpy as np
import torch

from autopipe.backends.torch.runtime.operators.sharded import batch_norm
from autopipe.backends.torch.runtime.state.running_statistics import RunningStatistics

MOMENTUM = 0.9


def test_they_move_by_micro_batches_in_order_and_are_read_in_a_validation() -> None:
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randn(4, 3, 5, generator=draw) + number for number in range(3)]
    mean = torch.zeros(3)
    variance = torch.ones(3)
    scale = torch.full((3,), 2.0)
    bias = torch.full((3,), 0.5)
    running = RunningStatistics()

    def forward(x: torch.Tensor) -> np.ndarray:
        return running.batch_norm(x, scale, bias, mean, variance, MOMENTUM, 1e-5).numpy()

    expected_mean = mean.numpy()
    expected_variance = variance.numpy()
    for x in (batch.numpy() for batch in batches):
        expected_mean = expected_mean * MOMENTUM + x.mean((0, 2)) * (1 - MOMENTUM)
        expected_variance = expected_variance * MOMENTUM + x.var((0, 2)) * (1 - MOMENTUM)
    for number in (2, 0, 1):
        running.begin(training=True)
        x = batches[number].numpy()
        y = (x - x.mean((0, 2), keepdims=True)) / np.sqrt(
            x.var((0, 2), keepdims=True) + 1e-5
        ) * 2 + 0.5
        np.testing.assert_allclose(forward(batches[number]), y, rtol=1e-4, atol=1e-5)
        running.end(number)
        forward(batches[number])  # As in a backward that runs it again.
    for statistic, left, added in running.updates_of_step(len(batches), {}):
        statistic.mul_(left).add_(added)
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-5)
    np.testing.assert_allclose(variance, expected_variance, rtol=1e-5)
    assert not running.updates_of_step(len(batches), {})
    running.begin(training=False)
    y = (batches[0].numpy() - expected_mean[:, None]) / np.sqrt(
        expected_variance[:, None] + 1e-5
    ) * 2 + 0.5
    np.testing.assert_allclose(forward(batches[0]), y, rtol=1e-4, atol=1e-5)


def test_the_variance_of_torchs_own_is_the_estimate_for_a_population() -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    module = torch.nn.BatchNorm1d(3, momentum=1 - MOMENTUM)
    expected = module(x)
    mean = torch.zeros(3)
    variance = torch.ones(3)
    running = RunningStatistics()
    running.begin(training=True)
    found = running.batch_norm(
        x, torch.ones(3), torch.zeros(3), mean, variance, MOMENTUM, 1e-5, unbiased=True
    )
    torch.testing.assert_close(found, expected)
    running.end(0)
    for statistic, left, added in running.updates_of_step(1, {}):
        statistic.mul_(left).add_(added)
    torch.testing.assert_close(mean, module.running_mean)
    torch.testing.assert_close(variance, module.running_var)
    moved = batch_norm(
        x,
        torch.ones(3),
        torch.zeros(3),
        torch.zeros(3),
        torch.ones(3),
        MOMENTUM,
        1e-5,
        unbiased=True,
    )
    torch.testing.assert_close(moved[2], module.running_var)
