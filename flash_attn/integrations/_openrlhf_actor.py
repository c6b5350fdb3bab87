"""OpenRLHF's `Actor.forward` on packs: the prompt of a micro-batch's rows is stored and attended once.

Log-probs, entropy and the auxiliary loss are those of the parent's forward: logits of the response tokens'
rows in fp32, divided by the temperature, through OpenRLHF's own functions. What cannot be shared runs in the
parent's forward, with the reason logged once and counted.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch

from flash_attn.integrations._sharing import INSTALLED, Account
from flash_attn.integrations._transformers_support import unwrap
from flash_attn.integrations.transformers import packed_forward, require_supported, wrap
from flash_attn.shared_prompt import PackedBatch, pack, unpack_responses

logger = logging.getLogger("flash_attn.integrations.openrlhf")
ARGUMENTS = [
    "sequences", "action_mask", "attention_mask", "return_output", "allgather_logits", "return_logprobs",
    "ring_attn_group", "packed_seq_lens", "return_entropy", "mm_inputs",
]  # fmt: skip
# OpenRLHF sets the attention of packed runs to flash_attention_2, whatever it was asked for.
ATTENTION = ("flash_attention_2", "sdpa")


class ActorAccount(Account):
    """Counts of one actor's forwards; `take` gives what was added since the last call."""

    def __init__(self) -> None:
        super().__init__()
        self._taken = (0, 0, 0)

    def take(self) -> dict[str, float]:
        """The metrics' values since the last call."""
        total = (self.num_packed_tokens, self.num_replicated_tokens, self.num_fallbacks)
        added = [float(x - y) for x, y in zip(total, self._taken, strict=True)]
        self._taken = total
        return dict(zip(("packed_tokens", "replicated_tokens", "fallbacks"), added, strict=True))

    def _tell(self, text: str) -> None:
        logger.warning(text)


def account(actor: Any) -> ActorAccount:
    """The actor's counts."""
    if not hasattr(actor, "sharing"):
        actor.sharing = ActorAccount()
    return actor.sharing


def install(actor_class: Any) -> None:
    """Replaces `actor_class.forward`, once per process, and lets its attention implementations take
    layouts."""
    original = actor_class.forward
    if hasattr(original, INSTALLED):
        return
    found = list(inspect.signature(original).parameters)[1:]
    if found != ARGUMENTS:
        raise RuntimeError(f"OpenRLHF's Actor.forward must take {ARGUMENTS}, got {found}")
    wrap(ATTENTION)

    @functools.wraps(original)
    def forward(
        self: Any,
        sequences: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: Any = None,
        packed_seq_lens: list[int] | None = None,
        return_entropy: bool = False,
        **mm_inputs: Any,
    ) -> Any:
        packed, reason = _pack(self, sequences, action_mask, attention_mask, ring_attn_group, mm_inputs)
        if packed is not None and action_mask is not None:
            log_probs, output = _packed_forward(self, packed, return_entropy)
            log_probs = log_probs[:, -action_mask.shape[1] :] * action_mask.float()
            return (log_probs, output) if return_output else log_probs
        account(self).count_fallback(str(reason), "OpenRLHF's own forward")
        return original(
            self, sequences, action_mask, attention_mask, return_output, allgather_logits, return_logprobs,
            ring_attn_group, packed_seq_lens, return_entropy, **mm_inputs,
        )  # fmt: skip

    setattr(forward, INSTALLED, True)
    actor_class.forward = forward


def _pack(
    actor: Any,
    sequences: torch.Tensor,
    action_mask: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    ring_attn_group: Any,
    mm_inputs: dict[str, Any],
) -> tuple[PackedBatch | None, str | None]:
    """(the pack, None), or (None, why not)."""
    if action_mask is None or attention_mask is None:
        return None, "log-probs of all tokens are asked for (no action_mask)"
    if ring_attn_group is not None:
        return None, "ring attention"
    if mm_inputs or getattr(actor, "is_vlm", False):
        return None, "a model with images"
    try:
        require_supported(actor.model, training=actor.training)
    except NotImplementedError as error:
        return None, str(error)
    packed = pack_rows(sequences, attention_mask, action_mask)
    return packed, "a row has no token before its first action" if packed is None else None


def pack_rows(
    sequences: torch.Tensor, attention_mask: torch.Tensor, action_mask: torch.Tensor
) -> PackedBatch | None:
    """Rows (B, L), packed. A row's prompt ends before its first action: action_mask's last column is that of
    token L - 1. None where a prompt would be empty."""
    kept, length = attention_mask.bool(), sequences.shape[1]
    action = torch.zeros_like(kept)
    action[:, length - action_mask.shape[1] :] = action_mask.bool()
    begun = (action & kept).cumsum(1) > 0
    begun[:, -1] |= ~begun.any(1)  # without any action: the last token, which is not scored
    prompt_mask = kept & ~begun
    if not bool(prompt_mask.any(1).all()):
        return None
    return pack(sequences, sequences, prompt_mask=prompt_mask, response_mask=kept & begun)


def _packed_forward(actor: Any, packed: PackedBatch, return_entropy: bool) -> tuple[torch.Tensor, Any]:
    """Log-probs (B, L - 1) of the tokens behind each row's prompt, 0 elsewhere; and the model's output."""
    from openrlhf.models import utils

    account(actor).count_shared(packed.num_packed_tokens, packed.num_replicated_tokens)
    takes_rows = "logits_to_keep" in inspect.signature(unwrap(actor.model).forward).parameters
    options = {"logits_to_keep": packed.pred_index} if takes_rows else {}
    output = packed_forward(actor.model, packed, **options)
    logits = output["logits"] if takes_rows else output["logits"][:, packed.pred_index]
    logits = logits.to(torch.float32)
    if actor.temperature != 1.0:
        logits = logits.div_(actor.temperature)  # in place, as the parent does
    output["logits"] = logits

    def in_rows(values: torch.Tensor) -> torch.Tensor:
        grid = unpack_responses(values[0], packed)
        assert isinstance(grid, torch.Tensor)
        return grid[:, 1:]  # the value of token t stands at t - 1, where it is predicted

    if return_entropy:
        output.entropy = in_rows(utils.compute_entropy(logits))
    return in_rows(utils.log_probs_from_logits(logits, packed.labels[None])), output
