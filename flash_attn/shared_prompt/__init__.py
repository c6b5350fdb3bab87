"""Training N responses of one prompt with the prompt stored, projected and attended once. Framework-free: needs torch only."""

from flash_attn.shared_prompt.layout import SharedPromptLayout

__all__ = ["SharedPromptLayout"]
