"""`cross_entropy_loss` as flash-attn names it."""

from flash_attn._cross_entropy import cross_entropy as cross_entropy_loss

__all__ = ["cross_entropy_loss"]
