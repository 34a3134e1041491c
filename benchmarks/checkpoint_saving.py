"""What a save costs the steps, and what it costs the thread beside them: one rank, AdamW, no
network.

Processor seconds, since other work on the machine changes the clock's.

    python benchmarks/checkpoint_saving.py --mebibytes 192
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from command_line import parse_arguments

from autopipe.backends.torch.runtime.communication.transport import ControlGroup
from autopipe.backends.torch.runtime.data.sample_order import RunProgress
from autopipe.backends.torch.runtime.state.checkpoint import Checkpointer
from autopipe.backends.torch.runtime.state.checkpoint_state import TrainingState
from autopipe.backends.torch.runtime.step.optimizers import TensorGroup, make_optimizer
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat
from autopipe.ir.graph import DType, Initializer, Parameter, Value
from autopipe.ir.layout import full_slice
from autopipe.ir.program import ParameterShard
from tests.backends.torch.runtime.state.checkpointing.saving import ADAMW, manifest_with

SIDE = 1024
STATES = 3
"""A parameter and two states, in float32."""


def checkpointer(folder: Path, mebibytes: int) -> Checkpointer:
    """One rank's, of a state of that size after a step."""
    count = mebibytes * 2**20 // (SIDE * SIDE * 4 * STATES)
    values = (Value(f"w{each}", DType.FLOAT32, (SIDE, SIDE)) for each in range(count))
    entries = tuple(Parameter(value, Initializer("zeros")) for value in values)
    shards = tuple(
        ParameterShard(each, full_slice((SIDE, SIDE)), (0,), None) for each in range(count)
    )
    manifest = manifest_with(parameters=entries, shards=(shards,))
    parameters = {each: torch.randn(SIDE, SIDE, requires_grad=True) for each in range(count)}
    optimizer = make_optimizer(
        ADAMW, [TensorGroup(tuple(parameters.values()), ADAMW["weight_decay"])]
    )
    assert optimizer is not None
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    cpu = torch.device("cpu")
    state = TrainingState(manifest, 0, parameters, optimizer, cpu)
    return Checkpointer(folder, manifest, state, ControlGroup(0, 1, 60.0, Heartbeat()))


def main() -> None:
    """Save and restore, and print what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mebibytes", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, mebibytes=12, rounds=1)
    with tempfile.TemporaryDirectory() as folder:
        saved = checkpointer(Path(folder), arguments.mebibytes)
        held = []
        beside = []
        for round_ in range(1 + arguments.rounds):  # The first one allocates the copies.
            before = time.process_time()
            thread = time.thread_time()
            saved.save(RunProgress(round_ + 1, round_ + 1), 0)
            held.append(time.thread_time() - thread)
            saved.wait()
            beside.append(time.process_time() - before - held[-1])
        before = time.process_time()
        saved.restore()
        restored = time.process_time() - before
        saved.close()
    print(
        f"{arguments.mebibytes} MiB, processor seconds, medians of {arguments.rounds} saves "
        "after the first:"
    )
    print(f"on the steps' thread {statistics.median(held[1:]):.3f} (first {held[0]:.3f})")
    print(f"beside it {statistics.median(beside[1:]):.3f}; restoring {restored:.3f}")


if __name__ == "__main__":
    main()
