"""The factorisations of a cluster's devices into pipeline, data and tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopipe.ir.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Degrees:
    """`pipeline` groups of devices in a line, each of `data` replicas of `tensor` devices that share every layer.

    A replica's devices are neighbours. The replicas of a group are neighbours, too, so that the line goes along the
    slowest links; or, where `apart`, the groups of one replica are, so that only sums of gradients do.
    """

    pipeline: int
    data: int
    tensor: int
    apart: bool = False

    @property
    def width(self) -> int:
        """Devices of a group."""
        return self.data * self.tensor

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each group: replica by replica."""
        between, step = (self.tensor, self.pipeline * self.tensor) if self.apart else (self.width, self.tensor)
        return tuple(
            tuple(
                place * between + replica * step + device
                for replica in range(self.data)
                for device in range(self.tensor)
            )
            for place in range(self.pipeline)
        )

    def may_be_apart(self, cluster: Cluster) -> bool:
        """True if it makes a difference where replicas are."""
        return self.pipeline > 1 and self.data > 1 and cluster.node_count > 1

    def __str__(self) -> str:
        text = f"pipeline {self.pipeline} x data {self.data} x tensor {self.tensor}"
        return f"{text}, replicas apart" if self.apart else text


def factorisations(
    cluster: Cluster, pipeline: int | None = None, data: int | None = None, tensor: int | None = None
) -> Iterator[Degrees]:
    """Every factorisation with the degrees that are given, replicas neighbours.

    Where `tensor` is open it is at most the devices of a node: what layers exchange, all micro-batches long, is more
    than other links carry (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", 2021, section 3).
    """
    size = cluster.size
    for shared in [tensor] if tensor else range(1, min(size, cluster.devices_per_node) + 1):
        if size % shared:
            continue
        rest = size // shared
        for count in [pipeline] if pipeline else range(1, rest + 1):
            if rest % count or data not in (None, rest // count):
                continue
            yield Degrees(count, rest // count, shared)
