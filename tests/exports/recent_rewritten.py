"""Files that tools make of exported ones: optimized, quantised, converted to another opset or type,
merged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import version_converter

Rewrite = Callable[[Path, Path], None]
"""Reads one file and writes another."""


def _optimized(kind: str, heads: int, width: int, half: bool = False) -> Rewrite:
    """By onnxruntime.transformers.optimizer, which puts operators of com.microsoft in the place of
    patterns.
    """

    def rewrite(source: Path, target: Path) -> None:
        from onnxruntime.transformers.fusion_options import FusionOptions
        from onnxruntime.transformers.optimizer import optimize_model

        options = FusionOptions(kind)
        options.enable_nhwc_conv = options.enable_group_norm = (
            False  # They have kernels on GPUs only.
        )
        optimized = optimize_model(
            str(source), kind, heads, width, optimization_options=options, opt_level=0
        )
        if half:
            optimized.convert_float_to_float16(keep_io_types=True)
        optimized.save_model_to_file(str(target))

    return rewrite


def _by_sessions(source: Path, target: Path) -> None:
    """As ONNX Runtime's own session writes what it has optimized, short of one machine's
    layouts.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(target)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 3
    onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def _dynamic_int8(source: Path, target: Path) -> None:
    """Weights in int8; the scale of what meets them is measured as it comes."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, target)


def _static_int8(source: Path, target: Path) -> None:
    """Weights and activations in int8 between pairs of QuantizeLinear and DequantizeLinear."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    class Drawn(CalibrationDataReader):  # type: ignore[misc]
        """Three batches of random numbers."""

        def __init__(self) -> None:
            self.batches = iter([_drawn(source, seed) for seed in range(3)])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.batches, None)

    quantize_static(source, target, Drawn(), quant_format=QuantFormat.QDQ, per_channel=True)


def _drawn(path: Path, seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    found = {}
    for each in onnx.load(path).graph.input:
        shape = [dimension.dim_value for dimension in each.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
        whole = np.issubdtype(dtype, np.integer)
        found[each.name] = (
            generator.integers(1, 40, shape) if whole else generator.standard_normal(shape)
        ).astype(dtype)
    return found


def _int4(source: Path, target: Path) -> None:
    """Weights of linear layers in blocks of 4-bit numbers (MatMulNBits)."""
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=16, is_symmetric=False)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target))


def _half(source: Path, target: Path) -> None:
    """By onnxruntime.transformers.float16, inputs and outputs in float32."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def _opset(version: int) -> Rewrite:
    """By onnx's own converter."""

    def rewrite(source: Path, target: Path) -> None:
        onnx.save(version_converter.convert_version(onnx.load(source), version), target)

    return rewrite


def _simplified(source: Path, target: Path) -> None:
    """Every shape inferred, and all initializers inputs too, as files before IR version 4 have
    them.
    """
    proto = onnx.shape_inference.infer_shapes(onnx.load(source))
    for each in proto.graph.initializer:
        proto.graph.input.append(
            onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims)
        )
    onnx.save(proto, target)


REWRITTEN: Mapping[str, tuple[str, Rewrite]] = {
    "bert_optimized": ("layoutlm-torchscript-static-forward", _optimized("bert", 2, 16)),
    "bert_optimized_half": (
        "layoutlm-torchscript-static-forward",
        _optimized("bert", 2, 16, half=True),
    ),
    "gpt2_optimized": ("gpt_neo-torchscript-static-forward", _optimized("gpt2", 2, 16)),
    "bert_fused": ("classic_bert-torchscript-dynamic-forward", _optimized("bert", 4, 32)),
    "bert_fused_loss": ("classic_bert-torchscript@14-static-loss", _optimized("bert", 4, 32)),
    "gpt2_fused": ("classic_gpt-torchscript-dynamic-forward", _optimized("gpt2", 4, 32)),
    "gpt2_fused_loss": ("classic_gpt-torchscript@14-dynamic-loss", _optimized("gpt2", 4, 32)),
    "bart_optimized": ("bart-torchscript-static-forward", _optimized("bart", 2, 16)),
    "vit_optimized": ("deit-dynamo-static-forward", _optimized("vit", 2, 16)),
    "unet_optimized": ("unet-torchscript-static-forward", _optimized("unet", 0, 0)),
    "phi3_optimized": ("phi3-dynamo-static-forward", _optimized("gpt2", 2, 16)),
    "roberta_session": ("roberta-dynamo-static-forward", _by_sessions),
    "convnext_session": ("convnext-torchscript-static-forward", _by_sessions),
    "albert_int8": ("albert-torchscript-static-forward", _dynamic_int8),
    "lstm_int8": ("tacotron-torchscript-static-forward", _dynamic_int8),
    "resnet_qdq": ("regnet-torchscript-static-forward", _static_int8),
    "distilbert_qdq": ("distilbert-torchscript-static-forward", _static_int8),
    "qwen2_int4": ("qwen2-dynamo-static-forward", _int4),
    "starcoder2_half": ("starcoder2-torchscript-static-forward", _half),
    "electra_opset17": ("electra-torchscript@13-static-forward", _opset(17)),
    "stablelm_opset19": ("stablelm-torchscript@14-static-forward", _opset(19)),
    "stablelm_opset21": ("stablelm-dynamo-static-forward", _opset(21)),
    "olmo2_opset22": ("olmo2-dynamo-static-forward", _opset(22)),
    "mistral_opset23": ("mistral-dynamo-static-forward", _opset(23)),
    "gru_inputs": ("gru-torchscript-static-forward", _simplified),
}
"""By name what is rewritten, and how."""
