"""CUDA graphs of a stage's forward and backward: what may be captured, and slots of static buffers to replay them on.

A graph reads and writes the same memory at every replay. So a stage has one graph a phase for each micro-batch that is
in flight at once: what a slot's forward leaves is there until the slot's backward.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from autopipe.backends.torch.runtime.parameters import Arguments

Tensors = Mapping[str, torch.Tensor]
Results = Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, ...]]

_NEVER = {
    "p.group": "its ranks exchange something inside of it",
    "p.weight_grads": "its backward is split, and what the second half needs is kept in Python",
    "p.running": "what its batches find is kept in Python",
    "recompute": "segments of it run again, which autograd does in Python",
}
"""By name in a stage's text, the reason why no graph may hold it."""


def why_not_captured(names: Collection[str], device: str, compiled: str | None) -> str:
    """The reason why no graph may be captured of a stage, "" where one may: `names` are the dotted names in its text,
    `device` is a type of device, `compiled` what was said of compiling it, None where it was not compiled. What is
    compiled as one has static shapes, no control flow by data and no synchronisation with the host."""
    if device != "cuda":
        return f"graphs are of CUDA devices, and this is {device}"
    for name, reason in _NEVER.items():
        if any(each == name or each.startswith(f"{name}.") for each in names):
            return reason
    if compiled is None:
        return "only what is compiled is known not to wait for the host"
    return f"it is not compiled as one: {compiled}" if compiled else ""


def names_in(source: str) -> frozenset[str]:
    """Dotted names that a module's text mentions, such as `p.group.all_reduce`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name):
            found.add(ast.unparse(node))
    return frozenset(found)


class StageGraphs:
    """The graphs of a stage, to be made where nothing is under way: `in_flight` slots in place of its `results`."""

    def __init__(
        self, p: Arguments, parameters: Sequence[torch.Tensor], sample: Tensors, in_flight: int, results: Results
    ):
        """`parameters` are what the stage reads of `p`; `sample` are arguments like those of every micro-batch."""
        self._p, self._parameters, drawn = p, parameters, p.random.state

        def run(state: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            p.random.state = state
            return results(dict(zip(sample, tensors, strict=False)))

        self._free: list[Callable[..., Any]] = []
        for _ in range(in_flight):
            buffers = (
                drawn.clone(),
                *(each.detach().clone().requires_grad_(each.requires_grad) for each in sample.values()),
            )
            # Parameters are their own buffers: what a graph reads is what the optimizer has written.
            slot = torch.cuda.make_graphed_callables(run, (*buffers, *parameters), allow_unused_input=True)
            self._free.append(slot)
        p.random.state = drawn
        self._taken: dict[int, Callable[..., Any]] = {}

    def run(self, micro_batch: int, arguments: Tensors) -> tuple[torch.Tensor, ...]:
        """A micro-batch's results, which no replay changes. Its slot is taken until `release` where it trains."""
        slot = self._free.pop()
        tensors = _Copied.apply(*arguments.values(), *self._parameters)  # type: ignore[no-untyped-call]
        outputs: tuple[torch.Tensor, ...] = slot(self._p.random.state, *tensors)
        results = tuple(output.clone() for output in outputs)
        if any(result.requires_grad for result in results):
            self._taken[micro_batch] = slot
        else:
            self._free.append(slot)
        return results

    def release(self, micro_batch: int) -> None:
        """A micro-batch's backward has run."""
        if (slot := self._taken.pop(micro_batch, None)) is not None:
            self._free.append(slot)


class _Copied(torch.autograd.Function):
    """Tensors as they are, and copies of their gradients: autograd would keep a graph's own buffer as the first one."""

    @staticmethod
    def forward(context: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        context.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.clone() for gradient in gradients)
