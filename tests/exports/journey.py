"""From an export to verified ranks, through the command line: plan, codegen, launch, verify."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopipe.cli.main import main
from autopipe.passes.frontend import read_model
from tests.exports.architectures import SEQUENCE
from tests.exports.export import Export, onnx_file
from tests.exports.light import LIGHT

SETTINGS = {
    "gpt2_merged": ("model.inputs.use_cache_branch=true",),
    "qwen2_vision": ("model.batch_axes.position_ids=1",),
}
"""What a model's file does not tell."""
MOST = {
    "vits_text-torchscript-static-forward": "/model/Range_output_0:0=64",
    "matcha-torchscript-static-forward": "/Range_output_0:0=64",
    "matcha-dynamo-static-loss": "arange:0=64",
}
"""The most numbers that data may give a Range."""
NORMALIZED = (
    "batch normalization is folded into the weights before it: each is a function of several "
    "parameters"
)
SHIFTED = "the scales of the normalizations are 1 + a parameter"
JOINED = "tables of relative positions are joined from several parameters"
FOLDED = {
    "resnet-torchscript-static-loss": NORMALIZED,
    "resnet-torchscript-dynamic-loss": NORMALIZED,
    "resnet-dynamo-static-loss": NORMALIZED,
    "resnet-dynamo-dynamic-loss": NORMALIZED,
    "mobilevit-dynamo-static-loss": NORMALIZED,
    "efficientnet-torchscript-static-loss": NORMALIZED,
    "yolo-torchscript-static-loss": NORMALIZED,
    "gemma2-dynamo-dynamic-loss": SHIFTED,
    "gemma3-torchscript-dynamic-loss": SHIFTED,
    "recurrent_gemma-torchscript-static-loss": SHIFTED,
    "gemma3_vision-dynamo-static-loss": SHIFTED,
    "beit-dynamo-static-loss": JOINED,
    "detr-torchscript-static-loss": "queries are expanded, and no metadata say from which axes",
    "wav2vec2-dynamo-static-loss": "a weight is a direction times a length",
    "style-dynamo-static-loss": "the first image is a normalized parameter",
    "pvt-dynamo-static-loss": "tables of positions are resized and joined",
    "gan_discriminator-dynamo-static-loss": "weights are divided by their norms",
}
"""Exports whose training is refused, by name, and what the exporter computed of their parameters;
without the refusal they are trained as files that hold these tensors.
"""
NUMBERED = {
    "yolo_rows-torchscript-dynamic-forward": "each row has the number of its image in the batch",
}
"""Exports whose outputs micro-batches would change, by name, and why. Micro-batches are refused, so
the whole batch is one.
"""
DEVICES = 4
MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Journey:
    """One export and how it is planned."""

    export: Export
    strategy: str = "pipedream"
    micro_batch_size: int | None = None
    """The batch of the export where None."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the step."""
        return 1 if self.export.name in NUMBERED else MICRO_BATCHES

    @property
    def samples(self) -> int:
        """Samples of a micro-batch."""
        size = self.micro_batch_size or self.export.batch
        return MICRO_BATCHES * size // self.micro_batches

    @property
    def name(self) -> str:
        """The export's name and what is not the default."""
        other = [] if self.strategy == "pipedream" else [self.strategy]
        if self.micro_batch_size is not None:
            other.append(f"{self.export.batch}to{self.micro_batch_size}")
        return "-".join((self.export.name, *other))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a journey; differences are ‖a − b‖₂ / ‖b‖₂ of the worst tensor, None where it
    never got there.
    """

    journey: Journey
    nodes: tuple[int, int] | None = None
    """Nodes in the file, and in the graph that was planned."""
    stages: tuple[int, ...] = ()
    """Devices of each stage."""
    steps: int = 0
    """Steps that launch ran, each with a finite loss in training."""
    ranks_outputs: float | None = None
    outputs: float | None = None
    loss: float | None = None
    gradients: float | None = None
    updates: float | None = None
    buffers: float | None = None
    failure: str = ""
    """The command that failed and its error, "" where all went well."""


class CommandError(Exception):
    """A command of autopipe that ended with another code than 0."""


def all_journeys() -> tuple[Journey, ...]:
    """Every export by the default strategy, and some by others and on parts of a baked batch."""
    from tests.exports.export import all_exports
    from tests.exports.recent import recent_exports

    others = [
        Journey(Export(model, exporter, dynamic, loss, batch=4), strategy, micro_batch)
        for model, exporter, dynamic, loss, strategy, micro_batch in (
            ("gpt2", "dynamo", False, True, "data_parallel", None),
            ("bert", "torchscript", True, True, "data_parallel", None),
            ("resnet", "torchscript", False, True, "data_parallel", None),
            ("lstm", "dynamo", False, True, "data_parallel", None),
            ("dlrm", "torchscript", False, False, "data_parallel", None),
            ("gpt2", "dynamo", False, True, "pipedream", 2),
            ("llama", "torchscript", False, True, "pipedream", 1),
            ("t5", "dynamo", False, True, "pipedream", 2),
            ("vit", "torchscript", False, True, "pipedream", 2),
            ("dlrm", "dynamo", False, True, "pipedream", 2),
            ("lstm", "torchscript", False, False, "pipedream", 2),
        )
    ]
    return (*map(Journey, all_exports()), *others, *map(Journey, recent_exports()))


def travel(journey: Journey, folder: Path) -> Outcome:
    """Run the four commands in `folder`."""
    seen: dict[str, Any] = {}
    try:
        path = _exported(journey.export, folder)
        plan = _plan(journey, path, folder)
        assert plan["mode"] == ("train" if journey.export.loss else "infer")
        stages = json.loads((folder / "plan" / "plan.json").read_text(encoding="utf-8"))[
            "placement"
        ]["stages"]
        seen["stages"] = tuple(len(stage["devices"]) for stage in stages)
        planned = {
            node
            for stage in stages
            for start, stop in stage["nodes"]
            for node in range(start, stop)
        }
        seen["nodes"] = _nodes_in_file(path), len(planned)
        _command("codegen", folder / "plan")
        program = folder / "plan" / "program"
        seen["steps"] = _launched(journey, program)
        verified = _command("verify", program, "--device", "cpu", accept_difference=True)
    except CommandError as error:
        return Outcome(journey, **seen, failure=re.sub(r"\S*/(\S+\.onnx)", r"\1", str(error)))
    for check in verified["checks"]:
        field = _FIELDS[check["compared"].removesuffix(" without Dropout")]
        seen[field] = float(check["relative_difference"])
    worst = max(verified["checks"], key=lambda check: float(check["relative_difference"]))
    failure = (
        "" if verified["equal"] else f"verify: {worst['compared']} differ, most in {worst['worst']}"
    )
    return Outcome(journey, **seen, failure=failure)


def _exported(export: Export, folder: Path) -> Path:
    """The file. Raises CommandError where its exporter fails, in whatever way."""
    try:
        return onnx_file(export, folder)
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise CommandError(
            f"export: {type(error).__name__}: {lines[0] if lines else ''}"
        ) from error


def _plan(journey: Journey, path: Path, folder: Path) -> dict[str, Any]:
    """Plan; where training is refused, check that, and plan to train the tensors that the refusal
    is about. Where micro-batches are refused, check that, too, and plan without.
    """
    arguments = _plan_arguments(journey, path, folder)
    if journey.export.name in NUMBERED:
        divided = [*arguments, "--micro-batches", MICRO_BATCHES]
        _require_refused(divided, folder / "refused", "micro-batches would change the output")
    if journey.export.name in FOLDED:
        _require_refused(arguments, folder / "refused", "training is refused")
        model = read_model(path, dims=dict.fromkeys(symbols(path), SEQUENCE))
        names = [each.value.name for each in model.tensors if each.refused]
        arguments += ["--set", f"model.trainable={json.dumps(names)}"]
    return _command("plan", *arguments, "-o", folder / "plan")


def _require_refused(arguments: list[object], folder: Path, reason: str) -> None:
    """Raise CommandError unless `plan` fails with an error that contains `reason`."""
    try:
        _command("plan", *arguments, "-o", folder)
    except CommandError as error:
        if reason in str(error):
            return
        raise
    raise CommandError(f"plan: no error says that {reason}")


_FIELDS = {
    "outputs of the ranks": "ranks_outputs",
    "outputs of one device": "outputs",
    "loss of the ranks": "loss",
    "gradients of the ranks": "gradients",
    "parameters after 2 updates": "updates",
    "buffers after a step": "buffers",
}
"""Field of an outcome by what a check of `verify` compares."""


def _plan_arguments(journey: Journey, path: Path, folder: Path) -> list[object]:
    export = journey.export
    samples = journey.micro_batches * journey.samples
    batch = ["--batch-size", samples, "--micro-batches", journey.micro_batches]
    arguments = [
        path,
        "--gpus",
        DEVICES,
        "--cluster",
        "cpu-local",
        "--strategy",
        journey.strategy,
        *batch,
    ]
    arguments += dimensions(path)
    arguments += ["--dim", MOST[export.name]] if export.name in MOST else []
    arguments += [word for each in SETTINGS.get(export.model, ()) for word in ("--set", each)]
    if export.loss and export.model in LIGHT:
        written = folder / "loss.yaml"
        scores = json.dumps(LIGHT[export.model])
        written.write_text(
            f"loss: {{cross_entropy: {{logits: {scores}, labels: labels}}}}\n", encoding="utf-8"
        )
        arguments += ["--config", written]
    return arguments


def dimensions(path: Path) -> list[str]:
    """The flags of `plan` that bind the symbols of a dynamic export's inputs but for the batch."""
    return [word for name in symbols(path) for word in ("--dim", f"{name}={SEQUENCE}")]


def symbols(path: Path) -> list[str]:
    """The symbols of a dynamic export's inputs behind axis 0; sums of them follow from these."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    shapes = [each.type.tensor_type.shape.dim for each in graph.input]
    return sorted(
        {each.dim_param for shape in shapes for each in shape[1:] if each.dim_param.isidentifier()}
    )


def _nodes_in_file(path: Path) -> int:
    import onnx

    return len(onnx.load(path, load_external_data=False).graph.node)


def _launched(journey: Journey, program: Path) -> int:
    """Train two steps or infer one; the number of steps."""
    count = 2 if journey.export.loss else 1
    steps = _command("launch", program, "--device", "cpu", "--steps", count)["steps"]
    if len(steps) != count:
        raise CommandError(f"launch: {len(steps)} steps of {count}")
    if journey.export.loss and not all(math.isfinite(step["loss"]) for step in steps):
        raise CommandError(f"launch: losses {[step['loss'] for step in steps]}")
    return count


def _command(name: str, *arguments: object, accept_difference: bool = False) -> dict[str, Any]:
    """The last that a command prints with --json. With `accept_difference` a failed comparison is a
    result too.

    The command line's own entry is called in this process: starting Python and torch for each
    command would take longer than all that the commands do. Ranks are processes of their own.
    """
    printed = io.StringIO()
    noted = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(noted):
        code = main([name, *map(str, arguments), "--json"])
    objects = [json.loads(line) for line in printed.getvalue().splitlines()]
    if code == 0:
        return dict(objects[-1])
    if accept_difference and objects and "checks" in objects[0]:
        return dict(objects[0])
    if objects and "error" in objects[-1]:
        error = objects[-1]["error"]
        place = f"{error['where']}: " if error["where"] else ""
        raise CommandError(f"{name}: {place}{error['message']}")
    raise CommandError(f"{name}: exit code {code}: {noted.getvalue()[-300:]}")
