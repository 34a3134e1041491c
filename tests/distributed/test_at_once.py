"""What is exchanged at once is what gloo's own collectives give, on every rank the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.support.pool import Pools

pytestmark = pytest.mark.distributed

RANK = """
import json
import torch
import torch.distributed as dist
from autopipe.backends.torch.runtime.communication.transport import Transport, all_gather, uses_direct_exchange
from autopipe.backends.torch.runtime.communication.transport import start_all_reduce, start_reduce_scatter

transport = Transport("cpu")
transport.start()
ranks, rank = transport.world_size, transport.rank
transport.connect([(0, 2), (1, 2)])
found = {}
for name, members in (("all", tuple(range(ranks))), ("two", (0, 2))):
    if rank not in members:
        continue
    group, count = transport.group(members), len(members)
    own = torch.arange(6, dtype=torch.float64).reshape(2, 3) * 7 ** rank + rank
    assert uses_direct_exchange(own, group)
    total, largest = own.clone(), -own
    dist.all_reduce(total, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    parts = [torch.empty_like(own) for _ in range(count)]
    dist.all_gather(parts, own, group=group)
    assert torch.equal(start_all_reduce(own.clone(), group).wait(), total)
    assert torch.equal(start_all_reduce(-own, group, dist.ReduceOp.MAX).wait(), largest)
    assert torch.equal(all_gather(own.T, group), torch.stack(parts).mT)
    rows = torch.stack([own * (place + 1) for place in range(count)])
    assert torch.equal(start_reduce_scatter(rows, group).wait(), total * (members.index(rank) + 1))
    large = torch.linspace(0, 1, 3 * (1 << 15)) ** (rank + 1)
    for elements in (1 << 10, 3 * (1 << 15)):
        reduced = large[:elements].clone()
        dist.all_reduce(reduced, group=group)
        summed = transport.start_all_reduce(large[:elements].clone(), members).wait()
        assert torch.allclose(summed, reduced, rtol=1e-6)
        found[f"{name} {elements}"] = summed.double().cumsum(0)[-1].item()
    share = transport.start_reduce_scatter(large.clone(), members).wait()
    row = torch.zeros_like(large)
    row.chunk(count)[members.index(rank)].copy_(share)
    transport.all_gather_in_place(row, members)
    assert torch.allclose(row, reduced, rtol=1e-6)
print(json.dumps(found))
transport.stop()
"""


def test_sums_and_gathered_tensors_are_those_of_gloo(pools: Pools, tmp_path: Path) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank:03d}.py").write_text(RANK)
    said = [json.loads(text) for text in pools.of(3).run(tmp_path)]
    assert said[0] == said[2], "ranks have the same sums, to the last bit"
    assert {name: said[0][name] for name in said[1]} == said[1]
