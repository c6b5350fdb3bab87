"""LayerNorm and RMSNorm with residual and dropout, as flash-attn names them."""

from flash_attn._layer_norm import (
    LayerNormFn,
    LayerNormLinearFn,
    RMSNorm,
    layer_norm_fn,
    layer_norm_linear_fn,
    layer_norm_ref,
    rms_norm_fn,
    rms_norm_ref,
)

__all__ = [
    "LayerNormFn",
    "LayerNormLinearFn",
    "RMSNorm",
    "layer_norm_fn",
    "layer_norm_linear_fn",
    "layer_norm_ref",
    "rms_norm_fn",
    "rms_norm_ref",
]
