"""What one micro-batch costs, shared and replicated, and whether sharing pays.

    cost = max(host, call + token * tokens + label * labels + pair * pairs)          (seconds, or FLOPs)

for one forward and backward: `tokens` pass through every layer, `labels` (response tokens) through the LM
head, `pairs` are (query row, visible key) pairs of causal attention; `host` is what the host needs to launch
a GPU's work, the least that a small batch takes. Shared and replicated batches differ in their tokens and
pairs, and have `host`, `call` and `pair` of their own: packing costs host time, and the two attention kernels
differ in speed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import torch


class GroupLens(NamedTuple):
    """One group: the tokens that its rows share, and the tokens of each row behind them."""

    prompt_len: int
    response_lens: tuple[int, ...]


def _seen(num_rows: int, window: int | None) -> int:
    """sum over pos < num_rows of min(pos + 1, window)."""
    inside = num_rows if window is None else min(num_rows, window)
    return inside * (inside + 1) // 2 + (num_rows - inside) * inside


def num_pairs(group: GroupLens, *, shared: bool, window: int | None = None, fork: int = 1) -> int:
    """(query row, visible key) pairs of one group. With S(n) = sum over pos < n of min(pos + 1, window):

    replicated: sum_i S(P + R_i);  shared: S(P - fork) + sum_i [S(P + R_i) - S(P - fork)].
    """
    context = _seen(group.prompt_len - fork, window)
    rows = [_seen(group.prompt_len + r, window) for r in group.response_lens]
    return sum(rows) if not shared else context + sum(row - context for row in rows)


def num_tokens(group: GroupLens, *, shared: bool, fork: int = 1) -> int:
    """Tokens that pass through the model: P - fork + sum_i (R_i + fork) shared, sum_i (P + R_i)
    replicated."""
    num_rows = len(group.response_lens)
    copies = 1 if shared else num_rows
    return copies * group.prompt_len + sum(group.response_lens) + (shared and fork * (num_rows - 1))


COEFFICIENTS = (
    "token", "label", "pair_shared", "pair_replicated", "call_shared", "call_replicated", "host_shared",
    "host_replicated",
)  # fmt: skip


@dataclass(frozen=True)
class CostModel:
    """Coefficients of the formula above, in one unit: seconds from `calibrate`, FLOPs from `from_flops`.

    `windows`: the sliding windows of the model's kinds of layers (None: full attention), each counted as
    often as it occurs; pairs are their mean. `fit_error` is the largest relative error over the
    calibration's measurements.
    """

    token: float
    label: float
    pair_shared: float
    pair_replicated: float
    call_shared: float = 0.0
    call_replicated: float = 0.0
    host_shared: float = 0.0
    host_replicated: float = 0.0
    windows: tuple[int | None, ...] = (None,)
    fork: int = 1
    unit: str = "seconds"
    fit_error: float | None = None

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if not self.windows or not all(window is None or window >= 1 for window in self.windows):
            raise ValueError(f"windows must be None or at least 1, for one layer or more, got {self.windows}")

    @classmethod
    def from_flops(
        cls,
        *,
        num_layer_parameters: int,
        num_head_parameters: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        windows: Sequence[int | None] = (None,),
        fork: int = 1,
    ) -> CostModel:
        """FLOPs of forward and backward: 6 per parameter and token; per layer and pair 4 H D forward and 10
        H D backward.

        (Two products forward, five backward, each 2 D per pair and head.) Without measurements, so sharing
        pays wherever it saves FLOPs.
        """
        pair = 14.0 * num_layers * num_heads * head_dim
        return cls(
            6.0 * num_layer_parameters, 6.0 * num_head_parameters, pair, pair,
            windows=tuple(windows), fork=fork, unit="FLOPs",
        )  # fmt: skip

    def features(self, groups: Sequence[GroupLens], *, shared: bool) -> tuple[int, int, float]:
        """(tokens, labels, pairs) of a micro-batch."""
        tokens = sum(num_tokens(g, shared=shared, fork=self.fork) for g in groups)
        labels = sum(sum(g.response_lens) for g in groups)
        pairs = sum(
            num_pairs(g, shared=shared, window=window, fork=self.fork)
            for g in groups
            for window in self.windows
        )
        return tokens, labels, pairs / len(self.windows)

    def cost(self, groups: Sequence[GroupLens], *, shared: bool, num_calls: int = 1) -> float:
        """Forward and backward of these groups in `num_calls` micro-batches."""
        tokens, labels, pairs = self.features(groups, shared=shared)
        host, call, pair = (
            (self.host_shared, self.call_shared, self.pair_shared)
            if shared
            else (self.host_replicated, self.call_replicated, self.pair_replicated)
        )
        work = num_calls * call + self.token * tokens + self.label * labels + pair * pairs
        return max(num_calls * host, work)

    def pays(
        self,
        groups: Sequence[GroupLens],
        *,
        replicated: Sequence[GroupLens] | None = None,
        num_calls: int = 1,
    ) -> bool:
        """Whether one shared micro-batch of `groups` costs less than `num_calls` replicated ones.

        `replicated`: the lengths that the replicated batch runs with, where padding makes them longer.
        """
        if all(len(g.response_lens) < 2 for g in groups):
            return False
        other = self.cost(groups if replicated is None else replicated, shared=False, num_calls=num_calls)
        return self.cost(groups, shared=True) < other

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `CostModel.from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CostModel:
        """The inverse of `as_dict`."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"values must hold CostModel's fields only, got {sorted(unknown)[0]!r}")
        return cls(**{**values, "windows": tuple(values.get("windows", (None,)))})


class Measurement(NamedTuple):
    """One timed forward and backward."""

    groups: tuple[GroupLens, ...]
    shared: bool
    seconds: float


Run = Callable[[Sequence[GroupLens], bool], None]


def calibrate(
    run: Run,
    *,
    max_tokens: int,
    max_seconds: float = 60.0,
    device: torch.device | str = "cpu",
    windows: Sequence[int | None] = (None,),
    fork: int = 1,
) -> CostModel:
    """Measures a user's model on a user's machine and fits the coefficients, within about `max_seconds`.

    `run(groups, shared)` does one forward and backward of random tokens with these lengths, packed or
    replicated. Sizes go up to `max_tokens` tokens a micro-batch, long and short prompts, many and few
    responses; each case runs once to warm up and then up to five times, and the median counts. Time left
    decides how often; at least one timed run of each case is made, so very slow models take longer. `host` is
    the least time of a batch of a few tokens. The fit is least squares of relative errors, coefficients at
    least 0.
    """
    if max_tokens < 64:
        raise ValueError(f"max_tokens must be at least 64, got {max_tokens}")
    cases = [(case, shared) for case in _cases(max_tokens, fork) for shared in (True, False)]
    deadline = time.perf_counter() + max_seconds
    few_tokens = (GroupLens(4 + fork, (2, 2)),)
    hosts = [min(_timed(run, few_tokens, shared, device) for _ in range(6)) for shared in (True, False)]
    measurements = []
    for i, (groups, shared) in enumerate(cases):
        _timed(run, groups, shared, device)
        allowed = (deadline - time.perf_counter()) / (len(cases) - i)
        times = [_timed(run, groups, shared, device)]
        while len(times) < 5 and sum(times) + times[-1] < allowed:
            times.append(_timed(run, groups, shared, device))
        measurements.append(Measurement(groups, shared, statistics.median(times)))
    return fit(measurements, windows=windows, fork=fork, hosts=(hosts[0], hosts[1]))


def _cases(max_tokens: int, fork: int) -> list[tuple[GroupLens, ...]]:
    """Lengths that tell tokens, labels, pairs and calls apart, each within `max_tokens` replicated tokens."""
    shapes: list[tuple[GroupLens, ...]] = []
    for size in (max_tokens // 8, max_tokens // 2, max_tokens):
        for num_rows, share_of_prompt in ((2, 0.8), (8, 0.8), (4, 0.2), (4, 0.5)):
            row = size // num_rows
            prompt_len = max(int(row * share_of_prompt), 1 + fork)
            shapes.append((GroupLens(prompt_len, (max(row - prompt_len, 1),) * num_rows),))
        row = max(size // 8, 4)  # four groups of two short rows: many tokens, few pairs
        shapes.append((GroupLens(max(row // 2, 1 + fork), (max(row // 2, 1),) * 2),) * 4)
    return shapes


def _timed(run: Run, groups: Sequence[GroupLens], shared: bool, device: torch.device | str) -> float:
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run(groups, shared)
    if on_gpu:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def fit(
    measurements: Sequence[Measurement],
    *,
    windows: Sequence[int | None] = (None,),
    fork: int = 1,
    hosts: tuple[float, float] | None = None,
) -> CostModel:
    """The coefficients >= 0 that minimise the sum of squared relative errors.

    `hosts`: `host_shared` and `host_replicated` where they were measured; times close to them then say
    nothing about the work. Otherwise `host` is 0 unless one of the measured times as `host` fits clearly
    better.
    """
    unit = CostModel(0.0, 0.0, 0.0, 0.0, windows=tuple(windows), fork=fork)
    rows, seconds = [], []
    for m in measurements:
        tokens, labels, pairs = unit.features(m.groups, shared=m.shared)
        rows.append([tokens, labels, pairs * m.shared, pairs * (not m.shared), m.shared, not m.shared])
        seconds.append(m.seconds)
    if len(rows) < 6:
        raise ValueError(f"measurements must be at least 6, got {len(rows)}")
    times = torch.tensor(seconds, dtype=torch.float64)
    matrix = torch.tensor(rows, dtype=torch.float64) / times[:, None]
    is_shared = torch.tensor([m.shared for m in measurements])

    def tried(hosts: tuple[float, float], above: torch.Tensor | None = None) -> _Tried:
        """(sum of squared errors, coefficients, largest error) with these `host`s, fitted to times
        `above` them."""
        least = torch.where(is_shared, hosts[0], hosts[1])
        above = times > least if above is None else above  # the others say nothing about the work
        scale = matrix[above].abs().amax(0).clamp(min=1e-300)
        found = _nonnegative_least_squares(matrix[above] / scale) / scale
        errors = torch.maximum(matrix @ found, least / times) - 1
        return float(errors.square().sum()), found, float(errors.abs().max())

    if hosts is not None:
        clear = times > 1.3 * torch.where(is_shared, hosts[0], hosts[1])
        enough = min(int((clear & is_shared).sum()), int((clear & ~is_shared).sum())) >= 5
        best = tried(hosts, clear if enough else torch.ones_like(clear))
        return _as_cost_model(best, hosts, unit)
    hosts = (0.0, 0.0)
    best = tried(hosts)
    for _ in range(2):  # one after the other, twice: they hardly depend on each other
        for kind in (True, False):
            for host in times[is_shared == kind].sort().values[:-5].tolist():
                other = (host, hosts[1]) if kind else (hosts[0], host)
                now = tried(other)
                if now[0] < 0.95 * best[0]:
                    best, hosts = now, other
    return _as_cost_model(best, hosts, unit)


_Tried = tuple[float, torch.Tensor, float]


def _as_cost_model(found: _Tried, hosts: tuple[float, float], like: CostModel) -> CostModel:
    values: dict[str, Any] = dict(zip(COEFFICIENTS, (*found[1].tolist(), *hosts), strict=True))
    return CostModel(**values, windows=like.windows, fork=like.fork, fit_error=found[2])


def _nonnegative_least_squares(matrix: torch.Tensor) -> torch.Tensor:
    """x >= 0 of least |matrix x - 1|, by trying every set of positive entries: there are six columns. All of
    them positive cannot be beaten.
    """
    num_columns = matrix.shape[1]
    ones = matrix.new_ones(matrix.shape[0], 1)
    best, best_error = matrix.new_zeros(num_columns), float("inf")
    for size in range(num_columns, 0, -1):
        for columns in itertools.combinations(range(num_columns), size):
            x = torch.linalg.lstsq(matrix[:, columns], ones, driver="gelsd").solution[:, 0]
            error = float((matrix[:, columns] @ x - 1).square().sum())
            if (x >= 0).all() and error < best_error * (1 - 1e-12):
                best, best_error = matrix.new_zeros(num_columns), error
                best[list(columns)] = x
        if size == num_columns and best_error < float("inf"):
            break
    return best
