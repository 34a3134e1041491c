"""Detection of the devices of this machine without torch: GPUs by NVML, otherwise CPU cores."""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from autopipe.configs.cluster import cluster_preset
from autopipe.ir.cluster import usable_cpu_cores

_PRESET_PATTERNS = (
    (r"\bH200\b", "h200"),
    (r"\bH100\b", "h100-80gb"),
    (r"\bA100\b", "a100-80gb"),
    (r"\bV100\b.*-32GB", "v100-32gb"),
    (r"\bV100\b", "v100-16gb"),
    (r"\bRTX 4090\b(?! D| Laptop)", "rtx-4090"),
    (r"\bRTX 2080 Ti\b", "2080ti-pcie"),
    (r"\bGTX 1080 Ti\b", "1080ti-pcie"),
)
"""Pairs (pattern of an NVML product name, cluster preset)."""
_MIN_MEMORY_FRACTION = 0.9
"""Minimum memory of a GPU as a fraction of its preset's memory. A GPU with less memory is a
different product, for example the A100 with 40 GB.
"""
_CPU_PRESET = "cpu-local"
_MAX_CPU_DEVICES = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    """Product name, such as `NVIDIA H100 80GB HBM3`."""
    memory_bytes: int
    uuid: str


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """The local devices, which are used if no cluster is given."""

    preset: str
    count: int
    why: str
    """Description of the devices for the first line of a plan."""
    warning: str = ""
    """Description of GPUs that were found but are not used; "" if there are none."""


@functools.cache
def local_cluster() -> LocalCluster:
    """Return the preset and the number of the GPUs that are visible to this process. Return
    `cpu-local`, with one device per CPU core and at most `_MAX_CPU_DEVICES`, if there is no GPU, or
    if the GPUs have different presets or no preset.
    """
    cores = usable_cpu_cores()
    count = min(cores, _MAX_CPU_DEVICES)
    found = visible_gpus(installed_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not found:
        return LocalCluster(_CPU_PRESET, count, "no GPU here; --cluster PRESET plans for others")
    names = " and ".join(
        f"{number} {name}" for name, number in Counter(gpu.name for gpu in found).items()
    )
    presets = {preset_of_gpu(gpu) for gpu in found}
    if len(presets) > 1 or None in presets:
        what = "of several kinds" if len(presets) > 1 else "of which there is no preset"
        return LocalCluster(
            _CPU_PRESET,
            count,
            "the GPUs here match no preset",
            f"{names}, {what}, are not planned for",
        )
    return LocalCluster(str(presets.pop()), len(found), f"{names} here")


def installed_gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs of this machine in the order of NVML, without GPUs that do not
    respond; () if the driver is not installed or does not respond.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    gpus: list[Gpu] = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                name = pynvml.nvmlDeviceGetName(handle)
                gpus.append(Gpu(name, memory.total, pynvml.nvmlDeviceGetUUID(handle)))
    except pynvml.NVMLError:
        return ()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return tuple(gpus)


def visible_gpus(gpus: tuple[Gpu, ...], variable: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that `variable`, the value of CUDA_VISIBLE_DEVICES, selects by index or by
    the beginning of a UUID; None selects all. A word that does not select exactly one new GPU ends
    the list.
    """
    if variable is None:
        return gpus
    found: list[Gpu] = []
    for word in variable.split(","):
        word = word.strip()
        if word.isdecimal():
            named = list(gpus[int(word) : int(word) + 1])
        else:
            named = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return tuple(found)


def preset_of_gpu(gpu: Gpu) -> str | None:
    """Return the cluster preset for a GPU by its name and memory; None if there is none."""
    for pattern, preset in _PRESET_PATTERNS:
        if re.search(pattern, gpu.name):
            device = cluster_preset(preset).device
            assert device is not None
            return preset if gpu.memory_bytes >= _MIN_MEMORY_FRACTION * device.memory else None
    return None
