"""The order in which chains of stages go over devices."""

from autopipe.passes.sharding.regions import visited


def test_chunks_visit_each_device_equally_often() -> None:
    assert visited((2, 3), 3, wave=False) == (2, 3, 2, 3, 2, 3)
    assert visited((2, 3), 3, wave=True) == (2, 3, 3, 2, 2, 3)
