"""Every script of `benchmarks/` and `scripts/` runs in its smallest sizes, and prints figures."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch import nn

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"

MODULES = {
    "auto_table",
    "command_line",
    "recorded_programs",
    "scatter",
    "small_models",
    "side_by_side",
    "tessel_baselines",
}
"""What the scripts import."""
PAPERS = {
    "__init__",
    "__main__",
    "auto",
    "graphpipe",
    "pase",
    "table",
    "tepdist",
    "tessel",
    "weighed_plans",
    "worker_pool",
}
"""Run by `python -m benchmarks`."""

PRINTED = {
    "checkpoint_saving": r"12 MiB.*\non the steps' thread {n} \(first {n}\)\nbeside it {n}; restoring {n}\n",
    "initialisation": r"(?:.+ 1 threads +{n} million/s of processor time +{n} million/s elapsed\n){{3}}",
    "integer_programs": (
        r"tiny: 2 programs, proven by auto 2, highs 2, cbc 2\n"
        r"(?:  \w+ and \w+: 2 proven by both, 0 differ, at most by {n}\n){{3}}"
    ),
    "many_micro_batches": r'\{{"search_s": {n}, "simulate_s": {n}, "tasks": 96, "step": {n}\}}\n',
    "min_sum": (
        r"model .*\n(?:(?:transformer|inception) +4 +0 +\d+ +\d+ +\d+(?: +(?:{n}|too "
        r"large)){{5}}\n){{2}}"
    ),
    "pase_search": r"alexnet +on 64 1080ti-pcie +{n} s \({n}\) +{n} s, proven\n",
    "plan_llama": (
        r'(?s)\{{\n "build": \{{\n  "seconds": {n}.*"peak_mib": {n}.*"passes": \{{.*"read": '
        r"{n}.*\}}\n"
    ),
    "tepdist_division": r"model .*\n(?:two-branch(?:  {n}){{10}}\n){{3}}",
    "tepdist_levels": r"\| model .*\n\|[-|]+\n\| two-branch \| 4(?: \| {n}%?){{10}} \|\n",
    "tepdist_outer": r"model .*\ntwo-branch 4(?: {n}){{6}} (?:SLOWER)?\n",
    "tessel_search": r"devices .*\n(?: +4 +\w+(?: +{n} \({n}\)){{2}} +\d+ +\d+ +yes +\d+ +\d+\n){{5}}",
    "zoo_strategies": r"\| model .*\n[-|]+\n\| two-branch \| 4(?: \| {n}){{5}} \|\n",
}
"""What scripts that plan and search print; `{n}` stands for a number."""

RANKS = {
    "gloo_collectives": r"ranks .*\n(?: +2 +4096 +(?:all-reduce|all-gather|reduce-scatter)(?: +{n}){{4}}\n){{3}}",
    "one_device": (
        r'(?s).*\{{"generated_s": {n}, "hand_written_s": {n}, "ratio": {n}, "ratios": \[{n}, '
        r"{n}\], "
        r'"generated_tflops": {n}, "hand_written_tflops": {n}, .*\}}\n'
    ),
    "code_forms": (
        r"gpt-1-infer peak memory: {n}\ngpt-1-train peak memory: {n}\n"
        r"gpt-1-train step time, 2 rounds: {n} {n} {n}\n"
    ),
    "auto_search": r"case .*\nsmall +{n} s +{n} s +{n} s +{n} s +{n} s  .* on 1 device of .*\n",
}
"""What scripts that start processes print."""

SLOW = {
    "memory": r"(?:gpt gpipe, recompute none, rank [01]: {n} predicted, {n} allocated, {n}\n){{2}}",
    "pipeline_step": r'(?s).*\{{"generated_s": {n}, "torch_pipelining_s": {n}, "ratio": {n}\}}\n',
    "blocking": r'\{{"shape": "v", "overlapping": {n}, "blocking": {n}, "ratio": {n}\}}\n',
    "scale": (
        r"\| [\w .]+(?: \| {n}){{5}} \|\n"
        r"(?:\| \d of \d \| \d \| \d+ \| {n} GiB \| {n} GiB \({n} GiB\) \| {n} \|\n){{3}}"
        r"no dry run took more than {n} GiB of memory\n"
    ),
    "auto_cases": r"candle-uno-paper/p=8 {n} s of processor time\n",
    "auto_never_slower": r"\('mmt', '[\w-]+', 4\) \w+ \w+ {n}\n",
    "step_times": (
        r"(?s)# Predicted .*\| dlrm \| one rank \| {n} ms \| {n} ms \| .*\| dlrm \| two stages \| "
        r"{n} ms .*"
    ),
    "graph_pipeline": r"\d+ cores.*\nmodel .*\ncandle-uno +4 +{n} ms +{n} ms +{n} +{n}\n",
    "large_vocabulary": r'\{{"1f1b": {n}, "tessel": {n}, "speedup": {n}\}}\n',
    "read_large_export": r'(?s).*\{{"seconds": {n}, "nodes": \d+, "nodes_after": \d+, "peak_mib": {n}\}}\n',
}
"""Smallest sizes take more than ten seconds, so that only parts of them run with all other tests.
"""

TABLES = {
    "layer_classes": "**{} of {} rows have repeated layers.**",
    "exported_models": "**{} of {} rows pass.**",
    "trained_parameters": "**{} of {} rows are equal**",
}
"""What the pages that scripts write say of their rows."""

NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"


def options(name: str, scratch: Path) -> list[str]:
    """The command line of a script's smallest run."""
    logs = {"auto_cases", "auto_never_slower", "step_times"}
    log = ["--log", str(scratch / "log.jsonl")] if name in logs else []
    return [*(["zoo"] if name == "tepdist_levels" else []), *log, "--tiny"]


def checked(name: str, printed: str, form: str) -> None:
    """Assert that the whole output has this form."""
    assert re.fullmatch(form.format(n=NUMBER), printed), f"{name} printed\n{printed}"


def run_apart(path: Path, *words: str) -> str:
    """What a script prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(path), *words], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As where a script is started: what stands beside it can be imported."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return monkeypatch


def run_here(here: pytest.MonkeyPatch, name: str, *words: str) -> None:
    """Run a script in this process."""
    here.setattr(sys, "argv", [f"{name}.py", *words])
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


def test_every_script_has_a_smallest_run() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {
        *PRINTED,
        *RANKS,
        *SLOW,
        *MODULES,
        *PAPERS,
    }
    assert {path.name for path in (ROOT / "scripts").iterdir() if path.is_file()} == {
        "environment.sh",
        "draw_architecture.py",
        "draw_dynamic_shapes.py",
        "prose.py",
        "structure.py",
        "reference_pages.py",
        "versions.py",
        *(f"{name}.py" for name in TABLES),
    }


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_searches(
    name: str, here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run_here(here, name, *options(name, tmp_path))
    checked(name, capsys.readouterr().out, PRINTED[name])


@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(RANKS))
def test_processes(name: str, tmp_path: Path) -> None:
    checked(name, run_apart(FOLDER / f"{name}.py", *options(name, tmp_path)), RANKS[name])


@pytest.mark.distributed
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--compile",), marks=pytest.mark.sweep),
        ("--optimizer", "sgd", "--precision", "bf16", "--scores", "recompute"),
    ],
)
def test_one_device_otherwise(flags: tuple[str, ...]) -> None:
    checked(
        "one_device", run_apart(FOLDER / "one_device.py", "--tiny", *flags), RANKS["one_device"]
    )


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_the_optimizer_of_the_hand_written_model(name: str, here: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(FOLDER / "one_device.py"))
    settings = {
        "name": name,
        "lr": 0.25,
        "weight_decay": 0.5,
        "momentum": 0.75,
        "betas": [0.5, 0.625],
        "eps": 0.125,
    }
    (group,) = script["make_optimizer"](settings, nn.Linear(2, 2)).param_groups
    assert (group["lr"], group["weight_decay"], group["fused"]) == (0.25, 0.5, None)
    own = {"sgd": {"momentum": 0.75}, "adamw": {"betas": (0.5, 0.625), "eps": 0.125}}
    assert {key: group[key] for key in own[name]} == own[name]


def test_operations_of_a_hand_written_step(here: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(FOLDER / "one_device.py"))
    sizes = argparse.Namespace(layers=2, hidden=8, sequence=4, batch=3)
    # 27 parameters, 12 tokens; scores and sums of 4 by 8 multiply-adds a token and layer, and
    # backward twice as many.
    assert script["step_flops"](sizes, nn.Linear(8, 3)) == 12 * (6 * 27 + 2 * (2 * 2 * 4 * 8) * 3)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(SLOW))
def test_slow_ones(name: str, tmp_path: Path) -> None:
    checked(name, run_apart(FOLDER / f"{name}.py", *options(name, tmp_path)), SLOW[name])


@pytest.mark.parametrize("name", sorted(SLOW))
def test_options_of_slow_ones(
    name: str, here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run_here(here, name, "--help")
    assert ended.value.code == 0
    assert "--tiny" in capsys.readouterr().out


def test_programs_of_a_large_vocabulary(here: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = runpy.run_path(str(FOLDER / "large_vocabulary.py"))
    sizes = argparse.Namespace(
        layers=4, hidden=32, heads=2, vocabulary=512, sequence=16, micro_batches=4
    )
    contestants = script["build"](sizes, tmp_path)
    assert [each.name for each in contestants] == ["1f1b", "tessel"]
    for each in contestants:
        assert len(list(each.program.glob("rank_*.py"))) == script["RANKS"]


def test_programs_of_a_graph_pipeline(here: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = runpy.run_path(str(FOLDER / "graph_pipeline.py"))
    case = next(each for each in script["CASES"][4] if each.model == "candle-uno")
    steps = {}
    for name in script["NAMES"]:
        program, steps[name] = script["build"](case, tmp_path, name, 2)
        assert len(list(program.glob("rank_*.py"))) == 4
    assert steps["graph"] < steps["sequential"]


def test_reading_a_large_export(here: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from autopipe.configs.zoo import build, configure

    path = tmp_path / "model.onnx"
    build(configure("two-branch", {"loss": True, "weights": "none"})).save(path)
    figures = runpy.run_path(str(FOLDER / "read_large_export.py"))["read"](path, 1)
    assert set(figures) == {"seconds", "nodes", "nodes_after", "peak_mib"}
    assert all(math.isfinite(value) for value in figures.values())


def test_pages_of_logs(here: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [{"case": "mmt-paper/p=8", "seconds": 1.0, "rows": [
        {"metric": "step_time_s", "ours": 0.5, "note": "grid"},
        {"metric": "speedup", "variant": "auto over piper", "theirs": 1.2, "ours": 1.3, "note": ""},
    ]}]  # fmt: skip
    log = tmp_path / "log.jsonl"
    page = tmp_path / "page.md"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run_here(here, "auto_cases", "--log", str(log), "--table", str(page))
    assert "| piper | 1.20 | 1.30 |  |  |" in page.read_text(encoding="utf-8")
    single = {
        "single_strategy": "grid",
        "single_schedule": "kfkb",
        "single_step_s": 2.0,
        "single_again_s": 2.0,
    }
    found = {
        "strategy": "grid",
        "schedule": "tessel",
        "step_s": 1.0,
        "samples_per_s": 4.0,
        "ideal_s": 0.5,
    }
    rest = {
        "model": "mmt",
        "preset": "cpu-local",
        "devices": 4,
        "micro_batches": 2,
        "search_s": 1.0,
        "cell_s": 1.0,
    }
    log.write_text(json.dumps(single | found | rest) + "\n", encoding="utf-8")
    run_here(here, "auto_never_slower", "--log", str(log), "--table", str(page))
    assert "| 2.000 | 4 | 50% |" in page.read_text(encoding="utf-8")


def test_a_page_of_measured_steps(here: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        {
            "model": "gpt",
            "layout": layout,
            "predicted_s": 0.1,
            "launches_s": [0.1, 0.2, 0.3],
            "nodes": [3, 4],
        }
        | {"processor": "CPU", "cores": 2, "time": "2026-01-01 00:00"}
        for layout in ("one rank", "two stages", "two stages, searched")
    ]
    log = tmp_path / "log.jsonl"
    page = tmp_path / "page.md"
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    run_here(here, "step_times", "--log", str(log), "--rounds", "0", "--write", str(page))
    assert "| gpt | one rank | 100.0 ms | 200.0 ms | -50.0% |" in page.read_text(encoding="utf-8")


def test_the_picture_of_the_architecture() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "draw_architecture.py"))
    words = {text.strip() for text in ElementTree.fromstring(script["draw_svg"]()).itertext()}
    assert {folder for row in script["ROWS"] for folder in row} <= words


def test_the_figure_of_dynamic_shapes() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "draw_dynamic_shapes.py"))
    assert script["TARGET"].read_text(encoding="utf-8") == script["draw_svg"]()


@pytest.mark.parametrize("name", sorted(TABLES))
def test_tables_of_exports_without_rows(name: str, tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    told = run_apart(
        ROOT / "scripts" / f"{name}.py", "--only", "no such model", "--table", str(table)
    )
    assert told == ""
    assert TABLES[name].format(0, 0) in table.read_text(encoding="utf-8")


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(TABLES))
def test_a_row_of_the_tables_of_exports(name: str, tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    told = run_apart(ROOT / "scripts" / f"{name}.py", "--tiny", "--table", str(table))
    assert len(told.splitlines()) == 1
    assert TABLES[name].format(1, 1) in table.read_text(encoding="utf-8")


def test_a_row_of_the_table_of_layers(tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    told = run_apart(ROOT / "scripts" / "layer_classes.py", "--tiny", "--table", str(table))
    cells = re.fullmatch(r"rnnlm  zoo  9  2 × layer \(2\)  44%  (\d+ → \d+)  \n", told)
    assert cells is not None
    row = f"| rnnlm | zoo | 9 | 2 × layer (2) | 44% | {cells[1]} |  |"
    assert row in table.read_text(encoding="utf-8")


def test_environments_of_other_versions() -> None:
    """The lowest versions are the bounds of pyproject.toml, which `constraints.txt` must not
    replace.
    """
    printed = run_apart(ROOT / "scripts" / "versions.py", "--list", "--sets", "launcher")
    lines = dict(line.split(": ", 1) for line in printed.splitlines())
    assert set(lines) == {"torch-2.9.1", "torch-2.11.0", "lowest", "newest", "launcher"}
    requirements = {name: lines[name].split(", ") for name in ("torch-2.11.0", "lowest", "newest")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [*project["dependencies"], *project["optional-dependencies"]["run"]]
    assert {each.replace(">=", "==") for each in bounds} <= set(requirements["lowest"])
    assert "torch==2.11.0" in requirements["torch-2.11.0"]
    assert {"torch", "numpy", "onnx", "click"} <= set(requirements["newest"])
    assert "tests/distributed/test_launch.py" in lines["launcher"].split()


def test_sets_of_tests_exist() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "versions.py"))
    assert [
        path
        for paths in script["TEST_SETS"].values()
        for path in paths
        if not (ROOT / path).exists()
    ] == []


def test_a_table_of_this_environment(tmp_path: Path) -> None:
    table = tmp_path / "versions.md"
    printed = run_apart(
        ROOT / "scripts" / "versions.py", "--tiny", "--jobs", "0", "--table", str(table)
    )
    assert printed == "this one 2 0\n"
    last = table.read_text(encoding="utf-8").splitlines()[-1]
    assert last.startswith(f"| this one | torch {importlib.metadata.version('torch')}, click ")
    assert last.endswith(" | launcher | 2 | 0 |  |")


def test_a_failing_test_of_another_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "def test_good(): ...\ndef test_bad(): assert False\n", encoding="utf-8"
    )
    (tmp_path / "test_none.py").write_text("import no_such_module\n", encoding="utf-8")
    script = runpy.run_path(str(ROOT / "scripts" / "versions.py"))
    run_tests = script["run_tests"]
    assert run_tests(Path(sys.executable), (str(tmp_path / "test_it.py"),), 0).cells() == [
        "2",
        "1: test_bad",
    ]
    broken = run_tests(Path(sys.executable), (str(tmp_path / "test_none.py"),), 0)
    assert len(broken.failed) == 1
    assert "test_none" in broken.failed[0]
    missing = run_tests(Path(sys.executable), (str(tmp_path / "no_such_file.py"),), 0)
    assert (missing.run, missing.failed) == (0, ())
    assert "no_such_file.py" in missing.broken
