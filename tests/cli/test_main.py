"""The frame of the command line: help, errors and their exit codes, and what is not imported."""

from __future__ import annotations

import fcntl
import importlib.metadata
import io
import json
import os
import platform
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from autopipe import __version__
from autopipe.cli import main as commands
from autopipe.cli.main import main, starts_ranks
from autopipe.cli.options import standard_options
from autopipe.cli.output import Output
from autopipe.ir.errors import (
    AutopipeError,
    ConfigurationError,
    InfeasibleError,
    LaunchError,
    ModelError,
)
from tests.cli.command_line import CommandLine

HEAVY = (
    "torch",
    "onnx",
    "onnx_ir",
    "onnxruntime",
    "onnxscript",
    "ortools",
    "pynvml",
    "scipy",
    "numpy",
    "yaml",
    "rich",
)

failure: BaseException | None = None
"""What the command `fail` raises; set by `failing`."""


@click.command()
@click.option("--count", type=int, default=1)
@standard_options
def fail(output: Output, count: int) -> None:
    """Raise the failure that the test chose."""
    output.warn(f"about to fail {count} times", hint="as asked")
    if failure is not None:
        raise failure
    output.result({"count": count}, f"count is {count}")


Failing = Callable[[BaseException | None], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Put the command `fail` into the table; the value is a setter of what it raises."""
    monkeypatch.setitem(commands.COMMANDS, "fail", "Fail as the test asks.")
    monkeypatch.setitem(sys.modules, "autopipe.cli.fail", sys.modules[fail.callback.__module__])

    def choose(error: BaseException | None) -> None:
        monkeypatch.setattr(sys.modules[__name__], "failure", error)

    return choose


def test_help_lists_every_command_with_its_summary(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert "Turn an ONNX model into one readable PyTorch program per device." in listed
    assert "autopipe plan gpt.onnx --gpus 4" in listed
    for name, summary in commands.COMMANDS.items():
        assert f"  {name} " in listed
        assert summary.split()[0] in listed


@pytest.mark.parametrize("name", list(commands.COMMANDS))
def test_every_listed_command_exists_and_shows_an_example(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: autopipe {name}" in text
    assert "Example" in text


def test_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert __version__ in capsys.readouterr().out


def test_unknown_command_names_the_nearest_one(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fial"]) == 2
    assert (
        capsys.readouterr().err
        == "error: the command 'fial' does not exist\nhint: did you mean 'fail'?\n"
    )


def test_unknown_option_is_a_usage_error(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fail", "--cuont", "3"]) == 2
    captured = capsys.readouterr()
    assert "--cuont" in captured.err
    assert "--count" in captured.err
    assert "autopipe fail --help" in captured.err
    assert captured.out == ""


def test_quiet_and_verbose_contradict(failing: Failing, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fail", "-q", "-v"]) == 2
    assert "contradict" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigurationError("bad key"), 2),
        (ModelError("bad file"), 3),
        (InfeasibleError("too large"), 4),
        (LaunchError("rank 1 failed"), 5),
        (AutopipeError("ours"), 70),
        (ZeroDivisionError("ours as well"), 70),
        (KeyboardInterrupt(), 130),
        (click.UsageError("no such thing"), 2),
    ],
)
def test_an_error_ends_in_its_exit_code_without_traceback(
    failing: Failing, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    failing(error)
    assert main(["fail"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_an_error_is_one_line_with_its_place_and_a_hint(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(
        ModelError(
            "operator 'Foo' is\n  not supported", hint="remove it", where="node [red]7[/red]"
        )
    )
    main(["fail", "-q"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2:] == [
        "error: node [red]7[/red]: operator 'Foo' is not supported",
        "hint: remove it",
    ]


def test_an_internal_error_asks_for_debug_which_shows_the_traceback(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(KeyError("block"))
    main(["fail"])
    assert capsys.readouterr().err.endswith(
        "error: internal error: KeyError: 'block'\nhint: rerun with --debug\n"
    )
    main(["fail", "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_debug_prints_the_versions_that_a_report_needs(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(KeyError("block"))
    main(["fail", "--debug"])
    lines = dict(line.split(" ", 1) for line in capsys.readouterr().err.splitlines() if " " in line)
    assert lines["autopipe"] == __version__
    assert lines["Python"] == platform.python_version()
    assert lines["torch"] == importlib.metadata.version("torch")
    assert lines["onnx"] == importlib.metadata.version("onnx")
    assert lines["onnxruntime"][0].isdigit()
    assert lines["platform"] == platform.platform()


def test_a_missing_extra_says_how_to_get_it(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert main(["fail"]) == 2
    assert "pip install 'autopipe[run]'" in capsys.readouterr().err


def test_json_error_is_one_object_on_stdout(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(InfeasibleError("stage 2 needs 3 GiB more", hint="more devices", where="stage 2"))
    assert main(["fail", "--json"]) == 4
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {
        "error": {
            "kind": "InfeasibleError",
            "message": "stage 2 needs 3 GiB more",
            "hint": "more devices",
            "where": "stage 2",
            "exit_code": 4,
        }
    }
    assert "error: stage 2: stage 2 needs 3 GiB more" in captured.err


def test_json_usage_error_is_an_object_too(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fail", "--json", "--count", "many"]) == 2
    assert "many" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_json_result_is_alone_on_stdout(
    failing: Failing, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fail", "--json", "--count", "7"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"count": 7}
    assert captured.err == "warning: about to fail 7 times (as asked)\n"


def test_help_imports_nothing_heavy_and_no_command() -> None:
    program = (
        "import sys\n"
        "from autopipe.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        "print(*sys.modules, sep='\\n', file=sys.stderr)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = set(run.stderr.split())
    assert "autopipe.cli.main" in loaded
    assert loaded.isdisjoint(HEAVY)
    assert loaded.isdisjoint(f"autopipe.cli.{name}" for name in commands.COMMANDS)
    assert not any(
        name.startswith(("autopipe.passes", "autopipe.backends", "autopipe.configs"))
        for name in loaded
    )


def test_the_module_runs_as_the_command_does() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "autopipe", "nothing"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stderr.startswith("error: the command 'nothing' does not exist")


def test_bench_says_in_one_line_where_the_benchmarks_are(command_line: CommandLine) -> None:
    command_line.refuses(
        2, ("bench", "tessel", "--only", "m/4"), "`python -m benchmarks tessel` in a checkout"
    )


def test_errors_wrap_between_words_on_a_terminal(tmp_path: Path) -> None:
    """And nowhere else: what reads them has a line each."""
    command = [
        sys.executable,
        "-m",
        "autopipe",
        "plan",
        str(tmp_path / "no.onnx"),
        "--set",
        "optimizer.momentums=1",
    ]
    piped = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    subprocess.run(command, stderr=follower, check=False)
    os.close(follower)
    shown = os.read(leader, 65536).decode().replace("\r\n", "\n")
    os.close(leader)
    assert all(len(line) <= 40 or " " not in line for line in shown.splitlines())
    assert len(shown.splitlines()) > len(piped.splitlines())
    assert shown.split() == piped.split()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_characters_that_stdout_lacks_are_replaced(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    command_line.done(
        "schedule", "--shape", "v", "--devices", "2", "--micro-batches", "4", "-o", "schedule.json"
    )
    utf8 = command_line.done("show", "schedule.json").out
    assert not utf8.isascii()
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, write_through=True) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "__stdout__", stream)
        assert main(["show", "schedule.json"]) == 0
        shown = raw.getvalue().decode(encoding)
        monkeypatch.undo()
    assert "?" in shown
    assert shown.count("\n") == utf8.count("\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("autopipe conf", "plain,config"),
        ("autopipe plan --strategy gri", "plain,grid"),
        ("autopipe plan --schedule zb_h", "plain,zb_h1\nplain,zb_h2"),
        ("autopipe plan --cluster h200", "plain,h200"),
        ("autopipe plan --cluster own/cl", "file,own/cl"),
        ("autopipe launch --device me", "plain,meta"),
    ],
)
def test_a_shell_completes_commands_and_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, expected: str
) -> None:
    monkeypatch.setenv("_AUTOPIPE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == expected


@pytest.mark.parametrize(("words", "starts"), [
    ("launch gpt.plan/program --steps 5", True), ("verify gpt.plan/program", True), ("launch program --dry-run", False),
    ("verify program --static", False), ("launch --help", False), ("launch -h", False), ("plan gpt.onnx", False),
    ("", False), ("generate gpt.plan", True), ("show launch", False),
])  # fmt: skip
def test_command_lines_that_start_ranks(words: str, starts: bool) -> None:
    assert starts_ranks(words.split()) is starts
