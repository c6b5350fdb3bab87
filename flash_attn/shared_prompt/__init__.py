"""Training N responses of one prompt with the prompt stored, projected and attended once. Needs torch
only.
"""

from flash_attn.shared_prompt.check import CheckResult, CheckRow, check_gradients
from flash_attn.shared_prompt.grouping import PromptGroups, group_by_prompt
from flash_attn.shared_prompt.layout import SharedPromptLayout
from flash_attn.shared_prompt.log_probs import LogProbs, log_probs
from flash_attn.shared_prompt.packing import PackedBatch, pack
from flash_attn.shared_prompt.unpacking import pack_responses, pack_tokens, unpack, unpack_responses

__all__ = [
    "SharedPromptLayout",
    "PackedBatch",
    "pack",
    "unpack",
    "pack_tokens",
    "pack_responses",
    "unpack_responses",
    "PromptGroups",
    "group_by_prompt",
    "LogProbs",
    "log_probs",
    "CheckResult",
    "CheckRow",
    "check_gradients",
]
