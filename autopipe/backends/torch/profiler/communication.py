"""Times of P2P messages and collectives between ranks of this machine, and the CPU time that
starting them takes in a pipeline.

`torchrun … -m autopipe.backends.torch.profiler.communication FILE DEVICE SECONDS` runs one of
several ranks that time messages and collectives together. Rank 0 writes the times to FILE.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from autopipe.backends.torch.fork_server import rank_environment
from autopipe.backends.torch.launcher import LaunchConfig, launch_program
from autopipe.backends.torch.runtime.communication.collectives import Group
from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.data.sources import save_samples
from autopipe.backends.torch.runtime.manifest import read_manifest
from autopipe.ir.measured_costs import COLLECTIVES, AffineTime, ExchangeCost, TimedBytes, Timing
from autopipe.ir.output_files import scratch_folder
from autopipe.ir.program import Channel


def measure_exchanges(ranks: int, device: str, seconds: float) -> tuple[ExchangeCost, ...]:
    """Time messages between two of `ranks` ranks, and collectives of groups of up to all of them,
    for about `seconds`. Raise LaunchError if a rank fails.
    """
    from autopipe.backends.torch.elastic_agent import run_agent
    from autopipe.backends.torch.rendezvous import RendezvousConfig

    with scratch_folder("profile") as name, rank_environment():
        found = Path(name) / "exchanges.json"
        logs = Path(name) / "logs"
        logs.mkdir()
        command = (__name__, str(found), device, str(seconds))
        failure = run_agent(
            command, ranks, RendezvousConfig(), 0, None, logs, False, lambda _: None
        )
        if failure is not None:
            raise failure.error()
        rows = json.loads(found.read_text(encoding="utf-8"))
    samples: dict[tuple[str, int], list[tuple[int, Timing]]] = {}
    for row in rows:
        case = row.pop("kind"), row.pop("ranks")
        samples.setdefault(case, []).append((row.pop("bytes"), Timing(**row)))
    return tuple(
        ExchangeCost(kind, size, fit_time_to_bytes(each), tuple(TimedBytes(*one) for one in each))
        for (kind, size), each in samples.items()
    )


def fit_time_to_bytes(samples: Sequence[tuple[int, Timing]]) -> AffineTime:
    """Return the line through times by size in bytes with the minimum squared relative error.
    Neither of its coefficients is negative.
    """
    sizes = np.array([size for size, _ in samples], dtype=float)
    weights = 1 / np.array([timing.seconds for _, timing in samples])
    columns = np.stack([weights, sizes * weights], axis=1)
    fixed, per_byte = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if fixed < 0:
        return AffineTime(0.0, float((sizes * weights).sum() / ((sizes * weights) ** 2).sum()))
    if per_byte < 0:
        return AffineTime(float(weights.sum() / (weights**2).sum()), 0.0)
    return AffineTime(float(fixed), float(per_byte))


_MEASURED_STEPS = 32
_WARM_UP_STEPS = 4
TaskSpans = dict[str, tuple[float, float]]
"""Start and end of each task of a step, in seconds."""


def measure_post_overhead(
    together: Path, apart: Path, laden: Path, messages: int, device: str
) -> tuple[float, float]:
    """Return the seconds of a rank's time that sending or receiving takes: for the first message of
    a task, and for each further message.

    The folders have programs of two stages, the second of which is slower. All three programs have
    the same stages. `together` runs both stages on one rank, and each micro-batch passes through
    both before the next one starts. `apart` runs them on two ranks under 1F1B, with one message in
    each direction per micro-batch. `laden` sends `messages` in each direction. The additional time
    between the tasks of the second stage is the time that sending and receiving these messages
    take. Raise LaunchError if a program fails.
    """

    def seconds_until_task(spans: TaskSpans, index: int, until: str) -> float:
        """Return the seconds from a micro-batch's forward in the second stage until the task
        `until` starts, without the micro-batch's own backward in the second stage.
        """
        forward = spans[f"1F{index}"]
        backward = spans[f"1B{index}"]
        return (spans[until][0] - backward[1]) + (backward[0] - forward[1])

    def until_first_stage(spans: TaskSpans, micro_batches: int) -> float:
        return statistics.median(
            seconds_until_task(spans, index, f"0B{index}") for index in range(1, micro_batches)
        )

    def until_next_forward(spans: TaskSpans, micro_batches: int) -> float:
        return statistics.median(
            seconds_until_task(spans, index, f"1F{index + 1}")
            for index in range(1, micro_batches - 1)
        )

    alone = _median_over_steps(together, device, 0, until_first_stage)
    with_one, with_all = (
        _median_over_steps(each, device, 1, until_next_forward) for each in (apart, laden)
    )
    return max(0.0, (with_one - alone) / 2), max(0.0, (with_all - with_one) / (2 * (messages - 1)))


def measure_period(program: Path, device: str) -> float:
    """Return the seconds between two micro-batches in the second of two stages, which run on two
    ranks under 1F1B with at least four micro-batches per step. This is the time of the slower
    stage. Raise LaunchError if the program fails.
    """

    return _median_over_steps(
        program,
        device,
        1,
        lambda spans, count: median_forward_interval(
            [spans[f"1F{each}"][0] for each in range(count)]
        ),
    )


def median_forward_interval(starts: Sequence[float]) -> float:
    """Return the median time between two consecutive forwards of a stage. `starts` are the start
    times of its forwards; the first one is not counted, because the pipeline is being filled.
    """
    return statistics.median(second - first for first, second in itertools.pairwise(starts[1:]))


def _median_over_steps(
    program: Path, device: str, rank: int, seconds: Callable[[TaskSpans, int], float]
) -> float:
    """Return the median of the result of `seconds` over the steps after the warm-up."""
    manifest = read_manifest(program)
    with scratch_folder("profile") as name:
        data = Path(name) / "samples.npz"
        traces = Path(name) / "spans"
        save_samples(manifest, data)
        words = [
            "--device",
            device,
            "--steps",
            str(_MEASURED_STEPS),
            "--data",
            str(data),
            "--trace",
            str(traces),
        ]
        launch_program(manifest, words, LaunchConfig())
        steps = (traces / f"rank_{rank:03d}.jsonl").read_text(encoding="utf-8").splitlines()

    found = []
    for line in steps[_WARM_UP_STEPS:]:
        spans = {
            task["task"]: (float(task["start"]), float(task["end"]))
            for task in json.loads(line)["spans"]
        }
        found.append(seconds(spans, manifest.micro_batches))
    return statistics.median(found)


# The following code runs in each of several ranks that time communication.

MESSAGE_SIZES_BYTES = tuple(2**power for power in (12, 15, 18, 20, 22, 24))
"""Message sizes in bytes."""
_MIN_REPETITIONS = 7
_MAX_REPETITIONS = 100
_WARM_UP_REPETITIONS = 2
_ROUNDS_PER_MEASUREMENT = 8
"""Number of rounds of computing and exchanging messages per measurement."""
_COMPUTATIONS_PER_ROUND = 6
"""Number of computations between messages; together they take about half a millisecond."""
_MIN_TRANSFER_FRACTION = 0.1
"""Minimum fraction of the measured time that is attributed to the transfer of a message, whatever
time sending and receiving take.
"""


CommunicationCase = tuple[str, int, int, Callable[[], float]]
"""Kind of the communication, number of ranks in its group, size in bytes, and a function that
performs it and returns its seconds.
"""


def _communication_cases(transport: Transport, sizes: Sequence[int]) -> Iterator[CommunicationCase]:
    for number, size in enumerate(MESSAGE_SIZES_BYTES):
        yield "send", 2, size, partial(_time_transfer, transport, number, size)
        yield "post", 2, size, partial(_time_message_end, transport, number, size)
    for ranks in sizes:
        group = Group(tuple(range(ranks)), transport) if transport.rank < ranks else None
        for size in MESSAGE_SIZES_BYTES:
            tensor = torch.ones(ranks, size // 4 // ranks, device=transport.device)
            for kind in COLLECTIVES:
                yield kind, ranks, size, partial(_time_collective, transport, kind, tensor, group)


def _synchronize(transport: Transport) -> None:
    if transport.device.type == "cuda":
        torch.cuda.synchronize()


def _time_collective(
    transport: Transport, kind: str, tensor: torch.Tensor, group: Group | None
) -> float:
    """Return the seconds of one collective on a tensor with one row per rank. A rank outside of the
    group does nothing.
    """
    arguments = {
        "all_reduce": (tensor,),
        "all_gather": (tensor[:1], 0),
        "reduce_scatter": (tensor, 0),
    }
    start = time.perf_counter()
    if group is not None:
        getattr(group, kind)(*arguments.get(kind, (tensor.T, 0, 1)))
    _synchronize(transport)
    return time.perf_counter() - start


def _time_transfer(transport: Transport, channel: int, size: int) -> float:
    """Return the seconds that a message between ranks 0 and 1 takes to be transferred: half of a
    round trip, without the CPU time that sending and receiving take.

    A round trip has two sends and two receives. On a CPU, the CPU time of all threads of the rank
    is subtracted, including gloo's, because they run on the rank's core. On other devices, only the
    time of the calls is subtracted. Sender and receiver of a large message work at the same time,
    so that little may remain of the transfer time.
    """
    tensor = torch.ones(size // 4, device=transport.device)
    like = (tensor.dtype, tuple(tensor.shape))
    peer = 1 - transport.rank
    first = transport.rank == 0
    if peer not in (0, 1):
        return 0.0
    _compute_and_fill_caches(transport)
    start = time.perf_counter()
    whole = time.process_time()
    own = time.thread_time()
    arrival = transport.recv(like, peer, channel, first)
    if not first:
        tensor = arrival.wait()
    transport.send(tensor, peer, channel, not first)
    posted = time.thread_time() - own
    if first:
        arrival.wait()
    transport.finish()
    _synchronize(transport)
    end = (time.process_time() - whole if transport.device.type == "cpu" else posted) / 2
    there = (time.perf_counter() - start) / 2
    return max(_MIN_TRANSFER_FRACTION * there, there - 2 * end)


def _time_message_end(transport: Transport, channel: int, size: int) -> float:
    """Return the CPU time of rank 0 for one send or receive of a message between ranks 0 and 1:
    half of the difference between its rounds with messages and without. It includes the calls and,
    on a CPU, gloo's threads and waking the other rank.
    """
    alone = _round_seconds(transport, None, size)
    return (_round_seconds(transport, channel, size) - alone) / 2


def _round_seconds(transport: Transport, channel: int | None, size: int) -> float:
    """Return the seconds of a round of rank 0. In a round, rank 0 computes and exchanges a message
    with rank 1 over the channel, if there is one.

    As in the slowest stage of a pipeline, the message from rank 1 has arrived when rank 0 waits for
    it: rank 1 computes half as long and waits for the rest of the round. Other ranks compute
    without messages.
    """
    tensor = torch.ones(size // 4, device=transport.device)
    slow = transport.rank == 0
    peer = 1 - transport.rank
    channel = channel if peer in (0, 1) else None

    def post_recv() -> Callable[[], object]:
        if channel is None:
            return lambda: None
        return transport.recv((tensor.dtype, tuple(tensor.shape)), peer, channel, slow).wait

    def send() -> None:
        if channel is not None:
            transport.send(tensor, peer, channel, not slow)

    wait: Callable[[], object] = lambda: None  # noqa: E731 - nothing has been sent yet
    start = time.perf_counter()
    for number in range(_ROUNDS_PER_MEASUREMENT):
        # No rank would wait for a message of rank 1 in the last round.
        goes_on = number + 1 < _ROUNDS_PER_MEASUREMENT
        if slow:
            wait()
            _compute_and_fill_caches(transport, _COMPUTATIONS_PER_ROUND)
            wait = post_recv() if goes_on else wait
            _compute_and_fill_caches(transport, _COMPUTATIONS_PER_ROUND)
            send()
        else:
            wait = post_recv()
            _compute_and_fill_caches(transport, _COMPUTATIONS_PER_ROUND)
            if goes_on:
                send()
            wait()
    transport.finish()
    _synchronize(transport)
    return (time.perf_counter() - start) / _ROUNDS_PER_MEASUREMENT


def _compute_and_fill_caches(transport: Transport, tasks: int = 1) -> None:
    """Compute, which fills the caches as a task before a message does."""
    for _ in range(tasks):
        rows = torch.ones(64, 64, device=transport.device)
        for _ in range(4):
            rows = torch.softmax(torch.tanh(rows @ rows) + rows, -1) * torch.layer_norm(rows, (64,))
        _synchronize(transport)


def _repeat_timing(exchange: Callable[[], float], seconds: float) -> Timing:
    """Return the timing on rank 0. The other ranks repeat `exchange` as often as rank 0."""
    found: list[float] = []
    started = time.perf_counter()
    again = torch.ones(1)
    while again.item():
        dist.barrier()
        found.append(exchange())
        short = time.perf_counter() - started < seconds
        again.fill_(
            float(
                len(found) < _MIN_REPETITIONS + _WARM_UP_REPETITIONS
                or (len(found) < _MAX_REPETITIONS and short)
            )
        )
        dist.broadcast(again, 0)
    return Timing.of([max(1e-9, each) for each in found[_WARM_UP_REPETITIONS:]])


def main(target: Path, device: str, seconds: float) -> None:
    """Measure, and write the samples on rank 0. The group sizes are the powers of two below the
    number of ranks, and the number of ranks.
    """
    transport = Transport(device)
    transport.start()
    world = transport.world_size
    sizes = [*(2**power for power in range(1, world.bit_length()) if 2**power < world), world]
    channels = [Channel(number, 0, 1, 2, 2) for number in range(len(MESSAGE_SIZES_BYTES))]
    transport.connect([tuple(range(size)) for size in sizes], channels)
    each = seconds / (len(MESSAGE_SIZES_BYTES) * (2 + 4 * len(sizes)))
    with torch.no_grad():
        found = [
            {"kind": kind, "ranks": ranks, "bytes": size, **asdict(_repeat_timing(exchange, each))}
            for kind, ranks, size, exchange in _communication_cases(transport, sizes)
        ]
    if transport.rank == 0:
        target.write_text(json.dumps(found), encoding="utf-8")
    transport.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    sys.stdout.flush()
    os._exit(0)
