"""The settings of a run of the profiler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """The settings of a run of the profiler."""

    sizes: tuple[int, ...] | None = None
    """Micro-batch sizes, or None to let the profiler choose."""
    degrees: tuple[int, ...] = (2,)
    """Numbers of shards into which operators are split."""
    device: str = "auto"
    """`auto`, `cuda` or `cpu`."""
    name: str | None = None
    """Name of the device in the cost file, None for its product name."""
    threads: int = 1
    """Number of threads of a rank on a CPU."""
    ranks: int | None = None
    """Number of ranks that communicate, or None if communication is not measured."""
    source: str = "torch"
    """`torch` or `onnxruntime`."""
    seconds: float = 30.0
    """Approximate duration of all measurements."""
