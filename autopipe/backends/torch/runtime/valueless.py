"""Tensors without values, as `--device meta` has them in a dry run: shapes, types and layouts alone, no memory.

They are torch's fake tensors: meta tensors that say that they are on the CPU. On torch's own device `meta` there is no
autocast, so that a plan in bf16 would be tried in other types than it runs in.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.ir.errors import LaunchError

_NEED_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_NO_NUMBERS = "is not supported for tensor subclasses"
"""Part of torch's message for `tolist` and `numpy` of fake tensors."""


@contextmanager
def use_fake_tensors() -> Iterator[MemoryTracker]:
    """From now on new tensors have no values, and exchanges return at once.

    Raises LaunchError at an operator that needs values to know what to do, or how large its result is.
    """
    tensors = MemoryTracker()
    try:
        # What is read as it is, data and constants, becomes such a tensor where it meets one.
        with FakeTensorMode(allow_non_fake_inputs=True), tensors:
            yield tensors
    except RuntimeError as error:
        if not isinstance(error, _NEED_VALUES) and _NO_NUMBERS not in str(error):
            raise
        raise LaunchError(
            f"an operator needs values, and tensors on device meta have none: {error}",
            hint="dry-run this rank with --device cpu or cuda",
        ) from error


class MemoryTracker(TorchDispatchMode):
    """Sees all that operators make, and counts what it would take."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        """Most that the tensors alive at once would have taken so far."""
        self._live_bytes = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or, if it is an exchange, say that it is done."""
        if function.namespace == "c10d":
            done = FakeWork().boxed()
            return done if len(function._schema.returns) == 1 else (args[0], done)
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count memory as long as any tensor has it."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return

        def gone(_: object) -> None:
            del self._storages[key]
            self._live_bytes -= size

        self._storages[key] = weakref.ref(storage, gone)
        self._live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
