"""Models that find, mask, measure or describe what is in an image, of `transformers`."""

from __future__ import annotations

from typing import Any

import torch

from tests.exports.with_loss import (
    BATCH,
    CLASSES,
    VOCABULARY,
    Tensors,
    WithLoss,
    hugging_face,
    tokens,
)

WIDTH = 16
IMAGE_TOKEN = VOCABULARY - 1
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
_VISION: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_RESNET: dict[str, Any] = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic",
    "out_features": ["stage2"],
}  # fmt: skip
_DETECTION: dict[str, Any] = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": _RESNET,
    "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_queries": 5, **_NO_DROPOUT,
}  # fmt: skip
_DINO: dict[str, Any] = {**_VISION, "model_type": "dinov2", "image_size": 28, "patch_size": 7}


def image(size: int = 32) -> Tensors:
    """An image for each sample."""
    return {"pixel_values": torch.randn(BATCH, 3, size, size)}


def _kinds() -> Tensors:
    return {**image(), "labels": torch.randint(0, CLASSES, (BATCH,))}


def _large() -> Tensors:
    return image(64)


def _described() -> Tensors:
    """Text in which four tokens stand for an image."""
    text = tokens(IMAGE_TOKEN - 1, 12)
    text[:, 3:7] = IMAGE_TOKEN
    return {
        "input_ids": text,
        "attention_mask": torch.ones_like(text),
        **image(16),
        "labels": tokens(IMAGE_TOKEN - 1, 12),
    }


def _typed() -> Tensors:
    given = _described()
    labels = given.pop("labels")
    kinds = (given["input_ids"] == IMAGE_TOKEN).long()
    return {**given, "token_type_ids": kinds, "labels": labels}


def _gridded() -> Tensors:
    given = _described()
    labels = given.pop("labels")
    kinds = (given["input_ids"] == IMAGE_TOKEN).long()
    given["pixel_values"] = torch.randn(BATCH * 16, 3 * 2 * 16)
    places = torch.arange(12).expand(3, BATCH, 12).contiguous()
    return {**given, "position_ids": places, "mm_token_type_ids": kinds, "labels": labels}


def _prompted() -> Tensors:
    places = {
        "input_points": torch.rand(BATCH, 1, 1, 2) * 32,
        "input_labels": torch.ones(BATCH, 1, 1).long(),
    }
    return {**_large(), **places}


def _questions() -> Tensors:
    return {"input_ids": tokens(), **image(16)}


IMAGES: dict[str, WithLoss] = {
    "llava": hugging_face(
        "Llava", "ForConditionalGeneration", _described, text_config={**_TEXT, "model_type": "llama"},
        vision_config={**_VISION, "model_type": "clip_vision_model", "projection_dim": WIDTH},
        image_token_index=IMAGE_TOKEN, vision_feature_layer=-1,
    ),
    "gemma3_vision": hugging_face(
        "Gemma3", "ForConditionalGeneration", _typed, text_config={**_TEXT, "head_dim": 8, "sliding_window": 4},
        vision_config={**_VISION, "patch_size": 4, "vision_use_head": False}, mm_tokens_per_image=4,
        image_token_index=IMAGE_TOKEN, boi_token_index=VOCABULARY - 2, eoi_token_index=VOCABULARY - 3,
    ),
    "qwen2_vision": hugging_face(
        "Qwen2VL", "ForConditionalGeneration", _gridded, image_token_id=IMAGE_TOKEN,
        fixed={"image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH)},
        vision_config={"depth": 2, "embed_dim": WIDTH, "hidden_size": WIDTH, "num_heads": 2, "patch_size": 4,
                       "spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 2},
        text_config={**_TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                  "mrope_section": [1, 1, 2]}},
        vision_start_token_id=VOCABULARY - 2, vision_end_token_id=VOCABULARY - 3, video_token_id=VOCABULARY - 4,
    ),
    "blip": hugging_face(
        "Blip", "ForConditionalGeneration", lambda: {**image(16), "input_ids": tokens(), "labels": tokens()},
        vision_config=_VISION, projection_dim=WIDTH, image_text_hidden_size=WIDTH,
        text_config={**_TEXT, "encoder_hidden_size": WIDTH, "hidden_dropout_prob": 0.0,
                     "attention_probs_dropout_prob": 0.0, "projection_dim": WIDTH, "sep_token_id": 2},
    ),
    "detr_resnet": hugging_face("Detr", "ForObjectDetection", _large, **_DETECTION, num_labels=CLASSES),
    "conditional_detr": hugging_face("ConditionalDetr", "ForObjectDetection", _large, **_DETECTION, num_labels=CLASSES),
    "rt_detr": hugging_face(
        "RTDetr", "ForObjectDetection", _large, num_labels=CLASSES, backbone=None, use_timm_backbone=False,
        use_pretrained_backbone=False, freeze_backbone_batch_norms=False, anchor_image_size=[64, 64],
        backbone_config={"model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16],
                         "depths": [1, 1, 1, 1], "layer_type": "basic",
                         "out_features": ["stage2", "stage3", "stage4"]},
        encoder_hidden_dim=WIDTH, encoder_in_channels=[8, 16, 16], encoder_ffn_dim=24, encoder_attention_heads=2,
        d_model=WIDTH, num_queries=6, decoder_in_channels=[WIDTH] * 3, decoder_ffn_dim=24, decoder_layers=2,
        decoder_attention_heads=2, decoder_n_points=2, num_denoising=0,
    ),
    "deformable_detr": hugging_face(
        "DeformableDetr", "ForObjectDetection", _large,
        **{**_DETECTION, "backbone_config": {**_RESNET, "out_features": ["stage1", "stage2"]}, "d_model": 32},
        num_feature_levels=3,
        encoder_n_points=2, decoder_n_points=2, num_labels=CLASSES,
    ),
    "yolos": hugging_face("Yolos", "ForObjectDetection", image, **{**_VISION, "image_size": [32, 32]},
                          num_detection_tokens=5, num_labels=CLASSES),
    "owlvit": hugging_face(
        "OwlViT", "ForObjectDetection", _questions, text_config={**_TEXT, "max_position_embeddings": 8},
        vision_config=_VISION, projection_dim=WIDTH,
    ),
    "sam": hugging_face(
        "Sam", "Model", _prompted, output="pred_masks",
        vision_config={"hidden_size": WIDTH, "output_channels": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
                       "image_size": 64, "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "mlp_dim": 24,
                       "num_pos_feats": 8},
        prompt_encoder_config={"hidden_size": WIDTH, "image_size": 64, "patch_size": 16, "mask_input_channels": 4,
                               "image_embedding_size": 4},
        mask_decoder_config={"hidden_size": WIDTH, "mlp_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                             "iou_head_hidden_dim": 24},
    ),
    "mask2former": hugging_face(
        "Mask2Former", "ForUniversalSegmentation", _large, output="masks_queries_logits", num_labels=CLASSES,
        backbone=None, use_pretrained_backbone=False,
        backbone_config={"model_type": "swin", "image_size": 64, "patch_size": 4, "embed_dim": 8,
                         "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "window_size": 2, "drop_path_rate": 0.0,
                         "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=24, encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, dim_feedforward=24, num_queries=5,
    ),
    "maskformer": hugging_face(
        "MaskFormer", "ForInstanceSegmentation", _large, output="masks_queries_logits",
        backbone_config={"model_type": "swin", "image_size": 64, "patch_size": 4, "embed_dim": 8,
                         "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 2], "window_size": 2, "drop_path_rate": 0.0,
                         "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        decoder_config={"model_type": "detr", **_DETECTION, "d_model": 32}, mask_feature_size=32, fpn_feature_size=32,
    ),
    "depth_anything": hugging_face(
        "DepthAnything", "ForDepthEstimation", lambda: image(28), output="predicted_depth", backbone=None,
        use_pretrained_backbone=False, patch_size=7, reassemble_hidden_size=WIDTH, reassemble_factors=[4, 2, 1, 0.5],
        neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, head_hidden_size=8,
        backbone_config={**_DINO, "num_hidden_layers": 4, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False},
    ),
    "dpt": hugging_face(
        "DPT", "ForDepthEstimation", image, output="predicted_depth",
        **{**_VISION, "image_size": 32, "num_hidden_layers": 4},
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, is_hybrid=False,
    ),
    "glpn": hugging_face(
        "GLPN", "ForDepthEstimation", _large, output="predicted_depth", num_encoder_blocks=4, depths=[1, 1, 1, 1],
        sr_ratios=[2, 2, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=8,
        mlp_ratios=[2, 2, 2, 2],
    ),
    "upernet": hugging_face(
        "UperNet", "ForSemanticSegmentation", _large, backbone=None, use_pretrained_backbone=False,
        backbone_config={"model_type": "convnext", "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                         "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        hidden_size=WIDTH, auxiliary_in_channels=16, auxiliary_channels=8, num_labels=CLASSES, pool_scales=[1, 2],
    ),
    "swin2sr": hugging_face(
        "Swin2SR", "ForImageSuperResolution", image, output="reconstruction", image_size=32, patch_size=1, embed_dim=8,
        depths=[1, 1], num_heads=[2, 2], window_size=4, drop_path_rate=0.0, upscale=2,
    ),
    "vitmae": hugging_face("ViTMAE", "Model", image, output="last_hidden_state", **{**_VISION, "image_size": 32}),
    "efficientnet": hugging_face(
        "EfficientNet", "ForImageClassification", _kinds, image_size=32, width_coefficient=0.25, hidden_dim=320,
        depth_coefficient=0.5, num_labels=CLASSES, dropout_rate=0.0,
    ),
    "perceiver": hugging_face(
        "Perceiver", "ForImageClassificationLearned", _kinds, num_latents=4, d_latents=WIDTH, d_model=WIDTH,
        num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2,
        qk_channels=WIDTH, v_channels=WIDTH, image_size=32, num_labels=CLASSES,
    ),
    "focalnet": hugging_face(
        "FocalNet", "ForImageClassification", _kinds, image_size=32, patch_size=4, embed_dim=8, hidden_sizes=[8, 16],
        depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3], num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "hiera": hugging_face(
        "Hiera", "ForImageClassification", _kinds, image_size=[32, 32], embed_dim=8, depths=[1, 1], num_heads=[1, 2],
        patch_size=[7, 7], patch_stride=[4, 4], patch_padding=[3, 3], masked_unit_size=[4, 4], query_stride=[2, 2],
        num_query_pool=1, num_labels=CLASSES, drop_path_rate=0.0,
    ),
    "pvt": hugging_face(
        "Pvt", "ForImageClassification", _kinds, image_size=32, num_encoder_blocks=2, depths=[1, 1],
        sequence_reduction_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[4, 2], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], num_labels=CLASSES, drop_path_rate=0.0,
    ),
}  # fmt: skip
"""By name."""
