"""Round trips of modules: export, import of the weights, training, export of the trained weights,
`load_state_dict`.

    python -m tests.exports.round_trips [NAME ...]

runs the modules NAME, or every module, about ten seconds each.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import autopipe
from autopipe.cli.main import main
from tests.distributed.support.pool import Pools, ranks_in
from tests.exports.round_trip_modules import ROUND_TRIPS, SAMPLES, Batch, RoundTrip

STEPS = 2
MICRO_BATCHES = 2
RATE = 0.05


class CommandFailure(Exception):
    """A command that failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one way."""

    loss: float
    """Relative difference of the losses of two modules: the one with the trained weights, and the
    one torch trained.
    """
    parameters: float
    """Largest difference of a parameter or buffer of the two, relative to its norm."""
    worst: str
    """Name of that tensor."""


def taken(name: str, folder: Path) -> Outcome:
    """Take one module all the way. Raises CommandFailure, naming the command, if one fails."""
    case = ROUND_TRIPS[name]
    module, fresh, target = (_built(case, seed) for seed in range(3))
    batch = case.batch(torch.Generator().manual_seed(0))
    model = folder / "model.onnx"
    started = folder / "started.onnx"
    _export(case, module, batch, model)
    save_file(_state(fresh), folder / "fresh.safetensors")
    _run("checkpoint", "import", folder / "fresh.safetensors", "--model", model, "-o", started)
    np.savez(folder / "data.npz", **{key: value.numpy() for key, value in batch.items()})
    plan = folder / "plan"
    words = [
        "--cluster",
        "cpu-local",
        "--gpus",
        2,
        "--strategy",
        "pipedream",
        "--batch-size",
        SAMPLES,
    ]
    words += ["--micro-batches", MICRO_BATCHES, "--optimizer", "sgd", "--lr", RATE]
    _run("plan", started, *words, "-o", plan)
    _run("codegen", plan)
    words = [
        "--device",
        "cpu",
        "--steps",
        STEPS,
        "--data",
        folder / "data.npz",
        "--checkpoint",
        folder / "saved",
    ]
    _run("launch", plan / "program", *words)
    _run("checkpoint", "export", folder / "saved", "-o", folder / "trained.safetensors")
    trained = load_file(folder / "trained.safetensors")
    target.load_state_dict(trained, strict=True)
    _require_same_shards(folder, trained)
    _train(case, fresh, batch)
    return _outcome(case, target, fresh, batch)


def _require_same_shards(folder: Path, trained: dict[str, torch.Tensor]) -> None:
    """Raise CommandFailure if the shards of an export hold other tensors than the file of the
    export.
    """
    words = ["--max-shard-size", 256, "-o", folder / "shards.safetensors"]
    _run("checkpoint", "export", folder / "saved", *words)
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("shards*.safetensors"):
        found |= load_file(file)
    if found.keys() != trained.keys() or not all(
        torch.equal(found[name], trained[name]) for name in trained
    ):
        raise CommandFailure("the shards of checkpoint export differ from its file")


def _built(case: RoundTrip, seed: int) -> nn.Module:
    """Return the module with numbers as if it had been trained."""
    torch.manual_seed(seed)
    module = case.build()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return module


def _state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state without shared memory, which safetensors refuses."""
    return {name: tensor.clone().contiguous() for name, tensor in module.state_dict().items()}


def _export(case: RoundTrip, module: nn.Module, batch: Batch, path: Path) -> None:
    rows = {name: tensor[:4] for name, tensor in batch.items()}
    if case.loss is None:
        autopipe.export(module, rows, path)
        return
    labels = rows.pop("labels")
    autopipe.export(module, tuple(rows.values()), path, loss=case.loss, labels=labels)


def _loss(case: RoundTrip, module: nn.Module, batch: Batch) -> torch.Tensor:
    if case.loss is None:
        found = module(**batch)
        assert isinstance(found, torch.Tensor)
        return found
    rows = dict(batch)
    labels = rows.pop("labels")
    return case.loss(module(*rows.values()), labels)


def _train(case: RoundTrip, module: nn.Module, batch: Batch) -> None:
    """Train in torch: a step averages the losses of its micro-batches."""
    optimizer = torch.optim.SGD(
        [each for each in module.parameters() if each.requires_grad], lr=RATE
    )
    size = SAMPLES // MICRO_BATCHES
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(MICRO_BATCHES):
            start = step * SAMPLES + index * size
            part = {name: tensor[start : start + size] for name, tensor in batch.items()}
            (_loss(case, module, part) / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _outcome(case: RoundTrip, found: nn.Module, expected: nn.Module, batch: Batch) -> Outcome:
    known = expected.state_dict()
    differences = {
        name: float(
            (tensor.double() - known[name].double()).norm()
            / known[name].double().norm().clamp(min=1e-12)
        )
        for name, tensor in found.state_dict().items()
    }
    worst = max(differences, key=lambda name: differences[name])
    with torch.no_grad():
        ours, theirs = (float(_loss(case, each, batch)) for each in (found, expected))
    return Outcome(abs(ours - theirs) / abs(theirs), differences[worst], worst)


def _run(*words: object) -> None:
    texts = [str(word) for word in words]
    if main([*texts, "-q"]):
        raise CommandFailure(" ".join(texts[:2]))


def sweep(names: Sequence[str]) -> int:
    """Print a line per module, and return the number of failures."""
    warnings.simplefilter("ignore")
    pools = Pools()
    failures = 0
    with ranks_in(pools):
        for name in names:
            with tempfile.TemporaryDirectory(prefix="round-trip-") as folder:
                try:
                    found = taken(name, Path(folder))
                    line = f"loss {found.loss:.1e}, tensors {found.parameters:.1e} ({found.worst})"
                    failures += not found.loss <= 1e-5
                except Exception as error:  # noqa: BLE001  (The sweep goes on.)
                    line = (
                        f"{type(error).__name__}: {str(error).splitlines()[0]} "
                        f"{getattr(error, 'hint', '')}"
                    )
                    failures += 1
            print(f"{name:24} {line}", flush=True)  # noqa: T201
    pools.stop()
    return failures


if __name__ == "__main__":
    sys.exit(bool(sweep(sys.argv[1:] or list(ROUND_TRIPS))))
