"""Memory of a GPU that no tensor can have: the CUDA context of the process, and the buffers of NCCL's communicators."""

from __future__ import annotations

_BUFFERS_BYTES = 524_288 + 4_915_200 + 4_194_304
"""Bytes that a communicator takes for each channel (a CTA of its kernels) to receive into, for the protocols LL, LL128
and Simple: DEFAULT_LL_BUFFSIZE, DEFAULT_LL128_BUFFSIZE and DEFAULT_BUFFSIZE (NCCL_BUFFSIZE) of NCCL 2.21's src/init.cc
and src/include/device.h. Connections, and with them buffers, are made when first used (NCCL_RUNTIME_CONNECT)."""
MESSAGE_CTAS = 32
"""Blocks of threads that all of a rank's message communicators may use at once. A kernel that waits for a message spins
on a multiprocessor for each, of which large GPUs have about a hundred, while the rank computes."""
_GROUP_CHANNELS = 24
"""Channels of a group's communicator, as many as NCCL opens at most: 24 with NVSwitch, 12 with a V100's NVLinks, 2 with
PCIe alone."""
_GROUPS = 3
"""Groups of a rank that sum or gather: one across replicas, one inside a stage, one of tied weights or of all ranks."""


def nccl_bytes(ranks: int) -> int:
    """Bytes of NCCL's buffers on one of these ranks, at most."""
    return 0 if ranks < 2 else (MESSAGE_CTAS + _GROUPS * _GROUP_CHANNELS) * _BUFFERS_BYTES
