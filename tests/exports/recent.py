"""Models of the last years as they are exported, optimized, quantised and built by hand: a table of
small files.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import nn

from tests.exports import (
    classic,
    decoders,
    detectors,
    other_models,
    recent_caches,
    recent_handmade,
    recent_images,
    recent_rewritten,
    recent_sound,
    recent_text,
    recent_torch,
    text_models,
    with_loss,
)
from tests.exports.architectures import perturb
from tests.exports.decoders import decoder_file, merge
from tests.exports.export import Export, onnx_file, write_torch
from tests.exports.recent_handmade import HANDMADE
from tests.exports.recent_rewritten import REWRITTEN
from tests.exports.with_loss import SEQUENCE, Tensors, WithLoss, without_loss

GROUPS: Mapping[ModuleType, Mapping[str, WithLoss]] = {
    text_models: text_models.TEXT,
    other_models: other_models.OTHER,
    recent_text: recent_text.TEXT,
    recent_images: recent_images.IMAGES,
    recent_sound: recent_sound.SOUND,
    recent_torch: recent_torch.TORCH,
    recent_caches: recent_caches.CACHES,
    classic: classic.CLASSIC,
    detectors: detectors.DETECTORS,
}
MODELS = {name: model for group in GROUPS.values() for name, model in group.items()}
"""Modules of torch by name."""
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

EXPORTS: Mapping[str, str] = {
    "qwen3": "dynamo-dynamic-forward-bf16 dynamo-static-loss torchscript-dynamic-loss",
    "qwen3_moe": "dynamo-static-loss torchscript-static-forward",
    "qwen3_moe_eager": "torchscript-static-forward torchscript-static-loss",
    "qwen2_moe": "dynamo-static-loss",
    "mixtral_eager": "torchscript-static-loss",
    "deepseek_v3": "dynamo-static-loss dynamo-dynamic-forward",
    "gpt_oss": "dynamo-static-loss",
    "gemma2": "dynamo-dynamic-loss torchscript-static-forward-fp16",
    "gemma3": "torchscript-dynamic-loss dynamo-static-forward-bf16",
    "phi3": "dynamo-dynamic-forward torchscript-static-loss",
    "granite": "dynamo-dynamic-loss",
    "smollm3": "torchscript-dynamic-forward",
    "olmo3": "dynamo-static-loss",
    "glm4": "dynamo-static-forward-fp16",
    "falcon": "torchscript-static-loss dynamo-dynamic-forward",
    "bloom": "dynamo-dynamic-loss torchscript-static-forward",
    "opt": "torchscript-dynamic-loss dynamo-static-forward-fp16",
    "gpt_neox": "dynamo-static-loss torchscript-dynamic-forward",
    "mamba": "torchscript-static-loss dynamo-static-forward",
    "mamba2": "dynamo-static-loss",
    "jamba": "dynamo-static-loss torchscript-static-forward",
    "bamba": "dynamo-static-loss",
    "zamba2": "dynamo-static-forward",
    "falcon_h1": "dynamo-static-loss",
    "granite_hybrid": "dynamo-static-forward",
    "lfm2": "dynamo-dynamic-loss",
    "recurrent_gemma": "torchscript-static-loss",
    "xlstm": "dynamo-static-loss",
    "rwkv": "torchscript-static-loss dynamo-static-forward",
    "xlnet": "torchscript-static-loss",
    "longformer": "torchscript-static-loss",
    "modernbert": "dynamo-static-loss torchscript-dynamic-forward",
    "deberta_v2": "torchscript-static-loss",
    "bart": "dynamo-static-loss torchscript-dynamic-forward",
    "mbart": "dynamo-dynamic-loss",
    "switch_transformers": "torchscript-static-forward",
    "swin": "dynamo-static-loss torchscript-dynamic-forward",
    "convnext": "torchscript-static-loss dynamo-dynamic-forward-fp16",
    "beit": "dynamo-static-loss",
    "dinov2": "torchscript-dynamic-loss",
    "segformer": "torchscript-static-loss dynamo-static-forward",
    "mobilevit": "dynamo-static-loss torchscript-static-forward",
    "clip": "dynamo-static-loss",
    "siglip": "torchscript-static-loss dynamo-static-forward",
    "wav2vec2": "dynamo-static-loss torchscript-static-forward",
    "hubert": "torchscript-static-loss",
    "whisper": "dynamo-static-loss torchscript-static-forward",
    "audio_transformer": "dynamo-static-loss",
    "dit": "dynamo-static-loss torchscript-dynamic-forward dynamo-static-forward-bf16",
    "unet": "torchscript-static-loss dynamo-static-forward-fp16",
    "style": "dynamo-static-loss torchscript-static-forward",
    "detr": "torchscript-static-loss",
    "mixer": "dynamo-dynamic-loss",
    "mpnet": "torchscript@11-static-forward torchscript@13-dynamic-forward",
    "marian": "torchscript@14-static-forward torchscript@15-static-loss",
    "pegasus": "torchscript@16-static-forward",
    "mobilenet_v2": "torchscript@9-static-forward",
    "poolformer": "torchscript@12-static-forward dynamo@18-static-forward",
    "gptj": "torchscript@17-static-loss dynamo@19-static-forward",
    "roberta": "torchscript@18-static-loss dynamo@21-dynamic-forward",
    "cohere": "dynamo@22-static-forward",
    "mistral": "dynamo@23-static-forward dynamo@24-static-loss",
    "llava": "torchscript-static-forward torchscript-static-loss dynamo-static-forward",
    "gemma3_vision": "dynamo-static-forward dynamo-static-loss",
    "qwen2_vision": "torchscript-static-forward",
    "blip": "torchscript-static-loss dynamo-static-forward",
    "detr_resnet": "torchscript-static-forward dynamo-static-forward-fp16",
    "conditional_detr": "dynamo-static-forward",
    "rt_detr": "torchscript-static-forward dynamo-static-forward",
    "deformable_detr": "torchscript-static-forward",
    "yolos": "torchscript-static-forward",
    "owlvit": "dynamo-static-forward",
    "sam": "torchscript-static-forward dynamo-static-forward",
    "mask2former": "torchscript-static-forward dynamo-static-forward",
    "maskformer": "dynamo-static-forward",
    "depth_anything": "torchscript-static-forward dynamo-static-forward",
    "dpt": "torchscript-static-forward",
    "glpn": "dynamo-static-forward",
    "upernet": "torchscript-static-forward",
    "swin2sr": "dynamo-static-forward",
    "efficientnet": "torchscript-static-loss dynamo-static-forward",
    "perceiver": "torchscript-static-loss",
    "focalnet": "dynamo-static-loss",
    "hiera": "torchscript-static-loss",
    "pvt": "dynamo-static-loss",
    "musicgen": "torchscript-static-forward dynamo-static-forward",
    "speech_t5": "dynamo-static-forward",
    "vits_text": "torchscript-static-forward",
    "wav2vec2_conformer": "dynamo-static-forward torchscript-static-forward",
    "yolo": "torchscript-static-loss dynamo-dynamic-forward-fp16",
    "yolo_rows": "torchscript-static-forward torchscript-dynamic-forward",
    "two_stages": "torchscript-static-forward",
    "joint_diffusion": "dynamo-static-loss dynamo-static-forward-bf16",
    "gan_generator": "torchscript-static-loss dynamo-dynamic-forward",
    "gan_discriminator": "dynamo-static-loss",
    "tacotron": "torchscript-static-loss dynamo-static-forward",
    "matcha": "torchscript-static-forward dynamo-static-loss",
    "vocoder": "torchscript-static-loss dynamo-static-forward",
    "flow": "torchscript-dynamic-loss",
    "separator": "dynamo-static-loss",
    "graph": "torchscript-dynamic-loss",
    "forecaster": "dynamo-static-loss",
    "recurrence": "torchscript-static-loss",
    "gpt2_step": "torchscript-static-forward dynamo-static-forward",
    "qwen3_step": "dynamo-static-forward dynamo-static-forward-bf16",
    "gemma2_step": "torchscript-static-forward",
    "phi3_step": "dynamo-static-forward-fp16",
    "falcon_step": "torchscript-static-forward",
    "bloom_step": "torchscript-static-forward",
    "whisper_step": "torchscript-static-forward dynamo-static-forward",
    "bart_step": "dynamo-static-forward",
    "t5_step": "torchscript-static-forward",
}
"""By model the files that are made of it: exporter, shapes, outputs, and the type of its weights if
not fp32.
"""


CACHED: Mapping[str, Callable[[str, Path], object]] = {
    "gpt2_cached": lambda exporter, path: shutil.copy(decoder_file("gpt2", exporter), path),
    "llama_cached": lambda exporter, path: shutil.copy(decoder_file("llama", exporter), path),
    "gpt2_merged": lambda exporter, path: merge(decoder_file("gpt2", exporter), path),
}
"""Decoders whose cache has a symbolic length."""


def recent_exports() -> tuple[Export, ...]:
    """Every file, in the order of the table."""
    made = [f"{model}-{file}" for model, files in EXPORTS.items() for file in files.split()]
    made += [f"{model}-{source.split('-', 1)[1]}" for model, (source, _) in REWRITTEN.items()]
    made += [f"{model}-hand-static-forward" for model in HANDMADE]
    made += [f"{model}-torchscript-dynamic-forward" for model in CACHED]
    return tuple(map(_export, made))


def _export(name: str) -> Export:
    model, exporter, shapes, outputs, *dtype = name.split("-")
    return Export(
        model, exporter, shapes == "dynamic", outputs == "loss", dtype=dtype[0] if dtype else "fp32"
    )


def sources_of(export: Export) -> tuple[Path, ...]:
    """The modules whose change makes the file anew."""
    if export.model in HANDMADE:
        return (Path(recent_handmade.__file__),)
    if export.model in CACHED:
        return (Path(decoders.__file__),)
    if export.model in REWRITTEN:
        return (Path(recent_rewritten.__file__), *sources_of(_export(REWRITTEN[export.model][0])))
    own = [module for module, models in GROUPS.items() if export.model in models]
    return tuple(Path(str(module.__file__)) for module in (with_loss, *own))


def write(export: Export, path: Path) -> None:
    """Make the file at `path`. Raises what the exporter raises."""
    if export.model in HANDMADE:
        HANDMADE[export.model](path)
        return
    if export.model in CACHED:
        CACHED[export.model](export.exporter, path)
        return
    if export.model in REWRITTEN:
        source, rewrite = REWRITTEN[export.model]
        rewrite(onnx_file(_export(source), path.parent), path)
        return
    module, inputs = module_of(export)
    result = module(*copy.deepcopy(tuple(inputs.values())))
    outputs = ["loss"] if export.loss else []
    count = len(result) if isinstance(result, tuple) else 1
    outputs += [f"output{index or ''}" for index in range(count - len(outputs))]
    sequences = {name: {1: "sequence"} for name, tensor in inputs.items() if _counts_tokens(tensor)}
    # Else checks of the data stand in the graph, for which the exporter has no operator.
    with mock.patch.dict(os.environ, TRANSFORMERS_DISABLE_TORCH_CHECK="1"):
        write_torch(module, inputs, tuple(outputs), path, export, sequences)


def _counts_tokens(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.int64 and tensor.ndim == 2 and tensor.shape[1] == SEQUENCE


def module_of(export: Export) -> tuple[nn.Module, Tensors]:
    """The module with random weights of the export's type, and its inputs."""
    model = MODELS[export.model]
    torch.manual_seed(0)
    module, inputs = (model.build(), model.inputs()) if export.loss else without_loss(model)
    perturb(module)
    module.train(model.training and export.loss)
    dtype = TYPES[export.dtype]
    typed = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }
    return module.to(dtype), typed
