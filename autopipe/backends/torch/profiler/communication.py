"""Measurement of P2P messages and collectives between ranks of this machine, and of the CPU time
that sends and receives cost a rank of a pipeline.

`torchrun … -m autopipe.backends.torch.profiler.communication FILE DEVICE SECONDS` runs one of
several ranks that measure together. Rank 0 writes the times to FILE.
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
    """Measure messages between two ranks, and collectives of groups of up to `ranks` ranks, on
    `device` for about `seconds` in all. Return one cost per kind of communication and group size.
    Raise LaunchError if a rank fails.
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
    """Return the affine function time = a + b · bytes that fits the measured (bytes, time) pairs
    with the minimum sum of squared relative errors, subject to a ≥ 0 and b ≥ 0.
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
"""(start, end) of each task of a step in seconds, by task such as `0F3`: stage 0, forward,
micro-batch 3.
"""


def measure_post_overhead(
    together: Path, apart: Path, laden: Path, messages: int, device: str
) -> tuple[float, float]:
    """Return (first, further): the seconds of a rank's time for one send or receive, for the first
    message of a task and for each further message of the task.

    `together`, `apart` and `laden` are folders of programs with the same two stages; stage 1 is
    slower than stage 0. In `together`, one rank runs both stages, and each micro-batch passes
    through both before the next one starts. In `apart`, two ranks run the stages under 1F1B, with
    one message per micro-batch in each direction. In `laden`, they send `messages` messages in each
    direction.

    The time between the tasks of stage 1 is longer in `apart` than in `together`, and longer still
    in `laden`. These differences are the cost of the sends and receives. Raise LaunchError if a
    program fails.
    """

    def seconds_until_task(spans: TaskSpans, index: int, until: str) -> float:
        """Return the seconds from the end of the forward of micro-batch `index` in stage 1 to the
        start of the task `until`, minus the time of the micro-batch's backward in stage 1.
        """
        forward = spans[f"1F{index}"]
        backward = spans[f"1B{index}"]
        return (spans[until][0] - backward[1]) + (backward[0] - forward[1])

    def until_first_stage(spans: TaskSpans, micro_batches: int) -> float:
        """Return the median seconds between tasks if one rank runs both stages: the task after
        stage 1's backward is stage 0's backward.
        """
        return statistics.median(
            seconds_until_task(spans, index, f"0B{index}") for index in range(1, micro_batches)
        )

    def until_next_forward(spans: TaskSpans, micro_batches: int) -> float:
        """Return the median seconds between tasks of the rank of stage 1: the task after a backward
        is the next forward.
        """
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
    """Return the seconds per micro-batch in the steady state of a program: the time between two
    consecutive forwards of stage 1. `program` has two stages, on two ranks under 1F1B, and at least
    four micro-batches per step. Raise LaunchError if the program fails.
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
    """Return the median time between the starts of two consecutive forwards of a stage. `starts`
    are the start times of its forwards. The interval after the first forward is not counted,
    because the pipeline is still being filled.
    """
    return statistics.median(second - first for first, second in itertools.pairwise(starts[1:]))


def _median_over_steps(
    program: Path, device: str, rank: int, seconds: Callable[[TaskSpans, int], float]
) -> float:
    """Run the program and return the median of `seconds(spans, micro_batches)` over its steps,
    without the warm-up steps. `spans` are the task times of the rank `rank` in a step.
    """
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


# The code below runs in the ranks that `measure_exchanges` starts.

MESSAGE_SIZES_BYTES = tuple(2**power for power in (12, 15, 18, 20, 22, 24))
"""Sizes, in bytes, of the measured messages and collectives."""
_MIN_REPETITIONS = 7
_MAX_REPETITIONS = 100
_WARM_UP_REPETITIONS = 2
_ROUNDS_PER_MEASUREMENT = 8
"""Number of rounds per measurement. In a round, a rank computes and exchanges one message in each
direction.
"""
_COMPUTATIONS_PER_ROUND = 6
"""Number of calls of the computation before and after the receive of a round. Together they take
about half a millisecond.
"""
_MIN_TRANSFER_FRACTION = 0.1
"""Minimum fraction of a message's measured time that counts as transfer time. It keeps the transfer
time positive if the CPU time of sending and receiving exceeds the measured time.
"""


CommunicationCase = tuple[str, int, int, Callable[[], float]]
"""A measurement: the kind of communication, the number of ranks of its group, the size in bytes,
and a function that runs the communication once and returns its seconds.
"""


def _communication_cases(transport: Transport, sizes: Sequence[int]) -> Iterator[CommunicationCase]:
    """Yield the measurements in the order in which all ranks run them: messages between ranks 0 and
    1, then the collectives of each group size in `sizes`.
    """
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
    """Wait until a GPU has finished all launched work. Do nothing on a CPU."""
    if transport.device.type == "cuda":
        torch.cuda.synchronize()


def _time_collective(
    transport: Transport, kind: str, tensor: torch.Tensor, group: Group | None
) -> float:
    """Return the seconds of one collective of the kind `kind` on `tensor`, which has one row per
    rank. `group` is None on a rank outside of the group, which does not take part.
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
    """Return the seconds to transfer a message of `size` bytes between ranks 0 and 1: half of a
    round trip, minus the CPU time of one send and one receive.

    A round trip has two sends and two receives. On a CPU, their CPU time is that of all threads of
    the rank, including gloo's, which run on the rank's core. On other devices, it is that of the
    calling thread only. At least `_MIN_TRANSFER_FRACTION` of half of the round trip is returned,
    because sender and receiver of a large message work at the same time, so that little may remain
    after the subtraction.
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
    """Return the seconds that rank 0 spends on one end of a message, a send or a receive. In a
    round, rank 0 computes, and sends and receives one message. The result is half of the difference
    between the time of such a round and that of a round without messages. It includes the calls
    and, on a CPU, the work of gloo's threads and waking the other rank.
    """
    alone = _round_seconds(transport, None, size)
    return (_round_seconds(transport, channel, size) - alone) / 2


def _round_seconds(transport: Transport, channel: int | None, size: int) -> float:
    """Return the seconds per round on rank 0. In a round, rank 0 computes, and exchanges a message
    of `size` bytes in each direction with rank 1 unless `channel` is None.

    Rank 0 acts as the slowest stage of a pipeline: each message has arrived when rank 0 waits for
    it, because rank 1 computes half as long and waits for the rest of the round. Ranks above 1
    compute without messages.
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
        # In each round, rank 1 sends the message of the next round. In the last round it sends
        # none, so no receive is posted.
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
    """Run `tasks` small computations. They fill the caches as a task of a model does before a
    message.
    """
    for _ in range(tasks):
        rows = torch.ones(64, 64, device=transport.device)
        for _ in range(4):
            rows = torch.softmax(torch.tanh(rows @ rows) + rows, -1) * torch.layer_norm(rows, (64,))
        _synchronize(transport)


def _repeat_timing(exchange: Callable[[], float], seconds: float) -> Timing:
    """Call `exchange` repeatedly and return the timing on rank 0. Rank 0 decides after about
    `seconds` that the calls end, and all other ranks follow it.
    """
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
    """Measure all cases and write the samples of rank 0 to `target`. The group sizes are the powers
    of two below the number of ranks, and the number of ranks.
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
