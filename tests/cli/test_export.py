"""`autopipe export` and `autopipe.export`: what is written trains as the module does, or is
rejected.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopipe
from autopipe.backends.torch.exporter import make_subject
from autopipe.backends.torch.module_gradients import evaluate_module
from autopipe.ir.errors import AutopipeError, ConfigurationError, VerificationError
from autopipe.passes.frontend import read_model
from autopipe.passes.frontend.scopes import layers_of
from tests.cli.command_line import CommandLine

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("here")]
SAMPLES = 4
TOKENS = 3
WIDTH = 6
CLASSES = 5


class Reversed(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


def stopped(x: torch.Tensor, h: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return h + 0.5 * x.detach()


def without_grad(x: torch.Tensor, h: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(layer(x))
    return h * gate


def straight_through(x: torch.Tensor, h: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return h + (torch.round(h * 4) / 4 - h).detach()


def backwards(x: torch.Tensor, h: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return Reversed.apply(h)  # type: ignore[no-any-return, no-untyped-call]


def data_of_a_tensor(x: torch.Tensor, h: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    return h + layer.weight.data.sum()  # type: ignore[operator, union-attr]


class Classifier(nn.Module):
    """An embedding, a normalised layer, and a part that changes how gradients flow."""

    def __init__(
        self, part: Callable[..., torch.Tensor] | None = None, padding: int | None = None
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH, padding_idx=padding)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.part = part

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens).mean(1)
        h = self.drop(self.norm(torch.tanh(self.layer(x))))
        if self.part is not None:
            h = self.part(x, h, self.layer)
        return self.head(h)  # type: ignore[no-any-return]


def example() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(CLASSES, (SAMPLES, TOKENS), generator=generator)
    return tokens, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def made(*arguments: Any, **keywords: Any) -> Classifier:
    torch.manual_seed(0)
    return Classifier(*arguments, **keywords)


def written(module: nn.Module, folder: Path, loss: Any = F.cross_entropy) -> Path:
    tokens, labels = example()
    return autopipe.export(module, tokens, folder / "model.onnx", loss=loss, labels=labels)


@pytest.mark.parametrize("part", [stopped, without_grad, straight_through])
def test_stopped_gradients_stay_stopped(part: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    path = written(made(part), tmp_path)
    assert "StopGradient" in [each.op for each in read_model(path).graph.nodes]


def test_rows_of_padding_have_no_gradient(tmp_path: Path) -> None:
    path = written(made(padding=1), tmp_path)
    assert "StopGradient" in [each.op for each in read_model(path).graph.nodes]


def test_a_backward_of_its_own_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match=r"table\.weight|layer\.weight") as raised:
        written(made(backwards), tmp_path)
    assert "Reversed" in raised.value.hint
    assert not (tmp_path / "model.onnx").exists()


def test_hooks_that_change_gradients_are_rejected(tmp_path: Path) -> None:
    module = made()
    module.head.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(VerificationError, match=r"head\.weight") as raised:
        written(module, tmp_path)
    assert "hooks" in raised.value.hint


def test_the_module_stays_as_it_is(tmp_path: Path) -> None:
    module = made().train()
    module.norm.eval()
    for parameter in module.table.parameters():
        parameter.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    modes = [each.training for each in module.modules()]
    written(module, tmp_path)
    assert modes == [each.training for each in module.modules()]
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert [name for name, each in module.named_parameters() if not each.requires_grad] == [
        "table.weight"
    ]
    assert all(each.grad is None for each in module.parameters())


@pytest.mark.parametrize("trains", [False, True])
def test_modes_are_those_of_the_submodules(trains: bool, tmp_path: Path) -> None:
    module = made().train()
    module.norm.train(trains)
    module.drop.train(not trains)
    graph = onnx.load(written(module, tmp_path)).graph
    (norm,) = [node for node in graph.node if node.op_type == "BatchNormalization"]
    modes = [each.i for each in norm.attribute if each.name == "training_mode"]
    assert any(modes) is trains
    assert ("Dropout" in [node.op_type for node in graph.node]) is not trains


def test_frozen_parameters_and_names_are_kept(tmp_path: Path) -> None:
    module = made()
    for parameter in module.layer.parameters():
        parameter.requires_grad_(False)
    graph = read_model(written(module, tmp_path)).graph
    assert {each.value.name for each in graph.parameters if each.trainable} == {
        "table.weight", "norm.weight", "norm.bias", "head.weight", "head.bias",
    }  # fmt: skip
    assert {each.value.name for each in graph.parameters} == module.state_dict().keys() - {
        "norm.num_batches_tracked"
    }


class Remembering(nn.Module):
    """A layer whose buffer follows its inputs, and an entry of the `state_dict` that is no
    tensor.
    """

    seen: torch.Tensor

    def __init__(self, follows: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.follows = follows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.follows:
            self.seen.mul_(0.9).add_(x.detach().mean(0))
        return self.layer(x - self.seen)  # type: ignore[no-any-return]

    def get_extra_state(self) -> object:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        pass


class Versioned(nn.Linear):
    """A layer whose extra state is a tensor."""

    def get_extra_state(self) -> object:
        return torch.tensor([2, 1])

    def set_extra_state(self, state: object) -> None:
        pass


class Changing(nn.Module):
    """A layer beside a part whose forward changes `state`."""

    state: torch.Tensor

    def __init__(self, change: Callable[[Any, torch.Tensor], None]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, CLASSES)
        self.other = nn.Linear(WIDTH, CLASSES)
        self.table = nn.Embedding(CLASSES, CLASSES, max_norm=0.5)
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=True)
        self.register_buffer("state", torch.ones(1))
        self.register_buffer("count", torch.tensor(1))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self, x)
        return self.layer(x)  # type: ignore[no-any-return]


def assign(module: Changing, x: torch.Tensor) -> None:
    module.count = module.count + 1


def count_floats(module: Changing, x: torch.Tensor) -> None:
    module.state += 1


def overwrite(module: Changing, x: torch.Tensor) -> None:
    with torch.no_grad():
        module.state.copy_(x.mean().reshape(1))


def average_parameters(module: Changing, x: torch.Tensor) -> None:
    with torch.no_grad():
        module.other.weight.mul_(0.5).add_(module.layer.weight)


def renormalise(module: Changing, x: torch.Tensor) -> None:
    module.table(torch.tensor([1]))


def normalise_instances(module: Changing, x: torch.Tensor) -> None:
    module.norm(torch.stack([x, x * x, x + 1], -1))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (assign, "count"),
        (count_floats, "state"),
        (overwrite, "state"),
        (average_parameters, r"other\.weight"),
        (renormalise, r"table\.weight"),
        (normalise_instances, r"norm\.running_mean"),
    ],
)
def test_changes_in_the_forward_that_a_file_has_not_are_rejected(
    change: Callable[[Any, torch.Tensor], None], name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Changing(change)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(VerificationError, match=f"changes {name}"):
        written_rows(module, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_forward_that_runs_again_must_change_nothing(tmp_path: Path) -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.part, x, use_reentrant=False)  # type: ignore[no-any-return]

    module = Recomputed()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(
        VerificationError, match=r"changes part\.1\.running_mean, .* twice per step"
    ):
        written_rows(module, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    module.part[1].eval()
    written_rows(module, tmp_path)


def test_a_module_with_a_part_under_several_names_stays_as_it_is(tmp_path: Path) -> None:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
    module = nn.Sequential(block, block, nn.Linear(WIDTH, CLASSES))
    before = {
        name: (tensor, tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()
    }
    written_rows(module, tmp_path)
    subject = make_subject(
        module, torch.randn(SAMPLES, WIDTH), F.cross_entropy, torch.arange(SAMPLES)
    )
    moved = evaluate_module(subject, subject.tensors, ulps=1e4).gradients["0.0.weight"]
    kept = evaluate_module(subject, subject.tensors).gradients["0.0.weight"]
    assert moved is not None and kept is not None and not (moved == kept).all()
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert tensor is before[name][0] and torch.equal(tensor, before[name][1])


def test_parameters_in_one_memory_are_rejected(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    module[2].weight = nn.Parameter(module[0].weight.data.t())
    with pytest.raises(
        ConfigurationError,
        match=r"'0\.weight' and '2\.weight' are different tensors that overlap in memory",
    ):
        written_rows(module, tmp_path)
    joined = torch.randn(WIDTH, 2 * WIDTH)
    module[0].weight, module[2].weight = (nn.Parameter(part) for part in joined.chunk(2, 1))
    written_rows(module, tmp_path)


def test_a_cumulative_average_is_rejected(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None))
    with pytest.raises(ConfigurationError, match=r"BatchNorm1d '1' uses momentum=None"):
        written_rows(module, tmp_path)
    module[1].eval()
    written_rows(module, tmp_path)


def test_hooks_after_the_backward_are_rejected(tmp_path: Path) -> None:
    module = nn.Linear(WIDTH, CLASSES)
    module.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(VerificationError, match="hooks of weight run after the backward"):
        written_rows(module, tmp_path)


def test_data_of_an_activation_are_rejected(tmp_path: Path) -> None:
    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.layer(2 * x).data  # type: ignore[no-any-return]

    with pytest.raises(ConfigurationError, match=r"use detach\(\)"):
        written_rows(Copying(), tmp_path)


def test_a_file_that_torch_cannot_make_is_told_in_one_line(tmp_path: Path) -> None:
    module = nn.utils.parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ConfigurationError, match="No ONNX function found for <OpOverload"):
        written_rows(module, tmp_path)


class Scaled(nn.Module):
    """A module with the names of its inputs and of a part of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Parameter(torch.ones(WIDTH))
        self.labels = nn.Parameter(torch.zeros(WIDTH))
        self.loss = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x * self.input + self.labels)  # type: ignore[no-any-return]


class Projected(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, CLASSES))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x @ self.weight, labels)


def test_parameters_named_as_inputs_and_as_the_loss_keep_their_names(tmp_path: Path) -> None:
    rows = torch.randn(SAMPLES, WIDTH)
    labels = torch.arange(SAMPLES)
    path = autopipe.export(Scaled(), rows, tmp_path / "model.onnx", loss=Projected(), labels=labels)
    graph = read_model(path).graph
    assert [each.name for each in graph.inputs] == ["input_", "labels_"]
    names = {each.value.name for each in graph.parameters if each.trainable}
    assert names == {"input", "labels", "loss.weight", "loss_.weight"}
    with pytest.raises(ConfigurationError, match="the module uses the tensor name 'loss'"):
        named = nn.Linear(WIDTH, CLASSES)
        named.loss = nn.Parameter(torch.ones(1))
        written_rows(named, tmp_path)


def test_weights_of_a_module_leave_those_of_its_loss(command_line: CommandLine) -> None:
    module = Scaled()
    folder = command_line.folder
    rows = torch.randn(SAMPLES, WIDTH)
    labels = torch.arange(SAMPLES)
    autopipe.export(module, rows, folder / "model.onnx", loss=Projected(), labels=labels)
    safetensors.torch.save_file(Scaled().state_dict(), folder / "fresh.safetensors")
    words = (
        "checkpoint",
        "import",
        "fresh.safetensors",
        "--model",
        "model.onnx",
        "-o",
        "started.onnx",
    )
    assert "keep their weights: 'loss_.weight'" in command_line.done(*words).err


def test_a_buffer_that_the_file_cannot_change_is_rejected(tmp_path: Path) -> None:
    _, labels = example()
    rows = torch.randn(SAMPLES, WIDTH)
    path = tmp_path / "model.onnx"
    module = Remembering()
    with pytest.raises(VerificationError, match="changes seen, which"):
        autopipe.export(module, rows, path, loss=F.cross_entropy, labels=labels)
    assert not path.exists() and not module.seen.any()
    with pytest.warns(UserWarning, match="does not change seen, which"):
        autopipe.export(module, rows, path, loss=F.cross_entropy, labels=labels, check=False)


def test_an_entry_of_the_state_that_is_no_tensor_is_told(tmp_path: Path) -> None:
    _, labels = example()
    rows = torch.randn(SAMPLES, WIDTH)
    with pytest.warns(UserWarning, match=r"_extra_state \(a dict, no tensor\)"):
        autopipe.export(
            Remembering(False), rows, tmp_path / "model.onnx", loss=F.cross_entropy, labels=labels
        )


def test_an_extra_state_that_is_a_tensor_is_stored(tmp_path: Path) -> None:
    proto = onnx.load(written_rows(Versioned(WIDTH, CLASSES), tmp_path))
    held = {each.name: onnx.numpy_helper.to_array(each) for each in proto.graph.initializer}
    assert held["autopipe.state/_extra_state"].tolist() == [2, 1]


def test_the_state_is_recorded_with_ties_and_counters(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.BatchNorm1d(WIDTH),
    )
    model[2].weight = model[0].weight
    model[3].eval()
    model.add_module("unused", nn.Identity())
    model.unused.register_parameter("scale", nn.Parameter(torch.arange(3.0)))
    model.unused.register_buffer("temporary", torch.ones(2), persistent=False)
    proto = onnx.load(written_rows(model, tmp_path))
    (record,) = [
        json.loads(each.value) for each in proto.metadata_props if each.key == "autopipe.state_dict"
    ]
    assert list(record["names"]) == list(model.state_dict())
    held = {each.name: onnx.numpy_helper.to_array(each) for each in proto.graph.initializer}
    assert record["names"]["2.weight"] == record["names"]["0.weight"] == "0.weight"
    assert record["counts"] == {record["names"]["1.num_batches_tracked"]: 1}
    for name, tensor in model.state_dict().items():
        assert torch.equal(torch.from_numpy(held[record["names"][name]].copy()), tensor)


def written_rows(module: nn.Module, folder: Path) -> Path:
    """Export a module of rows."""
    rows = torch.randn(SAMPLES, WIDTH)
    labels = torch.arange(SAMPLES)
    return autopipe.export(module, rows, folder / "model.onnx", loss=F.cross_entropy, labels=labels)


def test_layers_have_the_names_of_the_module(tmp_path: Path) -> None:
    module = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    )
    _, labels = example()
    rows = torch.randn(SAMPLES, WIDTH)
    path = autopipe.export(
        module, rows, tmp_path / "model.onnx", loss=F.cross_entropy, labels=labels
    )
    read = read_model(path)
    layers = dict(
        zip([node.op for node in read.graph.nodes], layers_of(read.source, read.graph), strict=True)
    )
    assert layers["Tanh"] == "1"
    assert layers["SoftmaxCrossEntropyLoss"] == ""


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_are_smoothed_as_the_loss_says(smoothing: float, tmp_path: Path) -> None:
    written(made().eval(), tmp_path, nn.CrossEntropyLoss(label_smoothing=smoothing))


class Attentive(nn.Module):
    """Attention that drops, of a sequence that is its own label."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.25, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        mixed = self.attention(x, x, x, need_weights=False)[0]
        causal = F.scaled_dot_product_attention(mixed, x, x, dropout_p=0.125, is_causal=True)
        return F.cross_entropy(self.head(causal).flatten(0, 1), labels.flatten())


def test_dropout_of_attention_and_an_input_that_is_given_twice_are_kept(tmp_path: Path) -> None:
    tokens, _ = example()
    torch.manual_seed(0)
    path = autopipe.export(
        Attentive(), {"tokens": tokens, "labels": tokens}, tmp_path / "model.onnx"
    )
    read = read_model(path)
    assert [each.name for each in read.graph.inputs] == ["tokens", "labels"]
    assert [each.op for each in read.graph.nodes].count("Dropout") == 2


class DroppingInPlace(nn.Module):
    """Dropouts whose operands are read before and after."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.drop = drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.silu(self.layer(x).unsqueeze(-1))
        before = torch.tanh(h)
        self.drop(h)
        return (before + torch.sigmoid(h)).flatten(1)


@pytest.mark.parametrize("drop", [nn.Dropout(0.25, inplace=True), nn.Dropout1d(0.25, inplace=True)])
def test_what_is_read_after_a_dropout_in_place_is_dropped(drop: nn.Module, tmp_path: Path) -> None:
    graph = read_model(written_rows(DroppingInPlace(drop), tmp_path)).graph
    following = {name: node for node in graph.nodes for name in node.inputs}
    (dropout,) = [node for node in graph.nodes if node.op == "Dropout"]
    (tanh,) = [node for node in graph.nodes if node.op == "Tanh"]
    reader = following[dropout.outputs[0]]
    if reader.op == "Mul":  # By a factor per channel.
        reader = following[reader.outputs[0]]
    assert reader.op == "Sigmoid"
    assert tanh.inputs[0] not in reader.inputs


def test_a_dropout_under_no_grad_has_no_gradient(tmp_path: Path) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)
            self.drop = nn.Dropout(0.25)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            with torch.no_grad():
                gate = self.drop(h)
            return h + gate  # type: ignore[no-any-return]

    assert "StopGradient" in [
        each.op for each in read_model(written_rows(Gated(), tmp_path)).graph.nodes
    ]


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return (h + torch.randn_like(h)).square().mean()


def test_random_numbers_are_told(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="random numbers"):
        autopipe.export(Drawing(), torch.ones(SAMPLES, WIDTH), tmp_path / "model.onnx")


def test_outputs_of_a_module_without_a_loss_are_compared(tmp_path: Path) -> None:
    tokens, _ = example()
    module = made().train()
    path = autopipe.export(module, tokens, tmp_path / "model.onnx")
    assert read_model(path).loss == ""
    assert module.drop.training


def test_a_missing_exporter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "onnxscript"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # As if it were not installed.
    with pytest.raises(ConfigurationError, match="onnxscript") as raised:
        written(made(), tmp_path)
    assert "extra 'export'" in raised.value.hint


def test_what_torch_cannot_trace_is_one_line(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(AutopipeError, match="trace"):
        autopipe.export(Branching(), torch.ones(2, 2), tmp_path / "model.onnx")


FACTORY = """
import torch
from torch import nn
from sizes import WIDTH


def factory():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    model[0].bias.requires_grad_(False)
    return model, torch.randn(4, WIDTH), nn.functional.cross_entropy, torch.tensor([0, 1, 2, 0])


def by_name():
    return {"module": nn.Linear(WIDTH, 1), "example": torch.ones(2, WIDTH)}


def failing():
    raise ValueError("no data")


def no_module():
    return "model", torch.ones(2, WIDTH)


def wrong():
    return nn.Linear(WIDTH, 1)
"""


@pytest.fixture
def command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return CommandLine.prepare(tmp_path, monkeypatch, capsys)


def test_the_command_exports_what_a_factory_returns(command_line: CommandLine) -> None:
    (command_line.folder / "small.py").write_text(FACTORY, encoding="utf-8")
    (command_line.folder / "sizes.py").write_text("WIDTH = 4\n", encoding="utf-8")
    shown = command_line.done("export", "small.py:factory", "-o", "small.onnx", "--json")
    data = json.loads(shown.out)
    assert (
        data["frozen"] == ["0.bias"]
        and data["inputs"] == ["input", "labels"]
        and data["parameters"] == 4
    )
    assert "3 gradients" in data["compared"]
    command_line.done("export", "small.py:by_name", "--no-check")
    assert (command_line.folder / "model.onnx").exists()
    command_line.refuses(
        2, ("export", "small.py:wrong"), "small.py:wrong returns a value of type Linear"
    )
    command_line.refuses(2, ("export", "small.py:absent"), "absent")
    command_line.refuses(
        2, ("export", "small.py:failing"), "small.py:failing raises ValueError: no data"
    )
    command_line.refuses(
        2, ("export", "small.py:no_module"), "the module is of type str, expected torch.nn.Module"
    )
    command_line.refuses(2, ("export", "small.py"), "is not the name of a function")
    command_line.refuses(2, ("export", "none.py:factory"), "none.py does not exist")
    command_line.refuses(2, ("export", "no_such_module:factory"), "no_such_module")
