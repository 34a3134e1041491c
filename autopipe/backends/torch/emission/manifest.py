"""The side file of a program: what is data rather than code, names from the model above all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopipe.backends.torch.emission.groups import meshes_of
from autopipe.ir.graph import FileSlice, Fill, FoldedSlice, Parameter, Storage
from autopipe.ir.problem import Optimizer
from autopipe.ir.program import InputRange, Output, OutputPlace, Program, RankCode, StageCode

FORMAT = "autopipe.program/1"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a program and the settings its steps run with."""

    model: str
    """Absolute path of the ONNX file whose weights the ranks read."""
    model_digest: str
    """SHA-256 of the ONNX file."""
    plan_digest: str
    optimizer: Optimizer
    precision: str
    seed: int
    predicted_step_s: float
    predicted_bubble: float


def manifest_of(program: Program, provenance: Provenance) -> dict[str, Any]:
    """The manifest as a JSON object; `autopipe.backends.torch.runtime.manifest` reads it."""
    optimizer = provenance.optimizer
    return {
        "format": FORMAT,
        "model": {"path": provenance.model, "sha256": provenance.model_digest},
        "plan": provenance.plan_digest,
        "world_size": program.world_size,
        "mode": "train" if program.train else "infer",
        "micro_batches": program.micro_batches,
        "micro_batch_size": program.micro_batch_size,
        "loss": program.loss,
        "precision": provenance.precision,
        "seed": provenance.seed,
        "optimizer": {
            "name": optimizer.name,
            "lr": optimizer.lr,
            "momentum": optimizer.momentum,
            "weight_decay": optimizer.weight_decay,
            "betas": list(optimizer.betas),
            "eps": optimizer.eps,
            "shard": program.shard,
        },
        "predicted": {"step_s": provenance.predicted_step_s, "bubble": provenance.predicted_bubble},
        "inputs": [_input(each) for each in program.inputs],
        "outputs": [_output(each, program) for each in program.outputs],
        "parameters": [_parameter(each) for each in program.parameters],
        "stages": [_stage(each) for each in program.stages],
        "channels": [
            {
                "number": each.number,
                "source": each.source_rank,
                "target": each.target_rank,
                "buffers": each.buffers,
                "gradient_buffers": each.gradient_buffers,
            }
            for each in program.channels
        ],
        "ranks": [_rank(each) for each in program.ranks],
    }


def _stage(stage: StageCode) -> dict[str, Any]:
    """With the sub-meshes of its group along which its ranks exchange anything."""
    found: dict[str, Any] = {
        "ranks": list(stage.devices),
        "pipeline": stage.pipeline,
        "meshes": [[[axis.degree, axis.stride] for axis in axes] for axes in meshes_of(stage)],
    }
    return found if stage.turns == 1 else found | {"turns": stage.turns}


def _input(entry: InputRange) -> dict[str, Any]:
    """With what its numbers must keep to, where they must."""
    found: dict[str, Any] = {
        "name": entry.value.name,
        "dtype": entry.value.dtype.value,
        "shape": list(entry.value.shape),
        "batch_axis": entry.batch_axis,
        "below": entry.below,
    }
    for key, bounds in (("drawn", entry.drawn), ("allowed", entry.allowed)):
        if bounds:
            found[key] = [
                {"least": each.least, "below": each.below, "starts": list(each.starts), "stops": list(each.stops)}
                for each in bounds
            ]
    return found if entry.ignored is None else found | {"ignored": entry.ignored}


def _output(output: Output, program: Program) -> dict[str, Any]:
    return {
        "name": output.value.name,
        "dtype": output.value.dtype.value,
        "shape": list(output.value.shape),
        "batch_axis": output.batch_axis,
        "places": [_place(output, place, program) for place in output.places],
    }


def _place(output: Output, place: OutputPlace, program: Program) -> dict[str, Any]:
    return {
        "stage": place.stage,
        "position": [value.name for value in program.stages[place.stage].outputs].index(output.value.name),
        "combine": place.combine,
        "copies": place.copies,
        "shards": [
            {"rank": shard.rank, "starts": list(shard.box.starts), "stops": list(shard.box.stops)}
            for shard in place.shards
        ],
    }


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.value.name,
        "dtype": parameter.value.dtype.value,
        "shape": list(parameter.value.shape),
        "trainable": parameter.trainable,
        "storage": _storage(parameter.storage),
    }


def _storage(storage: Storage) -> dict[str, Any]:
    if isinstance(storage, FileSlice):
        found: dict[str, Any] = {
            "kind": "file",
            "file": storage.file,
            "offset": storage.offset,
            "length": storage.length,
        }
        if isinstance(storage, FoldedSlice):
            found |= {"rows": list(storage.rows), "step": storage.step, "form": storage.form}
        return found
    if isinstance(storage, Fill):
        return {"kind": "fill", "value": storage.value}
    return {"kind": "draw", "scheme": storage.scheme, "scale": storage.scale}


def _rank(rank: RankCode) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "stages": [stage.stage for stage in rank.stages],
        "shards": [
            {
                "parameter": shard.parameter,
                "starts": list(shard.box.starts),
                "stops": list(shard.box.stops),
                "ranks": list(shard.gradient_ranks),
                "home": shard.home,
            }
            for shard in rank.shards
        ],
    }
