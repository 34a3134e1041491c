"""The bytes of a step that a plan predicts, that ranks count, and that dry runs of the ranks
count.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from autopipe.ir.program import COMMUNICATION_KINDS
from autopipe.passes.lower.traffic import communication_bytes
from tests.distributed.support.alone import dry_run
from tests.distributed.support.pool import Pools
from tests.distributed.support.running import report_lines, schedule_of, write
from tests.distributed.support.strategies import random_placement
from tests.distributed.support.trained import MICRO_BATCHES
from tests.distributed.support.zoo import SAMPLES, small_graph
from tests.distributed.test_verify import SETTINGS


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("mode", "kinds"), [("train", {"all_reduce", "gradient"}), ("infer", {"all_reduce"})]
)
def test_a_plan_its_ranks_and_their_dry_runs_agree(
    pools: Pools, tmp_path: Path, mode: str, kinds: set[str], precision: str
) -> None:
    model = tmp_path / "gpt.onnx"
    plan = tmp_path / "plan"
    build(configure("gpt", SETTINGS | {"loss": "true"})).save(model)
    flags = [
        "--gpus",
        "2",
        "--batch-size",
        "8",
        "--micro-batches",
        "2",
        "--strategy",
        "handcrafted",
        "--mode",
        mode,
    ]
    flags += ["--set", f"precision={precision}"]
    assert (
        main(["plan", str(model), *flags, "--set", "strategy.tensor=2", "-o", str(plan), "-q"]) == 0
    )
    assert main(["codegen", str(plan), "-q"]) == 0
    predicted = json.loads((plan / "plan.json").read_text(encoding="utf-8"))["summary"][
        "communication_bytes"
    ]
    assert {kind for kind in COMMUNICATION_KINDS if predicted[kind]} == kinds
    report = tmp_path / "report.jsonl"
    pools.of(2).run(plan / "program", "--device", "cpu", "--steps", 2, "--report", report)
    assert [line["communication_bytes"] for line in report_lines(report)] == [predicted, predicted]
    if mode == "train":
        assert rehearsed(plan / "program", 2) == predicted


@pytest.mark.distributed
def test_messages_have_half_the_bytes_under_autocast(
    here: None, pools: Pools, tmp_path: Path
) -> None:
    """As many as are predicted, of the same stages; the ranks' gradients are one device's as far as
    16 bits go.
    """
    model = tmp_path / "gpt.onnx"
    build(configure("gpt", SETTINGS | {"loss": "true"})).save(model)
    flags = [
        "--gpus",
        "2",
        "--batch-size",
        "8",
        "--micro-batches",
        "2",
        "--strategy",
        "grid",
        "--set",
    ]
    predicted = {}
    for precision in ("fp32", "bf16"):
        plan = tmp_path / precision
        words = [
            *flags,
            "strategy.pipeline=2",
            "--set",
            f"precision={precision}",
            "-o",
            str(plan),
            "-q",
        ]
        assert main(["plan", str(model), *words]) == 0
        assert main(["codegen", str(plan), "-q"]) == 0
        summary = json.loads((plan / "plan.json").read_text(encoding="utf-8"))["summary"]
        predicted[precision] = summary["communication_bytes"]
        report = tmp_path / "report.jsonl"
        pools.of(2).run(plan / "program", "--device", "cpu", "--steps", 1, "--report", report)
        assert report_lines(report)[-1]["communication_bytes"] == predicted[precision]
    assert predicted["bf16"]["send"] == predicted["fp32"]["send"] // 2 > 0
    assert rehearsed(tmp_path / "bf16" / "program", 2) == predicted["bf16"]
    assert main(["verify", str(tmp_path / "bf16" / "program"), "--device", "cpu", "-q"]) == 0


NODES = """
name: two-nodes
device:
  name: example
  memory: 16GB
  peak: {fp32: 10TFLOP/s, bf16: 20TFLOP/s}
  bandwidth: 1TB/s
  launch_latency: 1us
  efficiency: {matmul: 0.5, convolution: 0.5, elementwise: 0.5, normalization: 0.5, reduction: 0.5, memory: 0.5,
               recurrent: 0.5}
levels:
  - {name: node, size: 2, latency: 1us, bandwidth: 100GB/s}
  - {name: cluster, latency: 1us, bandwidth: 100MB/s}
"""


@pytest.mark.distributed
def test_a_rank_sends_its_part_where_the_other_group_has_faster_links(
    here: None, pools: Pools, tmp_path: Path
) -> None:
    """Two devices a layer halve what each sends; the other half is gathered. On uniform links all
    of it is sent.
    """
    model = tmp_path / "gpt.onnx"
    cluster = tmp_path / "nodes.yaml"
    build(configure("gpt", SETTINGS | {"loss": "true"})).save(model)
    cluster.write_text(NODES, encoding="utf-8")
    flags = [
        "--gpus",
        "4",
        "--batch-size",
        "8",
        "--micro-batches",
        "2",
        "--strategy",
        "grid",
        "--set",
    ]
    flags += ["strategy.pipeline=2", "--set", "strategy.tensor=2", "--set", "precision=bf16", "-q"]
    sent = {}
    for name in (str(cluster), "cpu-local"):
        plan = tmp_path / Path(name).stem
        assert main(["plan", str(model), *flags, "--cluster", name, "-o", str(plan)]) == 0
        document = json.loads((plan / "plan.json").read_text(encoding="utf-8"))
        predicted = document["summary"]["communication_bytes"]
        assert ["gathers" in stage for stage in document["placement"]["stages"]] == [
            False,
            name != "cpu-local",
        ]
        assert main(["codegen", str(plan), "-q"]) == 0
        report = plan / "report.jsonl"
        pools.of(4).run(plan / "program", "--device", "cpu", "--steps", 1, "--report", report)
        assert report_lines(report)[-1]["communication_bytes"] == predicted
        sent[plan.name] = predicted["send"]
    assert sent["nodes"] * 2 == sent["cpu-local"] > 0
    assert main(["verify", str(tmp_path / "nodes" / "program"), "--device", "cpu", "-q"]) == 0


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["gpt", "moe", "dlrm"])
def test_dry_runs_of_random_strategies_count_what_is_predicted(tmp_path: Path, name: str) -> None:
    graph, loss = small_graph(name)
    placement = random_placement(Random(name), graph, 4, SAMPLES)
    schedule = schedule_of(graph, placement, MICRO_BATCHES)
    write(graph, placement, schedule, loss, tmp_path / "program")
    assert rehearsed(tmp_path / "program", 4) == communication_bytes(
        graph, placement, MICRO_BATCHES, 4, loss
    )


def rehearsed(program: Path, ranks: int) -> dict[str, int]:
    """What dry runs of all ranks count together."""
    total: Counter[str] = Counter()
    report = program.with_name("rehearsed.json")
    for rank in range(ranks):
        dry_run(program, rank, "--device", "cpu", "--report", report)
        total.update(json.loads(report.read_text(encoding="utf-8"))["communication_bytes"])
    return {kind: total[kind] for kind in COMMUNICATION_KINDS}
