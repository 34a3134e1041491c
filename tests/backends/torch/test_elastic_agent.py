"""The agent on top of torch elastic's agent, whose private methods differ between versions of
torch.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from autopipe.backends.torch.elastic_agent import RankAgent
from autopipe.backends.torch.rendezvous import RendezvousConfig, RendezvousHandler


def _agent(logs: Path) -> RankAgent:
    spec = WorkerSpec(
        role="rank",
        local_world_size=1,
        entrypoint="true",
        rdzv_handler=RendezvousHandler(RendezvousConfig()),
    )
    return RankAgent(spec, logs, {}, None, lambda line: None, lambda: None, {})


def test_shutdown_of_a_torch_that_accepts_the_signal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.11 calls `_shutdown` with a signal or without arguments."""
    signals: list[signal.Signals] = []

    def of_torch_2_11(agent: LocalElasticAgent, death_sig: signal.Signals = signal.SIGTERM) -> None:
        signals.append(death_sig)

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", of_torch_2_11)
    agent = _agent(tmp_path)
    agent._shutdown()
    agent._shutdown(signal.SIGINT)
    assert signals == [signal.SIGTERM, signal.SIGINT]


def test_shutdown_of_a_torch_that_accepts_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.13 passes the time limit by name."""
    calls: list[tuple[signal.Signals, int]] = []

    def of_torch_2_13(
        agent: LocalElasticAgent, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30
    ) -> None:
        calls.append((death_sig, timeout))

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", of_torch_2_13)
    agent = _agent(tmp_path)
    agent._shutdown(timeout=7)
    agent._shutdown(signal.SIGINT, 8)
    assert calls == [(signal.SIGTERM, 7), (signal.SIGINT, 8)]
