"""YAML's traps and mistakes in configurations: exit code 2, and one line with the file, the line
and what to write.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopipe.configs.yaml_source import MAX_FILE_BYTES
from tests.cli.command_line import CommandLine

FILE = "train.yaml"
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{former}'] * 9)}]\n"
    for former, name in zip("abcdefgh", "bcdefghi", strict=True)
)

MISTAKES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    # The document.
    "list": ("- seed: 1\n", 1, ("not a mapping",)),
    "text": ("just words\n", 1, ("not a mapping",)),
    "several documents": ("seed: 1\n---\nseed: 2\n", 2, ("several documents",)),
    "no YAML": ("seed: 1\ngpus: [4\n", 3, ("not YAML",)),
    "tab": ("optimizer:\n\tlr: 1\n", 2, ("not YAML",)),
    "not UTF-8": ("seed: 1\nloss: \udcff\n", 2, ("the file is not UTF-8", "save the file as UTF-8")),
    "control character": ("seed: 1\nloss: \x07\n", 2, ("control character",)),
    "anchor": ("optimizer: &o {lr: 1}\n", 1, ("anchors and aliases",)),
    "anchors that multiply": (BOMB, 1, ("anchors and aliases",)),
    "merge key": ("optimizer: {lr: 1}\n<<: {seed: 1}\n", 2, ("does not read the key << as text",)),
    "tag": ("loss: !!python/object/apply:os.system [touch gone]\n", 1, ("the tag", "is not supported")),
    "deep": (f"model: {'[' * 2000}{']' * 2000}\n", 1, ("nested deeper",)),
    # Keys.
    "duplicate key": ("seed: 1\ngpus: 4\nseed: 2\n", 3, ("'seed' occurs twice (first in line 1)",)),
    "duplicate nested key": ("optimizer:\n  lr: 1\n  lr: 2\n", 3, ("'lr' occurs twice (first in line 2)",)),
    "unknown key": ("seed: 1\nbatchsize: 8\n", 2, ("unknown key 'batchsize'", "did you mean 'batch_size'?")),
    "unknown nested key": ("optimizer:\n  name: adamw\n  weigth_decay: 1\n", 3,
        ("'weigth_decay' in optimizer", "did you mean 'weight_decay'?")),
    "unknown key deep": (
        "cluster:\n  inline:\n    name: mine\n    device:\n      naem: x\n", 5,
        ("'naem' in cluster.inline.device", "did you mean 'name'?"),
    ),
    "key in a list": ("constraints:\n  - {match: a, stage: 0}\n  - {mach: b}\n", 3,
        ("'mach'", "did you mean 'match'?")),
    "key that is a number": ("1: 2\n", 1, ("the key 1", "quote the key")),
    "key that is true": ("on: 2\n", 1, ("the key on", "quote the key")),
    "key that is a list": ("[a, b]: 2\n", 1, ("a key is a list or a mapping",)),
    "option misspelt": ("strategy:\n  name: data_parallel\n  degre: 2\n", 3, ("'degre' in strategy",)),
    "option of another": ("schedule: {name: gpipe, time_limit: 3}\n", 1, ("'time_limit' in schedule",)),
    # Scalars.
    "no for a word": ("mode: no\n", 1, ("reads as false", "`infer`")),
    "no for text": ("loss: no\n", 1, ("reads as false", 'write "no" in quotes')),
    "off in a list": ("model: {frozen: [off]}\n", 1, ("model.frozen[0]", "reads as false", "quotes")),
    "exponent without digits": ("optimizer:\n  lr: 1e\n", 2, ("optimizer.lr is '1e'",)),
    "not a number": ("optimizer:\n  lr: .nan\n", 2, (".nan is not a finite number",)),
    "infinity": ("time_limit: .inf\n", 1, (".inf is not a finite number",)),
    "octal": ("seed: 010\n", 1, ("010", "decimal")),
    "base 60": ("seed: 1:30\n", 1, ("1:30",)),
    "quoted number": ('gpus: "4"\n', 1, ("gpus is '4'", "without quotes")),
    "fraction": ("gpus: 2.5\n", 1, ("gpus is 2.5", "whole number")),
    "nothing": ("optimizer:\n", 1, ("optimizer is nothing", "mapping")),
    "list for a number": ("seed: [1]\n", 1, ("seed is a list",)),
    "mapping for text": ("model: {path: {a: b}}\n", 1, ("model.path is a mapping",)),
    "number for a mapping": ("optimizer: 3\n", 1, ("optimizer is 3", "mapping")),
    "huge number": ("batch_size: 99999999999999999999\n", 1, ("too large",)),
    "no devices": ("seed: 0\ngpus: 0\n", 2, ("gpus is 0", "at least 1")),
    "devices below 0": ("gpus: -4\n", 1, ("gpus is -4", "at least 1")),
    "too many devices": ("gpus: 1000000000\n", 1, ("gpus is 1000000000", "at most")),
    "negative seed": ("seed: -1\n", 1, ("seed is -1", "at least 0")),
    "size without unit": ("memory_limit: 14Gig\n", 1, ("memory_limit is '14Gig'", "14GiB")),
    "size below a byte": ("memory_limit: 0.3B\n", 1, ("memory_limit is '0.3B'",)),
    "no memory": ("memory_limit: 0\n", 1, ("memory_limit is 0", "at least 1")),
    "unknown mode": ("mode: trian\n", 1, ("'trian' is none of train, infer", "did you mean 'train'?")),
    "unknown precision": ("precision: f32\n", 1, ("'f32'", "none of fp32, tf32, bf16, fp16")),
    # Choices.
    "unknown strategy": ("seed: 1\nstrategy: {name: pipedraem}\n", 2, ("'pipedraem'", "did you mean", "pipedream")),
    "unknown schedule": ("schedule:\n  name: 1f2b\n", 2, ("'1f2b'", "did you mean", "1f1b")),
    "unknown cluster": ("cluster: {preset: sumit}\n", 1, ("'sumit'", "did you mean 'summit'?")),
    "two clusters": ("cluster:\n  preset: summit\n  file: ./gone.yaml\n", 3, ("exclude each other",)),
    # Several keys together.
    "batch not divisible": ("batch_size: 10\nmicro_batches: 4\n", 2, ("micro_batches 4", "batch_size 10", "such as 5")),
    "micro-batch not divisible": ("batch_size: 10\nmicro_batch_size: 4\n", 2, ("micro_batch_size 4", "batch_size 10")),
    "count and size": ("micro_batches: 4\nmicro_batch_size: 4\n", 2, ("exclude each other",)),
    "foreign to the optimizer": ("optimizer: {name: adamw,\n  momentum: 0.9}\n", 2, ("adamw does not support the option momentum",)),
    "betas": ("optimizer: {name: adamw, betas: [0.9, 1.0]}\n", 1, ("optimizer.betas", "below 1")),
    "constraint without a wish": ("constraints:\n  - {match: a}\n", 2, ("requires nothing of its nodes",)),
    "constraint on a device twice": ("constraints: [{match: a, devices: [0, 0]}]\n", 1, ("[0, 0]", "once")),
    "constraint beyond the devices": (
        "gpus: 2\nconstraints: [{match: a, devices: [2]}]\n", 2, ("lists device 2, but the number of devices is 2",)
    ),
    "constraint below 0": ("constraints: [{match: a, stage: -1}]\n", 1, ("constraints[0].stage is -1",)),
    "no regular expression": ("constraints: [{match: 're:(', stage: 0}]\n", 1, ("no regular expression",)),
    "frozen is no regular expression": ("model:\n  frozen: ['re:*']\n", 2, ("no regular expression",)),
    "dimension below 0": ("model: {dims: {batch: -1}}\n", 1, ("model.dims.batch is -1", "at least 0")),
}  # fmt: skip
"""A file, the line that is to blame, and what is said."""


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize(
    "words", [("config", "check", FILE), ("plan", "gone.onnx", "--config", FILE)], ids=" ".join
)
def test_a_mistake_in_a_file_is_told_with_its_line(
    command_line: CommandLine, words: tuple[str, ...], name: str
) -> None:
    text, number, says = MISTAKES[name]
    Path(FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert command_line.refuses(2, words, *says).startswith(f"{FILE}:{number}: ")


@pytest.mark.parametrize(
    "words", [("config", "check", FILE), ("config", "show", "--config", FILE)], ids=" ".join
)
def test_files_that_cannot_be_read(command_line: CommandLine, words: tuple[str, ...]) -> None:
    path = Path(FILE)
    command_line.refuses(2, words, f"{FILE}: the file cannot be read: No such file")
    path.symlink_to("nowhere")
    command_line.refuses(2, words, f"{FILE}: the file cannot be read: No such file")
    path.unlink()
    path.mkdir()
    command_line.refuses(2, words, f"{FILE}: the file cannot be read: Is a directory")
    path.rmdir()
    for content in (b"", b"# nothing\n", b"---\n"):
        path.write_bytes(content)
        command_line.refuses(2, words, f"{FILE}: the file is empty")
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    command_line.refuses(2, words, f"{FILE}: the file is too large")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads everything")
def test_a_file_without_permission(command_line: CommandLine) -> None:
    Path(FILE).write_text("seed: 1\n")
    Path(FILE).chmod(0)
    command_line.refuses(
        2, ("config", "check", FILE), f"{FILE}: the file cannot be read: Permission denied"
    )


FLAGS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("--gpus", "0"): ("--gpus 0", "at least 1"),
    ("--gpus", "-1"): ("--gpus -1", "at least 1"),
    ("--gpus", "1e9"): ("--gpus 1e9", "whole number"),
    ("--gpus", "abc"): ("--gpus abc", "whole number"),
    ("--gpus", "1000000000"): ("--gpus 1000000000", "at most"),
    ("--gpus", "nan"): ("--gpus nan", "whole number"),
    ("--gpus", "9" * 30): ("--gpus 999", "at most"),
    ("--gpus", ""): ("--gpus", "whole number"),
    ("--batch-size", "0"): ("--batch-size 0", "at least 1"),
    ("--micro-batches", "-2"): ("--micro-batches -2", "at least 1"),
    ("--micro-batches", "many"): ("--micro-batches many", "auto"),
    ("--micro-batch-size", "1.5"): ("--micro-batch-size 1.5", "whole number"),
    ("--batch-size", "10", "--micro-batches", "3"): ("micro_batches 3", "batch_size 10"),
    ("--micro-batches", "2", "--micro-batch-size", "3"): ("exclude each other",),
    ("--mode", "learn"): ("--mode learn", "train"),
    ("--memory-limit", "lots"): ("--memory-limit lots", "14GiB"),
    ("--memory-limit", "0"): ("--memory-limit 0", "at least 1"),
    ("--memory-limit", "-4GiB"): ("--memory-limit -4GiB", "14GiB"),
    ("--time-limit", "0"): ("--time-limit 0", "above 0"),
    ("--time-limit", "soon"): ("--time-limit soon",),
    ("--strategy", "pipedraem"): ("pipedraem", "did you mean", "pipedream"),
    ("--schedule", "1f2b"): ("1f2b", "did you mean", "1f1b"),
    ("--cluster", "sumit"): ("--cluster sumit", "did you mean 'summit'?"),
    ("--cluster", "./gone.yaml"): ("gone.yaml", "No such file"),
    ("--costs", "guess"): ("--costs guess",),
    ("--set", "seed"): ("--set is 'seed'", "KEY=VALUE"),
    ("--set", "=1"): ("--set is '=1'", "KEY=VALUE"),
    ("--set", "a..b=1"): ("--set is 'a..b=1'", "KEY=VALUE"),
    ("--set", "sed=1"): ("--set sed=1", "did you mean 'seed'?"),
    ("--set", "optimizer.epps=1"): ("--set optimizer.epps=1", "did you mean 'eps'?"),
    ("--set", "optimizer=[1"): ("--set optimizer=[1", "not YAML"),
    ("--set", "seed=&a 1"): ("--set seed=&a 1", "anchors"),
    ("--set", "seed=.nan"): ("--set seed=.nan", "finite"),
    ("--set", "strategy.name=pase", "--set", "strategy.stage=2"): (
        "strategy.stage=2",
        "unknown key 'stage'",
    ),
    ("--set", "strategy.stages=2"): (
        "strategy.stages=2",
        "strategy auto does not support the option 'stages'",
    ),
    ("--set", "seed=1", "--set", "seed.x=1"): ("seed",),
    ("--dim", "batch"): ("--dim is 'batch'", "NAME=SIZE"),
    ("--dim", "batch=-1"): ("--dim batch=-1", "at least 0"),
    ("--dim", "batch=x"): ("--dim batch=x", "whole number"),
    ("--confg", "x"): ("--confg", "--config"),
    ("--gpus",): ("--gpus",),
}
"""Words of a command line and what is said of them."""


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: " ".join(flags)[:40])
@pytest.mark.parametrize("command", [("config", "show"), ("plan", "gone.onnx")], ids=" ".join)
def test_a_mistake_in_a_flag_names_the_flag(
    command_line: CommandLine, command: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    command_line.refuses(2, (*command, *flags), *FLAGS[flags])
