"""The tables of benchmarks/decode_report.py say what the rows hold: shares, failures, prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
FACTS = dict(gpu="G", cuda="13.0", torch="2.11", date="2026-11-30", copy_tb_s=4.2, library="abc")


def row(provider: str, graph: bool, **changes: Any) -> dict[str, Any]:
    case = dict(B=8, S=32768, P=0, N=1, H=32, Hk=4, d=128) | changes.pop("case", {})
    times = dict(time_ms=0.1325, of_floor=0.947, layers=4)
    return FACTS | dict(case=case, provider=provider, graph=graph) | times | changes


def test_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import decode_report

    def table(lines: list[tuple[str, ...]]) -> str:
        return "\n".join(" | ".join(line) for line in lines)

    shared = dict(B=64, S=1000, P=8192, N=16)
    rows = [
        row("ours", True), row("sdpa", True, time_ms=1.5), row("ours", False, time_ms=0.2),
        row("sdpa", False, time_ms=0.1),
        {k: v for k, v in row("ours-op-sm80", True, error="OutOfMemoryError: x").items() if k != "time_ms"},
        row("ours-shared", True, case=shared, of_floor=0.5),
        row("ours-replicated", True, case=shared, time_ms=2.0),
    ]  # fmt: skip
    text = decode_report.text(rows, table).splitlines()
    assert "G, CUDA 13.0, torch 2.11, 2026-11-30, library of commit abc" in text[0] and "4.20 TB/s" in text[3]
    assert "a CUDA graph of 4 to 4, each on caches of its own, 0.79 GB or more in all" in text[2]
    assert "H=32, Hk=4, d=128" in text[1]
    assert "8, 32K | 132 | 95 % | failed | 1,500 | 200 | **100**" in text
    assert "16, 4 | 8K, 1000 | 132 | 50 % | 2,000" in text
    text = decode_report.text([row("copy", True, time_ms=0.106), *rows], table).splitlines()
    assert "8, 32K | 132 | 95 % | 106 | 80 % | failed | 1,500 | 200 | **100**" in text
