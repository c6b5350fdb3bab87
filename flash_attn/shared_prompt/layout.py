"""One packed batch of prompts and responses, described once: the rows of each segment, the keys that it sees.

Rows of the pack are, group by group, the prompt's rows and then the rows of each of its responses; `segments`
lists (q_begin, q_end, context_begin, context_end, k_begin, k_end) of every segment in absolute rows. Built
from Python lengths once per micro-batch; attention, log-probs and adapters read its tensors and never the
lengths again.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple, get_args

import torch

from flash_attn.shared_prompt._tables import build_tables

Boundary = Literal["fork", "shared"]
_INT32_MAX = 2**31 - 1


def check_boundary(boundary: str) -> None:
    """Raises ValueError unless `boundary` is one of the two."""
    if boundary not in get_args(Boundary):
        raise ValueError(f'boundary must be "fork" or "shared", got {boundary!r}')


def whole_number(name: str, value: Any) -> int:
    """`value` as an int: anything with an index (NumPy integers too), but no tensor, since reading one from a
    GPU waits for it. Raises TypeError."""
    if not isinstance(value, (bool, torch.Tensor)):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} must be a Python int, got {type(value).__name__} {value!r}")


def _length(name: str, value: Any, minimum: int) -> int:
    length = whole_number(name, value)
    if length < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {length}")
    return length


def _check_sequence(name: str, value: Any) -> None:
    unordered = isinstance(value, (torch.Tensor, str, bytes, Set, Mapping))
    # An array without dimensions has a length method, which raises.
    if unordered or not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"{name} must be a sequence of Python ints, got {type(value).__name__}")


def _check_lengths(
    prompt_lens: Sequence[int], response_lens: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    _check_sequence("prompt_lens", prompt_lens)
    _check_sequence("response_lens", response_lens)
    if len(prompt_lens) != len(response_lens):
        raise ValueError(
            f"response_lens must have one entry per prompt ({len(prompt_lens)}), got {len(response_lens)}"
        )
    prompts = tuple(_length(f"prompt_lens[{g}]", p, 1) for g, p in enumerate(prompt_lens))
    responses = []
    for g, lens in enumerate(response_lens):
        _check_sequence(f"response_lens[{g}]", lens)
        if len(lens) == 0:
            raise ValueError(f"response_lens[{g}] must have at least one response (it may be empty), got []")
        responses.append(tuple(_length(f"response_lens[{g}][{i}]", r, 0) for i, r in enumerate(lens)))
    return prompts, tuple(responses)


class _PlanArguments(NamedTuple):
    head_dim: int
    num_heads_k: int
    dtype: torch.dtype
    causal: bool
    window_size: tuple[int, int]


# Tensors made in inference mode could be saved for no later backward, nor written to.
outside_inference_mode = torch.inference_mode(False)


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, without waiting for a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)  # a pageable copy would wait for the GPU
    return tensor.to(device)


class SharedPromptLayout:
    """Lengths, segments and index maps of one packed shared-prompt batch. Build with `from_lengths`.

    Boundary `"fork"`: a group's context is prompt[0:P-1], and each of its segments is [last prompt token, R
    response tokens]; every response token has its own predicting row. Boundary `"shared"`: the context is the
    whole prompt and each segment the R response tokens; the prompt's last row predicts the first token of
    every response.

    Immutable except through `copy_`. Device tensors (T = num_rows, S = num_segments; int32 unless noted):

    - `segments` (S, 6): q_begin, q_end, context_begin, context_end, k_begin, k_end; per group first the
      prompt's segment (its keys are its context, k is empty), then one per response. `segments_host` is the
      same on the CPU.
    - `cu_seqlens` (S + 1,): rows of the segments.
    - `position_ids` (T,) int64: logical positions; the prompt counts from 0, responses go on from the
      prompt's end.
    - `multiplicity` (T,) int64: the rows of the replicated batch that a row stands for (N where shared, 1
      elsewhere).
    - `group_of_segment` (S,) int64.
    - `pred_index`, `response_index` (num_response_tokens,) int64: for each response token, in pack order, the
      row whose logits predict it and the row that holds it. `cu_responses` (num_responses + 1,) int64
      delimits them.

    `max_seqlen_q` is the longest segment, `max_seqlen_k` the most keys that a row sees, context included.
    With capacities (`max_segments`, `max_total`) the tensors have these sizes for every batch: surplus
    segments are empty, rows behind `total` have position 0 and multiplicity 0, index maps are (max_total,)
    with zeros behind `num_response_tokens`, and `max_seqlen_q`, `max_seqlen_k` are `max_total`.
    """

    __slots__ = (
        "__weakref__",
        "_plans",
        "boundary",
        "capacities",
        "cu_responses",
        "cu_seqlens",
        "device",
        "group_of_segment",
        "max_seqlen_k",
        "max_seqlen_q",
        "multiplicity",
        "num_groups",
        "num_response_tokens",
        "num_responses",
        "num_rows",
        "num_segments",
        "position_ids",
        "pred_index",
        "prompt_lens",
        "response_index",
        "response_lens",
        "segments",
        "segments_host",
        "total",
    )  # fmt: skip
    _tensor_names: tuple[str, ...] = (
        "segments", "cu_seqlens", "position_ids", "multiplicity", "group_of_segment", "pred_index",
        "response_index", "cu_responses",
    )  # fmt: skip

    prompt_lens: tuple[int, ...]
    response_lens: tuple[tuple[int, ...], ...]
    boundary: Boundary
    device: torch.device
    segments: torch.Tensor
    segments_host: torch.Tensor
    cu_seqlens: torch.Tensor
    position_ids: torch.Tensor
    multiplicity: torch.Tensor
    group_of_segment: torch.Tensor
    pred_index: torch.Tensor
    response_index: torch.Tensor
    cu_responses: torch.Tensor
    num_groups: int
    num_responses: int
    num_response_tokens: int
    num_segments: int
    total: int
    num_rows: int
    max_seqlen_q: int
    max_seqlen_k: int
    capacities: tuple[int, int] | None
    _plans: dict[tuple[_PlanArguments, str], list[torch.Tensor]]

    def __init__(self) -> None:
        raise TypeError("SharedPromptLayout must be built with SharedPromptLayout.from_lengths")

    @classmethod
    @outside_inference_mode
    def from_lengths(
        cls,
        prompt_lens: Sequence[int],
        response_lens: Sequence[Sequence[int]],
        device: torch.device | str | int | None = None,
        boundary: Boundary = "fork",
        *,
        max_segments: int | None = None,
        max_total: int | None = None,
    ) -> SharedPromptLayout:
        """The layout of prompts of `prompt_lens[g]` >= 1 tokens with responses of `response_lens[g][i]` >= 0
        tokens.

        Lengths are the caller's own, in tokens, the same for both boundaries. `max_segments` (prompts plus
        responses) and `max_total` (rows) fix the sizes of all tensors, for `copy_`; give both or none. Raises
        TypeError for lengths that are not Python ints, ValueError for lengths out of range and for batches
        that exceed a capacity.
        """
        check_boundary(boundary)
        if (max_segments is None) != (max_total is None):
            raise ValueError(
                f"max_segments and max_total must be given together, got {max_segments=!s} and {max_total=!s}"
            )
        capacities = None
        if max_segments is not None and max_total is not None:
            capacities = (_length("max_segments", max_segments, 0), _length("max_total", max_total, 0))
            for name, capacity in zip(("max_segments", "max_total"), capacities, strict=True):
                if capacity > _INT32_MAX:
                    raise ValueError(f"{name} must be below 2**31, got {capacity}")
        layout = object.__new__(cls)
        layout._fill(*_check_lengths(prompt_lens, response_lens), boundary, capacities)
        layout._set(device=torch.device("cpu"), _plans={})
        return layout if device is None else layout.to(device)

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _fill(
        self,
        prompt_lens: tuple[int, ...],
        response_lens: tuple[tuple[int, ...], ...],
        boundary: Boundary,
        capacities: tuple[int, int] | None,
    ) -> None:
        """Sets lengths, counts and CPU tensors."""
        num_responses = sum(map(len, response_lens))
        num_segments = len(prompt_lens) + num_responses
        num_response_tokens = sum(map(sum, response_lens))
        fork = int(boundary == "fork")
        total = sum(prompt_lens) - fork * len(prompt_lens) + fork * num_responses + num_response_tokens
        if total > _INT32_MAX:
            raise ValueError(f"total must be below 2**31 rows, got {total}")
        if capacities is not None:
            for name, need, have in zip(
                ("max_segments", "max_total"), (num_segments, total), capacities, strict=True
            ):
                if need > have:
                    raise ValueError(f"{name} must hold the batch: it needs {need}, got {name}={have}")
        tables = build_tables(prompt_lens, response_lens, boundary, capacities)
        longest_q = [
            max(p - fork, fork + max(lens)) for p, lens in zip(prompt_lens, response_lens, strict=True)
        ]
        longest_k = [p + max(lens) for p, lens in zip(prompt_lens, response_lens, strict=True)]
        self._set(
            prompt_lens=prompt_lens,
            response_lens=response_lens,
            boundary=boundary,
            capacities=capacities,
            num_groups=len(prompt_lens),
            num_responses=num_responses,
            num_response_tokens=num_response_tokens,
            num_segments=num_segments,
            total=total,
            num_rows=total if capacities is None else capacities[1],
            max_seqlen_q=max(longest_q, default=0) if capacities is None else capacities[1],
            max_seqlen_k=max(longest_k, default=0) if capacities is None else capacities[1],
            segments_host=tables["segments"],
            **tables,
        )

    @property
    def sp_group(self) -> Any:
        """The process group over which the rows are spread (`ulysses.shard`); None: all rows are here."""
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"SharedPromptLayout is immutable (use copy_ or build a new one), cannot set {name!r}"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"SharedPromptLayout is immutable, cannot delete {name!r}")

    @outside_inference_mode
    def to(self, device: torch.device | str | int, *, non_blocking: bool = True) -> SharedPromptLayout:
        """This layout with its tensors on `device`: itself when already there, else a copy without cached
        plans.

        `non_blocking` stands here because trainers pass it to whatever they move; copies never wait.
        """
        target = torch.empty(0, device=device).device  # gives "cuda" its index
        if target == self.device:
            return self
        layout = object.__new__(type(self))
        layout._set(
            **{name: getattr(self, name) for name in self.__slots__ if name not in ("_plans", "__weakref__")}
        )
        layout._set(
            **{name: move(getattr(self, name), target) for name in self._tensor_names},
            device=target,
            _plans={},
        )
        # copy_ writes the host table too, so every layout owns its own.
        layout._set(segments_host=layout.segments if target.type == "cpu" else self.segments_host.clone())
        return layout

    def copy_(self, other: SharedPromptLayout) -> SharedPromptLayout:
        """Takes over `other`'s lengths in place: the tensors, and the plans built so far, keep their
        addresses.

        For CUDA graphs: shapes depend on this layout's capacities only. `other` may live on any device and
        have any capacities, but the same boundary. Nothing is changed when an error is raised.
        """
        if not isinstance(other, SharedPromptLayout):
            raise TypeError(f"other must be a SharedPromptLayout, got {type(other).__name__}")
        if self.capacities is None:
            raise ValueError(
                "copy_ must be called on a layout built with max_segments and max_total, got none"
            )
        if other.boundary != self.boundary:
            raise ValueError(f'other.boundary must be "{self.boundary}", got "{other.boundary}"')
        source = object.__new__(type(self))
        source._fill(other.prompt_lens, other.response_lens, self.boundary, self.capacities)
        for name in self._tensor_names:
            getattr(self, name).copy_(move(getattr(source, name), self.device))
        if self.segments_host is not self.segments:
            self.segments_host.copy_(source.segments_host)
        for name in (
            "prompt_lens",
            "response_lens",
            "num_groups",
            "num_responses",
            "num_response_tokens",
            "num_segments",
            "total",
        ):
            self._set(**{name: getattr(source, name)})
        for (arguments, _), tensors in self._plans.items():
            for old, new in zip(tensors, self._build_plan(arguments), strict=True):
                old.copy_(new)
        return self

    def plan(
        self,
        *,
        head_dim: int,
        num_heads_k: int,
        dtype: torch.dtype,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
    ) -> list[torch.Tensor]:
        """The attention ops' `plan` for this layout: built on first use, then cached. Empty unless the CUDA
        library runs.

        Layers of different head dim or window (Gemma) each have their own. No device synchronisation, so that
        a stream other than that of the first use must wait for it, as for the layout's own tensors.
        """
        from flash_attn._backend import backend, is_capturing

        window = (int(window_size[0]), int(window_size[1]))
        arguments = _PlanArguments(head_dim, num_heads_k, dtype, bool(causal), window)
        kind, capturing = backend(self.device), is_capturing(self.device)
        if kind == "composed" and capturing and self.capacities is not None:
            raise NotImplementedError("composed backend: no CUDA graphs of layouts with capacities")
        plan = self._plans.get((arguments, kind))
        if plan is None:
            plan = self._build_plan(arguments)
            if not capturing:  # what is captured has not run yet
                self._plans[arguments, kind] = plan
        return plan

    @outside_inference_mode
    def _build_plan(self, arguments: _PlanArguments) -> list[torch.Tensor]:
        from flash_attn._ops import plan_for

        return plan_for(self, **arguments._asdict())

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt from lengths: a copy owns its tensors, because copy_ may change the original's.
        return _rebuild, (
            self.prompt_lens,
            self.response_lens,
            str(self.device),
            self.boundary,
            self.capacities,
        )

    def __repr__(self) -> str:
        capacities = (
            "" if self.capacities is None else ", max_segments={}, max_total={}".format(*self.capacities)
        )
        responses = self.response_lens if self.num_responses <= 32 else f"<{self.num_responses} responses>"
        prompts = self.prompt_lens if self.num_groups <= 32 else f"<{self.num_groups} prompts>"
        return (
            f"SharedPromptLayout(prompt_lens={prompts}, response_lens={responses}, "
            f"boundary={self.boundary!r}, total={self.total}, device={str(self.device)!r}{capacities})"
        )


def _rebuild(
    prompt_lens: tuple[int, ...],
    response_lens: tuple[tuple[int, ...], ...],
    device: str,
    boundary: Boundary,
    capacities: tuple[int, int] | None,
) -> SharedPromptLayout:
    max_segments, max_total = capacities if capacities is not None else (None, None)
    return SharedPromptLayout.from_lengths(
        prompt_lens, response_lens, device, boundary, max_segments=max_segments, max_total=max_total
    )
