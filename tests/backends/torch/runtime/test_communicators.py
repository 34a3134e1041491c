"""How ranks agree on NCCL, in which order they make its communicators, and what it can carry."""

from __future__ import annotations

import threading
from itertools import groupby

import pytest
import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.communicators import agree_on_nccl, as_nccl_type, check_sum, order_in_rounds
from autopipe.ir.errors import LaunchError


@pytest.mark.parametrize(
    ("gpus", "nccl", "why"),
    [
        (["a GPU 0", "a GPU 1", "b GPU 2"], True, "ranks exchange tensors over NCCL: 3 ranks have a GPU each"),
        (["a GPU 0", "a GPU 1", "a GPU 0"], False, "ranks exchange tensors over gloo: ranks 0 and 2 share a GPU 0"),
        (["a GPU 0", "", "b GPU 2"], False, "ranks exchange tensors over gloo: rank 1 has no GPU"),
        (["", "", ""], False, ""),
    ],
)
def test_all_ranks_agree(gpus: list[str], nccl: bool, why: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    found: dict[int, tuple[bool, str]] = {}

    def join(rank: int) -> None:
        own = dist.TCPStore("127.0.0.1", store.port)
        found[rank] = agree_on_nccl(own, rank, len(gpus), gpus[rank])

    threads = [threading.Thread(target=join, args=(rank,)) for rank in reversed(range(len(gpus)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(len(gpus)), (nccl, why))


def test_a_chain_of_ranks_takes_two_rounds() -> None:
    pairs = {(rank, rank + 1): (rank, rank + 1) for rank in range(99)}
    ordered = order_in_rounds(pairs)
    assert sorted(ordered) == sorted(pairs)
    rounds = [list(each) for _, each in groupby(ordered, lambda pair: pair[0] % 2)]
    assert len(rounds) == 2


def test_numbers_that_nccl_has_no_type_for_travel_as_bytes_and_are_not_added_up() -> None:
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        numbers = torch.tensor([[1, 2], [3, 400]]).to(dtype)
        assert as_nccl_type(numbers).dtype == torch.uint8
        assert as_nccl_type(numbers).data_ptr() == numbers.data_ptr()
        assert as_nccl_type(numbers.new_zeros(())).numel() == numbers.element_size()
        with pytest.raises(LaunchError, match=f"no sum or maximum of {str(dtype).split('.')[1]}"):
            check_sum(numbers)
    halves = torch.ones(2, dtype=torch.bfloat16)
    assert as_nccl_type(halves) is halves
    check_sum(halves)
