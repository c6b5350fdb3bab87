"""`cross_entropy_loss` as flash-attn names it."""

from flash_attn._cross_entropy import cross_entropy as cross_entropy_loss

__all__ = ["CrossEntropyLoss", "cross_entropy_loss"]


class CrossEntropyLoss:
    """flash-attn's autograd class of `cross_entropy_loss`, called by its `apply`."""

    apply = staticmethod(cross_entropy_loss)
