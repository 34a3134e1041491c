"""`autopipe plan`: the folder it writes, what it prints, what it refuses, and that nothing is left
half-written.
"""

from __future__ import annotations

import json
import os
import re
import shlex

import pytest

from autopipe.api.plan_folder import open_plan
from autopipe.cli.main import main
from autopipe.configs.local_devices import local_cluster
from autopipe.configs.zoo import build, configure
from autopipe.ir.errors import ConfigurationError

SETTINGS = {
    "layers": "2",
    "hidden": "32",
    "heads": "2",
    "sequence": "16",
    "vocabulary": "64",
    "loss": "true",
}
SUMMARY_KEYS = {
    "strategy", "schedule", "devices", "stages", "micro_batches", "micro_batch_size", "depth", "step_time_s",
    "samples_per_s", "bubble_rate", "peak_memory_bytes", "search_time_s", "lower_bound_s", "optimal", "gap",
    "communication_bytes",
}  # fmt: skip


@pytest.fixture
def gpt(tmp_path):
    build(configure("gpt", SETTINGS)).save(tmp_path / "gpt.onnx")
    return tmp_path / "gpt.onnx"


def run(capsys, *words):
    named = () if "--strategy" in words or "--config" in words else ("--strategy", "pipedream")
    code = main(["plan", *map(str, words), *named])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_plan_folder_and_one_screen(gpt, capsys):
    code, out, _ = run(capsys, gpt, "--gpus", 2, "--cluster", "a100-80gb")
    assert code == 0
    assert sorted(os.listdir(f"{gpt}.plan")) == [
        "config.yaml",
        "graph.json",
        "placement.yaml",
        "plan.json",
        "schedule.json",
    ]
    for word in ("pipedream with tessel", "train, on 2 devices of a100-80gb\n", "bubble", "next:"):
        assert word in out
    assert "communication volume of a step: " in out
    assert "schedule: proven optimal" in out


def test_next_commands_are_quoted_for_the_shell(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = "it's a plan; really"
    build(configure("gpt", SETTINGS)).save(tmp_path / "gpt.onnx")
    assert run(capsys, "gpt.onnx", "--gpus", 2, "--cluster", "a100-80gb", "-o", folder)[0] == 0
    assert main(["codegen", folder]) == 0
    (command,) = re.findall("next: (.*)", capsys.readouterr().out)
    assert shlex.split(command) == ["autopipe", "launch", f"{folder}/program"]
    assert run(capsys, "gpt.onnx", "--gpus", 2, "--batch-size", 16, "-o", folder)[0] == 0
    assert main(["launch", folder, "--device", "cpu"]) == 2
    (command,) = re.findall("autopipe codegen .*", capsys.readouterr().err)
    assert shlex.split(command) == ["autopipe", "codegen", str(tmp_path / folder)]
    assert main(["explain", folder]) == 0
    (command,) = re.findall("more: (autopipe .* --node)", capsys.readouterr().out)
    assert shlex.split(command) == ["autopipe", "explain", folder, "--node"]


def test_next_commands_of_a_plan_are_quoted_for_the_shell(gpt, capsys, tmp_path):
    folder = str(tmp_path / "two words")
    _, out, _ = run(capsys, gpt, "--gpus", 2, "--cluster", "a100-80gb", "-o", folder)
    (commands,) = re.findall("next: (.*)", out)
    words = shlex.split(commands)
    assert words == [
        word for name in ("explain", "show", "codegen") for word in ("autopipe", name, folder)
    ]


@pytest.mark.parametrize("terminal", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_the_answer_has_at_most_twenty_lines(gpt, capsys, monkeypatch, tmp_path, terminal):
    """The plan has eight stages, and is compared with others. On a terminal prose wraps between
    words, which adds lines.
    """
    if terminal:
        for name, value in (("FORCE_COLOR", "1"), ("NO_COLOR", "1"), ("COLUMNS", "80")):
            monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    words = (
        "gpt.onnx",
        "--gpus",
        4,
        "--cluster",
        "a100-80gb",
        "--batch-size",
        16,
        "--micro-batches",
        2,
    )
    assert main(["plan", *map(str, words)]) == 0
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    lines = out.splitlines()
    assert len(lines) <= 20
    assert all(len(line) <= 80 for line in lines) or not terminal
    head = ["strategy", "schedule", "micro-batches", "step", "slowdown", "memory"]
    table = next(number for number, line in enumerate(lines) if line.split() == head)
    assert [line.startswith("plan in") for line in lines[table + 1 :]].index(True) <= 3
    told = " ".join(out.split())
    for part in (
        "of 8 samples",
        "lower bound",
        "samples/s",
        "peak memory",
        "the best of other strategies",
    ):
        assert part in told
    assert re.search(r"lower bound [\d.]+ \S+ for this placement", told)
    assert (
        "next: autopipe explain gpt.onnx.plan autopipe show gpt.onnx.plan autopipe codegen "
        "gpt.onnx.plan"
    ) in told
    main(["explain", "gpt.onnx.plan"])
    repeated = set(lines[2:]) & set(capsys.readouterr().out.splitlines())
    assert not [line for line in repeated if line.split()[0] not in ("strategy", "plan")], (
        "explain tells the rest"
    )


def test_quiet_says_nothing_of_what_went_well(gpt, capsys):
    assert run(capsys, gpt, "--gpus", 2, "-q")[:2] == (0, "")
    assert main(["codegen", f"{gpt}.plan", "-q"]) == 0
    assert "".join(capsys.readouterr()) == ""


def test_idle_devices_are_warned_of(gpt, capsys):
    constraints = "constraints=[{match: '*', stage: 0, devices: [0, 2]}]"
    code, _, err = run(
        capsys,
        gpt,
        "--gpus",
        4,
        "--cluster",
        "a100-80gb",
        "--strategy",
        "manual",
        "--set",
        constraints,
    )
    assert code == 0
    message = "warning: 2 devices of 4 are idle, because no stage uses them: 1,3"
    assert f"{message} (plan for fewer devices with --gpus)" in err


def test_the_devices_of_this_machine_are_the_default(gpt, capsys):
    here = local_cluster()
    code, out, _ = run(capsys, gpt)
    assert code == 0
    assert f"of {here.preset} ({here.why})" in out.splitlines()[0]
    summary = open_plan(gpt.parent / "gpt.onnx.plan").plan.summary
    assert summary.devices == here.count
    assert f"preset: {here.preset}" in (gpt.parent / "gpt.onnx.plan/config.yaml").read_text()


def test_json_is_the_summary_of_the_file(gpt, capsys):
    code, out, err = run(capsys, gpt, "--gpus", 2, "--json", "-q")
    document = json.loads(out)
    written = json.loads((gpt.parent / "gpt.onnx.plan/plan.json").read_text())
    assert code == 0
    assert document["summary"] == written["summary"]
    assert set(document["summary"]) >= SUMMARY_KEYS
    assert set(document["proof"]) == {"order", "lower_bound", "optimal", "rounding"}
    assert err == ""


def test_flags_override_the_file_and_the_effective_configuration_is_one(gpt, capsys, tmp_path):
    given = "batch_size: 8\nmicro_batches: 2\nschedule: {name: gpipe}\noptimizer: {name: adamw}\n"
    given += "strategy: {name: pipedream}\n"
    (tmp_path / "c.yaml").write_text(given)
    words = (
        "--config",
        tmp_path / "c.yaml",
        "--gpus",
        2,
        "--micro-batches",
        4,
        "-o",
        tmp_path / "a",
    )
    assert run(capsys, gpt, *words)[0] == 0
    planned = open_plan(tmp_path / "a")
    assert (planned.problem.micro_batches, planned.plan.summary.schedule) == (4, "gpipe")
    assert planned.problem.optimizer.name == "adamw"
    assert run(capsys, gpt, "--config", tmp_path / "a/config.yaml", "-o", tmp_path / "b")[0] == 0
    assert open_plan(tmp_path / "b").digest == planned.digest
    assert (tmp_path / "a/config.yaml").read_text() == (tmp_path / "b/config.yaml").read_text()


@pytest.mark.parametrize("strategy", ["pase", "tepdist"])
def test_stages_are_as_many_as_asked_for(gpt, capsys, tmp_path, strategy):
    words = (
        "--strategy",
        strategy,
        "--gpus",
        4,
        "--stages",
        2,
        "--batch-size",
        4,
        "--schedule",
        "1f1b",
    )
    assert run(capsys, gpt, *words, "-o", tmp_path / "a")[0] == 0
    assert [len(stage.devices) for stage in open_plan(tmp_path / "a").plan.placement.stages] == [
        2,
        2,
    ]


@pytest.mark.parametrize(
    ("asked", "shard"), [((), False), (("--set", "optimizer.zero_stage=1"), True)]
)
def test_the_plan_says_whether_the_optimizers_state_is_in_shares(
    gpt, capsys, tmp_path, asked, shard
):
    code, out, _ = run(
        capsys, gpt, "--gpus", 2, "--strategy", "data_parallel", "-o", tmp_path / "plan", *asked
    )
    assert code == 0
    assert (
        "parameter" in next(line for line in out.splitlines() if line.startswith("communication"))
    ) is shard
    assert f"zero_stage: {int(shard)}" in (tmp_path / "plan/config.yaml").read_text()
    assert open_plan(tmp_path / "plan").problem.optimizer.shard is shard
    assert main(["codegen", str(tmp_path / "plan"), "-q"]) == 0
    text = (tmp_path / "plan/program/rank_000.py").read_text()
    assert ("are shared out over ranks 0, 1 (ZeRO-1)" in text) is shard
    assert (
        json.loads((tmp_path / "plan/program/manifest.json").read_text())["optimizer"]["shard"]
        is shard
    )


def test_dumps_follow_their_pass(gpt, capsys):
    passes = ("read", "cost", "pipedream", "1f1b", "simulate")
    flags = ("--gpus", 2, "--schedule", "1f1b")
    code, out, _ = run(
        capsys, gpt, *flags, *(word for name in passes for word in ("--dump-after", name))
    )
    assert code == 0
    heads = [
        line.removeprefix("--- after ") for line in out.splitlines() if line.startswith("--- after")
    ]
    assert tuple(heads) == passes
    assert "0: 0F0 0F1 0B0" in out
    assert "stage 1: devices [1]" in out


def test_an_unknown_pass_is_refused_before_the_work(gpt, capsys):
    code, _, err = run(capsys, gpt, "--dump-after", "place")
    assert code == 2
    assert "the pass 'place' is unknown" in err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("--gpus", "0"), 2, "gpus"),
        (("--strategy", "pipedraem"), 2, "did you mean pipedream"),
        (("--stages", "2"), 2, "strategy pipedream chooses the number of stages itself"),
        (("--stages", "3", "--strategy", "tepdist", "--gpus", "4"), 2, "one of 1, 2, 4"),
        (("--schedule", "1f2b"), 2, "schedule '1f2b' is unknown"),
        (("--batch-size", "7", "--micro-batches", "2"), 2, "does not divide"),
        (("--gpus", "2", "--memory-limit", "1KiB"), 4, "over the limit"),
        (("--mode", "learn"), 2, "mode"),
        (("--dim", "batchs=3"), 2, "unknown dimension"),
        (("--cluster", "a100"), 2, "a100"),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(gpt, capsys, words, code, message):
    found, out, err = run(capsys, gpt, *words)
    assert found == code
    assert message in err
    assert out == ""
    assert "Traceback" not in err
    assert os.listdir(gpt.parent) == ["gpt.onnx"]


def test_a_file_that_is_no_model_is_a_models_error(tmp_path, capsys):
    (tmp_path / "no.onnx").write_bytes(b"\xff" * 50)
    code, _, err = run(capsys, tmp_path / "no.onnx")
    assert code == 3
    assert "no.onnx" in err


def test_a_plan_folder_is_replaced_and_no_other(gpt, capsys, tmp_path):
    assert run(capsys, gpt, "--gpus", 2, "-o", tmp_path / "p")[0] == 0
    (tmp_path / "p/saved").mkdir()
    (tmp_path / "p/saved/notes.txt").write_text("keep me")
    assert run(capsys, gpt, "--gpus", 1, "-o", tmp_path / "p")[0] == 0
    assert open_plan(tmp_path / "p").plan.summary.devices == 1
    assert (tmp_path / "p/saved/notes.txt").read_text() == "keep me"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep me")
    code, _, err = run(capsys, gpt, "-o", tmp_path / "mine")
    assert code == 2
    assert "is not a plan folder" in err
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]
    assert sorted(os.listdir(tmp_path)) == ["gpt.onnx", "mine", "p"]


def test_a_place_that_cannot_be_written_is_refused(gpt, capsys, tmp_path):
    for target in (tmp_path / "absent/p", gpt / "p", gpt):
        code, _, err = run(capsys, gpt, "-o", target)
        assert code == 2
        assert err.startswith("error: ")
        assert "Traceback" not in err


def test_a_failing_write_leaves_the_former_plan(gpt, capsys, tmp_path, monkeypatch):
    assert run(capsys, gpt, "--gpus", 2, "-o", tmp_path / "p")[0] == 0
    before = (tmp_path / "p/plan.json").read_text()

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autopipe.api.plan_folder.write_plan", full)
    code, _, err = run(capsys, gpt, "--gpus", 1, "-o", tmp_path / "p")
    assert code == 2
    assert "No space left on device" in err
    assert (tmp_path / "p/plan.json").read_text() == before
    assert sorted(os.listdir(tmp_path)) == ["gpt.onnx", "p"]


def test_a_plan_that_does_not_belong_to_the_model_is_refused(gpt, capsys, tmp_path):
    assert run(capsys, gpt, "--gpus", 2, "-o", tmp_path / "p")[0] == 0
    build(configure("gpt", {**SETTINGS, "layers": "3"})).save(gpt)
    with pytest.raises(ConfigurationError, match="was made for another model"):
        open_plan(tmp_path / "p")
    gpt.unlink()
    (tmp_path / "p" / "graph.json").unlink()
    with pytest.raises(ConfigurationError, match="the model of the plan does not exist"):
        open_plan(tmp_path / "p")


def test_folders_without_a_plan_are_refused(tmp_path):
    for folder, what in ((tmp_path, "contains no plan"), (tmp_path / "absent", "does not exist")):
        with pytest.raises(ConfigurationError, match=what):
            open_plan(folder)


def trained_names(capsys, gpt, *words):
    code, out, err = run(capsys, gpt, "--gpus", 1, "--cluster", "cpu-local", "-v", *words)
    lines = (line.partition(": ")[2] for line in out.splitlines() if line.startswith("trained: '"))
    return code, {line.split("'")[1] for line in lines}, err


def test_what_is_trained_is_chosen_by_patterns(gpt, capsys, tmp_path):
    """Those of model.trainable count where both match."""
    settings = tmp_path / "some.yaml"
    settings.write_text("model:\n  frozen: ['*']\n  trainable: ['re:layers.0.*bias']\n")
    code, names, err = trained_names(capsys, gpt, "--config", settings, "--strategy", "pipedream")
    assert code == 0, err
    assert names and all(name.startswith("layers.0.") and name.endswith("bias") for name in names)
    code, fewer, _ = trained_names(capsys, gpt, "--set", "model.frozen=['layers.*']")
    assert code == 0 and fewer and not any(name.startswith("layers.") for name in fewer)


@pytest.mark.parametrize("key", ["frozen", "trainable"])
def test_a_pattern_that_matches_nothing_is_refused(key, gpt, capsys):
    code, _, err = run(capsys, gpt, "--gpus", 1, "--set", f"model.{key}=['layer.*']")
    assert (
        code == 2
        and f"model.{key}: pattern 'layer.*' matches the full name of no floating-point tensor"
        in err
    )


def test_a_plan_to_train_that_trains_nothing_is_refused(gpt, capsys):
    code, _, err = run(capsys, gpt, "--gpus", 1, "--set", "model.frozen=['*']")
    assert code == 3 and "requires trainable parameters, but the model has none" in err
    assert not os.path.exists(f"{gpt}.plan")


def test_compiled_stages_take_less_and_their_costs_are_not_measured(gpt, capsys, tmp_path):
    steps = {}
    for compiled in ("true", "false"):
        words = ("--gpus", 2, "--set", f"compile={compiled}", "--json", "-q")
        code, out, _ = run(capsys, gpt, *words, "-o", tmp_path / compiled)
        assert code == 0
        steps[compiled] = json.loads(out)["summary"]["step_time_s"]
    assert steps["true"] < steps["false"]
    code, _, err = run(capsys, gpt, "--set", "compile=true", "--costs", "gpt.costs")
    assert code == 2
    assert "compile: true requires roofline costs" in err


def test_degrees_are_the_same_in_every_output(gpt, capsys, tmp_path):
    """A grid's degrees are also recorded in config.yaml, which gives the same plan again."""
    words = ("--strategy", "grid", "--gpus", 4, "--cluster", "a100-80gb", "--batch-size", 8, "--micro-batches", 2,
             "--set", "strategy.tensor=2", "--schedule", "1f1b")  # fmt: skip
    assert run(capsys, gpt, *words, "-o", tmp_path / "a", "--json", "-q")[0] == 0
    planned = open_plan(tmp_path / "a")
    degrees = planned.plan.summary.degrees
    assert degrees.settled == ("pipeline", "data")
    assert 2 * degrees.options["pipeline"] * degrees.options["data"] == 4
    configuration = (tmp_path / "a/config.yaml").read_text()
    assert configuration.startswith(f"# {degrees.text}\n")
    for name, value in {"tensor": 2, **degrees.options}.items():
        assert f"{name}: {value}\n" in configuration
    _, screen, _ = run(capsys, gpt, "--config", tmp_path / "a/config.yaml", "-o", tmp_path / "b")
    assert open_plan(tmp_path / "b").digest == planned.digest
    told = next(line for line in screen.splitlines() if line.startswith("degrees: ")).removeprefix(
        "degrees: "
    )
    assert re.fullmatch(
        rf"{re.escape(degrees.text)}; [\d,.]+ tokens/s per device, MFU [\d.]+%", told
    )
    main(["explain", str(tmp_path / "a"), "--json", "-q"])
    explained = json.loads(capsys.readouterr().out)
    assert explained["degrees"] == told
    (twice,) = (each for each in explained["helps"] if each["what"] == "twice the devices")
    assert twice["samples_per_s"] > 0, "degrees that nobody named are open"
    main(["compare", str(tmp_path / "a"), "--json", "-q"])
    assert json.loads(capsys.readouterr().out)["plans"][0]["degrees"] == told
    main(["compare", str(tmp_path / "a")])
    assert degrees.text in " ".join(capsys.readouterr().out.split())
    main(["show", str(tmp_path / "a"), "--html", str(tmp_path / "a.html"), "-q"])
    page = (tmp_path / "a.html").read_text()
    assert degrees.text in page
    assert "<span>tokens/s per device</span>" in page and "<span>MFU</span>" in page


def test_bounds_say_for_which_placements_they_hold(gpt, capsys, tmp_path):
    _, out, _ = run(capsys, gpt, "--gpus", 2, "-o", tmp_path / "a", "--json", "-q")
    assert json.loads(out)["summary"]["bound_holds_for"] == "placement"
    main(["compare", str(tmp_path / "a")])
    table = capsys.readouterr().out
    assert "lower bound of placement" in table and "gap of placement" in table
    main(["show", str(tmp_path / "a"), "--html", str(tmp_path / "a.html"), "-q"])
    page = (tmp_path / "a.html").read_text()
    assert (
        "<span>lower bound for this placement</span>" in page
        and "<span>gap to optimal for this placement</span>" in page
    )


def test_a_plan_of_an_earlier_version_has_no_degrees(gpt, capsys, tmp_path):
    assert run(capsys, gpt, "--gpus", 2, "-o", tmp_path / "a", "-q")[0] == 0
    path = tmp_path / "a/plan.json"
    document = json.loads(path.read_text())
    for key in ("degrees", "tokens_per_sample", "mfu", "bound_holds_for"):
        document["summary"].pop(key)
    path.write_text(json.dumps(document))
    for words in (["explain", "--json"], ["compare"], ["show"]):
        assert main([words[0], str(tmp_path / "a"), *words[1:]]) == 0
    assert main(["show", str(tmp_path / "a"), "--html", str(tmp_path / "a.html")]) == 0
