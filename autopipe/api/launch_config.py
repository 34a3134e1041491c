"""The configuration of the launcher: nodes, ranks per node, rendezvous and restarts of a launch,
and the devices of its ranks.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from autopipe.api.events import Events
from autopipe.api.launch_settings import LaunchSettings, SettingError
from autopipe.backends.torch.launcher import LaunchConfig
from autopipe.backends.torch.runtime.job import ManagedJob, detect_job
from autopipe.backends.torch.runtime.watch.heartbeat import Timeouts
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.words import count_text, plural

_MIN_KEY_BYTES = 32
"""Minimum length of a rendezvous key in bytes."""
_DEFAULT_RESTARTS = 3
"""Default number of restarts of a launch that saves checkpoints."""


def launch_config(
    settings: LaunchSettings, live: bool, debug: bool, events: Events
) -> LaunchConfig:
    """Return the configuration of the launcher. If `settings` has no number of nodes (`nnodes`) and
    this process belongs to a job of a job manager, the job determines the number of nodes and those
    settings of ranks per node, node rank and rendezvous that are None.
    """
    job = detect_job(os.environ) if settings.nnodes is None else None
    if job is None:
        job = ManagedJob("", settings.nnodes or "1", None, "")
    elif job.nodes != "1":
        events.note(
            f"{job.manager} runs {job.nodes} nodes, which meet at "
            f"{settings.rdzv_endpoint or job.endpoint}"
        )
    restarts = settings.max_restarts
    if restarts is None:
        restarts = 0 if settings.checkpoint is None else _DEFAULT_RESTARTS
    return LaunchConfig(
        nodes=_parse_nodes(job.nodes),
        ranks_per_node=settings.nproc_per_node or job.ranks_per_node,
        rendezvous_endpoint=settings.rdzv_endpoint or job.endpoint,
        node=job.node if settings.node_rank is None else settings.node_rank,
        local_address=settings.local_addr,
        hosts=job.hosts,
        rendezvous_id=settings.rdzv_id or job.name,
        rendezvous_key=b"" if settings.rdzv_key is None else _read_key(Path(settings.rdzv_key)),
        max_restarts=restarts,
        timeouts=Timeouts(
            settings.start_timeout, settings.step_timeout, settings.checkpoint_timeout
        ),
        live=live,
        saves=settings.checkpoint is not None,
        debug=debug,
    )


def _read_key(path: Path) -> bytes:
    """Return the key in the file `path`. Raises ConfigurationError if other users may read it."""
    try:
        others = path.stat().st_mode & 0o077
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigurationError(
            f"the rendezvous key cannot be read: {error.strerror}", where=str(path)
        ) from error
    if others:
        raise ConfigurationError(
            "other users can read the rendezvous key", hint=f"run chmod 600 {path}", where=str(path)
        )
    if len(key) < _MIN_KEY_BYTES:
        hint = f"create a key with openssl rand -hex {_MIN_KEY_BYTES}"
        raise ConfigurationError(
            f"the rendezvous key has {len(key)} {plural(len(key), 'byte')}, expected "
            f"{_MIN_KEY_BYTES} or more",
            hint=hint,
            where=str(path),
        )
    return key


def _parse_nodes(text: str) -> tuple[int, int]:
    """Return (minimum, maximum) for a text such as `2` or `1:4`."""
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        raise SettingError(f"{text!r} is neither a number nor MIN:MAX", "nnodes") from None
    if not 1 <= found[0] <= found[1]:
        raise SettingError(f"{text!r} must be at least 1, and MIN at most MAX", "nnodes")
    return found


def run_name(config: LaunchConfig) -> str:
    """Return a name of the launch that is equal on all nodes: the rendezvous endpoint and the name
    of the run if there are several nodes, otherwise a random name.
    """
    if config.nodes == (1, 1):
        return uuid.uuid4().hex
    return f"{config.rendezvous_endpoint} {config.rendezvous_id}"


def visible_gpus(device: str) -> int:
    """Return the number of this node's GPUs that ranks on `device` may use."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def placement_note(device: str, ranks: int) -> str:
    """Return one line about the devices on which the ranks of this node run. Raises
    ConfigurationError if `device` is "cuda" and there is no CUDA device.
    """
    gpus = visible_gpus(device)
    if not gpus and device == "cuda":
        raise ConfigurationError(
            "this machine lacks a CUDA device", hint="set --device cpu", where="--device cuda"
        )
    placed = count_text(ranks, "rank")
    if not gpus:
        why = "" if device == "cpu" else "no CUDA device: "
        return f"{why}{placed} on the CPU, over gloo"
    return (
        f"{placed} on {count_text(ranks, 'GPU')}"
        if ranks <= gpus
        else f"{placed} share {count_text(gpus, 'GPU')}"
    )
