"""What gradients that several ranks add up take of a rank's own time, besides the exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopipe.backends.torch.profiler.watch import Watch, repeated
from autopipe.backends.torch.runtime.gradients import GradientReduction
from autopipe.backends.torch.runtime.pending import Arrival
from autopipe.backends.torch.runtime.transport import Transport
from autopipe.ir.buckets import Block, Bucket


class _Alone(Transport):
    """A rank whose gradients are the sums already."""

    def start_all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Arrival:
        return Arrival(None, tensor, tensor.device)


def bucketing_seconds(watch: Watch, seconds: float, tensors: int, elements: int) -> float:
    """How much longer a backward takes that puts the gradients of so many parameters, of so many elements each, into a
    bucket as they come, with what it takes to have them back from there."""
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
