"""Receive buffers: used again when free, never while anything still holds what came."""

from __future__ import annotations

import torch

from autopipe.backends.torch.runtime.communication.transport import RecvBufferPool

CPU = torch.device("cpu")


def take(ring: RecvBufferPool) -> torch.Tensor:
    return ring.take((3, 4), torch.float32, CPU)


def test_a_free_buffer_is_used_again() -> None:
    ring = RecvBufferPool(1)
    first = take(ring)
    address = first.data_ptr()
    del first
    for _ in range(3):
        again = take(ring)
        assert again.data_ptr() == address
        assert again.is_leaf
        again.requires_grad_(True)
        del again


def test_buffers_that_are_held_are_left_alone() -> None:
    ring = RecvBufferPool(2)
    first = take(ring)
    second = take(ring)
    third = take(ring)
    assert len({each.data_ptr() for each in (first, second, third)}) == 3
    address = second.data_ptr()
    del second
    assert take(ring).data_ptr() == address
    address = third.data_ptr()
    del third
    assert take(ring).data_ptr() != address, "what the ring does not hold is no part of it"


def test_views_and_what_backward_keeps_hold_a_buffer() -> None:
    ring = RecvBufferPool(1)
    came = take(ring).normal_().requires_grad_(True)
    address = came.data_ptr()
    kept = (came * came).sum()
    view = came.detach()[1:]
    del came
    assert take(ring).data_ptr() != address
    del kept
    assert take(ring).data_ptr() != address
    array = view.numpy()
    del view
    assert take(ring).data_ptr() != address
    del array
    assert take(ring).data_ptr() == address


def test_a_gradient_that_is_passed_on_holds_its_buffer() -> None:
    """Backward of an addition hands on the very tensor that came."""
    ring = RecvBufferPool(1)
    bias = torch.zeros(3, 4, requires_grad=True)
    result = torch.ones(3, 4) + bias.view(3, 4)
    came = take(ring).fill_(1.0)
    address = came.data_ptr()
    torch.autograd.backward([result], [came])
    del came, result
    shared = bias.grad is not None and bias.grad.data_ptr() == address
    assert (take(ring).data_ptr() == address) is not shared


def test_messages_of_another_shape_get_buffers_of_their_own() -> None:
    ring = RecvBufferPool(1)
    del (first := [take(ring)])[0]
    assert not first
    assert ring.take((3, 8), torch.float32, CPU).shape == (3, 8)
    assert take(ring).shape == (3, 4)
