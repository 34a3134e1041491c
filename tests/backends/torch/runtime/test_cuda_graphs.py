"""What may be captured as CUDA graphs, and their replay, by a stand-in that records operators on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopipe.backends.torch.runtime.cuda_graphs import StageGraphs, names_in, why_not_captured
from autopipe.backends.torch.runtime.parameters import Arguments


class RecordedGraph(TorchDispatchMode):
    """As `torch.cuda.CUDAGraph` replays kernels, it runs what was recorded again, on the tensors of then."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        self.kernels.append((function, args, kwargs or {}, tree_leaves(results)))
        return results

    def replay(self) -> None:
        with torch.no_grad():
            for function, args, kwargs, results in self.kernels:
                for old, new in zip(results, tree_leaves(function(*args, **kwargs)), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: graph)
    monkeypatch.setattr(torch.cuda.graphs, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    yield


@pytest.mark.parametrize(
    ("names", "device", "compiled", "reason"),
    [
        (("torch.tanh", "p.w0"), "cuda", "", ""),
        (("torch.tanh",), "cpu", "", "graphs are of CUDA devices, and this is cpu"),
        (("p.group.all_reduce",), "cuda", "", "its ranks exchange something inside of it"),
        (("p.weight_grads",), "cuda", "", "its backward is split, and what the second half needs is kept in Python"),
        (("recompute",), "cuda", "", "segments of it run again, which autograd does in Python"),
        (("torch.nonzero",), "cuda", "all of it eagerly: x", "it is not compiled as one: all of it eagerly: x"),
        (("torch.tanh",), "cuda", None, "only what is compiled is known not to wait for the host"),
    ],
)
def test_what_may_be_captured(names: tuple[str, ...], device: str, compiled: str | None, reason: str) -> None:
    assert why_not_captured(names, device, compiled) == reason


def test_names_of_a_text() -> None:
    names = names_in("@recompute\ndef segment_0(p, x0):\n    return p.group.along((2, 1)).all_reduce(F.relu(x0)), ()\n")
    assert {"recompute", "p.group", "F.relu"} <= names


class Random:
    """State as that of `random_streams.Random`."""

    def __init__(self) -> None:
        self.state = torch.zeros(2)


def test_micro_batches_in_flight_and_the_optimizers_updates() -> None:
    """Three micro-batches are in flight in turn, over two steps with an update between them."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4, requires_grad=True)
    twin = weight.detach().clone().requires_grad_(True)
    p = Arguments(device=torch.device("cpu"), random=Random(), w0=weight)
    runs = []

    def results(arguments: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        runs.append(1)
        return ((arguments["x0"] @ p.w0).tanh() * p.random.state[0], arguments["x0"].detach() + 1)

    sample = {"x0": torch.zeros(3, 4, requires_grad=True)}
    graphs = StageGraphs(p, [weight], sample, 3, results)
    captured = len(runs)
    for _ in range(2):
        given = [torch.randn(3, 4, requires_grad=True) for _ in range(5)]
        found, expected = {}, []
        for number, x in enumerate(given):
            p.random.state = torch.tensor([1.0 + number, 0.0])
            found[number] = graphs.run(number, {"x0": x})
            expected.append((x.detach().requires_grad_(True), 1.0 + number))
            if number >= 2:
                _backward(graphs, found, number - 2)
        for number in (3, 4):
            _backward(graphs, found, number)
        for x, (copy, state) in zip(given, expected, strict=True):
            ((copy @ twin).tanh() * state).sum().backward()
            torch.testing.assert_close(x.grad, copy.grad)
        torch.testing.assert_close(weight.grad, twin.grad)
        for each in (weight, twin):
            with torch.no_grad():
                each -= 0.1 * each.grad
            each.grad = None
        torch.testing.assert_close(found[4][1], given[4].detach() + 1)
    assert len(runs) == captured, "Python runs the stage only to capture it"


def _backward(graphs: StageGraphs, found: dict[int, tuple[torch.Tensor, ...]], number: int) -> None:
    found[number][0].sum().backward()
    graphs.release(number)


def test_there_are_as_many_slots_as_micro_batches_in_flight() -> None:
    p = Arguments(device=torch.device("cpu"), random=Random(), w0=torch.ones(2, requires_grad=True))
    graphs = StageGraphs(p, [p.w0], {"x0": torch.zeros(2)}, 2, lambda arguments: (arguments["x0"] * p.w0,))
    graphs.run(0, {"x0": torch.ones(2)})
    graphs.run(1, {"x0": torch.ones(2)})
    with pytest.raises(IndexError):
        graphs.run(2, {"x0": torch.ones(2)})
    graphs.release(0)
    graphs.run(2, {"x0": torch.ones(2)})
