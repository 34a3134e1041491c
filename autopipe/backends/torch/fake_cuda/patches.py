"""Replacements for the parts of torch that would call the CUDA runtime or that behave differently
without a GPU.

The simulated device has compute capability 9.0 and 80 GiB of memory. Its operators take no time,
and its events read the clock of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from autopipe.backends.torch.runtime.operators.attention import attention_properties_of
from autopipe.backends.torch.torch_interfaces import (
    efficient_attention,
    flash_attention,
    import_modules_that_look_for_cuda,
    stop_device_initialisation,
)
from autopipe.ir.attention_kernels import Kernel, must_repeat_heads, usable_kernels

# These modules look for a GPU when they are imported. They must find none, so they are imported
# before `install_replacements` makes `torch.cuda.is_available` return True.
import_modules_that_look_for_cuda()

_GIB = 2**30
_MEMORY_BYTES = 80 * _GIB
_CAPABILITY = 9, 0
_PROPERTIES = SimpleNamespace(
    name="fake CUDA device",
    major=_CAPABILITY[0],
    minor=_CAPABILITY[1],
    total_memory=_MEMORY_BYTES,
    multi_processor_count=132,
    warp_size=32,
    uuid="00000000-0000-0000-0000-000000000000",
)


class Event:
    """Replacement for `torch.cuda.Event`. Recording stores the time of the host's clock, because
    the simulated device has finished all work at any time.
    """

    def __init__(self, *_: object, **__: object) -> None:
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """Replacement for `torch.cuda.Stream`. The stream is always idle, because the simulated device
    has finished all work at any time.
    """

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cuda", 0)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...


_STREAM = Stream()


def _enter_stream(stream: object) -> AbstractContextManager[None]:
    """Return a context manager without effect, in place of `torch.cuda.stream`."""
    return nullcontext()


def _do_nothing(*_: object, **__: object) -> None: ...


def _constant_function(value: object) -> Callable[..., Any]:
    """Return a function that takes any arguments and returns `value`."""
    return lambda *_, **__: value


def _generator_state(device: object = None) -> torch.Tensor:
    """Return a state for the random number generator of the simulated device, 16 zero bytes."""
    return torch.zeros(16, dtype=torch.uint8)


_CUDA_REPLACEMENTS: dict[str, object] = {
    "Event": Event,
    "Stream": Stream,
    "stream": _enter_stream,
    "get_rng_state": _generator_state,
    **dict.fromkeys(
        ("is_available", "is_initialized", "is_bf16_supported"), _constant_function(True)
    ),
    **dict.fromkeys(("current_device", "get_sync_debug_mode"), _constant_function(0)),
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved"), _constant_function(0)
    ),
    **dict.fromkeys(("current_stream", "default_stream"), _constant_function(_STREAM)),
    **dict.fromkeys(
        ("set_device", "set_stream", "synchronize", "set_rng_state", "empty_cache", "init"),
        _do_nothing,
    ),
    **dict.fromkeys(
        ("reset_peak_memory_stats", "set_per_process_memory_fraction", "set_sync_debug_mode"),
        _do_nothing,
    ),
    "device_count": _constant_function(1),
    "is_current_stream_capturing": _constant_function(False),
    "mem_get_info": _constant_function((_MEMORY_BYTES, _MEMORY_BYTES)),
    "get_device_name": _constant_function(_PROPERTIES.name),
    "get_device_properties": _constant_function(_PROPERTIES),
    "get_device_capability": _constant_function(_CAPABILITY),
}
"""Replacement for each function or class of the module `torch.cuda`, by name."""

_scaled_dot_product_attention = F.scaled_dot_product_attention


def _attention_by_gpu_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return `scaled_dot_product_attention` of the same arguments, computed by the kernel that
    torch chooses on a GPU of compute capability 9.0. Without a GPU, torch chooses the kernel that
    writes the full attention scores to memory.
    """
    if query.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        narrow = torch.get_autocast_dtype("cuda")
        query, key, value = (each.to(narrow) for each in (query, key, value))
    kernel = _attention_kernel(query, key, value, attn_mask, is_causal)
    if kernel is Kernel.FLASH:
        return flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if kernel is Kernel.EFFICIENT:
        bias = attn_mask
        if bias is not None:
            if bias.dtype is torch.bool:
                bias = torch.where(bias, 0.0, float("-inf"))
            bias = bias.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        return efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]
    return _scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
) -> Kernel:
    """Return the kernel that generated programs select for CUDA tensors on a GPU of compute
    capability 9.0, which is also torch's choice there; the math kernel for other tensors.
    """
    if query.device.type != "cuda":
        return Kernel.MATH
    form = attention_properties_of(query, key, value, mask, causal)
    return (
        Kernel.MATH
        if must_repeat_heads(form, _CAPABILITY)
        else usable_kernels(form, _CAPABILITY)[0]
    )


def install_replacements() -> None:
    """Install the replacements in torch for the rest of the process."""
    for name, stand_in in _CUDA_REPLACEMENTS.items():
        setattr(torch.cuda, name, stand_in)
    F.scaled_dot_product_attention = _attention_by_gpu_kernel
    # Torch lacks an implementation of this fused optimizer update for fake tensors. A function
    # without effect suffices, because the update modifies its operands in place and returns no
    # result.
    torch.library.register_fake("aten::_fused_sgd_", _do_nothing)
    stop_device_initialisation()
