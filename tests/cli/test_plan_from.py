"""`autopipe plan --from`: a plan made again from its folder, edited or under other flags, and what
that costs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from autopipe.api.plan_folder import open_plan
from autopipe.cli.main import main
from autopipe.configs.zoo import build, configure
from autopipe.passes.pipeline import PlanResult
from tests.cli.command_line import CommandLine

GPT = {
    "layers": "4",
    "hidden": "32",
    "heads": "2",
    "sequence": "16",
    "vocabulary": "64",
    "loss": "true",
}
BRANCHES = {"hidden": "32", "heads": "2", "sequence": "8", "loss": "true"}
FLAGS = ("--cluster", "a100-80gb", "--gpus", 4, "--batch-size", 16, "--micro-batches", 8)
LATE = "re:/layers.[23]/.*|/norm/.*|/head/.*"
"""The later half of the model, without its loss."""


def both_ways() -> str:
    """Constraints for two pipelines through two devices in opposite directions."""
    rows = [
        {
            "match": match,
            "stage": stage,
            "devices": [stage if way == 0 else 1 - stage],
            "pipeline": way,
        }
        for way in (0, 1)
        for stage, match in enumerate(("/Add", LATE))
    ]
    return json.dumps(rows)


def own_sizes() -> str:
    """Constraints for two stages, the second one on smaller micro-batches."""
    return json.dumps([{"match": LATE, "stage": 1, "devices": [1], "micro_batch_size": 1},
                       {"match": "/Add", "stage": 0, "devices": [0]},
                       {"match": "/loss/*", "stage": 2, "devices": [0]}])  # fmt: skip


CASES: dict[str, tuple[str, tuple[object, ...]]] = {
    "pipedream": ("gpt", (*FLAGS, "--strategy", "pipedream", "--schedule", "tessel")),
    "tessel_shapes": ("gpt", (*FLAGS, "--strategy", "tessel_shapes", "--schedule", "1f1b")),
    "pase": ("gpt", (*FLAGS, "--strategy", "pase", "--stages", 2, "--schedule", "zb_h1")),
    "tepdist": ("gpt", (*FLAGS, "--strategy", "tepdist", "--schedule", "1f1b", "--set", "recompute=full")),
    "graphpipe": ("two-branch", ("--gpus", 4, "--batch-size", 16, "--strategy", "graphpipe", "--schedule", "kfkb")),
    "chimera": ("gpt", ("--gpus", 2, "--batch-size", 8, "--micro-batches", 4, "--strategy", "manual",
                        "--schedule", "chimera", "--set", f"constraints={both_ways()}")),
    "own sizes": ("gpt", ("--gpus", 2, "--batch-size", 8, "--micro-batches", 4, "--strategy", "manual",
                          "--schedule", "kfkb", "--set", f"constraints={own_sizes()}")),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models and a plan, `two`, of two stages of two replicas each."""
    folder = tmp_path_factory.mktemp("made")
    build(configure("gpt", GPT)).save(folder / "gpt.onnx")
    build(configure("two-branch", BRANCHES)).save(folder / "two-branch.onnx")
    constraints = json.dumps([{"match": "re:.*", "stage": 0, "devices": [0, 1]}])
    words = (
        *FLAGS,
        "--strategy",
        "manual",
        "--schedule",
        "1f1b",
        "--set",
        f"constraints={constraints}",
    )
    assert (
        main(["plan", str(folder / "gpt.onnx"), *map(str, words), "-q", "-o", str(folder / "one")])
        == 0
    )
    placement = folder / "one/placement.yaml"
    text = placement.read_text()
    assert "    layers: [0, 3]\n" in text
    first, late, rest = text.partition("    - [/norm")
    nodes, key, end = rest.partition("    splits:\n")
    splits, name, _ = end.partition("  name: explicit\n")
    first = first.replace("    layers: [0, 3]\n    nodes:\n", "    nodes:\n")
    first += "    - /layers.0/*\n    - /layers.1/*\n"
    head = "  - devices: [2, 3]\n    micro_batch_size: 2\n    recompute: false\n    nodes:\n"
    late = "    - /layers.2/*\n    - /layers.3/*\n" + late
    placement.write_text(first + key + splits + head + late + nodes + key + splits + name)
    assert main(["plan", "--from", str(folder / "one"), "-q", "-o", str(folder / "two")]) == 0
    return folder


@pytest.fixture
def planned(made: Path, command_line: CommandLine) -> CommandLine:
    """The command line in a copy of that folder."""
    shutil.copytree(made, command_line.folder, dirs_exist_ok=True)
    return command_line


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_edited_is_the_same_plan(planned: CommandLine, case: str) -> None:
    model, words = CASES[case]
    planned.done("plan", f"{model}.onnx", *words, "-o", "first")
    shown = planned.done("plan", "--from", "first", "-o", "second")
    assert "the same plan as first held" in shown.out
    first = open_plan(Path("first"))
    second = open_plan(Path("second"))
    assert second.digest == first.digest
    assert (second.plan.placement, second.plan.schedule) == (
        first.plan.placement,
        first.plan.schedule,
    )
    assert Path("second/placement.yaml").read_text() == Path("first/placement.yaml").read_text()


def edited(*changes: tuple[str, str], name: str = "placement.yaml") -> None:
    """Make a copy `edit` of the folder `two` with texts replaced in one of its files."""
    shutil.copytree("two", "edit")
    text = Path("two", name).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    Path("edit", name).write_text(text)


def again(line: CommandLine, *words: object) -> tuple[PlanResult, dict[str, object]]:
    """The plan made again from `edit`, in its place, and what the command says of it."""
    data = json.loads(line.done("plan", "--from", "edit", *words, "--json").out)
    return open_plan(Path("edit")), data


def test_a_stage_is_cut_in_two(planned: CommandLine) -> None:
    stages = open_plan(Path("two")).plan.placement.stages
    assert [stage.devices for stage in stages] == [(0, 1), (2, 3)]
    assert all(stages[1].splits_of(node) for node in stages[1].nodes[:4])


def test_a_moved_layer_is_split_as_its_new_stage(planned: CommandLine) -> None:
    before = open_plan(Path("two")).plan.placement.stages
    edited(
        ("layers: [2, 3]", "layers: [3, 3]"),
        ("layers: [0, 1]", "layers: [0, 2]"),
    )
    again_planned, data = again(planned)
    after = again_planned.plan.placement.stages
    assert len(after[0].nodes) > len(before[0].nodes)
    assert after[0].nodes + after[1].nodes == before[0].nodes + before[1].nodes
    for old, new in zip(before, after, strict=True):
        kept = set(old.nodes) & set(new.nodes)
        assert {node: old.splits_of(node) for node in kept} == {
            node: new.splits_of(node) for node in kept
        }
        assert (old.devices, old.micro_batch_size, old.recompute) == (
            new.devices,
            new.micro_batch_size,
            new.recompute,
        )
    price = data["from"]
    assert isinstance(price, dict)
    assert (price["same"], price["worse"]) == (False, True)
    assert price["before"]["step_time_s"] < again_planned.timeline.end


@pytest.mark.parametrize(
    ("change", "of"),
    [
        (("devices: [2, 3]", "devices: [3, 2]"), lambda stage: stage.devices == (3, 2)),
        (("recompute: false", "recompute: true"), lambda stage: True),
        (("{samples: 2}", "{}"), lambda stage: True),
    ],
)
def test_other_edits_are_taken(
    planned: CommandLine, change: tuple[str, str], of: Callable[[object], bool]
) -> None:
    edited(change)
    found, _ = again(planned)
    before = open_plan(Path("two"))
    assert of(found.plan.placement.stages[1])
    assert found.digest != before.digest
    if "true" in change[1]:
        assert [stage.recompute for stage in found.plan.placement.stages] == [True, False]
        assert (
            found.plan.prediction.stages[0].kept_bytes < before.plan.prediction.stages[0].kept_bytes
        )
        assert found.plan.prediction.stages[1] == before.plan.prediction.stages[1]
    if "{}" in change[1]:
        assert not any(found.plan.placement.stages[0].splits_of(node) for node in range(4))
        assert found.timeline.end > before.timeline.end


def test_the_price_is_said(planned: CommandLine) -> None:
    edited(("recompute: false", "recompute: true"))
    out = planned.done("plan", "--from", "edit", "-o", "worse").out
    assert "worse: a step takes " in out and "longer than what edit held" in out
    out = planned.done("plan", "--from", "worse", "--schedule", "gpipe").out
    assert "bubble" in out and "points" in out
    assert (
        "strategy:\n  name: explicit\nschedule:\n  name: gpipe\n"
        in Path("worse/config.yaml").read_text()
    )


def test_more_micro_batches_of_the_same_size_are_judged_by_their_samples(
    planned: CommandLine,
) -> None:
    shown = planned.done(
        "plan", "--from", "two", "--batch-size", 64, "--micro-batches", 32, "-o", "more"
    )
    assert "better: " in shown.out and "more samples a second than what two held" in shown.out
    assert open_plan(Path("more")).plan.placement == open_plan(Path("two")).plan.placement


def test_a_placement_may_be_edited_for_more_devices(planned: CommandLine) -> None:
    edited(("devices: [2, 3]", "devices: [2, 5]"))
    found, _ = again(planned, "--gpus", 6)
    assert (found.plan.schedule.devices, found.plan.placement.stages[1].devices) == (6, (2, 5))


def test_flags_and_the_configuration_change_what_they_say(planned: CommandLine) -> None:
    edited(("name: 1f1b", "name: gpipe"), name="config.yaml")
    found, _ = again(planned, "--cluster", "v100-16gb", "--memory-limit", "1GiB")
    before = open_plan(Path("two"))
    assert found.plan.placement == before.plan.placement
    assert (found.plan.summary.schedule, found.problem.cluster.name) == ("gpipe", "v100-16gb")
    assert set(found.plan.memory_limits) == {2**30}
    assert found.timeline.end > before.timeline.end


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--strategy", "pipedream"), "strategy pipedream would make another placement"),
        (("--gpus", 8), "for 4 devices, not for 8"),
        (("--gpus", 2), "for 4 devices, not for 2"),
        (("--batch-size", 32), "micro-batches of 2, not of 4 samples"),
        (("--micro-batches", "auto"), "not of a number of samples to be chosen"),
        (("--stages", 2), "strategy explicit chooses the number of stages itself"),
        (("--mode", "infer"), "the placement is to train, not to infer"),
        (("--set", "recompute=full"), "recompute has no effect with --from"),
        (
            ("--set", "constraints=[{match: '*', stage: 0}]"),
            "constraints has no effect with --from",
        ),
        (("--config", "two/config.yaml"), "omit --config"),
    ],
)
def test_what_the_placement_cannot_bear_is_refused(
    planned: CommandLine, words: tuple[object, ...], says: str
) -> None:
    planned.refuses(2, ("plan", "--from", "two", *words, "-o", "no"), says)


def test_memory_that_does_not_hold_it_is_told(planned: CommandLine) -> None:
    planned.refuses(
        4, ("plan", "--from", "two", "--memory-limit", "100KiB"), "stage", "above the limit"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([("layers: [0, 1]", "layers: [0, 0]")], ["layer 1 is in no stage", "add the layer to"]),
        ([("layers: [2, 3]", "layers: [1, 3]")], ["layer 1 is in stages 0 and 1, expected one stage"]),
        ([("layers: [0, 1]", "layers: [0, 4]")], ["stage 0: layers [0, 4] selects layer 4", "use numbers from 0 to 3"]),
        ([("[/token", "[/taken")], ["stage 0: '/taken", "matches the name of no node", "'/token"]),
        ([("devices: [2, 3]", "devices: [2, 7]")], ["stage 1 lists device 7, but the cluster has 4", "0 to 3"]),
        ([("devices: [2, 3]", "devices: [2-x]")], ["stage 1: '2-x' is not a device"]),
        ([("devices: [2, 3]", "devices: [2, 2]")], ["stage 1 lists device 2 twice"]),
        ([("devices: [2, 3]", "devices: [2]")], ["stage 1 splits the node into 2 parts", "its 1 device"]),
        ([("{samples: 2}", "{samples: 3}")], ["stage 0 splits", "into 3 parts"]),
        ([("{samples: 2}", "{sample: 2}")], ["stage 0 splits axis 'sample', but none of the selected nodes has"]),
        ([("micro_batch_size: 2", "micro_batch_size: 3")], ["stage 0 has micro-batches of 3 samples"]),
        ([("micro_batch_size: 2", "micro_batch_size: 0")], ["stage 0 has micro-batches of 0 samples"]),
        ([("- devices: [2, 3]", "- device: [2, 3]")], ["placement.yaml:", "'device'", "devices"]),
        ([("devices: [0, 1]", "devices: [2-3]"), ("devices: [2, 3]", "devices: [0-1]"),
          ("layers: [2, 3]", "layers: [1, 1]"), ("layers: [0, 1]", "layers: ['layer[0]', 'layer[2:]']")],
         ["is in stage 0, but it reads a value of '/layers.1/", "in the later stage 1"]),
    ],
)  # fmt: skip
def test_edits_that_cannot_be_run(
    planned: CommandLine, changes: list[tuple[str, str]], says: list[str]
) -> None:
    edited(*changes)
    planned.refuses(2, ("plan", "--from", "edit"), *says)


def test_a_folder_without_its_placement(planned: CommandLine) -> None:
    Path("two/placement.yaml").unlink()
    planned.refuses(2, ("plan", "--from", "two"), "two/placement.yaml does not exist")
    planned.refuses(2, ("plan", "--from", "gpt.onnx"), "is not a folder")
    planned.refuses(2, ("plan",), "Missing argument 'MODEL'")


def test_the_configuration_of_a_given_plan_says_where_its_stages_are(planned: CommandLine) -> None:
    planned.refuses(
        2, ("plan", "gpt.onnx", "--config", "two/config.yaml", "-o", "no"), "plan --from DIR"
    )
    assert planned.done(
        "plan",
        "gpt.onnx",
        *FLAGS,
        "--config",
        "two/placement.yaml",
        "--schedule",
        "1f1b",
        "-o",
        "x",
    )
    assert open_plan(Path("x")).plan.placement == open_plan(Path("two")).plan.placement
