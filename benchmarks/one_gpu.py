"""What only a GPU can tell, in three calls of under ten minutes, their figures in one JSON file:

    one-rank    operators, exactness of one rank, steps and memory against plans, what the host costs
    four-ranks  four ranks on one GPU over gloo: exactness, a start after an end, traces, measured costs
    nccl        four ranks on one GPU over NCCL, each as a node of its own; one rank alone, should NCCL refuse that

The machine needs torch for CUDA, which must be there, and the wheels of `one_gpu_wheels.txt`; nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from autopipe.backends.torch.launcher import read_reports
from benchmarks.small_models import SIZES

ROOT = Path(__file__).parents[1]
CALL_S = 560.0
"""How long a call may take; what does not fit is named in its file."""
ROW_S = 240.0
ROWS_AT_ONCE = 4
"""Of rows that measure no time."""
MODELS = {
    "gpt2-125m": ("gpt", ("size=125m",), 8),
    "gpt-350m": ("gpt", ("size=350m",), 8),
    "resnet50": ("wide-resnet", ("size=resnet50",), 64),
    "bert": ("bert", ("size=base",), 16),
}
"""Model of the zoo, its settings, and the samples of a step."""
FOUR_RANKS = {
    "pase": ("--strategy", "pase"),
    "zb_h1": ("--strategy", "grid", "--set", "strategy.pipeline=2", "--schedule", "zb_h1"),
    "grid, shares of the optimizer": ("--strategy", "grid", "--set", "optimizer.shard=true"),
    "recomputed, bf16": (
        "--strategy", "grid", "--set", "strategy.pipeline=2", "--set", "recompute=full", "--set", "precision=bf16",
    ),
}  # fmt: skip
LAUNCHES = {"eager": (), "compiled": ("--compile",), "CUDA graphs": ("--compile", "--cuda-graphs")}
"""Flags of `launch`."""
NCCL_PROGRAMS = {
    "grid": ("--strategy", "grid"),
    "chimera": ("--schedule", "chimera"),
    "1f1b_plus": ("--schedule", "1f1b_plus"),
}


class Failed(Exception):
    """A command ended with an error; the message is its last line."""


@dataclass
class Call:
    """One call: rows of figures, written as they are found."""

    name: str
    device: str
    tiny: bool
    scratch: Path
    file: Path
    began: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def limit_s(self) -> float:
        """A few cores take longer for the smallest sizes than a GPU's machine for all."""
        return 3 * CALL_S if self.tiny else CALL_S

    def rows_at_once(self, rows: Mapping[str, Callable[[], Mapping[str, Any]]]) -> None:
        """Rows that do not mind that others use the device, too."""
        with ThreadPoolExecutor(ROWS_AT_ONCE) as pool:
            list(pool.map(self.row, rows, rows.values()))

    def row(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> None:
        """Measure and write a row; an error is its figure, and stops no other row."""
        start = time.monotonic()
        if start - self.began > self.limit_s - 30:
            found: dict[str, Any] = {"left_out": "there was no time"}
        else:
            try:
                found = dict(measure())
            except (Failed, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
                found = {"error": f"{type(error).__name__}: {error}"}
        with self.lock:
            self._write({"row": name, "seconds": round(time.monotonic() - start, 2), **found})

    def _write(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        calls = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
        calls[self.name] = {**card(self.device), "tiny": self.tiny, "rows": self.rows}
        self.file.write_text(json.dumps(calls, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(row), flush=True)

    def run(self, *words: object, **changes: str) -> str:
        """What a command of Python prints. Raises Failed where it fails."""
        left = max(10.0, min(self.limit_s if self.tiny else ROW_S, self.limit_s - (time.monotonic() - self.began)))
        environment = os.environ | {"PYTHONPATH": str(ROOT), "AUTOPIPE_CACHE": os.devnull} | changes
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=left, check=False, capture_output=True, text=True
        )
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines() or ["failed without a word"]
            raise Failed(" | ".join(said[-2:]))
        return done.stdout

    def last_line(self, *words: object) -> Any:
        """The object that a script prints at its end."""
        return json.loads(self.run(*words).splitlines()[-1])

    def autopipe(self, *words: object) -> Any:
        """The object that a command of autopipe prints at its end."""
        return self.last_line("-m", "autopipe", *words, "--json")

    def program(self, name: str, model: Path, samples: int, gpus: int, *flags: str) -> Path:
        """A plan for the model, and its program."""
        plan = self.scratch / f"{name}.plan"
        words = ["plan", model, "--gpus", gpus, "--cluster", "h100-80gb", "--batch-size", samples, *flags]
        self.autopipe(*words, "-o", plan)
        self.autopipe("codegen", plan)
        return plan / "program"

    def model(self, name: str, model: str, settings: tuple[str, ...]) -> Path:
        path = self.scratch / f"{name}.onnx"
        with self.lock:
            if not path.exists():
                words = [word for each in (*settings, "loss=true", "weights=none") for word in ("--set", each)]
                self.autopipe("zoo", "build", model, "-o", path, *words)
        return path

    def small(self, name: str) -> Path:
        settings = tuple(f"{key}={_text(value)}" for key, value in SIZES[name].items())
        return self.model(f"small-{name}", name, settings)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def card(device: str) -> dict[str, str]:
    """The card's name and the versions that figures hold for."""
    import torch

    if device == "cpu":
        return {"card": "none: on the CPU", "torch": torch.__version__}
    version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, version())),
    }


def steps_against_plan(call: Call, name: str, costs: Path | None = None) -> dict[str, Any]:
    """Median step and peak memory of one rank against what its plan says."""
    zoo, settings, samples = MODELS[name]
    model = call.small(zoo) if call.tiny else call.model(name, zoo, settings)
    samples = 4 if call.tiny else samples
    flags: tuple[str, ...] = ("--micro-batches", "1", "--set", "optimizer.name=adamw")
    if costs is not None:
        measured = ("--micro-batch-sizes", samples, "--degrees", "", "--seconds", 1 if call.tiny else 30)
        call.autopipe("profile", model, "--device", call.device, "--batch-size", samples, *measured, "-o", costs)
        flags += ("--costs", str(costs))
    program = call.program(f"{name}-{'profiled' if costs else 'roofline'}", model, samples, 1, *flags)
    predicted = json.loads((program.parent / "plan.json").read_text(encoding="utf-8"))["summary"]
    steps = call.autopipe("launch", program, "--device", call.device, "--steps", 3 if call.tiny else 20)["steps"]
    step = median(each["step_time_s"] for each in steps[len(steps) // 2 :])
    peak = max(steps[-1]["peak_memory_bytes"])
    planned = predicted["step_time_s"], max(predicted["peak_memory_bytes"])
    return {
        "step_s": step, "predicted_step_s": planned[0], "predicted_over_step": planned[0] / step,
        "peak_bytes": peak, "predicted_peak_bytes": planned[1], "predicted_over_peak": planned[1] / peak,
    }  # fmt: skip


def verified(call: Call, name: str, gpus: int, *flags: str) -> dict[str, Any]:
    """What `verify` says of a small model's program on the device."""
    program = call.program(f"{name}-{next(call.numbers)}", call.small(name), 4 * gpus, gpus, *flags)
    found = call.autopipe("verify", program, "--device", call.device)
    worst = max(found["checks"], key=lambda check: check["relative_difference"])
    return {"equal": found["equal"], "limit": found["tolerance"], "difference": worst["relative_difference"]}


def conformance(call: Call) -> dict[str, Any]:
    """The cases that ship with ONNX, on the device, with the values expected."""
    chosen = ("-k", "test_case and test_add") if call.tiny else ("-k", "CUDA", "-m", "cuda")
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/conformance/test_onnx_backend.py", *chosen)
    return {"pytest": call.run(*words).strip().splitlines()[-1]}


def one_rank(call: Call) -> None:
    call.row("conformance", partial(conformance, call))
    for name in MODELS if not call.tiny else ("gpt2-125m",):
        call.row(f"{name}, roofline", partial(steps_against_plan, call, name))
        call.row(f"{name}, profiled", partial(steps_against_plan, call, name, call.scratch / f"{name}.costs"))
    call.row("no synchronisation in a step", partial(without_waiting, call))
    call.row("optimizers", partial(call.last_line, __file__, "optimizers", call.device, "tiny" if call.tiny else ""))
    sizes = ("--tiny",) if call.tiny else ("--batch", 8, "--sequence", 1024, "--rounds", 10)
    written = ("benchmarks/one_device.py", "--device", call.device, *sizes)
    call.row("against the hand-written model", partial(call.last_line, *written))
    call.row("against the hand-written model, compiled", partial(call.last_line, *written, "--compile"))
    for title, flags in LAUNCHES.items():
        call.row(f"launches, {title}", partial(launches, call, flags))
    rows = {
        f"verify {name}, {precision}": partial(
            verified, call, name, 1, "--micro-batches", "1", "--set", f"precision={precision}"
        )
        for name in (SIZES if not call.tiny else ("gpt",))
        for precision in (("fp32", "tf32") if not call.tiny else ("fp32",))
    }
    call.rows_at_once(rows)


def four_ranks(call: Call) -> None:
    rows = {
        f"verify {name}, {title}": partial(
            verified, call, name, 4, "--micro-batches", "4", "--set", "optimizer.name=adamw", *flags
        )
        for name in (("gpt", "llama", "moe", "unet", "bert", "dlrm", "rnnlm") if not call.tiny else ("gpt",))
        for title, flags in (FOUR_RANKS.items() if not call.tiny else [*FOUR_RANKS.items()][1:2])
    }
    call.rows_at_once(rows)
    call.row("goes on after an end", partial(resumed, call))
    call.row("profile", partial(profiled, call))


def launches(call: Call, flags: tuple[str, ...]) -> dict[str, Any]:
    """A step of many small kernels, and the part of it in which the device does nothing between two of them."""
    zoo, settings, samples = MODELS["gpt2-125m"]
    model = call.small(zoo) if call.tiny else call.model("gpt2-125m", zoo, settings)
    words = ("--micro-batches", "4", "--set", "precision=bf16", "--set", "optimizer.name=adamw")
    program = call.program("launches", model, samples, 1, *words)
    found: dict[str, Any] = call.last_line(__file__, "gaps", program, call.device, *flags)
    return found


def without_waiting(call: Call) -> dict[str, Any]:
    flags = ("--micro-batches", "2", "--set", "optimizer.name=adamw")
    program = call.program("sync", call.small("gpt"), 4, 1, *flags)
    found: dict[str, Any] = call.last_line(__file__, "sync", program, call.device)
    return found


def profiled(call: Call) -> dict[str, Any]:
    costs = call.scratch / "four.costs"
    ranks = ("--ranks", 2 if call.tiny else 4, "--seconds", 1 if call.tiny else 5)
    call.autopipe("profile", call.small("gpt"), "--device", call.device, *ranks, "-o", costs)
    return {"bytes": costs.stat().st_size}


def resumed(call: Call) -> dict[str, Any]:
    """Losses of four steps at once, and of two and two; the trace of the first ones."""
    program = call.program("resumed", call.small("gpt"), 16, 4, "--micro-batches", "4", *FOUR_RANKS["zb_h1"])
    launch = ("launch", program, "--device", call.device)
    folder, trace = call.scratch / "checkpoint", call.scratch / "trace.json"
    whole = call.autopipe(*launch, "--steps", 4, "--trace", trace)["steps"]
    call.autopipe(*launch, "--steps", 2, "--checkpoint", folder)
    rest = call.autopipe(*launch, "--steps", 4, "--checkpoint", folder, "--resume")["steps"]
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    same = [each["loss"] for each in whole[2:]] == [each["loss"] for each in rest]
    return {"same_losses": same, "trace_events": len(events)}


def nccl(call: Call) -> None:
    call.row("one rank alone", partial(call.last_line, __file__, "alone", call.device))
    queues_and_ctas = [("32", "4"), ("8", "4"), ("1", "1")] if not call.tiny else [("8", "4")]
    for queues, ctas in queues_and_ctas:
        for title, flags in NCCL_PROGRAMS.items() if not call.tiny else [*NCCL_PROGRAMS.items()][:1]:
            environment = {"CUDA_DEVICE_MAX_CONNECTIONS": queues, "NCCL_MAX_CTAS": ctas}
            call.row(
                f"{title}, {queues} hardware queues, {ctas} CTAs", partial(as_nodes, call, title, flags, environment)
            )


_REFUSED = "Duplicate GPU detected"
"""Words of NCCL where it does not let ranks share a GPU."""


def as_nodes(call: Call, title: str, flags: tuple[str, ...], environment: Mapping[str, str]) -> dict[str, Any]:
    """Two steps of all ranks, each as a node of its own, so that NCCL lets them share a GPU."""
    ranks = 2 if call.tiny else 4
    program = call.program(title, call.small("gpt"), 16, ranks, "--micro-batches", "8", *flags)
    world = json.loads((program / "manifest.json").read_text(encoding="utf-8"))["world_size"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    report = program / "report.jsonl"
    report.unlink(missing_ok=True)
    processes = []
    for rank in range(world):
        node = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port, "NCCL_HOSTID": f"h{rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_P2P_DISABLE": 1, "NCCL_SHM_DISABLE": 1, "PYTHONPATH": ROOT}  # fmt: skip
        words = [sys.executable, program / "run.py", "--device", call.device, "--steps", 2, "--step-timeout", 60]
        command = [*map(str, (*words, "--start-timeout", 60, "--report", report))]
        variables = os.environ | dict(environment) | {name: str(value) for name, value in node.items()}
        processes.append(subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    try:
        said = [process.communicate(timeout=150)[1].decode().strip().splitlines() for process in processes]
    finally:
        for process in processes:
            process.kill()
    if failed := [lines[-1] for lines, process in zip(said, processes, strict=True) if process.returncode and lines]:
        if _REFUSED in failed[0]:
            return {"refused": failed[0]}
        raise Failed(failed[0])
    steps = read_reports(report)
    return {"losses": [step["loss"] for step in steps], "step_s": steps[-1]["step_time_s"]}


CALLS: Mapping[str, Callable[[Call], None]] = {"one-rank": one_rank, "four-ranks": four_ranks, "nccl": nccl}


def run_call(name: str, device: str, tiny: bool, file: Path) -> list[dict[str, Any]]:
    """The rows of a call, which are in `file` too."""
    with tempfile.TemporaryDirectory(prefix="autopipe-cuda-") as scratch:
        call = Call(name, device, tiny, Path(scratch), file)
        CALLS[name](call)
        return call.rows


def _started(folder: str, device: str, *flags: str) -> tuple[Any, Callable[[], None]]:
    """The rank of a one-rank program, and its step, after two of them."""
    import runpy

    sys.path.insert(0, folder)
    sys.argv = ["rank", "--device", device, "--steps", "3", *flags]
    names = runpy.run_path(str(Path(folder) / "rank_000.py"))
    rank, step = names["rank"], names["step"]
    rank.set_up()
    rank.run(step)
    rank.run(step)
    return rank, step


def _launch_gaps(folder: str, device: str, *flags: str) -> dict[str, Any]:
    """Seconds of a step; its kernels (on the CPU: operators), and the part of the time from the first one's start to
    the last one's end in which none runs."""
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
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]) as profiled:
        seconds()
    events = [each for each in profiled.events() or () if each.device_type == kind and each.cpu_parent is None]
    spans = sorted((each.time_range.start, each.time_range.end) for each in events)
    return {"step_s": step_s, "kernels": len(spans), "idle_share": idle_share(spans)}


def idle_share(spans: list[tuple[float, float]]) -> float:
    """The part of the time from the first start to the last end in which none of the spans is; they are sorted."""
    idle, end = 0.0, spans[0][0]
    for first, last in spans:
        idle += max(0.0, first - end)
        end = max(end, last)
    return idle / (end - spans[0][0])


def _alone(device: str) -> dict[str, Any]:
    """What a rank's communicators do in a world of one: collectives, and over NCCL a message to itself."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from autopipe.backends.torch.runtime.communicators import NcclCommunicators, exchange

    if device == "cpu":
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
        group, place = dist.group.WORLD, torch.device("cpu")
    else:
        place = torch.device("cuda", 0)
        dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
        made = NcclCommunicators(0, place, timedelta(seconds=60))
        made.make_groups([(0,)])
        made.wait_until_all_work()
        group = made.groups[0,]
    numbers = torch.arange(1024.0, device=place)
    summed, gathered, received = numbers.clone(), torch.empty_like(numbers), torch.zeros_like(numbers)
    dist.all_reduce(summed, group=group)
    dist.all_gather_into_tensor(gathered, numbers, group=group)
    same = [torch.equal(summed, numbers), torch.equal(gathered, numbers)]
    if device == "cuda":
        exchange([dist.P2POp(dist.isend, numbers, 0, group), dist.P2POp(dist.irecv, received, 0, group)]).wait()
        same.append(torch.equal(received, numbers))
    dist.destroy_process_group()
    return {"equal": all(same)}


def _step_without_waiting(folder: str, device: str) -> dict[str, Any]:
    """Three steps of a one-rank program, of which the last must not have the host wait."""
    import torch

    _, step = _started(folder, device)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    step()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return {"waits": False}


def _optimizers(device: str, size: str = "") -> dict[str, Any]:
    """Seconds of AdamW's step over 125 million parameters, fused and by its loop over lists."""
    import torch

    found = {}
    for name in ("fused", "foreach"):
        sizes = [1024] * 2 if size == "tiny" else [768 * 768] * 212
        parameters = [torch.zeros(size, device=device, requires_grad=True) for size in sizes]
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


_PARTS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "alone": _alone,
    "gaps": _launch_gaps,
    "optimizers": _optimizers,
    "sync": _step_without_waiting,
}

if __name__ == "__main__":
    print(json.dumps(_PARTS[sys.argv[1]](*sys.argv[2:])))
