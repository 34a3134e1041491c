"""Behaviour pinned by SHA-256: plans and programs of the zoo by every strategy and scheduler, and
what --json prints.

`./test tests/cli/test_digests.py -m sweep` compares every model with every placement and scheduler,
in half an hour on an idle machine, and what commands that run ranks print. After a change that is
meant, `--update-golden` with `-m "sweep or not sweep"` writes all digests anew; the commit says
why.

Names in generated code that have changed since the first digests, former and present:

    receive, receive_gradient         recv, recv_gradient
    input_gradient, weight_gradient   backward_input, backward_weight
    runtime.Receive                   runtime.Recv
    box=, share=                      offsets=, weight=
    operators.NAME_part               operators.sharded_NAME
    operators.NAME_share              operators.NAME_partial
    # repetend                        # steady state (Tessel: repetend)
    # ... d0:2                        # ... split d0 over 2
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autopipe import __version__
from autopipe.cli.main import main
from autopipe.passes.registry import scheduler_names, strategy_names
from tests.cli.command_line import CommandLine
from tests.distributed.support.zoo import SIZES

Golden = Callable[[str, str], None]

PLACEMENTS: Mapping[str, tuple[str, ...]] = {
    **{name: ("--strategy", name) for name in strategy_names() if name != "explicit"},
    "manual": ("--strategy", "manual", "--set", "constraints=[{match: '*', stage: 0, devices: [0, 1, 2, 3]}]"),
    "grid": ("--strategy", "grid", "--set", "strategy.pipeline=4"),
    "grid, tensor": ("--strategy", "grid", "--set", "strategy.pipeline=2", "--set", "strategy.tensor=2"),
    "grid, chunks": ("--strategy", "grid", "--set", "strategy.pipeline=4", "--set", "strategy.stages_per_rank=2"),
    "grid, wave": (
        "--strategy", "grid", "--set", "strategy.pipeline=4", "--set", "strategy.stages_per_rank=2",
        "--set", "strategy.style=v",
    ),
    "graphpipe, own sizes": ("--strategy", "graphpipe", "--set", "strategy.per_stage_micro_batch=true"),
    "pase, 2 stages": ("--strategy", "pase", "--stages", "2"),
    "tepdist, 2 stages": ("--strategy", "tepdist", "--stages", "2"),
    "tepdist, O4": ("--strategy", "tepdist", "--set", "strategy.level=O4"),
    **{f"tessel_shapes, {shape}": ("--strategy", "tessel_shapes", "--set", f"strategy.shape={shape}")
       for shape in ("v", "x", "m", "nn", "k")},
}  # fmt: skip
"""Flags of `autopipe plan` by name: each strategy as it is, and those with options that place
differently.
"""

FORMER_NAMES: Mapping[str, str] = {
    r"\bhandcrafted\b": "expert",
    r"\bname: explicit\b": "name: given",
    r'"explicit"': '"given"',
    r"\bstages_per_rank\b": "chunks",
    r"\bstages per rank\b": "chunks",
    r"\bstyle: v\b": "wave: true",
    r"\bstyle: loop\b": "wave: false",
    r'"style", "v"': '"wave", "true"',
    r"\ballow_mixed_stages\b": "straddle",
    r"(?m)^  zero_stage: 0$": "  shard: false",
    r"(?m)^  zero_stage: 1$": "  shard: true",
    r"\bimbalance_tolerance\b": "unbalance",
    r"\bextrapolated\b": "judged",
    r"\bexposed_p2p_s\b": "messages_s",
    r"\bredundant_compute_s\b": "repetition_s",
    r"\blaunch_overhead_s\b": "launches_s",
}
"""Pattern of each renamed key or name, and the name that it had when the digests were recorded.
`settled` replaces these names, so that a renaming alone changes no digest of a plan or program.
"""

CLUSTER = ("--cluster", "a100-80gb")
SCHEDULERS = tuple(name for name in scheduler_names() if name != "csv")
VARIANTS: Mapping[str, tuple[str, ...]] = {
    "inference": ("--mode", "infer", "--strategy", "pipedream"),
    "recomputed": ("--set", "recompute=full", "--strategy", "pipedream"),
    "sharded update": (
        "--set",
        "optimizer={name: adamw, lr: 0.01, zero_stage: 1}",
        "--strategy",
        "data_parallel",
    ),
    "bf16": ("--set", "precision=bf16", "--strategy", "handcrafted"),
    "frozen": ("--set", "model.frozen=['*embedding*']", "--strategy", "handcrafted"),
    "eight devices of two kinds": (
        "--cluster",
        "a100-v100",
        "--gpus",
        "8",
        "--strategy",
        "pipedream",
    ),
    "short memory": ("--memory-limit", "300KiB", "--strategy", "tepdist"),
}
"""Further requests for the small gpt."""


@pytest.mark.parametrize("placement", ["grid", "grid, chunks", "grid, wave", "tessel_shapes, x"])
def test_every_scheduler(command_line: CommandLine, golden: Golden, placement: str) -> None:
    build("gpt")
    # Tessel's search in chunks ends by its limit, and on a busy machine with another schedule.
    schedulers = [name for name in SCHEDULERS if (placement, name) != ("grid, chunks", "tessel")]
    golden(
        text_of(digests("gpt", placement, schedulers)),
        f"digests/{placement.replace(', ', '_')}.json",
    )


def test_every_placement(command_line: CommandLine, golden: Golden) -> None:
    build("gpt")
    golden(
        text_of({name: digests("gpt", name, ("1f1b",)) for name in PLACEMENTS}),
        "digests/placements.json",
    )


def test_every_model(command_line: CommandLine, golden: Golden) -> None:
    names = (
        "handcrafted",
        "graphpipe",
        "grid, tensor",
        "pase",
        "pipedream",
        "piper",
        "tessel_shapes",
    )
    found = {}
    for number, model in enumerate(SIZES):
        build(model)
        found[model] = digests(model, names[number % len(names)], ("gpipe",))
    golden(text_of(found), "digests/models.json")


def test_further_requests(command_line: CommandLine, golden: Golden) -> None:
    build("gpt")
    found = {
        name: planned(command_line.folder, "gpt.onnx", *CLUSTER, *words)
        for name, words in VARIANTS.items()
    }
    golden(text_of(found), "digests/requests.json")


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model", SIZES)
def test_every_model_placement_and_scheduler(
    command_line: CommandLine, golden: Golden, model: str
) -> None:
    build(model)
    found = {name: folded(digests(model, name, SCHEDULERS)) for name in PLACEMENTS}
    golden(text_of(found), f"digests/sweep/{model}.json")


def test_what_commands_print_with_json(command_line: CommandLine, golden: Golden) -> None:
    """All commands that only read and plan, one after the other in one folder."""
    build("gpt")
    done = command_line.done
    done(
        "plan",
        "gpt.onnx",
        "--gpus",
        4,
        *CLUSTER,
        "--strategy",
        "pipedream",
        "--schedule",
        "gpipe",
        "-o",
        "other",
    )
    train = (
        "cluster: {preset: a100-80gb}\noptimizer: {name: adamw}\nstrategy: {name: grid, pipeline: "
        "2}\n"
    )
    (command_line.folder / "train.yaml").write_text(train)
    commands = (
        "inspect gpt.onnx",
        (
            "plan gpt.onnx --gpus 4 --strategy grid --set strategy.pipeline=2 --schedule 1f1b "
            "--annotate own.onnx -o plan"
        ),
        "plan gpt.onnx --gpus 4 --no-cache -o auto",
        "plan own.onnx --gpus 4 --strategy manual -o by-hand",
        "plan --from plan --schedule tessel -o again",
        "codegen plan",
        "codegen plan --ranks 1,3 -o some",
        "show plan",
        "show plan --html report.html --trace trace.json --csv order.csv --svg picture.svg",
        "show plan --tasks",
        "explain plan",
        "explain auto",
        "explain plan --node 7",
        "explain plan --stage 1",
        "explain plan --device 3",
        "compare plan other --html compared.html",
        "schedule --shape v --micro-batches 8",
        "schedule --shape m --devices 4 --memory 12 --micro-batches 8 -o blocks.json",
        "schedule --shape nn --mode infer --micro-batches 8",
        "schedule --shape x --schedule gpipe --micro-batches 8",
        "show blocks.json --svg blocks.svg",
        "zoo list",
        "zoo build dlrm -o dlrm.onnx --set rows=24",
        "config show --config train.yaml",
        "config check train.yaml",
        "config clusters",
        "plan gpt.onnx --gpus 3 --strategy data_parallel --batch-size 16",
        "plan missing.onnx",
    )
    golden(
        text_of({words: printed(command_line, words) for words in commands}),
        "digests/commands.json",
    )
    written = (
        "report.html",
        "trace.json",
        "order.csv",
        "picture.svg",
        "compared.html",
        "blocks.json",
        "blocks.svg",
    )
    golden(
        text_of({name: digest([command_line.folder / name]) for name in written}),
        "digests/written.json",
    )


@pytest.mark.sweep
@pytest.mark.distributed
def test_what_commands_that_run_print_with_json(command_line: CommandLine, golden: Golden) -> None:
    """Which keys they print, and of which types: their numbers are measured."""
    build("gpt")
    done = command_line.done
    done(
        "plan",
        "gpt.onnx",
        "--gpus",
        2,
        *CLUSTER,
        "--strategy",
        "pipedream",
        "--batch-size",
        4,
        "-o",
        "plan",
    )
    done("codegen", "plan")
    commands = (
        "launch plan/program --device cpu --steps 2 --checkpoint saved",
        "launch plan/program --device meta --dry-run",
        "verify plan/program --device cpu",
        "checkpoint inspect saved",
        "checkpoint verify saved",
        "checkpoint export saved -o trained.onnx",
        "profile gpt.onnx --device cpu --micro-batch-sizes 1 --seconds 0.1 -o gpt.costs",
    )
    found = {
        words: outline(json.loads(done(*words.split(), "--json", "-q").out.splitlines()[-1]))
        for words in commands
    }
    golden(json.dumps(found, indent=1, sort_keys=True) + "\n", "digests/running.json")


def build(model: str) -> None:
    """Write the small `model` with a loss into the working folder."""
    settings = {**SIZES[model], "loss": "true", "weights": "none"}
    words = [
        word for key, value in settings.items() for word in ("--set", f"{key}={as_text(value)}")
    ]
    assert main(["zoo", "build", model, "-o", f"{model}.onnx", "-q", *words]) == 0


def as_text(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def digests(model: str, placement: str, schedulers: Iterable[str]) -> dict[str, str]:
    """Digests by scheduler of the plans with one placement, and of their programs."""
    first = "1f1b"
    folder = Path.cwd()
    words = (
        f"{model}.onnx",
        *PLACEMENTS[placement],
        "--gpus",
        "4",
        "--batch-size",
        "32",
        "--micro-batches",
        "8",
    )
    words = (*words, *CLUSTER)
    found = {first: planned(folder, *words, "--schedule", first, "-o", "first", name="first")}
    if not (folder / "first").exists():  # A placement that 1F1B cannot take may still be another's.
        found[first] += " " + planned(
            folder, *words, "--schedule", "tessel", "-o", "first", name="first"
        )
    for scheduler in schedulers:
        if scheduler != first and (folder / "first").exists():
            found[scheduler] = planned(folder, "--from", "first", "--schedule", scheduler)
    return {key: found[key] for key in sorted(found)}


def planned(folder: Path, *words: str, name: str = "plan") -> str:
    """Digests of a plan's files and of its program's, or the exit code of a request that is
    refused.
    """
    # By SGD, whose state is nothing: what is pinned is the search, not the optimizer.
    if code := main(
        [
            "plan",
            "--set",
            "optimizer.name=sgd",
            *words,
            *(() if "-o" in words else ("-o", name)),
            "-q",
        ]
    ):
        return f"exit {code}"
    # `graph.json` holds the graph of the model, which `graph_digest` in `plan.json` names.
    files = sorted((folder / name).glob("*.*"))
    plan = digest(path for path in files if path.name != "graph.json")
    if code := main(["codegen", name, "-o", "program", "-q"]):
        return f"plan {plan} exit {code}"
    return f"plan {plan} program {digest(sorted((folder / 'program').rglob('*.*')))}"


def digest(files: Iterable[Path]) -> str:
    """Twelve digits of the SHA-256 of all texts, with the names of their files."""
    whole = hashlib.sha256()
    for path in files:
        if path.is_file():
            content = path.read_bytes().decode(errors="surrogateescape")
            text = f"{path.relative_to(Path.cwd())}\n{settled(content)}"
            whole.update(text.encode(errors="surrogateescape"))
    return whole.hexdigest()[:12]


def printed(command_line: CommandLine, words: str) -> str:
    """The digest of what a command prints with --json, or the exit code of one that fails."""
    target = CLUSTER if words.startswith("plan ") and "--from" not in words else ()
    shown = command_line.run(*words.split(), *target, "--json", "-q")
    return (
        f"exit {shown.code}"
        if shown.code
        else hashlib.sha256(settled(shown.out).encode()).hexdigest()[:12]
    )


def settled(text: str) -> str:
    """The text without what differs from one run, machine or version to the next.

    Real numbers keep six digits: numerical libraries do not agree on the last ones.
    """
    for pattern, former in FORMER_NAMES.items():
        text = re.sub(pattern, former, text)
    if text.startswith("{"):
        text = json.dumps(without_times(json.loads(text)), sort_keys=True, indent=1)
    text = text.replace(str(Path.cwd()), "FOLDER").replace(__version__, "VERSION")
    text = re.sub(r"plan [0-9a-f]{12}, |<td[^>]*>[0-9.]+ [mµ]?s</td>", "", text)
    return re.sub(r"\d+\.\d+(e[-+]?\d+)?|\d+e-\d+", lambda found: f"{float(found[0]):.6g}", text)


def without_times(value: Any) -> Any:
    """The value without how long searches took, and without digests of files and unrounded numbers.
    The figures for metrics in a manifest follow from the plan, whose own digest is there.
    """
    unsettled = {
        "metrics",
        "search_time_s",
        "search_s",
        "seconds",
        "sha256",
        "plan_digest",
        "digest",
        "graph_digest",
    }
    if isinstance(value, dict):
        return {key: without_times(each) for key, each in value.items() if key not in unsettled}
    return [without_times(each) for each in value] if isinstance(value, list) else value


def outline(value: Any) -> Any:
    """Keys and types of a value; those of a list's first item."""
    if isinstance(value, dict):
        return {key: outline(each) for key, each in value.items()}
    if isinstance(value, list):
        return [outline(value[0])] if value else []
    return (
        "number"
        if isinstance(value, (int, float)) and not isinstance(value, bool)
        else type(value).__name__
    )


def folded(found: Mapping[str, str]) -> str:
    return hashlib.sha256(text_of(found).encode()).hexdigest()[:12]


def text_of(found: Mapping[str, object]) -> str:
    return json.dumps(found, indent=1) + "\n"
