"""One of several ranks that time messages and collectives together; rank 0 writes what they took.

torchrun … -m autopipe.backends.torch.profiler.exchange_worker FILE DEVICE SECONDS
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from autopipe.backends.torch.profiler.watch import timing_of
from autopipe.backends.torch.runtime.collectives import Group
from autopipe.backends.torch.runtime.manifest import ChannelEntry
from autopipe.backends.torch.runtime.transport import Transport
from autopipe.ir.costs import EXCHANGES, Timing

SIZES = tuple(2**power for power in (12, 15, 18, 20, 22, 24))
"""Bytes."""
_LEAST, _MOST = 7, 100


def group_sizes(ranks: int) -> Iterator[int]:
    """Ranks of the groups whose collectives are measured: powers of two, and all."""
    size = 2
    while size < ranks:
        yield size
        size *= 2
    yield ranks


def main(target: Path, device: str, seconds: float) -> None:
    """Measure, and write the samples from rank 0."""
    transport = Transport(device)
    transport.start()
    sizes = tuple(group_sizes(transport.world_size))
    transport.make_groups(tuple(range(size)) for size in sizes)
    transport.make_channels(ChannelEntry(number, 0, 1, 2, 2) for number in range(len(SIZES)))
    each = seconds / (len(SIZES) * (1 + 4 * len(sizes)))
    with torch.no_grad():
        found = [
            {"kind": kind, "ranks": ranks, "bytes": size, **asdict(_timed(transport, ranks, run, parts, each))}
            for kind, ranks, size, run, parts in _runs(transport, sizes)
        ]
    if transport.rank == 0:
        target.write_text(json.dumps(found), encoding="utf-8")
    transport.stop()


Run = tuple[str, int, int, Callable[[], object], int]
"""What is exchanged, among how many ranks, how many bytes, how, and how many exchanges that makes."""


def _runs(transport: Transport, sizes: tuple[int, ...]) -> Iterator[Run]:
    for channel, size in enumerate(SIZES):
        yield "send", 2, size, _there_and_back(transport, channel, size), 2
    for ranks in sizes:
        members = tuple(range(ranks))
        group = Group(members, transport.rank, transport.group, transport.traffic) if transport.rank < ranks else None
        for size in SIZES:
            tensor = torch.ones(ranks, size // 4 // ranks, device=transport.device)
            for kind in EXCHANGES[1:]:
                yield kind, ranks, size, partial(_collective, kind, tensor, group), 1


def _collective(kind: str, tensor: torch.Tensor, group: Group | None) -> None:
    """One collective of a tensor with as many rows as ranks; nothing on a rank outside of the group."""
    if group is None:
        return
    if kind == "all_reduce":
        group.all_reduce(tensor)
    elif kind == "all_gather":
        group.all_gather(tensor[:1], 0)
    elif kind == "reduce_scatter":
        group.reduce_scatter(tensor, 0)
    else:
        group.all_to_all(tensor.T, 0, 1)


def _there_and_back(transport: Transport, channel: int, size: int) -> Callable[[], object]:
    """A message from rank 0 to rank 1 and one back, waited for where it comes, as between stages."""
    tensor = torch.ones(size // 4, device=transport.device)
    like = (tensor.dtype, tuple(tensor.shape))

    def run() -> None:
        if transport.rank == 0:
            arrival = transport.receive(like, 1, channel, True)
            transport.send(tensor, 1, channel, False)
            arrival.wait()
        elif transport.rank == 1:
            transport.send(transport.receive(like, 0, channel, False).wait(), 0, channel, True)
        transport.finish()

    return run


def _timed(transport: Transport, ranks: int, run: Callable[[], object], parts: int, seconds: float) -> Timing:
    """The median of one part, on rank 0; the others run as often as it does."""
    found: list[float] = []
    started = time.perf_counter()
    again = torch.ones(1)
    while again.item():
        dist.barrier()
        start = time.perf_counter()
        run()
        if transport.device.type == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / parts)
        short = time.perf_counter() - started < seconds
        again.fill_(float(len(found) < _LEAST + 2 or (len(found) < _MOST and short)))
        dist.broadcast(again, 0)
    return timing_of(found[2:])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
