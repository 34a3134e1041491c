"""Gradients are added up over ranks in buckets that are the same on every rank."""

from __future__ import annotations

import torch

from autopipe.backends.torch.runtime.step.gradients import GradientReduction
from autopipe.ir.program import BucketShard, make_buckets


class Work:
    """A sum over ranks that is done when waited for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> torch.Tensor:
        return self.tensor * 2


class Transport:
    """Two ranks with equal gradients: sums are doubles. Keeps what was started, in order."""

    def __init__(self) -> None:
        self.started: list[tuple[tuple[int, ...], int]] = []

    def start_all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Work:
        self.started.append((ranks, tensor.numel()))
        return Work(tensor)


def parameter(size: int, dtype: torch.dtype = torch.float32, trained: bool = True) -> torch.Tensor:
    return torch.ones(size, dtype=dtype, requires_grad=trained)


def block(
    index: int, size: int, ranks: tuple[int, ...], home: int | None = None, dtype: str = "float32"
) -> BucketShard:
    return BucketShard(index, size, dtype, 8 if dtype == "float64" else 4, ranks, home)


def reduction(
    parameters: dict[int, torch.Tensor], blocks: list[BucketShard]
) -> tuple[GradientReduction, Transport]:
    transport = Transport()
    return GradientReduction(transport, parameters, make_buckets(blocks), shared=False), transport  # type: ignore[arg-type]


def test_gradients_become_sums_and_those_of_one_rank_stay() -> None:
    held = {0: parameter(2), 1: parameter(3), 2: parameter(4), 3: parameter(5, trained=False)}
    worker, transport = reduction(held, [block(0, 2, (0, 1)), block(2, 4, (0, 1))])
    (3 * held[0].sum() + held[1].sum()).backward()
    worker.finish()
    assert held[0].grad is not None
    assert held[0].grad.tolist() == [6, 6]
    assert held[1].grad is not None
    assert held[1].grad.tolist() == [1, 1, 1]
    assert held[2].grad is not None
    assert held[2].grad.tolist() == [0] * 4, "a rank without a gradient adds zeros"
    assert held[3].grad is None
    assert transport.started == [((0, 1), 6)]


def test_buckets_start_with_the_last_backward_of_their_stage() -> None:
    held = {0: parameter(2), 1: parameter(3)}
    worker, transport = reduction(held, [block(0, 2, (0, 1), 4), block(1, 3, (0, 1), 4)])
    (held[0].sum() + held[1].sum()).backward()
    assert not transport.started, "an earlier micro-batch sends nothing"
    worker.start_during_backward(5, {})
    held[0].sum().backward()
    assert not transport.started, "another stage's backward sends nothing"
    worker.start_during_backward(4, {})
    (held[0].sum() + held[1].sum()).backward()
    assert transport.started == [((0, 1), 5)]
    worker.finish()
    assert transport.started == [((0, 1), 5)]
    assert held[0].grad is not None
    assert held[0].grad.tolist() == [6, 6]


def test_a_bucket_waits_for_all_that_is_added_to_a_gradient() -> None:
    """Two segments that run again each add theirs."""
    held = {0: parameter(2), 1: parameter(3)}
    worker, transport = reduction(held, [block(0, 2, (0, 1), 0), block(1, 3, (0, 1), 0)])
    worker.start_during_backward(0, {0: 2})
    (held[0].sum() + held[1].sum()).backward()
    assert not transport.started
    held[0].sum().backward()
    assert transport.started == [((0, 1), 5)]


def test_a_second_step_is_like_the_first() -> None:
    held = {0: parameter(2)}
    worker, transport = reduction(held, [block(0, 2, (0, 1), 0)])
    for _ in range(2):
        held[0].grad = None
        worker.start_during_backward(0, {})
        held[0].sum().backward()
        worker.finish()
        assert held[0].grad is not None
        assert held[0].grad.tolist() == [2, 2]
    assert transport.started == [((0, 1), 2)] * 2


def test_buckets_start_in_the_order_that_all_ranks_keep() -> None:
    held = {0: parameter(2), 1: parameter(3), 2: parameter(4, torch.float64)}
    blocks = [block(0, 2, (0, 1), 1), block(1, 3, (0, 1)), block(2, 4, (0, 1), 1, "float64")]
    worker, transport = reduction(held, blocks)
    worker.finish()
    assert [size for _, size in transport.started] == [3, 4, 2]
