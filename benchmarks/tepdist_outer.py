"""TePDist's outer search, compared with strategies whose placements are in its search space, on the
models of the zoo.

Prints the simulated steps under schedule 1F1B and the CPU time of TePDist's search. Steps longer
than that of another strategy are marked.

    python benchmarks/tepdist_outer.py --devices 4 8 --models gpt vgg19 --set size=350m
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from command_line import parse_arguments

from autopipe.configs.cluster import build_cluster, cluster_preset
from autopipe.configs.zoo import MODELS, build, configure
from autopipe.ir.errors import AutopipeError
from autopipe.passes.pipeline import Request, make_plan
from autopipe.passes.placement.data_parallel import DataParallel
from autopipe.passes.placement.pase.strategy import Pase
from autopipe.passes.placement.pipedream import PipeDream
from autopipe.passes.placement.tepdist.strategy import TePDist
from autopipe.passes.registry import Strategy
from autopipe.passes.schedule.published.one_f_one_b import KForwardsKBackwards

RIVALS: tuple[Strategy, ...] = (DataParallel(), Pase(), PipeDream(), PipeDream(sweep=True))


def step_s(model: Path, cluster: str, devices: int, batch: int, strategy: Strategy) -> float | None:
    """Return the seconds of the plan's step, or None if the strategy has no plan."""
    gpus = build_cluster(cluster_preset(cluster), devices)
    try:
        planned = make_plan(Request(model, gpus, strategy, KForwardsKBackwards(), batch_size=batch))
    except AutopipeError:
        return None
    return planned.plan.summary.step_time_s


def main() -> None:
    """Print one line per model and number of devices."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=sorted(MODELS))
    parser.add_argument("--devices", nargs="*", type=int, default=[4, 8])
    parser.add_argument("--cluster", default="tepdist-m8")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step")
    parser.add_argument("--level", default="O2", choices=["O2", "O3", "O4"])
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="settings of the model"
    )
    options = parse_arguments(parser, models=["two-branch"], devices=[4], batch=4)
    settings = dict(word.split("=", 1) for word in options.set)
    print(
        "model devices tepdist_ms data_parallel_ms pase_ms pipedream_ms pipedream_sweep_ms search_s"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            model = Path(folder, f"{name}.onnx")
            build(configure(name, {**settings, "loss": "true", "weights": "none"})).save(model)
            for devices in options.devices:
                begin = time.process_time()
                own = step_s(
                    model, options.cluster, devices, options.batch, TePDist(level=options.level)
                )
                seconds = time.process_time() - begin
                others = [
                    step_s(model, options.cluster, devices, options.batch, each) for each in RIVALS
                ]
                least = min((other for other in others if other is not None), default=None)
                slower = own is None or (least is not None and own > least * (1 + 1e-9))
                texts = [
                    f"{each * 1e3:.4f}" if each is not None else "-" for each in (own, *others)
                ]
                print(
                    name, devices, *texts, f"{seconds:.1f}", "SLOWER" if slower else "", flush=True
                )


if __name__ == "__main__":
    main()
