"""What ships with autopipe is valid, and clusters of one's own are checked alike."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from autopipe import configs
from autopipe.configs.cluster import (
    Efficiencies,
    PeakRates,
    build_cluster,
    cluster_names,
    cluster_preset,
    is_cluster,
    read_cluster,
)
from autopipe.configs.configuration import dump_configuration, load_configuration, resolve_cluster
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from tests.configs.texts import parse_configuration

RECIPES = sorted((Path(configs.__file__).parent / "recipes").glob("*.yaml"))
"""The example configurations."""
NAMES = (
    "1080ti-pcie", "2080ti-pcie", "a100-80gb", "cpu-local", "h100-80gb", "h100-superpod", "h200", "rtx-4090", "summit",
    "summit-6", "tepdist-m8", "tepdist-s1", "v100-16gb", "v100-32gb",
)  # fmt: skip

MINE = """\
name: mine
device:
  name: D
  memory: 8GiB
  peak: {fp32: 10TFLOP/s}
  bandwidth: 100GB/s
  launch_latency: 0
  efficiency: {matmul: 1, convolution: 1, elementwise: 1, normalization: 1, reduction: 1, memory: 1, recurrent: 0.5}
levels:
  - {name: node, size: 4, latency: 1us, bandwidth: 10GB/s}
  - {name: rack, size: 2, latency: 2us, bandwidth: 1GB/s}
"""


MIXED = ("a100-v100", "h100-a100-v100")
"""Presets of several kinds of devices, of which there are so many."""


def test_the_presets_are_there() -> None:
    assert cluster_names() == tuple(sorted((*NAMES, *MIXED)))


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_grows_to_any_number_of_devices(name: str) -> None:
    description = cluster_preset(name)
    assert description.name == name
    for count in (1, 4, 12, 64):
        cluster = build_cluster(description, count)
        assert cluster.size == count
        device = cluster.devices[-1]
        assert all(
            0 < device.efficiency_of(kind) <= 1
            for kind in (field.name for field in fields(Efficiencies))
        )
        assert all(
            device.peak(precision) > 0 for precision in (field.name for field in fields(PeakRates))
        )
        assert device.peak("fp16") >= device.peak("fp32") > device.peak("fp64") > 1e8
        assert all(
            level.link.bandwidth_bytes_per_s < device.bandwidth_bytes_per_s
            for level in cluster.levels
        )
    assert [level.link.bandwidth_bytes_per_s for level in cluster.levels] == sorted(
        (level.link.bandwidth_bytes_per_s for level in cluster.levels), reverse=True
    )


def test_summit_is_the_one_of_graphpipe() -> None:
    summit = build_cluster(cluster_preset("summit"), 32)
    assert (summit.devices_per_node, summit.node_count) == (4, 8)
    assert summit.devices[0].memory_bytes == 16 * 10**9
    assert summit.link(3, 4).bandwidth_bytes_per_s == 12.5e9


def test_every_device_of_a_cluster_where_no_number_is_given() -> None:
    assert build_cluster(cluster_preset("summit"), None).size == 4
    assert build_cluster(cluster_preset("summit"), None, nodes=3).size == 12
    assert build_cluster(cluster_preset("summit"), None, nodes=3, devices_per_node=2).size == 6


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid(path: Path) -> None:
    configuration = load_configuration(path)
    assert resolve_cluster(configuration).size == configuration.gpus
    assert parse_configuration(dump_configuration(configuration), "effective") == configuration


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 2


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    assert is_cluster(path)
    configuration = parse_configuration(f"cluster: {{file: {path}}}\ngpus: 6\n", "c.yaml")
    cluster = resolve_cluster(configuration)
    assert (cluster.name, cluster.size, cluster.node_count) == ("mine", 6, 2)
    assert cluster.link(0, 5).latency_s == 2e-6
    inline = (
        "cluster:\n  inline:\n"
        + "".join(f"    {line}\n" for line in MINE.splitlines())
        + "gpus: 6\n"
    )
    read = parse_configuration(inline, "c.yaml")
    assert resolve_cluster(read) == cluster
    assert parse_configuration(dump_configuration(read), "effective") == read


def test_a_cluster_that_is_too_small() -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"summit consists of 8 devices \(4 in a node x 2 in a cluster\), 2 fewer than",
    ):
        resolve_cluster(
            parse_configuration("cluster: {preset: summit, nodes: 2}\ngpus: 10\n", "c.yaml")
        )
    with pytest.raises(ConfigurationError, match="cluster summit consists of 4000000 devices"):
        resolve_cluster(
            parse_configuration("cluster: {preset: summit, nodes: 1000000}\n", "c.yaml")
        )
    with pytest.raises(
        ConfigurationError,
        match=r"describes no link between nodes, so it cannot have cluster\.nodes 2",
    ):
        resolve_cluster(parse_configuration("cluster: {preset: cpu-local, nodes: 2}\n", "c.yaml"))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("memory: 8GiB", "memory: 8", ""),
        (
            "memory: 8GiB",
            "memory: 8Gb",
            "mine.yaml:4: device.memory is '8Gb' (expected a size such as 14GiB",
        ),
        (
            "memory: 8GiB",
            "memmory: 8GiB",
            "mine.yaml:4: unknown key 'memmory' in device (did you mean 'memory'?)",
        ),
        ("fp32: 10TFLOP/s", "fp16: 1TFLOP/s", "mine.yaml:5: device.peak lacks the key 'fp32'"),
        (
            "recurrent: 0.5",
            "recurrent: 1.5",
            "mine.yaml:8: device.efficiency.recurrent is 1.5 (it must be at most 1)",
        ),
        (
            "bandwidth: 10GB/s",
            "bandwidth: 0B/s",
            "mine.yaml:10: levels[0].bandwidth is 0B/s (it must be above 0)",
        ),
        ("size: 4, ", "", "level node of cluster mine lacks a size"),
        ("size: 4", "size: 0", "mine.yaml:10: levels[0].size is 0 (it must be at least 1)"),
    ],
)
def test_mistakes_in_a_cluster(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE.replace(old, new))
    if not expected:
        assert build_cluster(read_cluster(path), None).devices[0].memory_bytes == 8
        return
    with pytest.raises(ConfigurationError) as caught:
        build_cluster(read_cluster(path), None)
    assert expected in str(caught.value)


def test_a_cluster_without_levels(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINE.partition("levels:")[0] + "levels: []\n")
    with pytest.raises(ConfigurationError, match="cluster mine describes no levels"):
        build_cluster(read_cluster(path), None)


def test_hosts_of_presets() -> None:
    """Devices on which published tables were made have hosts whose time does not count, and so has
    a CPU.
    """
    hosts = {
        name: device.host_launch
        for name in NAMES
        if (device := cluster_preset(name).device) is not None
    }
    counted = {"h100-80gb", "h100-superpod", "h200", "rtx-4090"}
    assert hosts == {name: 1e-5 if name in counted else 0.0 for name in NAMES}
