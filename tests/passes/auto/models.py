"""Models of a few operators, on which a search takes no time."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from autopipe.configs.configuration import load_configuration, resolve_cluster


def layers(path, count=3, width=64):
    """As many products and rectifiers after one another, the mean of squares as the loss; the batch
    is open.
    """
    nodes = []
    weights = []
    value = "x"
    for number in range(count):
        weights.append(
            numpy_helper.from_array(np.full((width, width), 0.01, np.float32), f"w{number}")
        )
        nodes.append(
            helper.make_node("MatMul", [value, f"w{number}"], [f"h{number}"], f"product{number}")
        )
        nodes.append(helper.make_node("Relu", [f"h{number}"], [f"r{number}"], f"relu{number}"))
        value = f"r{number}"
    nodes.append(helper.make_node("Mul", [value, value], ["square"], "square"))
    nodes.append(helper.make_node("ReduceMean", ["square"], ["loss"], "loss", keepdims=0))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])]
    outputs = [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])]
    graph = helper.make_graph(nodes, "layers", inputs, outputs, weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return path


def cluster(devices, preset="v100-32gb"):
    return resolve_cluster(load_configuration(words={"--gpus": str(devices), "--cluster": preset}))
