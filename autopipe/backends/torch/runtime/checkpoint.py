"""Saving and restoring a rank's training state: parameters, optimizer state, random state and position in the data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from autopipe.backends.torch.runtime import checkpoint_folder as files
from autopipe.backends.torch.runtime.manifest import Manifest, ShardEntry
from autopipe.backends.torch.runtime.transport import Transport
from autopipe.ir.errors import ConfigurationError, LaunchError

_CPU_STATE, _CUDA_STATE = "random.cpu", "random.cuda"


class TrainingState:
    """What changes as a rank trains, as tensors with safe names and a table that says what each is."""

    def __init__(
        self,
        manifest: Manifest,
        shards: tuple[ShardEntry, ...],
        parameters: dict[int, torch.Tensor],
        optimizer: torch.optim.Optimizer | None,
        device: torch.device,
    ) -> None:
        self._manifest = manifest
        self._shards = shards
        self._parameters = parameters
        self._optimizer = optimizer
        self._device = device

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by key: `p12` is the block of parameter 12, `p12.exp_avg` a state that the optimizer keeps."""
        found = {_CPU_STATE: torch.get_rng_state()}
        if self._device.type == "cuda":
            found[_CUDA_STATE] = torch.cuda.get_rng_state(self._device)
        for index, tensor in self._parameters.items():
            found[f"p{index}"] = tensor.detach().contiguous()
            for name, value in self._kept(tensor).items():
                found[f"p{index}.{name}"] = value.contiguous()
        return found

    def _kept(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the optimizer keeps of a parameter."""
        state = {} if self._optimizer is None else self._optimizer.state.get(tensor, {})
        return {name: value for name, value in sorted(state.items()) if isinstance(value, torch.Tensor)}

    def table(self) -> list[dict[str, Any]]:
        """For each block: the parameter's name and global shape, the block within it, and its keys."""
        found = []
        for shard in self._shards:
            entry = self._manifest.parameters[shard.parameter]
            key = f"p{shard.parameter}"
            kept = self._kept(self._parameters[shard.parameter])
            found.append(
                {
                    "name": entry.name,
                    "dtype": entry.dtype,
                    "shape": entry.shape,
                    "starts": shard.starts,
                    "stops": shard.stops,
                    "key": key,
                    "state": {name: f"{key}.{name}" for name in kept},
                }
            )
        return found

    def restore(self, tensors: dict[str, torch.Tensor], table: list[dict[str, Any]]) -> None:
        """Put saved tensors in place. Raises LaunchError where they are not those of this rank."""
        entries = {entry["key"]: entry for entry in table}
        for index, parameter in self._parameters.items():
            saved = tensors.get(f"p{index}")
            if saved is None or saved.shape != parameter.shape or saved.dtype is not parameter.dtype:
                raise LaunchError(f"the checkpoint lacks this rank's {self._manifest.parameters[index].name!r}")
            with torch.no_grad():
                parameter.copy_(saved)
        if self._optimizer is not None:
            self._restore_optimizer(self._optimizer, tensors, entries)
        torch.set_rng_state(tensors[_CPU_STATE])
        if self._device.type == "cuda" and _CUDA_STATE in tensors:
            torch.cuda.set_rng_state(tensors[_CUDA_STATE], self._device)

    def _restore_optimizer(
        self, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], entries: dict[str, Any]
    ) -> None:
        indices = {id(parameter): index for index, parameter in self._parameters.items()}
        form = optimizer.state_dict()
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        form["state"] = {}
        for position, parameter in enumerate(trained):
            keys = entries[f"p{indices[id(parameter)]}"]["state"]
            if keys:
                form["state"][position] = {name: tensors[key] for name, key in keys.items()}
        optimizer.load_state_dict(form)


class Checkpointer:
    """Saves all ranks' states together, and finds the newest that all can restore."""

    def __init__(self, folder: Path, manifest: Manifest, transport: Transport, state: TrainingState) -> None:
        self._folder = folder
        self._manifest = manifest
        self._transport = transport
        self._state = state

    def save(self, step: int) -> None:
        """Commit the state after `step` steps. Raises LaunchError where it cannot be written."""
        rank = self._transport.rank
        token = self._transport.gather_bytes(str(os.getpid()).encode())[0].decode()
        temporary = files.temporary_path(self._folder, step, token)
        if rank == 0:
            files.begin(temporary)
        self._transport.gather_bytes(b"")
        path = temporary / files.rank_file(rank)
        if not temporary.is_dir():
            raise LaunchError("rank 0's checkpoint folder is not here", hint="all nodes must share it", where=str(path))
        size, digest = files.write_file(path, lambda target: save_file(self._state.tensors(), target))
        own = {"file": path.name, "bytes": size, "sha256": digest, "tensors": self._state.table()}
        parts = self._transport.gather_bytes(json.dumps(own).encode())
        if rank == 0:
            files.commit(temporary, self._form(step) | {"ranks": [json.loads(part) for part in parts]})
            files.prune(self._folder)

    def _form(self, step: int) -> dict[str, Any]:
        manifest = self._manifest
        return {
            "format": files.FORMAT,
            "plan": manifest.plan,
            "model_sha256": manifest.model_digest,
            "world_size": manifest.world_size,
            "step": step,
            "samples": step * manifest.batch_size,
            "optimizer": manifest.optimizer["name"],
        }

    def restore(self) -> int:
        """Restore the newest committed state. Returns the steps done, 0 where there is none.

        Raises ConfigurationError for a checkpoint of another plan, LaunchError for a damaged one.
        """
        steps = files.committed_steps(self._folder)
        newest = str(steps[-1] if steps else 0)
        found = {each.decode() for each in self._transport.gather_bytes(newest.encode())}
        if len(found) > 1:
            raise LaunchError(
                f"ranks see different newest checkpoints: steps {', '.join(sorted(found))}",
                hint="all nodes must share the folder", where=str(self._folder),
            )  # fmt: skip
        if not steps:
            return 0
        path = files.checkpoint_path(self._folder, steps[-1])
        form = files.read_checkpoint_manifest(path)
        self._check(form, path)
        try:
            own = form["ranks"][self._transport.rank]
            file = path / files.rank_file(self._transport.rank)
            files.check_file(file, own["bytes"], own["sha256"])
            self._state.restore(load_file(file), own["tensors"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise LaunchError(f"the checkpoint is damaged: {error!r}", where=str(path)) from error
        return steps[-1]

    def _check(self, form: dict[str, Any], path: Path) -> None:
        """Raise ConfigurationError unless the checkpoint is of this program."""
        ours = self._form(0)
        words = {
            "world_size": "number of ranks",
            "plan": "plan",
            "model_sha256": "model",
            "optimizer": "optimizer",
        }
        for key, word in words.items():
            if form.get(key) != ours[key]:
                raise ConfigurationError(
                    f"the checkpoint is of another {word}: {form.get(key)}, the program's is {ours[key]}",
                    hint="choose another --checkpoint folder", where=str(path),
                )  # fmt: skip
