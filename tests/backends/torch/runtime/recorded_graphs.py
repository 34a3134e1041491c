"""A stand-in for CUDA graphs on the CPU: a graph records operators during the capture and runs them
again at a replay.

It behaves as CUDA does where a mistake of the caller would show:

- A capture has no effect: tensors that existed before have their old values when it ends.
- Memory that a graph allocates holds NaN when its replay begins, as if something else had used the
  memory.
- An operator that waits for the device (`item`, `tolist`, `nonzero`) is an error in a capture and
  in debug mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopipe.backends.torch.runtime.random_numbers import philox
from autopipe.backends.torch.runtime.step import cuda_graphs, optimizers

_WAITING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}
_FREE_BYTES = 2**40


class Device:
    """Counters and settings of the stand-in."""

    def __init__(self) -> None:
        self.capturing = 0
        self.debug_mode = 0
        self.replays = 0
        self.free_bytes = _FREE_BYTES
        self.micro_batch_bytes = 0
        """Memory that a micro-batch takes which runs between two looks at it."""
        self.captures = 0
        self.failing = 0
        """Number of the capture that fails, from 1; 0 for none."""
        self.open_pools: list[object] = []
        """Pools of captures that have not ended."""
        self.released_pools: list[object] = []
        self.generator_states: list[str] = []
        """States that torch's generator was given."""
        self._reserved_bytes = 0

    def memory_reserved(self, *_: object) -> int:
        self._reserved_bytes += self.micro_batch_bytes
        return self._reserved_bytes

    def check_wait(self, what: str) -> None:
        """An operator waits for the device."""
        if self.capturing:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({what})"
            )
        if self.debug_mode:
            raise RuntimeError("called a synchronizing CUDA operation")


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator that a capture has recorded."""

    function: Any
    args: Any
    kwargs: Any
    results: list[Any]
    with_gradients: bool
    """If autograd was on: some operators keep more for a backward."""

    def run(self) -> None:
        """Run it again on the same tensors, and put what it gives where its results were."""
        with torch.set_grad_enabled(self.with_gradients):
            found = tree_leaves(self.function(*self.args, **self.kwargs))
        for old, new in zip(self.results, found, strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)


class RecordedGraph(TorchDispatchMode):
    """Stands for `torch.cuda.CUDAGraph`."""

    device: Device

    def __init__(self) -> None:
        super().__init__()
        self._kernels: list[Kernel] = []
        self._allocated: dict[int, torch.UntypedStorage] = {}
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        """Storages that the capture has written, with copies of what they held."""
        self._floating: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _WAITING:
            self.device.check_wait(str(function))
        self._keep_written(function, args, kwargs)
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        results = function(*args, **kwargs)
        for each in _tensors(results):
            storage = each.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._allocated:
                self._allocated[storage._cdata] = storage
                if each.is_floating_point():
                    self._floating.append(each.detach())
        self._kernels.append(
            Kernel(function, args, kwargs, tree_leaves(results), torch.is_grad_enabled())
        )
        return results

    def _keep_written(self, function: Any, args: Any, kwargs: Any) -> None:
        named = (
            dict(zip((each.name for each in function._schema.arguments), args, strict=False))
            | kwargs
        )
        for each in function._schema.arguments:
            if each.alias_info is not None and each.alias_info.is_write:
                for tensor in _tensors(named.get(each.name)):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in self._allocated and storage._cdata not in self._before:
                        self._before[storage._cdata] = storage, storage.clone()

    def end(self) -> None:
        """The capture ends."""
        for storage, before in self._before.values():
            storage.copy_(before)

    def replay(self) -> None:
        """Run the operators again, on the tensors of the capture."""
        self.device.replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for each in self._floating:
                each.fill_(torch.nan)
            for kernel in self._kernels:
                kernel.run()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def install(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Have CPU tensors captured and replayed as those of a CUDA device."""
    device = Device()
    monkeypatch.setattr(RecordedGraph, "device", device, raising=False)

    @contextmanager
    def capture(
        graph: RecordedGraph, pool: object, stream: object, capture_error_mode: str
    ) -> Iterator[None]:
        device.capturing += 1
        device.captures += 1
        device.open_pools.append(pool)
        try:
            with graph:
                yield
            if device.captures == device.failing:
                # CUDA has invalidated the capture, and torch does not end it.
                raise torch.OutOfMemoryError("CUDA error: out of memory")
            device.open_pools.remove(pool)
        finally:
            device.capturing -= 1
            graph.end()

    def waiting(name: str) -> Any:
        method = getattr(torch.Tensor, name)

        def wait(tensor: torch.Tensor, *args: Any) -> Any:
            device.check_wait(name)
            return method(tensor, *args)

        return wait

    def set_debug_mode(mode: int | str) -> None:
        device.debug_mode = 2 if mode == "error" else int(mode)

    for name in ("item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, waiting(name))

    def end_allocation(_: int, pool: object) -> None:
        """Raise an error as torch does if no capture allocates from the pool."""
        if pool not in device.open_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        device.open_pools.remove(pool)

    def release(_: int, pool: object) -> None:
        device.released_pools.append(pool)

    generator = SimpleNamespace(
        clone_state=lambda: "a copy", graphsafe_set_state=device.generator_states.append
    )
    monkeypatch.setattr(cuda_graphs, "_DEVICE_NAME", "cpu")
    # A graph records operators, but not NumPy.
    monkeypatch.setattr(philox, "_kernel_for", lambda tensor: None)
    monkeypatch.setattr(optimizers, "_has_fused_kernel", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end_allocation, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", device.memory_reserved)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (device.free_bytes, _FREE_BYTES))
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: device.debug_mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_debug_mode)
    return device
