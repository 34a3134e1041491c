"""Loss and gradients that PyTorch computes for a module on example inputs, as a reference for the
exported ONNX file.

The module is not changed: buffers are copied, gradients are returned instead of stored in `.grad`,
and torch's random state is restored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from autopipe.backends.torch.exporter import ExportSubject, find_loss_result
from autopipe.backends.torch.torch_interfaces import nested_tensors

_RECURRENT_FUNCTIONS: Final = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions of `torch` whose only floating-point argument is the probability of the dropout between
layers. The number of layers is the argument before it, and `train` is the argument after it.
"""
_TRAINING_ARGUMENTS: Final = ("training", "train")


@dataclass(frozen=True, slots=True)
class ModuleResults:
    """Results and gradients of a module on example inputs, computed without dropout."""

    results: tuple[np.ndarray, ...]
    loss: int | None
    """Index of the loss in `results`; None if the module returns no loss."""
    gradients: Mapping[str, np.ndarray | None]
    """Gradient of each parameter with `requires_grad`, by name; None if no gradient reaches the
    parameter.
    """
    functions: tuple[str, ...]
    """Names of the user's `torch.autograd.Function` classes between the parameters and the loss."""
    dropped: tuple[float, ...]
    """Nonzero dropout probabilities that the module uses in training, one per call, in ascending
    order.
    """
    changed: tuple[str, ...]
    """Names of the buffers that the forward changed."""
    changed_again: tuple[str, ...]
    """Names of the buffers that the backward changed, because it ran a checkpointed part of the
    forward again.
    """

    @property
    def is_finite(self) -> bool:
        """True if no result and no gradient contains an infinity or a NaN."""
        arrays = (*self.results, *(each for each in self.gradients.values() if each is not None))
        return all(bool(np.isfinite(each).all()) for each in arrays)


class _WithoutDropout(TorchFunctionMode):
    """Context in which dropout functions run with probability 0. `asked` collects the nonzero
    probabilities that the module passed in training mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float] = []

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        asked = len(self.asked)
        if name in _RECURRENT_FUNCTIONS:
            args = self._without_probability(args)
        # Torch's built-in dropout functions have the arguments (input, probability, train).
        elif "dropout" in name and inspect.isbuiltin(function):
            self._note(args[1], args[2])
            args = (args[0], 0.0, False)
            given = {}
        elif "dropout" in name or name in (
            "scaled_dot_product_attention",
            "multi_head_attention_forward",
        ):
            args, given = self._with_zero(function, args, given)
        found = function(*args, **given)
        if (
            len(self.asked) > asked
            and isinstance(found, torch.Tensor)
            and not torch.is_grad_enabled()
        ):
            # With probability 0, the function may return its operand, which has an autograd history
            # in spite of `torch.no_grad`. So the result is detached.
            return found.detach()
        return found

    def _without_probability(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments of a recurrent function with dropout probability 0. The probability
        is the only floating-point argument, and the number of layers is the argument before it.
        """
        place = next(place for place, each in enumerate(args) if isinstance(each, float))
        layers = args[place - 1]
        for _ in range(layers - 1):
            self._note(args[place], args[place + 1])
        return [*args[:place], 0.0, *args[place + 1 :]]

    def _with_zero(
        self, function: Callable[..., Any], args: Sequence[Any], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) for a call of `function` with dropout probability 0. The function
        names its probability `p` or `dropout_p`.
        """
        if function is F.scaled_dot_product_attention:
            names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]
            bound: dict[str, Any] = (
                {"dropout_p": 0.0} | dict(zip(names, args, strict=False)) | given
            )
        else:
            signature = inspect.signature(function).bind(*args, **given)
            signature.apply_defaults()
            bound = dict(signature.arguments)
        name = "dropout_p" if "dropout_p" in bound else "p"
        trains = next((bound[each] for each in _TRAINING_ARGUMENTS if each in bound), True)
        self._note(bound.get(name, 0.0), trains)
        bound[name] = 0.0
        return (), bound

    def _note(self, probability: float, trains: bool) -> None:
        """Record a dropout probability if it is not zero and the call is in training mode
        (`trains`).
        """
        if probability and trains:
            self.asked.append(float(probability))


def evaluate_module(
    subject: ExportSubject, tensors: Sequence[torch.Tensor], seed: int = 0, ulps: float = 0.0
) -> ModuleResults:
    """Return the results and gradients of the module on the inputs `tensors`. Submodules run in
    their current modes if the module returns a loss, otherwise in `eval()` mode. `seed` seeds
    torch's random numbers.

    If `ulps` is not 0, each element of a parameter is moved up or down at random by this many units
    in the last place, to measure the effect of rounding on the results.
    """
    found = _evaluate_once(subject, tensors, seed, ulps)
    if found.loss is not None:
        return found
    modes = [(each, each.training) for each in subject.module.modules()]
    try:
        subject.module.eval()
        return _evaluate_once(subject, tensors, seed, ulps)
    finally:
        for each, training in modes:
            each.training = training


def _evaluate_once(
    subject: ExportSubject, tensors: Sequence[torch.Tensor], seed: int, ulps: float
) -> ModuleResults:
    """Return the results and gradients of the module on the inputs `tensors`, with its submodules
    in their current modes. `seed` seeds torch's random numbers. If `ulps` is not 0, each element of
    a parameter is moved up or down at random by this many units in the last place.
    """
    module = subject.module
    own = dict(module.named_parameters())
    before = dict(module.named_buffers())
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _WithoutDropout() as dropouts:
        torch.manual_seed(seed)
        read: Mapping[str, torch.Tensor] = (
            {name: _move_by_ulps(each, ulps) for name, each in own.items()} if ulps else own
        )
        trained = {name: each for name, each in read.items() if each.requires_grad}
        replaced = {id(own[name]): each for name, each in read.items()}
        replaced |= {id(each): each.clone() for each in before.values()}
        with _replace_tensors(module, replaced):
            results = tuple(nested_tensors(module(*tensors)))
            after = {name: each.detach().clone() for name, each in module.named_buffers()}
            place = find_loss_result(results)
            gradients: Sequence[torch.Tensor | None] = [None] * len(trained)
            if place is not None and results[place].requires_grad and trained:
                # If the module uses activation checkpointing, this backward runs a part of the
                # forward again, which may change buffers a second time.
                gradients = torch.autograd.grad(
                    results[place], list(trained.values()), allow_unused=True
                )
            again = dict(module.named_buffers())
    pairs = zip(trained, gradients, strict=True)
    return ModuleResults(
        results=tuple(_to_numpy(each) for each in results),
        loss=place,
        gradients={
            subject.name_of(name): None if each is None else _to_numpy(each) for name, each in pairs
        },
        functions=() if place is None else tuple(sorted(_custom_functions(results[place]))),
        dropped=tuple(sorted(dropouts.asked)),
        changed=tuple(map(subject.name_of, _names_of_differing(before, after))),
        changed_again=tuple(map(subject.name_of, _names_of_differing(after, again))),
    )


@contextmanager
def _replace_tensors(module: nn.Module, tensors: Mapping[int, torch.Tensor]) -> Iterator[None]:
    """Context manager in which the parameters and buffers of a module are replaced. `tensors` has
    the replacements by the `id` of the original.

    `torch.func.functional_call` is not used, because it does not restore the original tensors of a
    module that contains one submodule under several names.
    """
    tables: list[dict[str, Any]] = []
    for each in module.modules():
        tables += [each._parameters, each._buffers]
    own = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: tensors.get(id(tensor), tensor) for name, tensor in table.items()})
        yield
    finally:
        for table, held in zip(tables, own, strict=True):
            table.clear()
            table.update(held)


def _names_of_differing(
    before: Mapping[str, torch.Tensor], after: Mapping[str, torch.Tensor]
) -> list[str]:
    """Return the names in `before` whose tensors have other values or shapes in `after`, or are
    missing in it.
    """
    return [
        name
        for name, each in before.items()
        if name not in after or not _are_equal_tensors(each, after[name])
    ]


def _are_equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have equal shapes and values. A NaN equals a NaN."""
    one = one.detach()
    other = other.detach()
    return one.shape == other.shape and bool(
        ((one == other) | torch.isnan(one) & torch.isnan(other)).all()
    )


def _move_by_ulps(parameter: torch.Tensor, ulps: float) -> torch.Tensor:
    """Return a copy of a parameter with each element moved up or down at random by a relative
    amount of `ulps` times the machine epsilon. A parameter of integers is returned with unchanged
    values.
    """
    if not parameter.is_floating_point():
        return parameter.detach()
    signs = torch.randint(0, 2, parameter.shape, device=parameter.device) * 2 - 1
    step = ulps * torch.finfo(parameter.dtype).eps
    return (
        (parameter.detach() * (1 + signs * step))
        .to(parameter.dtype)
        .requires_grad_(parameter.requires_grad)
    )


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a dense array. Values of 16-bit floating-point types are converted to
    float32.
    """
    plain = tensor.detach().cpu().to_dense()
    if plain.dtype in (torch.bfloat16, torch.float16):
        plain = plain.float()
    found: np.ndarray = plain.contiguous().numpy()
    return found


def _custom_functions(loss: torch.Tensor) -> set[str]:
    """Return the names of the user's `torch.autograd.Function` classes in the autograd graph of
    `loss`.
    """
    found: set[str] = set()
    seen: set[Any] = set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            found.add(type(node).__name__.removesuffix("Backward"))
        waiting += [following for following, _ in node.next_functions]
    return found


def perturb_inputs(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return different inputs with similar values. The elements of each tensor are permuted at
    random. The elements of a floating-point tensor are then multiplied by random factors between
    0.9 and 1, unless all of them are integers.
    """
    generator = torch.Generator().manual_seed(1)
    return tuple(_perturb_input(each, generator) for each in tensors)


def _perturb_input(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor with the elements of `tensor` in random order. Unless all elements are
    integers, they are multiplied by random factors between 0.9 and 1.
    """
    order = torch.randperm(tensor.numel(), generator=generator)
    found = tensor.detach().cpu().flatten()[order].reshape(tensor.shape)
    if tensor.is_floating_point() and not bool((found == found.round()).all()):
        found = found * (1 - 0.1 * torch.rand(tensor.shape, generator=generator)).to(found.dtype)
    return found.to(tensor.device)


def parts_with_backward_hooks(module: nn.Module) -> list[str]:
    """Return the names of the parameters and submodules with backward hooks. An exported file does
    not contain hooks.
    """
    found = [name for name, each in module.named_parameters() if each._backward_hooks]
    hooked = (
        name
        for name, each in module.named_modules()
        if each._backward_hooks or each._backward_pre_hooks
    )
    return [*found, *(name or "the module" for name in hooked)]


def parameters_with_late_hooks(module: nn.Module) -> list[str]:
    """Return the names of the parameters with hooks that run after their gradient was accumulated.
    `torch.autograd.grad` does not run these hooks.
    """
    return [
        name
        for name, each in module.named_parameters()
        if getattr(each, "_post_accumulate_grad_hooks", None)
    ]
