"""A training run as people do it, killed twice and resumed on fewer ranks, against the same in
plain PyTorch.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

import autopipe
from autopipe.cli.main import main

pytestmark = [pytest.mark.distributed, pytest.mark.sweep]

STEPS = 300
BATCH = 16
SEQUENCE = 64
INTERVAL = 50
LR = 1e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
MAX_NORM = 1.0
WARMUP = 30
GROUPS = ("*bias", "*ln_*")
"""Parameters without weight decay."""
CONFIGURATION = f"""
batch_size: {BATCH}
micro_batches: 4
loss: {{output: loss, normalize: tokens}}
optimizer:
  name: adamw
  lr: {LR}
  betas: {list(BETAS)}
  weight_decay: {WEIGHT_DECAY}
  groups: [{", ".join(f"{{match: '{each}', weight_decay: 0}}" for each in GROUPS)}]
lr_scheduler: {{warmup_steps: {WARMUP}, decay_type: cosine, total_steps: {STEPS}}}
training: {{max_norm: {MAX_NORM}}}
"""
TOLERANCE = 1e-4
KILLED = (80, 170)


def prose(seed: int) -> bytes:
    """Words of 2 to 9 letters, some of them much more often than others."""
    random = np.random.default_rng(seed)
    words = [
        bytes(random.integers(97, 123, random.integers(2, 10)).astype(np.uint8)) for _ in range(400)
    ]
    return b" ".join(words[number % len(words)] for number in random.zipf(1.4, 40_000))


def rows(text: bytes, count: int, seed: int) -> dict[str, np.ndarray]:
    """Pieces of a text, byte by byte, with the next bytes as labels: those beyond a length of 20 to
    64 are left out.
    """
    random = np.random.default_rng(seed)
    numbers = np.frombuffer(text, np.uint8).astype(np.int64)
    starts = random.integers(0, len(numbers) - SEQUENCE - 1, count)
    found = np.stack([numbers[start : start + SEQUENCE + 1] for start in starts])
    labels = found[:, 1:].copy()
    for row, length in zip(labels, random.integers(20, SEQUENCE + 1, count), strict=True):
        row[length:] = -100
    return {"tokens": found[:, :-1], "labels": labels}


class Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "n_embd": 64,
            "n_layer": 4,
            "n_head": 4,
            "vocab_size": 256,
            "n_positions": SEQUENCE,
        }
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        self.model = GPT2LMHeadModel(
            GPT2Config(**sizes, **no_dropout, bos_token_id=None, eos_token_id=None)
        )

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return cross_entropy(logits.flatten(0, 1), labels.flatten())


def reference(
    module: Loss, data: dict[str, np.ndarray], held_out: dict[str, np.ndarray]
) -> Iterator[dict[str, float]]:
    """A record of each step: with `transformers`' own scheduler and torch's `clip_grad_norm_`."""
    plain = [
        each for name, each in module.named_parameters() if name.endswith("bias") or "ln_" in name
    ]
    rest = [each for each in module.parameters() if not any(each is other for other in plain)]
    groups = [
        {"params": rest, "weight_decay": WEIGHT_DECAY},
        {"params": plain, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS)
    scheduler = get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)
    for step in range(STEPS):
        batch = slice(step * BATCH, (step + 1) * BATCH)
        loss = module(*(torch.from_numpy(data[name][batch]) for name in ("tokens", "labels")))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)
        record = {
            "loss": loss.item(),
            "grad_norm": norm.item(),
            "learning_rate": scheduler.get_last_lr()[0],
        }
        optimizer.step()
        scheduler.step()
        if (step + 1) % INTERVAL == 0:
            with torch.no_grad():
                record["eval_loss"] = float(module(*map(torch.from_numpy, held_out.values())))
        yield record


def logged(folder: Path) -> dict[int, dict[str, Any]]:
    """The figures of each step, those of validations beside them."""
    found: dict[int, dict[str, Any]] = {}
    path = folder / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        record = json.loads(line)
        found.setdefault(record["step"], {}).update(record)
    return found


@pytest.mark.timeout(3600)
def test_every_figure_is_that_of_plain_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = Loss()
    text = prose(2)
    data = rows(text, STEPS * BATCH, 0)
    held_out = rows(text, 50, 1)
    np.savez("train.npz", **data)  # type: ignore[arg-type]
    np.savez("held_out.npz", **held_out)  # type: ignore[arg-type]
    example = {name: torch.from_numpy(array[:2]) for name, array in data.items()}
    model = autopipe.export(module, example, "gpt.onnx")
    Path("train.yaml").write_text(CONFIGURATION, encoding="utf-8")
    for ranks in (4, 2):
        words = (
            "plan",
            model,
            "--gpus",
            ranks,
            "--cluster",
            "cpu-local",
            "--config",
            "train.yaml",
            "--schedule",
            "1f1b",
        )
        assert (
            main(
                [
                    str(word)
                    for word in (*words, "--strategy", "pipedream", "-o", f"on{ranks}", "-q")
                ]
            )
            == 0
        )
        assert main(["codegen", f"on{ranks}", "-q"]) == 0

    for ranks, end in ((4, KILLED[0]), (4, KILLED[1]), (2, None)):
        run(ranks, end)
    expected = list(reference(module, data, held_out))
    found = logged(tmp_path / "log")
    assert sorted(found) == list(range(STEPS))
    for step, record in enumerate(expected):
        for name, figure in record.items():
            assert found[step][name] == pytest.approx(figure, rel=TOLERANCE), (
                f"{name} of step {step}"
            )

    best = min(
        (each for each in found.values() if "eval_loss" in each), key=lambda each: each["eval_loss"]
    )
    assert (
        main(["checkpoint", "export", "saved/best", "--model", "gpt.onnx", "-o", "best.onnx", "-q"])
        == 0
    )
    session = onnxruntime.InferenceSession("best.onnx", providers=["CPUExecutionProvider"])
    (loss,) = session.run(None, held_out)
    assert float(loss) == pytest.approx(best["eval_loss"], rel=TOLERANCE)


def run(ranks: int, end: int | None) -> None:
    """Launch, or go on with, the run, until a step has been logged, at which everything is
    killed.
    """
    words = [
        "launch",
        f"on{ranks}/program",
        "--device",
        "cpu",
        "--steps",
        STEPS,
        "--data",
        "train.npz",
        "--log",
        "log",
    ]
    words += ["--eval-data", "held_out.npz", "--eval-interval", INTERVAL, "--checkpoint", "saved"]
    words += ["--checkpoint-every", 25, "-q", *(["--resume"] if Path("saved").exists() else [])]
    command = [sys.executable, "-m", "autopipe", *map(str, words)]
    with subprocess.Popen(command, start_new_session=True) as process:
        while end is not None and max(logged(Path("log")), default=-1) < end:
            assert process.poll() is None, "the launch has ended by itself"
            time.sleep(0.2)
        if end is not None:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    assert (code == 0) == (end is None)
