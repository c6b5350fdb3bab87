"""The two steps that `check_gradients` compares: every row by itself, by torch alone, and the pack."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flash_attn.shared_prompt._check_state import restored_attention
from flash_attn.shared_prompt.log_probs import log_probs
from flash_attn.shared_prompt.packing import PackedBatch, Rows
from flash_attn.shared_prompt.unpacking import unpack_responses

# (log_probs, entropy, mask), each (num_rows, longest response), zeros outside the mask -> scalar
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def default_packed(model: Any, packed: PackedBatch) -> Any:
    return model(
        packed.input_ids, position_ids=packed.position_ids, dualkv_layout=packed.layout, use_cache=False
    )


def default_replicated(model: Any, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
    options = {}
    if position_ids.dim() == 2 and bool((position_ids.diff() != 1).any()) and _takes_masks(model):
        # transformers takes positions that jump for the beginning of another sequence, unless there is a mask
        options["attention_mask"] = torch.ones_like(input_ids)
    return model(input_ids, position_ids=position_ids, use_cache=False, **options)


def _takes_masks(model: Any) -> bool:
    return "attention_mask" in inspect.signature(getattr(model, "forward", model)).parameters


def _logits(output: Any) -> torch.Tensor:
    logits = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or logits.shape[0] != 1:
        shape = list(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(f"model must give logits (1, num_tokens, vocab_size), got {shape}")
    return logits


def weighted_loss(values: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(values.shape, generator=generator, dtype=torch.float64).to(values)
    return -((weights * values + 0.1 * entropy) * mask).sum() / mask.sum()


@dataclass(frozen=True)
class ReplicatedRows:
    """The caller's rows as one-row batches, taken from the caller's own arguments: the pack has no part in
    them.
    """

    input_ids: list[torch.Tensor]  # (1, length)
    position_ids: list[torch.Tensor]  # (1, length) or (K, 1, length)
    columns: list[torch.Tensor]  # columns of the response grid that hold the row's response tokens
    in_loss: torch.Tensor  # (num_rows, width) bool

    @classmethod
    def of(
        cls, packed: PackedBatch, prompts: Rows, responses: Rows, options: Mapping[str, Any]
    ) -> ReplicatedRows:
        device, num_rows = packed.input_ids.device, len(prompts)
        positions = options.get("position_ids")
        input_ids, position_ids, columns = [], [], []
        in_loss = torch.zeros(packed.grid_to_response.shape, dtype=torch.bool)
        for i in range(num_rows):
            ids, kept = [], []
            for rows, mask in (
                (prompts, options.get("prompt_mask")),
                (responses, options.get("response_mask")),
            ):
                row = torch.as_tensor(rows[i]).cpu().long()
                keep = torch.ones_like(row) if mask is None else torch.as_tensor(mask[i]).cpu()
                ids.append(row)
                kept.append(keep.bool())
            keep = torch.cat(kept)
            input_ids.append(torch.cat(ids)[keep][None].to(device))
            if positions is None:
                position = torch.arange(int(keep.sum()))[None]
            elif isinstance(positions, torch.Tensor):
                position = positions.cpu().long()[..., i, keep]
                position = position[None] if position.dim() == 1 else position[:, None]
            else:
                position = torch.as_tensor(positions[i]).cpu().long()[keep][None]
            position_ids.append(position.to(device))
            columns.append(kept[1].nonzero()[:, 0])
            loss_mask = options.get("loss_mask")
            trained = kept[1] if loss_mask is None else kept[1] & torch.as_tensor(loss_mask[i]).cpu().bool()
            in_loss[i, : len(trained)] = trained
        return cls(input_ids, position_ids, columns, in_loss.to(device))


@dataclass(frozen=True)
class Steps:
    """The two steps. Each leaves the parameters' gradients in `.grad` and returns loss, log-probs and
    entropy.
    """

    model: Any
    named: dict[str, torch.nn.Parameter]
    packed: PackedBatch
    rows: ReplicatedRows
    packed_forward: Callable[[Any, PackedBatch], Any]
    replicated_forward: Callable[..., Any]
    loss: Loss
    temperature: float
    replicated_attention: str
    progress: Callable[[str], None]

    def run_packed(self, name: str) -> dict[str, torch.Tensor]:
        self._begin()
        self.progress(f"packed step, {name}: {self.packed.num_packed_tokens} tokens")
        logits = _logits(self.packed_forward(self.model, self.packed))[0]
        found = log_probs(logits, self.packed, temperature=self.temperature)
        values, entropy = (self._grid(unpack_responses(x, self.packed)) for x in found if x is not None)
        loss = self._loss(values, entropy)
        loss.backward()
        return {"loss": loss.detach(), "log_probs": values.detach(), "entropy": entropy.detach()}

    def run_replicated(self, name: str) -> dict[str, torch.Tensor]:
        """One row at a time, twice: values for the loss first, then each row's share of its gradient."""
        self._begin()
        num_rows = len(self.rows.input_ids)
        with restored_attention(self.model):
            if hasattr(self.model, "set_attn_implementation"):
                self.model.set_attn_implementation(self.replicated_attention)
            with torch.no_grad():
                pairs = []
                for i in range(num_rows):
                    self.progress(f"replicated step, {name}: values of row {i + 1}/{num_rows}")
                    pairs.append(self._row(i))
            values, entropy = (torch.stack(grids).requires_grad_() for grids in zip(*pairs, strict=True))
            loss = self._loss(values, entropy)
            grads = torch.autograd.grad(loss, (values, entropy), allow_unused=True, materialize_grads=True)
            for i in range(num_rows):
                self.progress(f"replicated step, {name}: gradients of row {i + 1}/{num_rows}")
                row = self._row(i)
                if row[0].requires_grad:
                    torch.autograd.backward(row, [g[i] for g in grads])
        return {"loss": loss.detach(), "log_probs": values.detach(), "entropy": entropy.detach()}

    def _loss(self, values: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        loss = self.loss(values, entropy, self.rows.in_loss)
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            kind = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"loss must give a scalar tensor that has a gradient, got {kind}")
        return loss

    def _begin(self) -> None:
        for parameter in self.named.values():
            parameter.grad = None

    def _grid(self, values: Any) -> torch.Tensor:
        if isinstance(values, torch.Tensor):
            return values
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

    def _row(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropy of one row at its columns of the response grid, by torch alone."""
        ids, columns = self.rows.input_ids[i], self.rows.columns[i].to(self.rows.in_loss.device)
        logits = _logits(self.replicated_forward(self.model, ids, self.rows.position_ids[i]))[0]
        begin = ids.shape[1] - columns.numel()
        logits = logits[begin - 1 : ids.shape[1] - 1].to(torch.promote_types(logits.dtype, torch.float32))
        log_p = torch.log_softmax(logits / self.temperature, -1)
        values = log_p.gather(1, ids[0, begin:, None])[:, 0]
        entropy = -(log_p.exp() * log_p.where(log_p > -torch.inf, 0)).sum(-1)
        trained = self.rows.in_loss[i]
        empty = log_p.new_zeros(trained.shape)
        values, entropy = (empty.index_copy(0, columns, x).where(trained, 0) for x in (values, entropy))
        return values, entropy
