"""Start of a rank's process: options, manifest and heartbeat, then the connection to the other
ranks and the limit of the rank's GPU memory.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from autopipe.backends.torch.runtime.communication.transport import Transport
from autopipe.backends.torch.runtime.job import variables_of_rank
from autopipe.backends.torch.runtime.manifest import Manifest, read_manifest
from autopipe.backends.torch.runtime.modes.execution import Execution
from autopipe.backends.torch.runtime.modes.selection import choose_execution, choose_modes
from autopipe.backends.torch.runtime.options import RankOptions, parse_options
from autopipe.backends.torch.runtime.state.running_statistics import (
    groups_with_shared_statistics,
    shared_statistics,
)
from autopipe.backends.torch.runtime.step.gradients import process_groups_of_program
from autopipe.backends.torch.runtime.step.precision import set_matmul_precision
from autopipe.backends.torch.runtime.step.stage import Mode, RankContext
from autopipe.backends.torch.runtime.watch.failures import install_error_hook, start_launcher_watch
from autopipe.backends.torch.runtime.watch.heartbeat import Heartbeat, Timeouts
from autopipe.ir.errors import ConfigurationError
from autopipe.ir.words import plural


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Objects that `start_process` has set up for a rank, before the rank connects to the other
    ranks.
    """

    options: RankOptions
    manifest: Manifest
    transport: Transport
    heartbeat: Heartbeat
    execution: Execution
    modes: tuple[Mode, ...]


def start_process(number: int, file: str) -> RankProcess:
    """Prepare this process to run rank `number`; `file` is the rank's generated file. Afterwards,
    an uncaught exception ends the process at once and writes a failure file for the launcher.

    Raise ConfigurationError if the environment variables give this process another rank, or if the
    world size differs from the program's number of ranks.
    """
    heartbeat = Heartbeat.open_for_rank(number)
    install_error_hook(number, heartbeat)
    start_launcher_watch(heartbeat)
    os.environ.update(variables_of_rank(os.environ))
    options = parse_options(sys.argv[1:])
    manifest = read_manifest(Path(file).resolve().parent, options.model)
    timeouts = Timeouts(options.start_timeout, options.step_timeout, options.checkpoint_timeout)
    execution = choose_execution(options)
    transport = execution.make_transport(options.device, timeouts, heartbeat)
    if transport.world_size != manifest.world_size:
        count = manifest.world_size
        raise ConfigurationError(
            f"the program is for {count} {plural(count, 'rank')}, "
            f"but WORLD_SIZE is {transport.world_size}",
            hint=f"start {count} {plural(count, 'process', 'processes')}",
        )
    if transport.rank != number:
        raise ConfigurationError(
            f"the process with RANK {transport.rank} runs the program file of rank {number}"
        )
    return RankProcess(options, manifest, transport, heartbeat, execution, choose_modes(options))


def connect(rank: RankContext) -> None:
    """Set the precision of matmuls, connect to all other ranks, and limit this rank's GPU memory to
    the limit in the manifest, if there is one. Collective over all ranks.
    """
    manifest = rank.manifest
    transport = rank.transport
    transport.start()
    set_matmul_precision(manifest.precision, exact=any(mode.exact_matmuls for mode in rank.modes))
    groups = process_groups_of_program(manifest)
    if (
        manifest.scales_loss
        or manifest.counts_labels
        or manifest.loss_division.root
        or manifest.training.max_norm is not None
    ):
        groups.add(tuple(range(manifest.world_size)))
    groups |= groups_with_shared_statistics(manifest, shared_statistics(manifest))
    transport.connect(groups, manifest.channels)
    if rank.device.type == "cuda" and manifest.memory_limits:
        limit_memory(manifest.memory_limits[rank.number], rank.device)


def limit_memory(limit: int, device: torch.device) -> None:
    """Limit the memory that torch's allocator takes on `device`, a GPU, to `limit` bytes. The CUDA
    context and NCCL's buffers do not count, because torch does not allocate them.
    """
    fraction = limit / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, fraction), device)
