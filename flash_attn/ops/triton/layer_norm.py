"""LayerNorm and RMSNorm with residual and dropout, as flash-attn names them."""

from flash_attn._layer_norm import RMSNorm, layer_norm_fn, layer_norm_linear_fn, rms_norm_fn

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_linear_fn", "rms_norm_fn"]
