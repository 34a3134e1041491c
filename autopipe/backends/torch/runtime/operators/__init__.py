"""Operators that torch spells with more than one expression. Generated code calls them by name."""

from __future__ import annotations

from autopipe.backends.torch.runtime.operators.attention import attention, rotary_embedding
from autopipe.backends.torch.runtime.operators.convolution import (
    conv_integer,
    conv_quantized,
    conv_transpose,
    deform_conv,
)
from autopipe.backends.torch.runtime.operators.elementwise import shrink
from autopipe.backends.torch.runtime.operators.indexing import (
    gather_elements,
    gather_nd,
    one_hot,
    scatter_elements,
    scatter_nd,
    tensor_scatter,
)
from autopipe.backends.torch.runtime.operators.joint import once
from autopipe.backends.torch.runtime.operators.joint_indexing import gather_elements_part, gather_part
from autopipe.backends.torch.runtime.operators.joint_losses import (
    cross_entropy_and_logarithms_part,
    cross_entropy_and_logarithms_share,
    cross_entropy_part,
    cross_entropy_share,
    nll_part,
    nll_share,
)
from autopipe.backends.torch.runtime.operators.joint_normalization import (
    batch_norm_part,
    group_norm_part,
    instance_norm_part,
    layer_norm_part,
    mean_variance_norm_part,
    normalize_part,
    rms_norm_part,
    skip_layer_norm_part,
    skip_rms_norm_part,
)
from autopipe.backends.torch.runtime.operators.joint_reduction import (
    extreme_part,
    index_of_extreme_part,
    log_sum_exp_part,
    log_sum_part,
    norm_part,
)
from autopipe.backends.torch.runtime.operators.joint_softmax import log_softmax_part, softmax_part
from autopipe.backends.torch.runtime.operators.losses import cross_entropy
from autopipe.backends.torch.runtime.operators.movement import col2im, compress, pad, reverse_sequence
from autopipe.backends.torch.runtime.operators.normalization import (
    batch_norm,
    layer_norm,
    local_response_norm,
    mean_variance_norm,
    skip_layer_norm,
    skip_rms_norm,
)
from autopipe.backends.torch.runtime.operators.pooling import average_pool, lp_pool, max_pool_with_indices, max_unpool
from autopipe.backends.torch.runtime.operators.quantization import (
    dequantize_linear,
    dynamic_quantize_linear,
    matmul_integer,
    matmul_quantized,
    matmul_whole,
    quantize_linear,
)
from autopipe.backends.torch.runtime.operators.random import (
    bernoulli,
    dropout,
    dropout_and_mask,
    multinomial,
    normal,
    uniform,
)
from autopipe.backends.torch.runtime.operators.recurrent import gru, lstm, rnn
from autopipe.backends.torch.runtime.operators.reduction import cumprod, cumsum, hardmax, top_k
from autopipe.backends.torch.runtime.operators.regions import roi_align
from autopipe.backends.torch.runtime.operators.resize import resize
from autopipe.backends.torch.runtime.operators.spectral import dft, hamming_window, mel_weights, stft

__all__ = [
    "attention",
    "average_pool",
    "batch_norm",
    "batch_norm_part",
    "bernoulli",
    "col2im",
    "compress",
    "conv_integer",
    "conv_quantized",
    "conv_transpose",
    "cross_entropy",
    "cross_entropy_and_logarithms_part",
    "cross_entropy_and_logarithms_share",
    "cross_entropy_part",
    "cross_entropy_share",
    "cumprod",
    "cumsum",
    "deform_conv",
    "dequantize_linear",
    "dft",
    "dropout",
    "dropout_and_mask",
    "dynamic_quantize_linear",
    "extreme_part",
    "gather_elements",
    "gather_elements_part",
    "gather_nd",
    "gather_part",
    "group_norm_part",
    "gru",
    "hamming_window",
    "hardmax",
    "index_of_extreme_part",
    "instance_norm_part",
    "layer_norm",
    "layer_norm_part",
    "local_response_norm",
    "log_softmax_part",
    "log_sum_exp_part",
    "log_sum_part",
    "lp_pool",
    "lstm",
    "matmul_integer",
    "matmul_quantized",
    "matmul_whole",
    "max_pool_with_indices",
    "max_unpool",
    "mean_variance_norm",
    "mean_variance_norm_part",
    "mel_weights",
    "multinomial",
    "nll_part",
    "nll_share",
    "norm_part",
    "normal",
    "normalize_part",
    "once",
    "one_hot",
    "pad",
    "quantize_linear",
    "resize",
    "reverse_sequence",
    "rms_norm_part",
    "rnn",
    "roi_align",
    "rotary_embedding",
    "scatter_elements",
    "scatter_nd",
    "shrink",
    "skip_layer_norm",
    "skip_layer_norm_part",
    "skip_rms_norm",
    "skip_rms_norm_part",
    "softmax_part",
    "stft",
    "tensor_scatter",
    "top_k",
    "uniform",
]
