"""Models of the zoo as an exporter writes them in training mode: with Dropout at the usual places,
with batch statistics.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx
from onnx import TensorProto, helper

from autopipe.configs.zoo import build, configure
from autopipe.ir.graph import Graph
from autopipe.passes.frontend import read_model
from benchmarks.small_models import SIZES

GPT = {
    "layers": "2", "hidden": "24", "heads": "6", "vocabulary": "48", "sequence": "12"
}  # fmt: skip
DROPPED = frozenset({"Softmax", "Add", "Gather"})
"""What Dropout stands behind: attention's weights, products with a bias, and embeddings, that of
positions too.
"""


def save_with_dropout(path: Path, ratio: float = 0.1, weights: str = "none") -> None:
    """Write a small GPT with its loss and Dropout in training mode."""
    build(configure("gpt", {**GPT, "loss": "true", "weights": weights})).save(path)
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    graph.initializer.append(helper.make_tensor("dropout/ratio", TensorProto.FLOAT, [], [ratio]))
    graph.initializer.append(helper.make_tensor("dropout/training", TensorProto.BOOL, [], [True]))
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type in DROPPED and (node.op_type != "Add" or node.input[1].endswith(".bias")):
            name, node.output[0] = node.output[0], f"{node.output[0]}/full"
            operands = [node.output[0], "dropout/ratio", "dropout/training"]
            nodes.append(helper.make_node("Dropout", operands, [name], f"{node.name}/Dropout"))
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(model, str(path))


def save_with_batch_statistics(path: Path, weights: str = "none") -> None:
    """Write a small ResNet with its loss and BatchNormalization in training mode, as torch's
    exporter does.
    """
    build(
        configure("wide-resnet", {**SIZES["wide-resnet"], "loss": "true", "weights": weights})
    ).save(path)
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            node.attribute.append(helper.make_attribute("training_mode", 1))
            node.output.extend(f"{node.output[0]}/{name}" for name in ("mean", "variance"))
    onnx.save(model, str(path))


@lru_cache
def graph_with_batch_statistics(samples: int) -> tuple[Graph, str]:
    """The graph of training it on a micro-batch, parameters to be drawn, and its loss."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save_with_batch_statistics(path)
        model = read_model(path, batch=samples)
    return model.graph, model.loss


@lru_cache
def graph_with_dropout(samples: int) -> tuple[Graph, str]:
    """The graph of training it on a micro-batch, parameters to be drawn, and its loss."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        save_with_dropout(path)
        model = read_model(path, batch=samples)
    return model.graph, model.loss
