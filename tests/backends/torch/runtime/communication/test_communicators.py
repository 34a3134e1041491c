"""How ranks agree on NCCL, in which order they make its communicators, and what it can carry."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # Makes the backend "fake" known.

from autopipe.backends.torch.runtime.communication.communicators import (
    NcclCommunicators,
    agree_on_nccl,
    as_nccl_type,
    check_reducible,
    order_in_rounds,
)
from autopipe.ir.errors import LaunchError
from autopipe.ir.program import Channel


@pytest.mark.parametrize(
    ("gpus", "nccl", "why"),
    [
        (
            ["a GPU 0", "a GPU 1", "b GPU 2"],
            True,
            "ranks exchange tensors over NCCL: 3 ranks have a GPU each",
        ),
        (
            ["a GPU 0", "a GPU 1", "a GPU 0"],
            False,
            "ranks exchange tensors over gloo: ranks 0 and 2 share a GPU 0",
        ),
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


class Untouched(dist.Store):
    """A store that nobody may use."""

    def _refuse(self, *_: Any) -> Any:
        raise AssertionError("a rank asks the store about groups that it is no member of")

    set = get = add = wait = check = compare_set = _refuse


@contextmanager
def world_of(ranks: int, rank: int, store: dist.Store) -> Iterator[None]:
    """The default group of one rank of many, of which there are no others."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_a_rank_of_many_neither_makes_nor_waits_for_communicators_of_others() -> None:
    """Llama-7B on 1,024 GPUs has 1,920 for messages: who is no member of one passes by."""
    ends = [
        (64 * stage + place, 64 * (stage + 1) + place) for stage in range(15) for place in range(64)
    ]
    channels = [Channel(number, *pair, 1, 1) for number, pair in enumerate(ends)]
    with world_of(1025, 1024, Untouched()):
        communicators = NcclCommunicators(1024, torch.device("cuda", 0), timedelta(seconds=1))
        communicators.make_p2p_communicators(channels)
        communicators.make_group_communicators(
            tuple(range(start, start + 8)) for start in range(0, 1024, 8)
        )
    assert not communicators.messages
    assert not communicators.groups


def test_ranks_make_their_communicators_without_waiting_for_those_of_others() -> None:
    """A rank makes at most four for messages, and the last is made in the fourth round, however
    long the pipeline.
    """
    ends = [
        (64 * stage + place, 64 * (stage + 1) + place) for stage in range(15) for place in range(64)
    ]
    paths = {each: each for source, target in ends for each in ((source, target), (target, source))}
    made = [0] * 1024
    for pair in order_in_rounds(dict(sorted(paths.items()))):
        source, target = pair
        made[source] = made[target] = 1 + max(made[source], made[target])
    assert max(made) == 4


def test_numbers_that_nccl_has_no_type_for_travel_as_bytes_and_are_not_added_up() -> None:
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        numbers = torch.tensor([[1, 2], [3, 400]]).to(dtype)
        assert as_nccl_type(numbers).dtype == torch.uint8
        assert as_nccl_type(numbers).data_ptr() == numbers.data_ptr()
        assert as_nccl_type(numbers.new_zeros(())).numel() == numbers.element_size()
        with pytest.raises(
            LaunchError, match=f"cannot compute a sum or maximum of type {str(dtype).split('.')[1]}"
        ):
            check_reducible(numbers)
    halves = torch.ones(2, dtype=torch.bfloat16)
    assert as_nccl_type(halves) is halves
    check_reducible(halves)
