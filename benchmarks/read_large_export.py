"""What reading costs: Llama-70B as torch exports it from meta tensors, every weight a dangling
name.

The export holds about 15,000 nodes. Printed are the wall-clock seconds of reading and cleaning it
(`read_model`), the median of several runs in one process, and the process's peak memory.

    python benchmarks/read_large_export.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from command_line import parse_arguments


def export(path: Path, layers: int) -> None:
    """Write the model's graph without its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    configuration = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(configuration).eval()
        tokens = torch.zeros((1, 128), dtype=torch.int64)
    program = torch.onnx.export(model, (tokens,), dynamo=True, optimize=False, verbose=False)
    assert program is not None
    program.save(str(path), include_initializers=False)


def read(path: Path, rounds: int) -> dict[str, float]:
    """Median seconds of `read_model`, nodes before and after, peak MiB of this process."""
    from autopipe.passes.frontend import read_model

    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        model = read_model(path, batch=1)
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "seconds": round(statistics.median(times), 2),
        "nodes": model.nodes_before,
        "nodes_after": len(model.graph.nodes),
        "peak_mib": round(peak, 1),
    }


def main() -> None:
    """Export in one process, read in another, so that the memory is the reader's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--export", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parse_arguments(parser, layers=1, rounds=1)
    if arguments.export:
        export(arguments.export, arguments.layers)
    elif arguments.read:
        print(json.dumps(read(arguments.read, arguments.rounds)))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "llama.onnx"
            this = [
                sys.executable,
                __file__,
                "--layers",
                str(arguments.layers),
                "--rounds",
                str(arguments.rounds),
            ]
            subprocess.run([*this, "--export", path], check=True, stdout=subprocess.DEVNULL)
            subprocess.run([*this, "--read", path], check=True)


if __name__ == "__main__":
    main()
