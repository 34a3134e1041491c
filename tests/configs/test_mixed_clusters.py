"""Clusters of groups of different devices, as they are described."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopipe.configs.cluster import (
    build_cluster,
    cluster_names,
    cluster_preset,
    is_cluster,
    read_cluster,
)
from autopipe.configs.configuration import dump_configuration, resolve_cluster
from autopipe.ir.cluster import Level, Link
from autopipe.ir.errors import ConfigurationError, InfeasibleError
from tests.configs.texts import parse_configuration

MIXED = """\
name: mine
groups:
  - {name: new, device: a100-80gb, count: 12}
  - name: old
    device:
      name: D
      memory: 8GiB
      peak: {fp32: 10TFLOP/s}
      bandwidth: 100GB/s
      launch_latency: 0
      efficiency: {matmul: 1, convolution: 1, elementwise: 1, normalization: 1, reduction: 1, memory: 1, recurrent: 1}
    count: 4
    levels:
      - {name: box, size: 2, latency: 1us, bandwidth: 3GB/s}
      - {name: rack, latency: 2us, bandwidth: 2GB/s}
levels:
  - {name: site, latency: 9us, bandwidth: 1GB/s}
"""


def test_groups_have_the_links_of_a_preset_or_their_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MIXED)
    assert is_cluster(path)
    cluster = resolve_cluster(parse_configuration(f"cluster: {{file: {path}}}\n", "c.yaml"))
    assert (cluster.size, cluster.node_count) == (16, 4)
    assert [device.name for device in cluster.kinds] == ["A100-SXM4-80GB", "D"]
    bandwidths = [
        cluster.link(*pair).bandwidth_bytes_per_s / 1e9
        for pair in ((0, 7), (7, 8), (11, 12), (12, 13), (13, 14))
    ]
    assert bandwidths == [300, 25, 1, 3, 2]
    assert cluster.devices[12].memory_bytes == 8 * 2**30
    assert not cluster.allow_mixed_stages


def test_inline_and_written_again(tmp_path: Path) -> None:
    inline = "cluster:\n  allow_mixed_stages: true\n  inline:\n" + "".join(
        f"    {line}\n" for line in MIXED.splitlines()
    )
    read = parse_configuration(inline, "c.yaml")
    assert resolve_cluster(read).size == 16 and resolve_cluster(read).allow_mixed_stages
    assert parse_configuration(dump_configuration(read), "effective") == read


def test_fewer_devices_are_the_first(tmp_path: Path) -> None:
    a100 = build_cluster(cluster_preset("a100-v100"), 8)
    assert len(a100.kinds) == 1 and [group.size for group in a100.groups] == [8]
    ten = build_cluster(cluster_preset("a100-v100"), 10)
    assert [device.name for device in ten.devices].count("A100-SXM4-80GB") == 8
    assert [group.size for group in ten.groups] == [8, 2]
    with pytest.raises(
        InfeasibleError,
        match=r"a100-v100 consists of 16 devices \(8 in a100, 8 in v100\), 4 fewer than the requested 20",
    ):
        build_cluster(cluster_preset("a100-v100"), 20)


def test_equal_groups_are_one_hierarchy(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: twins\nlevels: [{name: site, latency: 10us, bandwidth: 12.5GB/s}]\ngroups:\n"
        "  - {name: one, device: a100-80gb, count: 8}\n  - {name: two, device: a100-80gb, "
        "count: 8}\n"
    )
    cluster = build_cluster(read_cluster(path), None)
    assert not cluster.groups
    assert cluster.levels[1] == Level("site", 2, Link(1e-5, 12.5e9))
    assert cluster.levels[0].size == 8 and len(cluster.levels) == 2


@pytest.mark.parametrize("name", [name for name in cluster_names() if cluster_preset(name).groups])
def test_mixed_presets_have_devices_of_several_kinds(name: str) -> None:
    cluster = build_cluster(cluster_preset(name), None)
    assert len(cluster.kinds) == len(cluster.groups) >= 2


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("device: a100-80gb", "device: a100", "mine.yaml: cluster preset 'a100' is unknown (did you mean"),
        ("device: a100-80gb", "device: a100-v100", "the device of group new is the preset a100-v100, which consists of several"),
        ("count: 12", "cout: 12", "mine.yaml:3: unknown key 'cout' in groups[0] (did you mean 'count'?)"),
        ("count: 12", "count: 0", "mine.yaml:3: groups[0].count is 0 (it must be at least 1)"),
        (", count: 12", "", "mine.yaml:3: groups[0] lacks the key 'count'"),
        ("name: old", "name: new", "cluster mine contains two groups with the name 'new'"),
        ("name: D", "name: A100-SXM4-80GB", "cluster mine contains two different devices with the name 'A100-SXM4-80GB'"),
        ("rack, ", "rack, size: 1, ", "group old of cluster mine consists of 4 devices, but its levels connect only 2"),
        ("box, size: 2", "box", "level box of group old of cluster mine lacks a size"),
        ("site, ", "site, size: 3, ", "cluster mine connects 2 groups by a level of 3"),
        ("levels:\n  - {name: site", "levels:\n  - {name: a, latency: 0, bandwidth: 1B/s}\n  - {name: site",
         "cluster mine connects 2 groups by 2 levels"),
        ("groups:", "device: {}\ngroups:", "device lacks the key 'name'"),
    ],
)  # fmt: skip
def test_mistakes_in_groups(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MIXED.replace(old, new, 1))
    with pytest.raises((ConfigurationError, InfeasibleError)) as caught:
        build_cluster(read_cluster(path), None)
    assert expected in str(caught.value)


def test_groups_leave_nothing_else_open(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError,
        match=r"for which cluster\.nodes and cluster\.devices_per_node are ambiguous",
    ):
        resolve_cluster(parse_configuration("cluster: {preset: a100-v100, nodes: 2}\n", "c.yaml"))
    path = tmp_path / "mine.yaml"
    path.write_text("name: bare\nlevels: [{name: node, latency: 0, bandwidth: 1GB/s}]\n")
    with pytest.raises(ConfigurationError, match="cluster bare describes no devices"):
        build_cluster(read_cluster(path), None)
    alone = MIXED.replace("    levels:\n", "").replace(
        "      - {name: box, size: 2, latency: 1us, bandwidth: 3GB/s}\n", ""
    )
    path.write_text(alone.replace("      - {name: rack, latency: 2us, bandwidth: 2GB/s}\n", ""))
    with pytest.raises(ConfigurationError, match="group old of cluster mine describes no levels"):
        build_cluster(read_cluster(path), None)
