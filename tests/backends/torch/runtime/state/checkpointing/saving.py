"""A rank that does nothing but step and save, until it is killed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopipe.backends.torch.runtime.communication.transport import ControlGroup
from autopipe.backends.torch.runtime.data.sample_order import RunProgress
from autopipe.backends.torch.runtime.manifest import Manifest
from autopipe.backends.torch.runtime.state.checkpoint import Checkpointer
from autopipe.backends.torch.runtime.state.checkpoint_state import TrainingState
from autopipe.backends.torch.runtime.step.optimizers import TensorGroup, make_optimizer
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat
from autopipe.ir import training
from autopipe.ir.graph import DType, Initializer, Parameter, Value
from autopipe.ir.layout import TensorSlice, full_slice
from autopipe.ir.program import ParameterShard

ADAMW = {
    "name": "adamw",
    "lr": 0.1,
    "momentum": 0.0,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "shard": False,
}
ROWS = 4
COLUMNS = 100


def drawn(name: str, shape: tuple[int, ...], trainable: bool = True) -> Parameter:
    return Parameter(Value(name, DType.FLOAT32, shape), Initializer("zeros"), trainable)


def manifest_with(**given: Any) -> Manifest:
    """What is `given`, and of the rest as little as a save needs."""
    form: dict[str, Any] = dict.fromkeys(Manifest.__dataclass_fields__, ()) | {
        "training": training.Training()
    }
    form |= {
        "folder": Path(),
        "model": Path("m.onnx"),
        "model_digest": "model",
        "plan": "plan",
        "world_size": 1,
    }
    form |= {"train": True, "micro_batches": 1, "micro_batch_size": 1, "optimizer": ADAMW}
    return Manifest(**form | given)


def manifest_of(world_size: int) -> Manifest:
    """Two parameters: of "split" each rank holds some rows, of "whole" everything."""
    names = ("split", "whole")
    parameters = tuple(drawn(name, (ROWS, COLUMNS)) for name in names)
    rows = ROWS // world_size
    shards = tuple(
        (
            ParameterShard(
                0, TensorSlice((rows * rank, 0), (rows * (rank + 1), COLUMNS)), (rank,), None
            ),
            ParameterShard(1, full_slice((ROWS, COLUMNS)), tuple(range(world_size)), None),
        )
        for rank in range(world_size)
    )
    return manifest_with(world_size=world_size, parameters=parameters, shards=shards)


def digest_of(split: bytes, whole: bytes) -> str:
    """What tells one state from another."""
    return hashlib.sha256(split + whole).hexdigest()


def save_all_steps(
    folder: Path, rank: int, world_size: int, store: str, says: Connection[Any, Any]
) -> None:
    """Go on from what is there, and save every step.

    Tells (what, step, digest): "restored" once, "saves" before each save, "committed" when it is
    known to be.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # What a rank says when another is killed.
    if world_size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        patience = timedelta(seconds=60)
        shared = dist.FileStore(store, world_size)
        dist.init_process_group(
            "gloo", store=shared, rank=rank, world_size=world_size, timeout=patience
        )
    manifest = manifest_of(world_size)
    cpu = torch.device("cpu")
    parameters = {
        shard.parameter: torch.ones(shard.box.shape, requires_grad=True)
        for shard in manifest.shards[rank]
    }
    optimizer = make_optimizer(
        ADAMW, [TensorGroup(tuple(parameters.values()), ADAMW["weight_decay"])]
    )
    assert optimizer is not None
    state = TrainingState(manifest, rank, parameters, optimizer, cpu)
    control_group = ControlGroup(rank, world_size, 60.0, Heartbeat())
    checkpointer = Checkpointer(folder, manifest, state, control_group)

    def digest() -> str:
        return digest_of(*(parameters[index].detach().numpy().tobytes() for index in (0, 1)))

    found = checkpointer.restore()
    done = 0 if found is None else found.step
    says.send(("restored", done, digest()))
    for step in count(done + 1):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters.values():
            parameter.grad = torch.randn(ROWS, COLUMNS, generator=generator)[: len(parameter)]
        optimizer.step()
        says.send(("saves", step, digest()))
        checkpointer.save(RunProgress(step, step), 0)
        says.send(("committed", step - 1, ""))


def heard(says: Connection[Any, Any]) -> list[tuple[str, int, str]]:
    """All that a killed rank has told."""
    found = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            found.append(says.recv())
    return found
