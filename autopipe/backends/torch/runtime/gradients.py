"""Adding up gradients over the ranks that hold the same block of a parameter: in buckets, overlapped with backward.

Updating parameters in shares (ZeRO-1): each of the ranks that hold them keeps the optimizer's state of one share.

Rajbhandari, Rasley, Ruwase, He: "ZeRO: Memory optimizations toward training trillion parameter models" (SC 2020),
section 5.1. Updates are element by element, so a share is any part of a bucket's row: see `autopipe.ir.program`.

Optimizers by name, torch's own.

What verification compares: each rank's gradients after they are added up, and how much a rounding changes them.

The buckets in which a rank's gradients are added up over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.transport import PendingRecv, PendingReduce, Transport
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.graph import DType
from autopipe.ir.program import Block, Bucket, ElementRange, buckets_of


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerShard:
    """A tensor that the optimizer updates in place of parameters, and which elements of them it is."""

    tensor: torch.Tensor
    runs: tuple[ElementRange, ...]


class ShardedBucket:
    """A bucket of which each rank gets a share of the sums, and updates that.

    Its parameters lie in one row, and the share is a part of it: what is gathered after an update is in place.
    """

    def __init__(self, transport: Transport, bucket: Bucket, parameters: list[torch.Tensor]) -> None:
        self.bucket = bucket
        self.parameters = parameters
        self.runs = tuple(bucket.runs(transport.rank))
        self._transport = transport
        self._row = parameters[0].detach().new_zeros(bucket.elements)
        for parameter, place in zip(parameters, self._places(self._row), strict=True):
            parameter.data = place.copy_(parameter.detach())
        self.share = self._row.chunk(len(bucket.ranks))[bucket.ranks.index(transport.rank)]
        self._coming: PendingRecv | PendingReduce | None = None

    def _places(self, row: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' parts of a row."""
        return [
            row[start : start + parameter.numel()].view_as(parameter)
            for start, parameter in zip(self.bucket.starts, self.parameters, strict=True)
        ]

    def start(self) -> None:
        """Take the parameters' gradients and send them off."""
        gradients = torch.zeros_like(self._row)
        for parameter, place in zip(self.parameters, self._places(gradients), strict=True):
            if parameter.grad is not None:
                place.copy_(parameter.grad)
                parameter.grad = None  # It is in the message now.
        self._coming = self._transport.start_reduce_scatter(gradients, self.bucket.ranks)

    def finish(self) -> None:
        """Wait for the sums, and make them the share's gradient."""
        assert self._coming is not None
        self.share.grad = self._coming.wait()
        self._coming = None

    def gather(self) -> None:
        """Get the other ranks' shares of the parameters."""
        self._transport.traffic["parameter"] += self._row.nbytes
        self._transport.gather(self._row, self.bucket.ranks)

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients by parameter, whole. All of the bucket's ranks together; not counted as a step's."""
        assert self.share.grad is not None
        row = torch.zeros_like(self._row)
        row.chunk(len(self.bucket.ranks))[self.bucket.ranks.index(self._transport.rank)].copy_(self.share.grad)
        self._transport.gather(row, self.bucket.ranks)
        places = zip(self.bucket.blocks, self._places(row), strict=True)
        return {block.parameter: place for block, place in places}


class ReducedBucket(Protocol):
    """A bucket of a rank, and what is done with its gradients."""

    bucket: Bucket
    parameters: list[torch.Tensor]

    def start(self) -> None:
        """Take the parameters' gradients and send them off."""

    def finish(self) -> None:
        """Wait for the sums, and put them in place."""


class WholeBucket:
    """A bucket of which each rank gets all sums."""

    def __init__(self, transport: Transport, bucket: Bucket, parameters: list[torch.Tensor]) -> None:
        self.bucket = bucket
        self.parameters = parameters
        self._transport = transport
        self._coming: PendingRecv | PendingReduce | None = None

    def start(self) -> None:
        """Take the parameters' gradients and send them off."""
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in self.parameters
        ]
        row = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for parameter in self.parameters:
            parameter.grad = None  # It is in the message now, and comes back from there.
        self._coming = self._transport.start_all_reduce(row, self.bucket.ranks)

    def finish(self) -> None:
        """Wait for the sums, and make them the parameters' gradients."""
        assert self._coming is not None
        parts = torch.split(self._coming.wait(), [parameter.numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._coming = None


class GradientReduction:
    """All buckets of a rank. Every rank of a group starts the group's buckets in the same order.

    Buckets of parameters with a home stage start as soon as the stage's last backward has their gradients, the others
    at the end.
    """

    def __init__(
        self, transport: Transport, parameters: dict[int, torch.Tensor], buckets: Iterable[Bucket], shared: bool
    ) -> None:
        """With `shared` each rank updates a share of each bucket (ZeRO-1): its parameters move into one row."""
        self._parameters = parameters
        self.shared: list[ShardedBucket] = []
        self._buckets: list[ReducedBucket] = []
        for bucket in buckets:
            tensors = [parameters[block.parameter] for block in bucket.blocks]
            if shared:
                self.shared.append(ShardedBucket(transport, bucket, tensors))
                self._buckets.append(self.shared[-1])
            else:
                self._buckets.append(WholeBucket(transport, bucket, tensors))
        self._waiting = [0] * len(self._buckets)
        """By bucket the gradients that its stage's last backward has still to give; not armed, it only falls."""
        self._started = [False] * len(self._buckets)
        for number, each in enumerate(self._buckets):
            if each.bucket.home is not None:
                for parameter in each.parameters:
                    parameter.register_post_accumulate_grad_hook(self._hook(number))

    @property
    def updated(self) -> list[torch.Tensor]:
        """Tensors that the optimizer updates: parameters, and shards of buckets."""
        in_rows = {id(parameter) for each in self.shared for parameter in each.parameters}
        own = [each for each in self._parameters.values() if each.requires_grad and id(each) not in in_rows]
        return own + [each.share for each in self.shared]

    @property
    def shares(self) -> list[OptimizerShard]:
        """The shares among them."""
        return [OptimizerShard(each.share, each.runs) for each in self.shared]

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            self._waiting[number] -= 1
            if self._waiting[number] == 0:
                self._start(number)

        return ready

    def arm(self, stage: int, times: Mapping[int, int]) -> None:
        """Mark the stage's next backward as its last: buckets start when their gradients are complete.

        `times` is how often a backward adds to the gradient of a parameter, by its index; once where absent.
        """
        for number, each in enumerate(self._buckets):
            if each.bucket.home == stage:
                self._waiting[number] = sum(times.get(block.parameter, 1) for block in each.bucket.blocks)

    def start(self, stage: int) -> None:
        """Start the stage's buckets that wait for their gradients no longer."""
        for number, each in enumerate(self._buckets):
            if each.bucket.home == stage and not self._started[number]:
                self._start(number)

    def _start(self, number: int) -> None:
        self._started[number] = True
        self._buckets[number].start()

    def finish(self) -> None:
        """Start what has not started, wait for all, and put the sums in place."""
        for number, started in enumerate(self._started):
            if not started:
                self._start(number)
        for number, each in enumerate(self._buckets):
            each.finish()
            self._started[number] = False
            self._waiting[number] = 0

    def gather(self) -> None:
        """Get what the other ranks have updated."""
        for each in self.shared:
            each.gather()

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients of the rank's trained blocks by parameter, all of them: what verification compares."""
        found = {
            index: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for index, parameter in self._parameters.items()
            if parameter.requires_grad
        }
        for each in self.shared:
            found |= each.gradients()
        return found


def buckets_of_rank(manifest: Manifest, rank: int) -> tuple[Bucket, ...]:
    """Buckets of the trained blocks that the rank holds together with others, in the order of their exchanges."""
    found = []
    for shard in manifest.shards[rank]:
        entry = manifest.parameters[shard.parameter]
        dtype = DType(entry.dtype)
        if len(shard.ranks) > 1 and entry.trainable and dtype.is_floating:
            found.append(Block(shard.parameter, shard.elements, entry.dtype, dtype.itemsize, shard.ranks, shard.home))
    return buckets_of(found)


def make_optimizer(settings: dict[str, Any], parameters: list[torch.Tensor]) -> torch.optim.Optimizer | None:
    """The optimizer of a manifest over the rank's trainable blocks; None where the rank has none."""
    if not parameters:
        return None
    if settings["name"] == "sgd":
        return torch.optim.SGD(
            parameters, lr=settings["lr"], momentum=settings["momentum"], weight_decay=settings["weight_decay"]
        )
    if settings["name"] == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=settings["lr"],
            betas=tuple(settings["betas"]),
            eps=settings["eps"],
            weight_decay=settings["weight_decay"],
        )
    raise ConfigurationError(f"there is no optimizer {settings['name']!r}", hint="sgd or adamw")


def make_state(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer make what it keeps, as its first step would: by a step of gradients that are zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def dump_gradients(folder: Path, rank: int, gradients: dict[int, torch.Tensor]) -> None:
    """Write the gradients of the rank's blocks to `gradients_<rank>.npz` by parameter index, as float32 or float64."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for index, gradient in gradients.items():
        wide = gradient if gradient.dtype is torch.float64 else gradient.float()
        found[str(index)] = wide.cpu().numpy()
    np.savez(folder / f"gradients_{rank:03d}.npz", **found)  # type: ignore[arg-type]


def moved(tensor: torch.Tensor, step: float, key: int) -> torch.Tensor:
    """The tensor with each number a relative `step` larger or smaller, as `key` decides; whole numbers stay."""
    if not tensor.is_floating_point():
        return tensor
    signs = np.random.default_rng(key).integers(0, 2, tensor.shape, np.int8)
    factors = 1 + (torch.from_numpy(2 * signs - 1) * step).to(torch.float64)
    return (tensor.double() * factors.to(tensor.device)).to(tensor.dtype)
