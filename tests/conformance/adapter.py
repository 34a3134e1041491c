"""onnx's backend interface over our emission: the emitted forward of a model, as one stage, is run
as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx.backend.base import Backend, BackendRep

from autopipe.backends.torch.codegen.stage import emit_forward
from autopipe.backends.torch.runtime import operators
from autopipe.backends.torch.runtime.random_numbers.random_streams import RandomStreams
from autopipe.backends.torch.runtime.step.precision import set_matmul_precision
from autopipe.ir.graph import DType, Graph
from autopipe.ir.ops import signature_of, space_of
from autopipe.ir.program import Compute, StageCode
from tests.conformance.importer import import_model


def stage_of(graph: Graph) -> StageCode:
    """The whole graph as one stage of one device."""
    return StageCode(
        stage=0,
        devices=(0,),
        inputs=graph.inputs,
        outputs=tuple(graph.type_of(name) for name in graph.outputs),
        parameters=tuple(
            (index, parameter.value) for index, parameter in enumerate(graph.parameters)
        ),
        constants=tuple(enumerate(graph.constants)),
        operations=tuple(
            Compute(index, signature_of(graph, node)) for index, node in enumerate(graph.nodes)
        ),
    )


def forward_of(text: str) -> Any:
    """The function that the text of a forward defines."""
    scope: dict[str, Any] = {"torch": torch, "F": F, "operators": operators}
    exec(compile(text, "<stage>", "exec"), scope)
    return scope["forward"]


def to_tensor(array: np.ndarray, device: str | torch.device = "cpu") -> torch.Tensor:
    """A tensor of the array's numbers and type."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).to(device)
    dtype = DType(array.dtype.name)
    if dtype.is_float8:
        return (
            torch.from_numpy(array.view(np.uint8).copy())
            .view(getattr(torch, dtype.torch_name))
            .to(device)
        )
    if dtype.packed_bits:
        array = (
            array.view(np.uint8) if dtype is DType.FLOAT4E2M1 else array.astype(dtype.torch_name)
        )
    return torch.from_numpy(np.array(array, order="C")).to(device)


def to_array(tensor: torch.Tensor, dtype: DType | None = None) -> np.ndarray:
    """The numbers of a tensor, which is how numbers of `dtype` are held."""
    if dtype is DType.FLOAT4E2M1 or (dtype is not None and dtype.is_float8):
        assert tensor.dtype == getattr(torch, dtype.torch_name)
        return (
            tensor.cpu()
            .contiguous()
            .view(torch.uint8)
            .numpy()
            .view(getattr(ml_dtypes, dtype.value))
        )
    if dtype is not None and dtype.packed_bits:
        return tensor.cpu().numpy().astype(getattr(ml_dtypes, dtype.value))
    plain = tensor.detach().cpu().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


@dataclass(slots=True)
class Deferred(BackendRep):
    """A model that becomes a graph when its inputs come: shapes may depend on their numbers."""

    model: onnx.ModelProto
    device: str

    def run(self, inputs: Sequence[Any], **kwargs: Any) -> tuple[np.ndarray, ...]:
        arrays = [np.asarray(each) for each in inputs]
        imported = import_model(self.model, arrays)
        graph = imported.graph
        for node in graph.nodes:
            space_of(graph, node)
        names = [each.name for each in graph.inputs]
        given = dict(zip(fed_names(self.model, arrays), arrays, strict=True))
        held = SimpleNamespace(
            device=torch.device(self.device),
            random=RandomStreams(torch.device(self.device)),
            training=True,
            **{
                f"w{index}": to_tensor(array, self.device)
                for index, array in enumerate(imported.weights)
            },
            **{
                f"c{index}": to_tensor(each.array, self.device)
                for index, each in enumerate(graph.constants)
            },
        )
        forward = forward_of(emit_forward(stage_of(graph)).text)
        results = forward(held, *(to_tensor(given[name], self.device) for name in names))
        for name, result in zip(graph.outputs, results, strict=True):
            assert tuple(result.shape) == graph.type_of(name).shape, (
                f"{name}: inferred {graph.type_of(name).shape}"
            )
        return tuple(
            to_array(each, graph.type_of(name).dtype)
            for name, each in zip(graph.outputs, results, strict=True)
        )


def fed_names(model: onnx.ModelProto, arrays: Sequence[np.ndarray]) -> list[str]:
    """Names of the inputs that `arrays` belong to: initializers listed among the inputs are not
    fed.
    """
    held = {each.name for each in model.graph.initializer}
    names = [each.name for each in model.graph.input if each.name not in held]
    return names if len(names) == len(arrays) else [each.name for each in model.graph.input]


class EmissionBackend(Backend):
    """Runs models by emitting them."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Deferred:
        # As generated programs do: torch's default for convolutions on CUDA is TF32.
        set_matmul_precision("fp32")
        return Deferred(model, device.lower())

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU" or (device == "CUDA" and torch.cuda.is_available())
