"""Time of PaSE's search over executable splits, tables included: from the graph to the placement.

    OMP_NUM_THREADS=1 python benchmarks/pase_search.py

Prints medians of five runs in one process, on an idle machine: the paper's four models at its sizes
on 64 devices, Llama-70B (80 layers) on 64 devices in micro-batches of one sample, and DenseNet-121
of onnx's light networks on 16. Targets: 0.1 s for AlexNet and RNNLM, 1 s for InceptionV3, 2 s for
Transformer, 10 s for Llama. `-m benchmarks pase` measures the paper's own search space.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import onnx
from command_line import parse_arguments

from autopipe.configs import zoo
from autopipe.configs.configuration import load_configuration, resolve_cluster
from autopipe.ir.placement import Placement
from autopipe.passes.pipeline import Request, Runner, supported_problems
from autopipe.passes.placement.pase.strategy import Pase

_PAPER = {"alexnet": 128, "rnnlm": 64, "inceptionv3": 128, "transformer": 64}
MODELS = (*_PAPER, "llama", "densenet121")


def main() -> None:
    """Search each model, and print the times and the proof."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse_arguments(parser, models=["alexnet"], rounds=1)
    models = arguments.models
    rounds = arguments.rounds
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, batch in _PAPER.items():
            if model in models:
                _search(_built(model, "paper", folder), batch, 64, "1080ti-pcie", rounds)
        if "llama" in models:
            _search(_built("llama", "70b", folder), 64, 64, "a100-80gb", rounds, micro_batches=64)
        if "densenet121" in models:
            light = Path(onnx.__file__).parent / "backend/test/data/light/light_densenet121.onnx"
            _search(light, 16, 16, "1080ti-pcie", rounds)


def _built(model: str, size: str, folder: Path) -> Path:
    path = folder / f"{model}.onnx"
    zoo.build(zoo.configure(model, {"loss": "true", "weights": "none", "size": size})).save(path)
    return path


def _search(
    model: Path,
    batch: int,
    devices: int,
    preset: str,
    rounds: int,
    micro_batches: int | None = None,
) -> None:
    cluster = resolve_cluster(
        load_configuration(words={"--gpus": str(devices), "--cluster": preset})
    )
    took = []
    found: Placement | None = None
    for _ in range(rounds):
        request = Request(model, cluster, None, None, batch_size=batch, micro_batches=micro_batches)
        _, problem = next(supported_problems(request, Pase(), Runner()))
        began = time.perf_counter()
        found = Pase().run(problem)
        took.append(time.perf_counter() - began)
    assert found is not None
    assert found.proof is not None
    proof = "proven" if found.proof.optimal else f"at least {found.proof.lower_bound:.6g}"
    runs = " ".join(f"{seconds:.3f}" for seconds in took)
    print(
        f"{model.stem:20s} on {devices:2d} {preset:12s} {statistics.median(took):7.3f} s ({runs})  "
        f"{found.proof.cost:.6g} {found.proof.unit}, {proof}",
        flush=True,
    )


if __name__ == "__main__":
    main()
