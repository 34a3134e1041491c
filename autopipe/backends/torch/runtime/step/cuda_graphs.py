"""CUDA graphs of a stage: its forward and its backward are captured once and replayed for every
micro-batch.

A CUDA graph reads and writes the same memory at each replay. So a stage has a `GraphSlot`, static
tensors and the graphs on them, for each micro-batch in flight (its forward has run, its backward
has not). Each slot has its own memory pool: its graphs are replayed in the order of their capture,
and graphs of other slots, which run in between, cannot overwrite tensors that the forward graph
saved for the backward graph.

Autograd runs in Python only during the capture. A captured backward adds to static gradient tensors
(`StaticGradients`), which become `parameter.grad`. During the capture, the stage reads its
parameters through aliases that are created on the capturing stream: autograd runs each node on the
stream on which the node was created, and a node of the default stream would break the capture.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from autopipe.backends.torch.runtime.random_numbers.random_streams import ForwardState, StaticState
from autopipe.backends.torch.runtime.state.arguments import (
    Arguments,
    get_attribute,
    set_attribute,
)
from autopipe.backends.torch.runtime.state.running_statistics import NotedStatistic
from autopipe.backends.torch.runtime.step.output_edges import OutputEdge, run_backward
from autopipe.backends.torch.runtime.step.weight_gradients import (
    PendingWeightGradients,
    WeightGradQueue,
    compute_weight_gradients,
)
from autopipe.backends.torch.torch_interfaces import abandon_capture, foreach_copy_, foreach_zero_

Tensors = dict[str, torch.Tensor]

_NEVER_CAPTURED = {"p.group": "its ranks communicate within it"}
"""Reasons, for the user, why a stage cannot be captured, by the name whose use in the stage's
generated code is the reason.
"""
_DEVICE_NAME = "cuda"
_MAX_FREE_MEMORY_FRACTION = 0.9
"""Maximum fraction of the device's free memory that the capture of one stage may use."""


def has_cuda_graphs(device: torch.device) -> bool:
    """Return True if `device` supports CUDA graphs."""
    return device.type == _DEVICE_NAME


def reason_not_captured(names: Collection[str]) -> str:
    """Return the reason why a stage cannot be captured, "" if none is known. `names` are the dotted
    names in its generated code, from `names_in_source`.
    """
    for name, reason in _NEVER_CAPTURED.items():
        if any(each == name or each.startswith(f"{name}.") for each in names):
            return reason
    return ""


def names_in_source(source: str) -> frozenset[str]:
    """Return all names in a piece of Python code, with their attributes, for example `p`, `p.group`
    and `p.group.all_reduce`.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute | ast.Name):
            found.add(ast.unparse(node))
    return frozenset(found)


class NotCapturedError(Exception):
    """Raised if a stage or the update cannot be captured. The message is the reason."""


class StaticGradients:
    """Gradient tensors of a rank's parameters that stay at the same address, so that captured
    backwards can add to them. A parameter has one such tensor, even if several stages use it.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}
        """Static gradients by `id` of the parameter. The rank keeps the parameters alive, so ids
        are unique.
        """

    def gradient_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the static gradient of `parameter`. It is allocated, as zeros, at the first
        call.
        """
        if id(parameter) not in self._buffers:
            self._buffers[id(parameter)] = torch.zeros_like(parameter, requires_grad=False)
        return self._buffers[id(parameter)]

    def missing_bytes(self, parameters: Sequence[torch.Tensor]) -> int:
        """Return the number of bytes of the static gradients of `parameters` that are not allocated
        yet.
        """
        return sum(each.nbytes for each in parameters if id(each) not in self._buffers)

    def set_as_gradients(self, parameters: Sequence[torch.Tensor]) -> None:
        """Set `grad` of each parameter to its static gradient, which gets the value of the former
        `grad`, or zeros if that was None.
        """
        fresh: list[torch.Tensor] = []
        moved: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for parameter in parameters:
            buffer = self.gradient_of(parameter)
            if parameter.grad is buffer:
                continue
            if parameter.grad is None:
                fresh.append(buffer)
            else:
                moved.append(buffer)
                values.append(parameter.grad)
            parameter.grad = buffer
        if fresh:
            foreach_zero_(fresh)
        if moved:
            foreach_copy_(moved, values)


class CaptureResources:
    """Resources that all captures of a rank share: a stream, the static gradients, and the limit of
    their memory.
    """

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        """`free_bytes` returns the number of bytes that the rank can still allocate on its
        device.
        """
        # All captures use one stream, because libraries allocate a workspace for each stream.
        self.stream = torch.cuda.Stream()
        self.gradients = StaticGradients()
        self._free_bytes = free_bytes

    def check_free_memory(self, needed: int) -> None:
        """Raise NotCapturedError if `needed` bytes exceed `_MAX_FREE_MEMORY_FRACTION` of the free
        memory. Allocates nothing.
        """
        free = self._free_bytes()
        if needed > _MAX_FREE_MEMORY_FRACTION * free:
            share = f"{_MAX_FREE_MEMORY_FRACTION:.0%} of the {_gib_text(free)} that are free"
            raise NotCapturedError(f"its graphs need about {_gib_text(needed)}, more than {share}")

    @contextmanager
    def capture_context(self) -> Iterator[None]:
        """Make the capturing stream the current stream in the block, in which `capture` may be
        called. Errors in the block are raised as NotCapturedError. Waits for the device before and
        after the block.
        """
        torch.cuda.synchronize()
        # A capture that ends with an error does not restore the current stream. The stream context
        # restores it.
        with torch.cuda.stream(self.stream):
            try:
                yield
            except NotCapturedError:
                raise
            except Exception as error:
                raise NotCapturedError(
                    f"the capture failed: {_first_line_of_error(error)}"
                ) from error
            finally:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    def capture(self, run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
        """Call `run` and return the graph of the kernels that it launches. The graph's tensors are
        allocated in the memory pool `pool`. Must be called in a `capture_context` block.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # With the mode `thread_local`, other threads may call CUDA during the capture, for
            # example to copy data. By default, these calls can make the capture fail.
            with torch.cuda.graph(
                graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                run()
        except Exception:
            abandon_capture(pool)
            raise
        return graph


class _LowPrecisionAlias(torch.autograd.Function):
    """The 16-bit copy of a parameter, as the result of a cast of the parameter's alias, a tensor
    with the parameter's memory and its own `grad`. So autograd returns the gradient in the
    parameter's type and adds it to the alias.
    """

    @staticmethod
    def forward(
        context: Any, alias: torch.Tensor, copy: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        context.dtype = alias.dtype
        return copy()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].to(context.dtype), None


@dataclass(frozen=True, slots=True)
class CapturedStage:
    """The parts of a stage that its capture uses. `p` is the first argument of its forward."""

    p: Arguments
    results: Callable[[Tensors], tuple[torch.Tensor, ...]]
    """Function that runs the stage's forward on its arguments and returns the results."""
    make_arguments: Callable[[], Tensors]
    """Function that returns arguments of zeros. Those whose gradients the stage computes require
    gradients.
    """
    parameters: Mapping[int, torch.Tensor]
    """The parameters of the stage by index. If `p` has a 16-bit copy of a parameter, the entry is
    the fp32 parameter.
    """
    paths: Mapping[int, Sequence[str]]
    """Paths of the attributes of `p` that are each parameter."""
    seeded: frozenset[int]
    """Indices of the results from which the backward starts: the loss, and results whose gradients
    other stages send. Empty in inference.
    """


class StageGraphs:
    """The captured graphs of a stage. There is one slot, static tensors and the graphs on them, for
    each micro-batch that may be in flight (its forward has run, its backward has not).
    """

    def __init__(self, stage: CapturedStage, resources: CaptureResources, slots: int) -> None:
        """Capture `stage` with `slots` slots, each for one micro-batch in flight. If this raises
        NotCapturedError, the stage is unchanged and can run eagerly.
        """
        self._stage = stage
        self._resources = resources
        self._trained: list[torch.Tensor] = []
        self._placed = False
        self.free: list[GraphSlot] = []
        with resources.capture_context():
            self._capture(slots)

    def _capture(self, slots: int) -> None:
        """Measure how much memory a slot (static tensors and graphs for one micro-batch) needs,
        check that there is enough memory, and capture `slots` slots.
        """
        with self._use_aliases() as aliases:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            self._warm_up()
            grown = torch.cuda.memory_reserved() - before
            found = [index for index, alias in aliases.items() if alias.grad is not None]
            self._trained = [self._stage.parameters[index] for index in found]
            # A slot is the static memory of one micro-batch in flight. Gradients of parameters are
            # not part of it, because all slots add to the same gradients.
            slot_bytes = max(0, grown - sum(each.nbytes for each in self._trained))
            for alias in aliases.values():
                alias.grad = None
            torch.cuda.empty_cache()
            # One slot is added for eager passes, which need about as much memory. They run in a
            # validation, or when all slots are in use.
            gradients = self._resources.gradients
            self._resources.check_free_memory(
                (slots + 1) * slot_bytes + gradients.missing_bytes(self._trained)
            )
            for index in found:
                aliases[index].grad = gradients.gradient_of(self._stage.parameters[index])
            # The second warm-up adds to existing gradients, which requires other kernels than the
            # first warm-up. CUDA must load these kernels before the capture.
            self._warm_up()
            self.free += [GraphSlot(self._stage, self._resources, self) for _ in range(slots)]

    @contextmanager
    def _use_aliases(self) -> Iterator[dict[int, torch.Tensor]]:
        """In the block, make the stage read aliases instead of its trained parameters: tensors that
        share their memory but have their own `grad`. Yield the aliases by index of the parameter.
        The block also has its own queue of weight gradients.
        """
        p = self._stage.p
        paths = self._stage.paths
        read = {index: get_attribute(p, paths[index][0]) for index in self._stage.parameters}
        queue = p.weight_grads
        state = p.random.state
        aliases = {
            index: parameter.data.requires_grad_(True)
            for index, parameter in self._stage.parameters.items()
            if parameter.requires_grad and self._stage.seeded
        }
        used = {}
        for index, alias in aliases.items():
            is_copy = read[index] is not self._stage.parameters[index]
            used[index] = _low_precision_alias(alias, read[index]) if is_copy else alias
            for path in paths[index]:
                set_attribute(p, path, used[index])
        try:
            p.weight_grads = WeightGradQueue(used.values())
            p.training = True
            yield aliases
        finally:
            for index, tensor in read.items():
                for path in paths[index]:
                    set_attribute(p, path, tensor)
            p.weight_grads = queue
            p.random.state = state

    def _warm_up(self) -> None:
        """Run the stage's forward and backward eagerly on the capturing stream, so that kernels are
        loaded and libraries allocate their workspaces. Raise NotCapturedError if an operator waits
        for the device, which a graph cannot contain.
        """
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            passed = _CapturedPass(self._stage, self._stage.make_arguments())
            passed.run_forward(self._stage.p.random.state)
            passed.make_seeds()
            passed.run_backward()
            passed.run_weight_gradients()
        except RuntimeError as error:
            if "synchronizing CUDA operation" in str(error):
                raise NotCapturedError("an operator of the stage waits for the device") from error
            raise
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize()

    def take(self) -> GraphSlot | None:
        """Remove a slot (static tensors and graphs for one micro-batch) from the free slots and
        return it. Return None if all slots are in use.
        """
        return self.free.pop() if self.free else None

    def place_gradients(self) -> None:
        """At the first call in a step, set `grad` of the stage's parameters to their static
        gradients, the tensors to which captured backwards add.
        """
        if not self._placed:
            self._resources.gradients.set_as_gradients(self._trained)
            self._placed = True

    def end_step(self) -> None:
        """Note that the step has ended. Afterwards `grad` of a parameter may be another tensor than
        its static gradient, to which captured backwards add.
        """
        self._placed = False


@dataclass(slots=True)
class _CapturedPass:
    """A forward of a stage and its backward, on tensors that stay at the same addresses, so that a
    CUDA graph may contain the addresses. The methods are called in this order: `run_forward`,
    `make_seeds`, `run_backward`, `run_weight_gradients`.
    """

    stage: CapturedStage
    arguments: Tensors
    results: tuple[torch.Tensor, ...] = ()
    edges: tuple[OutputEdge, ...] = ()
    seeds: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients of results, from which the backward starts, by index of the result."""
    statistics: list[NotedStatistic] = field(default_factory=list)
    waiting: PendingWeightGradients = field(default_factory=list)

    def run_forward(self, state: ForwardState | StaticState) -> None:
        """Run the forward with the random numbers of `state`."""
        p = self.stage.p
        p.random.state = state
        p.running.begin(training=True)
        results = self.stage.results(self.arguments)
        self.statistics = p.running.take()
        self.waiting = p.weight_grads.take()
        self.edges = tuple(map(OutputEdge.from_result, results))
        self.results = tuple(each.detach() for each in results)

    def make_seeds(self) -> None:
        """Allocate the gradients of the results from which the backward starts, as zeros."""
        for index in sorted(self.stage.seeded):
            if self.edges[index].edge is not None:
                self.seeds[index] = torch.zeros_like(self.results[index])

    def run_backward(self) -> None:
        """Run the backward, without the deferred gradients of parameters."""
        if self.seeds:
            run_backward(self.edges, self.seeds)
        # The backward of recomputed segments adds deferred gradients to the queue `weight_grads`.
        # They are collected here, so that `run_weight_gradients` computes them.
        self.waiting += self.stage.p.weight_grads.take()

    def run_weight_gradients(self) -> None:
        """Compute the deferred gradients of parameters."""
        compute_weight_gradients(self.waiting)


class GraphSlot:
    """The static tensors of one micro-batch in flight, and the captured graphs that read and write
    them.
    """

    def __init__(
        self, stage: CapturedStage, resources: CaptureResources, graphs: StageGraphs
    ) -> None:
        """Capture the forward and, in training, the backward and the deferred gradients of
        parameters. Must be called in a `capture_context` block.
        """
        self._graphs = graphs
        self._state = (
            StaticState(stage.p.random.state, stage.p.device) if stage.p.random.draws else None
        )
        self._pass = _CapturedPass(stage, stage.make_arguments())
        self._has_backward = False
        pool = torch.cuda.graph_pool_handle()
        state = self._state or stage.p.random.state
        self._forward = resources.capture(lambda: self._pass.run_forward(state), pool)
        self._pass.make_seeds()
        self._backward: torch.cuda.CUDAGraph | None = None
        self._weight_gradients: torch.cuda.CUDAGraph | None = None
        if self._pass.seeds:
            self._backward = resources.capture(self._pass.run_backward, pool)
            if self._pass.waiting:
                self._weight_gradients = resources.capture(self._pass.run_weight_gradients, pool)

    @property
    def edges(self) -> tuple[OutputEdge, ...]:
        """The positions of the results in the autograd graph of the captured forward."""
        return self._pass.edges

    def forward(self, arguments: Tensors, state: ForwardState) -> tuple[torch.Tensor, ...]:
        """Replay the forward for a micro-batch with these arguments and with the random numbers of
        `state`. Return copies of the results, because the next replay overwrites them.
        """
        with torch.no_grad():
            if self._pass.arguments:
                foreach_copy_(list(self._pass.arguments.values()), list(arguments.values()))
            if self._state is not None:
                self._state.copy(state)
            self._forward.replay()
            self._pass.stage.p.running.record_replayed(self._pass.statistics)
            return tuple(each.clone() for each in self._pass.results)

    def backward(self, seeds: dict[int, torch.Tensor]) -> Tensors:
        """Replay the backward. `seeds` are the gradients of results, by index of the result;
        missing ones count as zero. Return the gradients of the arguments by name. The gradients of
        parameters that are deferred are not computed before `run_weight_gradients`.
        """
        inputs = {name: each for name, each in self._pass.arguments.items() if each.requires_grad}
        self._has_backward = bool(seeds) and self._backward is not None
        if self._backward is None or not seeds:
            return {
                name: torch.zeros_like(each, requires_grad=False) for name, each in inputs.items()
            }
        self._graphs.place_gradients()
        with torch.no_grad():
            for index, seed in self._pass.seeds.items():
                if index in seeds:
                    seed.copy_(seeds[index])
                else:
                    seed.zero_()
            self._backward.replay()
            return {
                name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
                for name, each in inputs.items()
            }

    def run_weight_gradients(self) -> None:
        """Replay the computation of the deferred gradients of parameters, and make the slot
        available for another micro-batch.
        """
        if self._weight_gradients is not None and self._has_backward:
            self._weight_gradients.replay()
        self.release()

    def release(self) -> None:
        """Make the slot, its static tensors and graphs, available for another micro-batch."""
        self._graphs.free.append(self)


def _low_precision_alias(alias: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Return the 16-bit copy `copy` of a parameter as a differentiable function of `alias`, a
    tensor that shares the parameter's memory.
    """
    found: torch.Tensor = _LowPrecisionAlias.apply(  # type: ignore[no-untyped-call]
        alias, lambda: copy.data
    )
    return found


def _gib_text(count: float) -> str:
    """Return a number of bytes as text in GiB, with one decimal."""
    return f"{count / 2**30:.1f} GiB"


def _first_line_of_error(error: Exception) -> str:
    """Return the first line of the error's message, or the name of its type if the message is
    empty.
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
