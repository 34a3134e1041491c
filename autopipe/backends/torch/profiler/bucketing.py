"""CPU time of a rank's gradient buckets, besides the exchange itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopipe.backends.torch.profiler.watch import Stopwatch, repeated
from autopipe.backends.torch.runtime.gradients import GradientReduction
from autopipe.backends.torch.runtime.pending import PendingRecv
from autopipe.backends.torch.runtime.transport import Transport
from autopipe.ir.program import Block, Bucket


class _Alone(Transport):
    """A rank whose gradients are the sums already."""

    def start_all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> PendingRecv:
        return PendingRecv(None, tensor, tensor.device)


def bucketing_seconds(watch: Stopwatch, seconds: float, tensors: int, elements: int) -> float:
    """Extra seconds of a backward that copies the gradients of `tensors` parameters with `elements` each into a bucket
    as they come, and copies the sums back.
    """
    own = [torch.ones(elements, device=watch.device, requires_grad=True) for _ in range(tensors)]
    shared = [torch.ones_like(each, requires_grad=True) for each in own]
    gradients = [torch.full((elements,), 1e-6, device=watch.device) for _ in range(tensors)]
    blocks = tuple(Block(index, elements, "fp32", 4, (0, 1), 0) for index in range(tensors))
    reduction = GradientReduction(_Alone(watch.device.type), dict(enumerate(shared)), [Bucket(blocks)], shared=False)

    def run() -> list[float]:
        marks = [watch.mark()]
        _backward(own, gradients)
        marks.append(watch.mark())
        reduction.arm(0, {})
        _backward(shared, gradients)
        reduction.finish()
        marks.append(watch.mark())
        for parameter in (*own, *shared):
            parameter.grad = None
        alone, together = watch.spans(marks)
        return [max(0.0, together - alone)]

    return repeated(run, seconds)[0].seconds


def _backward(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    torch.autograd.backward([each.neg() for each in parameters], gradients)
