"""Tests of the order in which chains of stages use the groups of devices."""

from autopipe.passes.sharding.regions import stage_groups


def test_chunks_visit_each_device_equally_often() -> None:
    assert stage_groups((2, 3), 3, style="loop") == (2, 3, 2, 3, 2, 3)
    assert stage_groups((2, 3), 3, style="v") == (2, 3, 3, 2, 2, 3)
