"""Processes that rows start on the device: `python -m benchmarks.cuda.parts NAME ARGUMENT...`.

Each prints one JSON object as its last line. On the CPU they show that they run, and measure
nothing that counts.
"""

from __future__ import annotations

import json
import platform
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

_TERA = 1e12
_GIGA = 1e9


def describe(device: str) -> dict[str, Any]:
    """Return the name of the card and the versions that all figures hold for."""
    import torch

    found: dict[str, Any] = {
        "card": "none: on the CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for package in ("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        nccl: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
        found["card"] = torch.cuda.get_device_name()
        found["memory_bytes"] = torch.cuda.get_device_properties(0).total_memory
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, nccl()))
    return found


def measure_ceilings(device: str) -> dict[str, Any]:
    """Return the rates of a product of 8192³ in bf16 and in fp32 (TFLOP/s) and of a copy (GB/s,
    read and written).
    """
    import torch

    size, length = (8192, 2**31) if device == "cuda" else (64, 2**16)

    def seconds(work: Callable[[], object]) -> float:
        if device == "cpu":
            begin = time.perf_counter()
            work()
            return time.perf_counter() - begin
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        left = torch.randn(size, size, device=device, dtype=dtype)
        right = torch.randn(size, size, device=device, dtype=dtype)
        times = [seconds(lambda left=left, right=right: left @ right) for _ in range(12)]  # type: ignore[misc]
        found[f"{name}_tflops"] = 2 * size**3 / median(times[3:]) / _TERA
    source = torch.empty(length, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found["copy_gb_s"] = (
        2 * length / min(seconds(lambda: target.copy_(source)) for _ in range(4)) / _GIGA
    )
    return found


def measure_host(device: str) -> dict[str, Any]:
    """Return the host's seconds per eager operator on small tensors: without autograd, in forward,
    and in backward.
    """
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def host_seconds(work: Callable[[], object]) -> float:
        """Return the time until `work` returns, without that in which the device finishes."""
        wait()
        begin = time.perf_counter()
        work()
        taken = time.perf_counter() - begin
        wait()
        return taken

    operators = 200
    numbers = torch.ones(16, 16, device=device)
    weight = torch.ones(16, 16, device=device, requires_grad=True)

    def plain() -> None:
        for _ in range(operators):
            torch.add(numbers, numbers)

    def forward() -> torch.Tensor:
        found = numbers
        for _ in range(operators):
            found = found * weight
        return found.sum()

    def timed_backward() -> float:
        loss = forward()
        return host_seconds(loss.backward)

    repeats = 9
    return {
        "plain_s": median(host_seconds(plain) for _ in range(repeats)) / operators,
        "forward_s": median(host_seconds(forward) for _ in range(repeats)) / operators,
        "backward_s": median(timed_backward() for _ in range(repeats)) / operators,
    }


def _started(folder: str, device: str, *flags: str) -> tuple[Any, Callable[[], None]]:
    """Return the rank of a one-rank program and its step, after two steps."""
    sys.path.insert(0, folder)
    sys.argv = ["rank", "--device", device, "--steps", "3", *flags]
    names = runpy.run_path(str(Path(folder) / "rank_000.py"))
    rank = names["rank"]
    step = names["step"]
    rank.set_up()
    rank.run(step)
    rank.run(step)
    return rank, step


def measure_gaps(folder: str, device: str, *flags: str) -> dict[str, Any]:
    """Return the seconds of a step, its number of kernels (on the CPU: of operators), and the idle
    fraction of the time from the start of the first kernel to the end of the last one.
    """
    import torch
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    rank, step = _started(folder, device, *flags)

    def seconds() -> float:
        start = time.perf_counter()
        rank.run(step)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    step_s = median(seconds() for _ in range(10))
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    ) as profiled:
        seconds()
    events = [
        each
        for each in profiled.events() or ()
        if each.device_type == kind and each.cpu_parent is None
    ]
    spans = sorted((each.time_range.start, each.time_range.end) for each in events)
    return {"step_s": step_s, "kernels": len(spans), "idle_fraction": idle_fraction(spans)}


def idle_fraction(spans: list[tuple[float, float]]) -> float:
    """Return the fraction of the time from the first start to the last end that none of the sorted
    spans covers.
    """
    idle = 0.0
    end = spans[0][0]
    for first, last in spans:
        idle += max(0.0, first - end)
        end = max(end, last)
    return idle / (end - spans[0][0])


def run_alone(device: str) -> dict[str, Any]:
    """Check the communicators of a rank in a world of one: collectives, and over NCCL a message to
    itself.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from autopipe.backends.torch.runtime.communication.communicators import (
        NcclCommunicators,
        start_p2p_batch,
    )

    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", 0)
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    group = dist.group.WORLD
    if device == "cuda":
        made = NcclCommunicators(0, place, timedelta(seconds=60))
        made.make_group_communicators([(0,)])
        made.wait_until_connected()
        group = made.groups[0,]
    numbers = torch.arange(1024.0, device=place)
    summed = numbers.clone()
    gathered = torch.empty_like(numbers)
    received = torch.zeros_like(numbers)
    dist.all_reduce(summed, group=group)
    dist.all_gather_into_tensor(gathered, numbers, group=group)
    equal = [torch.equal(summed, numbers), torch.equal(gathered, numbers)]
    if device == "cuda":
        start_p2p_batch(
            [dist.P2POp(dist.isend, numbers, 0, group), dist.P2POp(dist.irecv, received, 0, group)]
        ).wait()
        equal.append(torch.equal(received, numbers))
    dist.destroy_process_group()
    return {"equal": all(equal)}


def step_without_waiting(folder: str, device: str) -> dict[str, Any]:
    """Run three steps of a one-rank program, the last of which must not make the host wait for the
    device.
    """
    import torch

    _, step = _started(folder, device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    step()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return {"waits": False}


def measure_optimizers(device: str, size: str) -> dict[str, Any]:
    """Return the seconds of AdamW's step over 125 million parameters: fused, and in its loop over
    lists.
    """
    import torch

    found = {}
    for name in ("fused", "foreach"):
        sizes = [1024] * 2 if size == "tiny" else [768 * 768] * 212
        parameters = [torch.zeros(each, device=device, requires_grad=True) for each in sizes]
        for each in parameters:
            each.grad = torch.ones_like(each)
        optimizer = torch.optim.AdamW(parameters, fused=name == "fused", foreach=name == "foreach")
        times = []
        for _ in range(5):
            start = time.perf_counter()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        found[f"{name}_s"] = median(times)
    return found


def compare_random_numbers(device: str, *kinds: str) -> dict[str, Any]:
    """Return whether the device draws the bits that the CPU draws, and the kinds of numbers that
    differ; with `compiled` also in functions that torch compiles.
    """
    import torch

    from autopipe.backends.torch.random_comparison import compare_random_numbers

    found = compare_random_numbers(torch.device(device), compiled="compiled" in kinds)
    return {
        "equal": all(found.values()),
        "kinds": len(found),
        "differ": [name for name in found if not found[name]],
    }


PARTS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "alone": run_alone,
    "ceilings": measure_ceilings,
    "describe": describe,
    "gaps": measure_gaps,
    "host": measure_host,
    "optimizers": measure_optimizers,
    "random": compare_random_numbers,
    "sync": step_without_waiting,
}

if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](*sys.argv[2:])))
