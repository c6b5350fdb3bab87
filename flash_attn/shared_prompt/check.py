"""Is the packed step of this model equal to the replicated one? Loss, log-probs, entropy and every parameter
gradient.

The replicated step runs each row by itself, with its own copy of the prompt; a run in higher precision says
how large a difference rounding explains. Users call `check_gradients` on their own model before they trust a
packed run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from flash_attn.shared_prompt._check_state import Precision, restored_state
from flash_attn.shared_prompt._check_steps import (
    Loss,
    ReplicatedRows,
    Steps,
    default_packed,
    default_replicated,
    weighted_loss,
)
from flash_attn.shared_prompt.packing import IGNORE_INDEX, PackedBatch, Rows, pack

PARITY = 1e-5  # relative error allowed where the model runs in fp64
# A gradient far below the whole gradient's norm is held to this part of it (that of a key bias is exactly 0).
FLOOR = 1e-3


@dataclass(frozen=True)
class CheckRow:
    """One quantity. `relative` is ||packed - reference|| / max(||reference||, floor), `tolerance` its
    limit.
    """

    quantity: str
    precision: str
    max_abs: float
    relative: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.relative <= self.tolerance  # False for NaN


LAYOUT_HINT = (
    "a model that ignores dualkv_layout differs everywhere. With transformers, load it with "
    'attn_implementation="dualkv" and pass '
    "packed_forward=flash_attn.integrations.transformers.packed_forward, which names the layers that did "
    "not use the layout"
)


@dataclass(frozen=True)
class CheckResult:
    """`rows` of every quantity and precision; `notes` say what could not be run, or where to look."""

    rows: tuple[CheckRow, ...]
    notes: tuple[str, ...]
    num_packed_tokens: int
    num_replicated_tokens: int
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)

    def table(self, max_rows: int | None = None) -> str:
        """Rows as text; with `max_rows` those closest to, or beyond, their tolerance."""
        rows = list(self.rows)
        if max_rows is not None and len(rows) > max_rows:
            rows.sort(key=lambda row: (row.passed, -row.relative / max(row.tolerance, 1e-300)))
            rows = rows[:max_rows]
        width = max([len("quantity"), *(len(row.quantity) for row in rows)])
        lines = [
            f"{'quantity':<{width}}  {'precision':<9}  {'max abs':>9}  {'relative':>9}  {'tolerance':>9}"
        ]
        lines += [
            f"{row.quantity:<{width}}  {row.precision:<9}  {row.max_abs:>9.2e}  {row.relative:>9.2e}  "
            f"{row.tolerance:>9.2e}  {'pass' if row.passed else 'FAIL'}"
            for row in rows
        ]
        failed = sum(not row.passed for row in self.rows)
        lines.append(
            f"{'PASS' if self.passed else 'FAIL'}: {len(self.rows) - failed} of {len(self.rows)} quantities "
            "agree; "
            f"{self.num_packed_tokens} packed tokens for {self.num_replicated_tokens} replicated ones"
        )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.table(max_rows=20)

    def raise_if_failed(self) -> None:
        """AssertionError with the table when a quantity is out of tolerance."""
        if not self.passed:
            raise AssertionError("the packed step differs from the replicated one\n" + str(self))


def check_gradients(
    model: torch.nn.Module | Callable[..., Any],
    prompts: Rows,
    responses: Rows,
    *,
    packed_forward: Callable[[Any, PackedBatch], Any] | None = None,
    replicated_forward: Callable[..., Any] | None = None,
    loss: Loss | None = None,
    temperature: float = 1.0,
    parameters: Mapping[str, torch.nn.Parameter] | None = None,
    replicated_attention: str = "eager",
    progress: Callable[[str], None] | None = print,
    **pack_options: Any,
) -> CheckResult:
    """Runs the same step replicated and packed, on the model's own precision and a higher one, and compares
    them.

    `model(input_ids, position_ids=..., use_cache=False)` gives logits, or an output with `.logits`, or a
    tuple that begins with them. The packed forward is `packed_forward(model, packed)` (adapters bring one,
    e.g. `flash_attn.integrations.transformers.packed_forward`), by default the same call with
    `dualkv_layout=packed.layout`. `replicated_forward(model, input_ids, position_ids)` runs one row (1,
    length). Models with `set_attn_implementation` run their replicated rows under `replicated_attention`,
    those with `set_experts_implementation` their fp64 steps under "eager" (grouped products know no fp64).
    `parameters` names the tensors to compare where `model` is no module. Other options (masks, position ids,
    boundary, ...) go to `pack`.

    `loss(log_probs, entropy, mask)` takes (num_rows, longest response) tensors; the default weighs every
    token by a fixed random number and adds an entropy bonus. Tolerances: relative error 1e-5 where both steps
    run in fp64; in the model's own precision twice the replicated step's error against the higher-precision
    run, plus one rounding. The model runs in eval mode. Gradients, training flags, precision, attention and
    the random state are restored, also after an exception. One extra copy of parameters and gradients in fp64
    is needed.
    """
    named = _named_parameters(model, parameters)
    with torch.inference_mode(False), torch.enable_grad():
        packed = pack(prompts, responses, **pack_options).to(next(iter(named.values())).device)
        if not (packed.labels != IGNORE_INDEX).any():
            raise ValueError("responses must have at least one token in the loss, got 0")
        rows = ReplicatedRows.of(packed, prompts, responses, pack_options)
        steps = Steps(
            model,
            named,
            packed,
            rows,
            packed_forward or default_packed,
            replicated_forward or default_replicated,
            loss or weighted_loss,
            temperature,
            replicated_attention,
            progress or (lambda message: None),
        )
        with restored_state(model, named):
            result = _compare(steps)
    if result.passed or packed_forward is not None:
        return result
    return replace(result, notes=(*result.notes, LAYOUT_HINT))


def _named_parameters(
    model: Any, parameters: Mapping[str, torch.nn.Parameter] | None
) -> dict[str, torch.nn.Parameter]:
    if not callable(model):
        raise TypeError(f"model must be callable, got {type(model).__name__}")
    if parameters is None and not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"parameters must be given where model is no torch.nn.Module, got {type(model).__name__}"
        )
    named = dict(model.named_parameters() if parameters is None else parameters)
    named = {name: p for name, p in named.items() if p.requires_grad}
    if not named:
        raise ValueError("model must have parameters that require gradients, got none")
    return named


def _gradients(named: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    return {f"grad {name}": torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}


def _errors(
    found: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """Per quantity max |x - reference| and ||x - reference||, in fp64."""
    errors = {}
    for name, true in reference.items():
        difference = found[name].to(true.device, torch.float64) - true
        errors[name] = (
            float(difference.abs().max()) if difference.numel() else 0.0,
            float(difference.norm()),
        )
    return errors


def _scales(reference: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """What an error of a quantity is relative to: its norm, unless that is small for its kind (sums that
    cancel).
    """
    norms = {name: float(true.norm()) for name, true in reference.items()}
    gradient = sum(norm**2 for name, norm in norms.items() if name.startswith("grad ")) ** 0.5
    # Of 1 nat per token: entropies may be almost 0.
    nats = max(int((reference["log_probs"] != 0).sum()), 1) ** 0.5
    floors = {"loss": norms["log_probs"] / nats, "log_probs": FLOOR * nats, "entropy": nats}
    return {name: max(norm, floors.get(name, FLOOR * gradient), 1e-300) for name, norm in norms.items()}


def _noise(low: Mapping[str, tuple[float, float]], scales: Mapping[str, float]) -> dict[str, float]:
    """Relative error of the replicated step: of each quantity, or of its kind where that is larger.

    One number, or a few, can be exact by luck; the kind (loss, log-probs and entropy, or all gradients) tells
    what rounding does to this model.
    """
    relative = {name: error / scales[name] for name, (_, error) in low.items()}
    values = [name for name in low if not name.startswith("grad ")]
    gradients = [name for name in low if name.startswith("grad ")]
    kinds = dict.fromkeys(values, max(relative[name] for name in values))
    squares = [
        sum(x**2 for x in column) for column in zip(*((low[n][1], scales[n]) for n in gradients), strict=True)
    ]
    kinds |= dict.fromkeys(gradients, (squares[0] / squares[1]) ** 0.5)
    return {name: max(relative[name], kinds[name]) for name in low}


def _compare(steps: Steps) -> CheckResult:
    """The replicated step in fp64 (fp32 where that does not run) is the reference. The packed step is held
    against it there, in fp64 only, and in the model's own precision."""
    own = next(iter(steps.named.values())).dtype
    runs = _Runs(steps, own)
    reference = None
    for high in [torch.float64] if own in (torch.float64, torch.float32) else [torch.float64, torch.float32]:
        with Precision(steps.model, steps.named, high):
            reference = runs.reference(high)
            if reference is not None and high == torch.float64:
                runs.add_parity(high, reference)
        if reference is not None:
            break
    if reference is None:
        raise NotImplementedError(
            f"no precision above {own} runs, so there is no reference: {runs.notes[-1]}"
        )
    if high != own:
        runs.add_own(reference)
    packed = steps.packed
    return CheckResult(
        tuple(runs.rows), tuple(runs.notes), packed.num_packed_tokens, packed.num_replicated_tokens,
        runs.seconds,
    )  # fmt: skip


class _Runs:
    """The steps that were run, and what they found."""

    def __init__(self, steps: Steps, own: torch.dtype) -> None:
        self.steps, self.own = steps, own
        self.notes: list[str] = []
        self.rows: list[CheckRow] = []
        self.seconds: dict[str, float] = {}

    def reference(self, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
        """What the replicated step gives, in fp64; None, with a note, where it does not run in `dtype`."""
        found = self._tried("replicated", self.steps.run_replicated, dtype)
        if found is None:
            return None
        reference = {key: value.detach().to(torch.float64, copy=True) for key, value in found.items()}
        if not any(true.any() for key, true in reference.items() if key.startswith("grad ")):
            raise ValueError("loss must have a gradient, got 0 for every parameter in the replicated step")
        return reference

    def add_parity(self, dtype: torch.dtype, reference: Mapping[str, torch.Tensor]) -> None:
        """Rows of the packed step in the reference's own precision."""
        found = self._tried("packed", self.steps.run_packed, dtype)
        if found is not None:
            scales = _scales(reference)
            for key, (max_abs, norm) in _errors(found, reference).items():
                self.rows.append(CheckRow(key, _short(dtype), max_abs, norm / scales[key], PARITY))

    def add_own(self, reference: Mapping[str, torch.Tensor]) -> None:
        """Rows of the packed step in the model's precision: within the rounding of the replicated step."""
        scales = _scales(reference)
        low = _errors(self._run("replicated", self.steps.run_replicated, self.own), reference)
        noise = _noise(low, scales)
        errors = _errors(self._run("packed", self.steps.run_packed, self.own), reference)
        for key, (max_abs, norm) in errors.items():
            tolerance = 2 * noise[key] + torch.finfo(self.own).eps
            self.rows.append(CheckRow(key, _short(self.own), max_abs, norm / scales[key], tolerance))

    def _tried(self, name: str, step: _Step, dtype: torch.dtype) -> dict[str, torch.Tensor] | None:
        """The step's results; None, with a note, where it does not run in a precision above the model's."""
        try:
            return self._run(name, step, dtype)
        except (RuntimeError, TypeError) as error:
            if dtype == self.own:
                raise
            self.notes.append(f"the {name} step did not run in {_short(dtype)}: {error}")
            return None

    def _run(self, name: str, step: _Step, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        begin = time.perf_counter()
        found = step(_short(dtype)) | _gradients(self.steps.named)
        self.seconds[f"{name} {_short(dtype)}"] = time.perf_counter() - begin
        return found


_Step = Callable[[str], dict[str, torch.Tensor]]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
