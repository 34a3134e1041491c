"""The scale of the loss on one rank: when it changes, and what an optimizer does with it."""

from __future__ import annotations

import copy

import pytest
import torch

from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.step.precision import LossScaler


def scaler_of(scale: float) -> LossScaler:
    return LossScaler(scale, Transport("cpu"))


def optimizer_of(name: str, parameters: list[torch.Tensor], fused: bool) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1, fused=fused)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused)


def train(
    name: str, fused: bool, bad_steps: set[int]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Parameter and state after six steps, of which some overflow."""
    weight = torch.ones(5, requires_grad=True)
    optimizer = optimizer_of(name, [weight], fused)
    scaler = scaler_of(4.0)
    for step in range(6):
        gradient = torch.arange(5.0) + (0 if step in bad_steps else step)
        weight.grad = gradient * scaler.scale
        if step in bad_steps:
            weight.grad[step % 5] = torch.inf
        before = weight.detach().clone(), copy.deepcopy(optimizer.state[weight]) if step else {}
        scaler.unscale([weight])
        scaler.step_optimizer(optimizer)
        scaler.end_step()
        if step in bad_steps:
            assert torch.equal(weight, before[0])
            assert all(
                torch.equal(optimizer.state[weight][key], old) for key, old in before[1].items()
            )
    return weight.detach(), optimizer.state[weight]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("bad_steps", [set(), {3}, {0}, {0, 1, 4}], ids=str)
def test_fused_optimizers_skip_as_others_do(name: str, bad_steps: set[int]) -> None:
    """The first step too, after which torch's fused SGD would go on from numbers that it never
    wrote.
    """
    (found, state), (expected, known) = (train(name, fused, bad_steps) for fused in (True, False))
    torch.testing.assert_close(found, expected)
    assert state.keys() == known.keys()
    for key, value in known.items():
        torch.testing.assert_close(state[key], value)


def test_a_fused_optimizer_is_not_asked_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(5, requires_grad=True)
    weight.grad = torch.full((5,), torch.nan)
    optimizer = optimizer_of("adamw", [weight], fused=True)
    scaler = scaler_of(4.0)

    def read(_: torch.Tensor) -> float:
        raise AssertionError("the host waits for the device")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "item", read)
        patched.setattr(torch.Tensor, "__bool__", read)
        scaler.unscale([weight])
        scaler.step_optimizer(optimizer)
        scaler.end_step()
    assert torch.equal(weight, torch.ones(5))
    assert scaler.outcome.tolist() == [4.0, 1.0]


def test_the_scale_doubles_after_two_thousand_good_steps() -> None:
    weight = torch.ones(1)
    scaler = scaler_of(4.0)
    scaler.restore(4.0, 1998)
    states = []
    for gradient in (1.0, 1.0, 1.0, torch.inf, 1.0):
        weight.grad = torch.full((1,), gradient)
        scaler.unscale([weight])
        scaler.end_step()
        states.append(scaler.state())
    assert states == [(4.0, 1999), (8.0, 0), (8.0, 1), (4.0, 0), (4.0, 1)]


def test_gradients_of_every_type_are_unscaled() -> None:
    weights = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 12.0)
    scaler_of(4.0).unscale([*weights, torch.ones(1)])
    assert [weight.grad.tolist() for weight in weights if weight.grad is not None] == [
        [3.0, 3.0]
    ] * 2
