"""Collectives of ranks on this machine over gloo: its own, and those made of one exchange among all
at once.

    OMP_NUM_THREADS=1 python benchmarks/gloo_collectives.py --ranks 2 4 8

For each number of ranks and of bytes: median milliseconds until rank 0 has the result, and of its
processor time. Both ways are run in turns. The runtime goes by what is shorter
(`backends/torch/runtime/communication/transport.py`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from command_line import parse_arguments

from autopipe.backends.torch.runtime.communication.transport import (
    all_gather,
    rows_for_all_ranks,
    start_direct_exchange,
    start_reduce_scatter,
)
from autopipe.backends.torch.runtime.host import keep_freed_memory

_TIMES = 16
_WARM_UP = 3


def main() -> None:
    """Run the ranks of each number; as one of them, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument(
        "--bytes", type=int, nargs="*", default=[2**power for power in (12, 16, 18, 20, 22, 24)]
    )
    words = parse_arguments(parser, ranks=[2], bytes=[4096])
    if words.store:
        _measure(words.store, words.bytes)
        return
    titles = (
        f"{'ranks':>5s} {'bytes':>8s}  {'collective':14s} {'gloo ms':>8s} {'cpu':>6s} "
        f"{'at once':>8s} {'cpu':>6s}"
    )
    print(titles, flush=True)  # Before the ranks write to the same place.
    for ranks in words.ranks:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                __file__,
                "--store",
                f"{folder}/store",
                "--bytes",
                *map(str, words.bytes),
            ]
            world = {**os.environ, "WORLD_SIZE": str(ranks)}
            processes = [
                subprocess.Popen(command, env={**world, "RANK": str(rank)}) for rank in range(ranks)
            ]
            codes = [process.wait() for process in processes]
            if any(codes):
                raise SystemExit("a rank failed")


def _measure(store: str, sizes: Sequence[int]) -> None:
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for size in sizes:
        for name, (own, at_once) in _ways(torch.ones(ranks, size // 4 // ranks)).items():
            found = [[*_timed(own), *_timed(at_once)] for _ in range(_TIMES + _WARM_UP)][_WARM_UP:]
            middle = [1e3 * statistics.median(each) for each in zip(*found, strict=True)]
            if rank == 0:
                print(f"{ranks:5d} {size:8d}  {name:14s} " + " ".join(
                    f"{seconds:8.2f} {cpu:6.2f}" for seconds, cpu in (middle[:2], middle[2:])
                ), flush=True)  # fmt: skip
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def _ways(rows: torch.Tensor) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    parts = [torch.empty_like(row) for row in rows]
    return {
        "all-reduce": (
            lambda: dist.all_reduce(rows.clone()),
            lambda: start_direct_exchange(
                rows_for_all_ranks(rows, None), None, dist.ReduceOp.SUM
            ).wait(),
        ),
        "all-gather": (lambda: dist.all_gather(parts, rows[0]), lambda: all_gather(rows[0], None)),
        "reduce-scatter": (
            lambda: dist.reduce_scatter(parts[0], list(rows)),
            lambda: start_reduce_scatter(rows, None).wait(),
        ),
    }


def _timed(exchange: Callable[[], object]) -> tuple[float, float]:
    dist.barrier()
    began = time.perf_counter()
    worked = time.process_time()
    exchange()
    return time.perf_counter() - began, time.process_time() - worked


if __name__ == "__main__":
    main()
