"""The rule of thumb that a search begins with."""

from __future__ import annotations

from types import SimpleNamespace

from autopipe.ir.problem import Optimizer
from autopipe.passes.auto.candidates import Candidate
from autopipe.passes.auto.choose import rule_of_thumb_candidate
from autopipe.passes.pipeline import Request
from autopipe.passes.placement.grid import Grid
from tests.passes.auto.models import cluster


def first(devices, gigabytes, batch, **given):
    """For parameters of so many GB and a device's 32 GiB, of which state may fill 8."""
    request = Request(None, cluster(devices), None, None, batch_size=batch, **given)
    parameter = SimpleNamespace(value=SimpleNamespace(bytes=gigabytes * 10**9))
    return rule_of_thumb_candidate(request, SimpleNamespace(parameters=(parameter,)))


def test_stages_are_as_few_as_memory_allows():
    node = cluster(64).devices_per_node
    assert first(64, 1, 256) == Candidate(Grid(1, 64 // node, node), 16, "auto")
    # 30 GB thrice and once more for momentum are 120 GB: in 8 GiB parts 14 of them, on nodes of
    # `node` devices.
    stages = {4: 4, 8: 2, 16: 1}[node]
    found = first(64, 30, 256, optimizer=Optimizer(momentum=0.9))
    assert found is not None
    assert found.strategy == Grid(stages, 64 // node // stages, node)


def test_micro_batches_are_shared_by_the_replicas():
    found = first(64, 1, 48)
    assert found is not None
    assert found.micro_batches is not None
    assert 48 // found.micro_batches % found.strategy.data == 0
    assert first(64, 1, 1) is None, "there is no sample for each"


def test_what_is_asked_for_is_not_guessed():
    assert first(8, 1, None) is None
    assert first(8, 1, 16, micro_batches=4) is None
    assert first(8, 1, 16, micro_batch_size=4) is None
