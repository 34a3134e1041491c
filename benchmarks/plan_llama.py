"""What planning costs: the 70B-parameter Llama of the zoo, without weights, for 64 devices.

Each command runs in a process of its own; printed are its wall-clock seconds and the most memory it
held.

    python benchmarks/plan_llama.py --gpus 64 --batch-size 256
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from command_line import parse_arguments


def run(*words: str) -> dict[str, float]:
    """Seconds and peak MiB of one `autopipe` command."""
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "autopipe", *words], stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    if status:
        raise SystemExit(f"autopipe {' '.join(words)} failed")
    return {"seconds": round(seconds, 2), "peak_mib": round(usage.ru_maxrss / 1024, 1)}


def main() -> None:
    """Print one JSON object: a command each, and the plan's search times by pass."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", default="64")
    parser.add_argument("--batch-size", default="256")
    parser.add_argument(
        "--set", nargs="+", default=["size=70b"], metavar="KEY=VALUE", help="of the zoo's llama"
    )
    options = parse_arguments(
        parser,
        gpus="2",
        batch_size="4",
        set=[
            "layers=2",
            "hidden=64",
            "heads=4",
            "key_value_heads=2",
            "feed_forward=128",
            "sequence=32",
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "llama.onnx")
        plan = Path(folder, "plan")
        settings = [
            word for each in (*options.set, "weights=none", "loss=true") for word in ("--set", each)
        ]
        built = run("zoo", "build", "llama", "-o", str(model), *settings)
        batch = ("--gpus", options.gpus, "--batch-size", options.batch_size)
        recompute = ("--set", "recompute=full", "--set", "precision=bf16")
        planned = run("plan", str(model), *batch, *recompute, "-o", str(plan))
        shown = run("show", str(plan), "--html", str(Path(folder, "report.html")))
        summary = json.loads((plan / "plan.json").read_text())["summary"]
    print(
        json.dumps(
            {"build": built, "plan": planned, "show": shown, "passes": summary["search_time_s"]},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
