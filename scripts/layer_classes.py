"""List the repeated layers of exported models and of the zoo, and write the results to
docs/reference/repeated-layers.md.

    python scripts/layer_classes.py
        all models (half an hour on two cores if no export is cached)
    python scripts/layer_classes.py --only gpt2
        models whose name contains `gpt2`; the other rows stay
    python scripts/layer_classes.py --tiny
        one small model: checks that this script runs

A model is exported and read; it is not planned, and no ranks start.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "reference" / "repeated-layers.md"
sys.path.insert(0, str(ROOT))

from autopipe.api.inspection import LayerSummary, summarize_layers  # noqa: E402 - needs the path
from autopipe.backends.torch.codegen.stage_file import emit_stage  # noqa: E402
from autopipe.configs.zoo import MODELS, build, configure  # noqa: E402
from autopipe.ir.errors import AutopipeError  # noqa: E402
from autopipe.passes.frontend import read_model  # noqa: E402
from autopipe.passes.frontend.model import Model  # noqa: E402
from autopipe.passes.lower.lower import one_device_program  # noqa: E402
from tests.exports.export import Export, onnx_file  # noqa: E402
from tests.exports.journey import MOST, SEQUENCE, all_journeys, symbols  # noqa: E402

SMALLEST = "rnnlm"
EXPORTERS = {"torchscript": "dynamo=False", "dynamo": "dynamo=True", "onnx": "light"}
HEADER = (
    "model",
    "source",
    "nodes",
    "repeated layers",
    "covered",
    "lines",
    "reason why layers are not repeated",
)
FIXED_INPUTS = {"gpt2_merged": {"use_cache_branch": True}}
"""Inputs that are replaced by a constant, by name of the model."""
SHAPES = "the layers have different shapes"
STAGES = "one block per stage, and the stages have different shapes"
TWO_BLOCKS = "two blocks per stage, of which the first one changes the shape"
DETECTOR = (
    "one encoder layer; the first decoder layer lacks self-attention, whose operands are constant"
)
REASONS = {
    "albert_int8": "the quantizer has quantized only the first of two uses of the shared layer",
    "alexnet": SHAPES,
    "bart_optimized": "the file mixes the nodes of the decoder layers with those of the encoder",
    "bvlc_alexnet": SHAPES,
    "conditional_detr": DETECTOR,
    "convnext": STAGES,
    "convnext_session": STAGES,
    "deepseek_v3": "the first of two layers is dense, the second one has experts",
    "deformable_detr": (
        "one encoder layer; the file computes values for both decoder layers in the first one"
    ),
    "densenet121": "each layer reads the results of all earlier ones, so that widths differ",
    "detr": "one encoder layer and one decoder layer",
    "detr_resnet": DETECTOR,
    "dlrm": SHAPES,
    "efficientnet": "consecutive blocks have different widths or kernels",
    "focalnet": STAGES,
    "fused_encoder": "the two layers have different activations",
    "gan_discriminator": SHAPES,
    "gan_generator": SHAPES,
    "glpn": STAGES,
    "graph": SHAPES,
    "gru_inputs": SHAPES,
    "hiera": STAGES,
    "inception_v1": "each module has other widths",
    "joint_diffusion": "the second of two blocks has no output for the context",
    "lstm": SHAPES,
    "lstm_int8": "in the file, a node of another branch is inside of the first decoder layer",
    "matcha": SHAPES,
    "mask2former": (
        "one block per stage and one encoder layer; the first decoder layer lacks projections of "
        "constant operands"
    ),
    "maskformer": (
        "one block per stage; the first decoder layer lacks self-attention, whose operands are "
        "constant"
    ),
    "mixer": "one layer",
    "modernbert": "the first of two layers has no normalization before its attention",
    "pooled_regions": SHAPES,
    "poolformer": STAGES,
    "pvt": STAGES,
    "recurrence": SHAPES,
    "recurrent_gemma": "the first of two layers is recurrent, the second one has attention",
    "resnet": TWO_BLOCKS,
    "resnet_qdq": TWO_BLOCKS,
    "rt_detr": "a refinement of boxes separates the two decoder layers",
    "sam": "the first of two image layers has windows; decoder layers have different positions",
    "segformer": STAGES,
    "selective_scan": "one loop",
    "separator": "each of three layers has another dilation",
    "smollm3": "the second of two layers has no rotary positions",
    "squeezenet": "each module has another width",
    "style": SHAPES,
    "swin": "the second of two blocks of a stage shifts its windows",
    "switch_transformers": "the first of two layers is dense, the second one has experts",
    "two_stages": SHAPES,
    "unet": "each level has another width",
    "unet_optimized": "each level has another width",
    "upernet": STAGES,
    "vocoder": "levels have different widths, and their convolutions different dilations",
    "wide-resnet": STAGES,
    "yolos": "positions are added between the two layers",
    "zamba2": (
        "the first of two pairs of layers reads the embedding both as its input and as the embedding"
    ),
}
"""Reason why a model has no repeated layers, or why layers that a reader expects are not repeated,
by name of the model.
"""
TEXT = """# Repeated layers

This page lists the repeated layers that autopipe finds in models. `autopipe inspect MODEL` prints
them for one model. `python scripts/layer_classes.py` writes this page, here with {versions}.

Layers are repeated if their operators, attributes, shapes and wiring are equal (`find_layers` in
`autopipe/passes/analysis/layers.py`). Names of parameters and nodes only name the result. Layers of
one name are numbered together. [Constraints and placements](../guides/manual-placement.md) select
layers by these names and numbers.

The exported models are small: most have two to four layers. If a model has two layers that differ,
larger versions of it can have repeated layers. The columns contain:

- *source*: the zoo of autopipe, an exporter of torch (`torch.onnx.export` with `dynamo=True` or
  `dynamo=False`), `light` for networks that ship with onnx, or `hand` for graphs of
  `tests/exports`.
- *nodes*: number of nodes after cleaning and fusion.
- *repeated layers*: number of layers × name (nodes per layer); in brackets, layers inside a layer.
  Classes of one name have their numbers.
- *covered*: percentage of the nodes that belong to repeated layers.
- *lines*: number of lines of the stage file of the whole model, with `codegen --style flat` → with
  one function per class of repeated layers.

**{passed} of {count} rows have repeated layers.**

"""


def main() -> int:
    """Find the layers of the chosen models and write the table. Return 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="read only models whose name contains PATTERN"
    )
    parser.add_argument(
        "--table", type=Path, default=TABLE, metavar="FILE", help="the page with the table"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="one small model: checks that this script runs"
    )
    arguments = parser.parse_args()
    only = SMALLEST if arguments.tiny else arguments.only
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = _former_rows(arguments.table) if only else {}
    for model, source, path, dims in _files(only):
        try:
            row = _row(model, source, path, dims)
        except AutopipeError as error:
            row = (model, source, "", "", "", error.message)
        rows[model, source] = row
        print("  ".join(row), flush=True)
    _write(rows, arguments.table)
    return 0


def _files(only: str) -> Iterator[tuple[str, str, Path, dict[str, int]]]:
    """Yield (model, source, file, sizes of symbolic dimensions) for each chosen model."""
    with tempfile.TemporaryDirectory() as folder:
        for name in MODELS:
            if only in name:
                path = Path(folder) / f"{name}.onnx"
                build(configure(name, {"weights": "none"})).save(path)
                yield name, "zoo", path, {}
        seen = set[tuple[str, str]]()
        for export in sorted((each.export for each in all_journeys()), key=_order):
            exporter = export.exporter.partition("@")[0]
            if only not in export.model or (export.model, exporter) in seen:
                continue
            seen.add((export.model, exporter))
            try:
                path = onnx_file(export, Path(folder))
            except Exception as error:  # noqa: BLE001 - exporters raise exceptions of any class
                print(f"{export.name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            dims = dict.fromkeys(symbols(path), SEQUENCE) if export.dynamic else {}
            if limit := MOST.get(export.name):
                name, _, size = limit.rpartition("=")
                dims[name] = int(size)
            yield export.model, EXPORTERS.get(exporter, exporter), path, dims


def _order(export: Export) -> tuple[str, str, bool, bool]:
    """Return the key by which static exports precede dynamic exports of a model."""
    return export.model, export.exporter, export.dynamic, export.loss


def _row(model: str, source: str, path: Path, dims: dict[str, int]) -> tuple[str, ...]:
    """Return the cells of the row of a model."""
    inputs = FIXED_INPUTS.get(model)
    read = read_model(path, dims=dims, fixed_inputs=inputs, with_unsupported=True)
    graph = read.graph
    found = summarize_layers(graph, ())
    covered = sum(each.count * each.nodes for each in found)
    return (
        model,
        source,
        str(len(graph.nodes)),
        ", ".join(_text(each, found) for each in found),
        f"{covered / max(1, len(graph.nodes)):.0%}",
        _lines(read),
        REASONS.get(model, "") if 2 * covered < len(graph.nodes) else "",
    )


def _lines(model: Model) -> str:
    """Return the number of lines of the stage file of a model on one device in both forms; "" if
    the model contains operators for which no code is generated.
    """
    try:
        program = one_device_program(model.graph, 1, model.batch or 1, model.loss or None)
        (stage,) = program.stages
        texts = [
            emit_stage(stage, "A stage.", style, is_training=program.train).text
            for style in ("flat", "layers")
        ]
    except AutopipeError:
        return ""
    flat, layered = (text.count("\n") for text in texts)
    return f"{flat} → {layered}"


def _text(layer: LayerSummary, among: Sequence[LayerSummary]) -> str:
    """Return a class of layers for the table, with its numbers if another class of `among` has its
    name.
    """
    inside = ", ".join(_text(each, layer.inner) for each in layer.inner)
    is_shared = sum(each.name == layer.name for each in among) > 1 and layer.numbers
    numbers = f" {layer.numbers}" if is_shared else ""
    return (
        f"{layer.count} × {layer.name}{numbers} ({layer.nodes}){f' [{inside}]' if inside else ''}"
    )


def _former_rows(table: Path) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return the rows of the page by model and source."""
    if not table.exists():
        return {}
    lines = table.read_text(encoding="utf-8").splitlines()
    rows = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in lines
        if line.startswith("|")
    ]
    return {(row[0], row[1]): row for row in rows[2:]}


def _write(rows: dict[tuple[str, str], tuple[str, ...]], table: Path) -> None:
    packages = ("torch", "transformers", "onnx")
    text = TEXT.format(
        versions=", ".join(f"{name} {version(name)}" for name in packages),
        passed=sum(bool(row[3]) for row in rows.values()),
        count=len(rows),
    )
    lines = [f"| {' | '.join(row)} |" for row in (HEADER, ("---",) * len(HEADER))]
    lines += [f"| {' | '.join(rows[key])} |" for key in sorted(rows)]
    table.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
