"""What make report writes from measurements: who wins, what passed, what ran out of memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import build_time
import checks_report
import decoder_layer_report
import gains_report
import kernel_plot
import kernel_report
import model_update_report
from report import markdown_table

FACTS = dict(gpu="a GPU", driver="1", cuda="13.0", torch="2.13.0", date="2026-01-01", commit="0" * 40)
ROWS = """\
| feature | state | test |
| :-- | :-- | :-- |
| other | works | `tests/test_windows.py::test_x` |
| Gemma-4 | {} | `tests/gpu/test_gpu_models.py::test_x` |
| CUDA kernels, sm_80 and sm_90a | {} | `tests/gpu/test_gpu_equivalence.py::test_x` |
"""


def run_of(**files: dict[str, int]) -> dict:
    return {"files": {f"tests/gpu/test_gpu_{name}.py": counts for name, counts in files.items()}}


@pytest.mark.parametrize(
    "models, others, states",
    [
        ({"passed": 8}, {"passed": 30, "skipped": 2}, ("works", "works")),
        ({"passed": 8}, {"passed": 29, "not run": 1}, ("works", checks_report.UNFINISHED)),
        ({"passed": 7, "failed": 1}, {"passed": 30}, ("not yet", checks_report.UNFINISHED)),
        ({"skipped": 8}, {"passed": 30}, ("not yet", "works")),
    ],
)
def test_rows_on_the_gpu_suite_follow_its_run(models, others, states):
    text = ROWS.format("works", "not yet")
    assert checks_report.support_states(text, [run_of(models=models, equivalence=others)]) == ROWS.format(
        *states
    )
    assert checks_report.support_states(text, []) == ROWS.format("not yet", checks_report.UNFINISHED)


def kernel_rows(case: dict, **times: tuple[float, float]) -> list[dict]:
    facts = FACTS | {"matmul_tflops": 700, "case": case, "peak_gib": 1.0, "extra_gib": 0.1}
    return [
        facts | {"provider": name.replace("_", "-"), "pass": direction, "time_ms": ms, "tflops": 100 / ms}
        for name, pair in times.items()
        for direction, ms in zip(("fwd", "bwd"), pair, strict=True)
    ]


CASE = {"N": 8, "P": 1024, "R": 256, "H": 32, "Hk": 8, "d": 128, "dtype": "bf16", "groups": 1}


def test_a_peer_that_wins_is_shown():
    """Pass by pass against the fastest peer of that pass; the step against one peer's own two passes."""
    rows = kernel_rows(
        CASE, ours_sm90a=(1.0, 4.0), fa4_two_call=(3.0, 3.6), fa4_gather=(1.5, 8.0), flex=(9.0, 9.0)
    )
    text = kernel_report.summary(rows, markdown_table)
    assert "| N=8, P=1024, R=256, d=128 | 100 / 25 | 67 / 28† | 1.50x | **0.90x** | 1.32x |" in text
    words = " ".join(text.split())
    assert words.startswith("Ours, sm_90a, is ahead of every peer measured in 1 of 2 passes. | forward")
    assert "Faster than ours: fa4-two-call, backward: N=8, P=1024, R=256, d=128. " in words
    near = [row | {"p20_ms": 0.9 * row["time_ms"], "p80_ms": 1.1 * row["time_ms"]} for row in rows]
    words = " ".join(kernel_report.summary(near, markdown_table).split())
    assert "overlap): fa4-two-call, backward: N=8, P=1024, R=256, d=128 (~). " in words
    others = {"With others": rows, "In fp16": kernel_rows(CASE, ours_sm90a=(1.0, 4.0), flex=(2.0, 5.0))}
    words = " ".join(kernel_report.summary(rows, markdown_table, others).split())
    assert (
        "With others 1 of 2; of FlashAttention-4's three ways two ran in 1 of 1 rows. In fp16 2 of 2."
        in words
    )
    assert "Faster than ours, with others: fa4-two-call, backward: N=8" in words


def test_a_win_within_the_rounds_and_a_tie_say_so():
    rows = kernel_rows(CASE, ours_sm90a=(1.0, 4.0), flex=(1.0, 5.0))
    won = "in 2 of 2 passes (in {} of them the rounds of both overlap)."
    assert won.format(1) in kernel_report.text(rows, markdown_table)
    near = [row | {"p20_ms": 0.8 * row["time_ms"], "p80_ms": 1.2 * row["time_ms"]} for row in rows]
    assert won.format(2) in kernel_report.text(near, markdown_table)
    assert [close for *_, close in kernel_report.step_ratios(rows)] == [False]
    assert [close for *_, close in kernel_report.step_ratios(near)] == [True]


def test_rows_where_not_every_way_of_a_peer_ran_are_marked():
    ways = dict(ours_sm90a=(1.0, 4.0), fa4_two_call=(3.0, 5.0), fa4_gather=(2.0, 8.0))
    rows = kernel_rows(CASE, **ways, fa4_block_sparse=(4.0, 6.0)) + kernel_rows(CASE | {"P": 512}, **ways)
    for text in (kernel_report.summary(rows, markdown_table), kernel_report.text(rows, markdown_table)):
        assert "| 100 / 25 | 50 / 20 | 2.00x |" in text and "| 100 / 25 | 50 / 20† | 2.00x |" in text
        assert "(†: not all three in both passes; two ran in 1 of 2 rows)" in " ".join(text.split())


def test_a_way_without_a_backward_counts_in_the_forward():
    rows = kernel_rows(CASE, ours_sm90a=(1.0, 4.0), flex=(2.0, 9.0))
    rows += [row for row in kernel_rows(CASE, fa3_gather=(0.5, 1.0)) if row["pass"] == "fwd"]
    text = kernel_report.summary(rows, markdown_table)
    assert "| N=8, P=1024, R=256, d=128 | 100 / 25 | 200 / - | **0.50x** | 2.25x | 2.20x |" in text
    assert "fa3-fwd, has the forward only" in " ".join(text.split())
    assert "| fa3-gather | 0.5 | 200 | - | - | - | - | - |" in kernel_report.text(rows, markdown_table)


def test_rows_of_several_runs_say_so():
    old = [row | {"commit": "a" * 40} for row in kernel_rows(CASE, flex=(9.0, 9.0))]
    new = kernel_rows(CASE, ours_sm90a=(1.0, 4.0), fa4_gather=(2.0, 5.0))
    foot = f"Not of one run: ours-sm90a, fa4-gather: {'0' * 12}; flex: {'a' * 12}."
    assert foot in kernel_report.text([*old, *new], markdown_table)
    summary = " ".join(kernel_report.summary([*old, *new], markdown_table).split())
    assert "in one process, but in some cases these, which ran in another process: flex." in summary
    assert f"commits {'a' * 12} and {'0' * 12}" in summary
    text = kernel_report.text(new, markdown_table)
    assert f"commit {'0' * 12}," in text and "Commit" not in text and "Not of one run" not in text


def test_plain_attention_is_compared_with_flash_attention_2():
    case = {"B": 16, "S": 500, "causal": True, "H": 32, "Hk": 8, "d": 128, "dtype": "bf16"}
    rows = kernel_rows(case, fa2=(1.0, 3.0), ours_sm80=(0.8, 4.0))
    text = kernel_report.text(rows, markdown_table)
    assert "| B=16, S=500, causal, d=128 | - | - | 1.25x | **0.75x** |" in text


def test_who_did_not_run_is_named(tmp_path):
    lost = FACTS | {
        "case": CASE | {"ragged": True},
        "provider": "flex",
        "pass": "fwd",
        "error": "no such thing",
    }
    rows = [*kernel_rows(CASE, ours_sm90a=(1.0, 4.0)), lost]
    text = kernel_report.text(rows, markdown_table)
    assert "- flex (N=8, P=1024, R~U(131, 256), d=128): no such thing" in text
    assert "| ours-sm90a | 1.0 | 100 | 4.0 | 25 | 5.0 | 1.0 | 0.1 |" in text
    kernel_plot.draw([*rows, *kernel_rows(CASE | {"d": 64}, ours_sm90a=(1.0, 2.0))], tmp_path / "plot.svg")
    assert "other" not in text and "d=64" in (tmp_path / "plot.svg").read_text()


def layer_rows() -> list[dict]:
    """Ours and a peer at P = 1K, 2K, 4K and 1, 2 responses; replicated rows run out of memory at 4K."""
    rows = []
    for prompt in (1024, 2048, 4096):
        for count in (1, 2):
            packed = prompt + 1000 * count
            for name, size, ms in (
                ("ours", packed, 10.0),
                ("fa4-two-call", packed, 9.0 if prompt == 1024 else 11.0),
                ("fa2-replicated", (prompt + 1000) * count, 20.0),
            ):
                case = {"P": prompt, "mb": count, "tokens": 1000 * count}
                row = FACTS | {"case": case, "provider": name, "rows": size, "flops": 1e9 * size}
                if name == "fa2-replicated" and prompt == 4096 and count == 2:
                    rows.append(row | {"error": "no memory", "out_of_memory": True})
                else:
                    rows.append(row | {"time_ms": ms, "peak_gib": 1 + size * 2**-20 * 64})
    return rows


def test_layer_says_who_wins_and_where_memory_ends(tmp_path):
    text = decoder_layer_report.text(layer_rows(), markdown_table)
    assert "| 1K | 10; **0.90x fa4-two-call** | 10; **0.90x fa4-two-call** |" in text
    assert "| 2K | 10; 1.10x fa4-two-call | 10; 1.10x fa4-two-call |" in text
    assert "Ours is ahead in 4 of 6 cells with both; in 0 of the other 2 the rounds of both overlap" in text
    near = [
        row | {"p20_ms": 0.95 * row["time_ms"], "p80_ms": 1.1 * row["time_ms"]}
        for row in layer_rows()
        if "time_ms" in row
    ]
    assert "in all 2 others the rounds" in decoder_layer_report.text(near, markdown_table)
    one = [row for row in near if (row["case"]["P"], row["case"]["mb"]) != (1024, near[0]["case"]["mb"])]
    assert (
        "4 of 5 cells with both (in 4 of them the rounds of both overlap); in the other the rounds"
        in " ".join(decoder_layer_report.text(one, markdown_table).split())
    )
    assert "| 4K | 2.00x (1.00) | OOM (1.67) |" in text
    assert "| fa2-replicated | ≥ 2 | ≥ 2 | 1 |" in text and "| ours | ≥ 2 | ≥ 2 | ≥ 2 |" in text
    assert "1.0 GiB + 64 KiB a row (within 0%)" in text
    assert "| rho, tokens replicated / packed | 1.34 | 1.51 | 1.67 | of the lengths drawn |" in text
    decoder_layer_report.draw(layer_rows(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_memory_law_of_copied_keys():
    """1 GiB + 64 KiB a row + 8 KiB for every copy of a prompt row."""
    rows = [
        row | {"provider": "gather-varlen", "peak_gib": row["peak_gib"] + 8 * 2**-20 * c["P"] * c["mb"]}
        for row in layer_rows()
        if row["provider"] == "ours" and (c := row["case"])
    ]
    law = decoder_layer_report.memory_law(rows, "gather-varlen")
    assert decoder_layer_report.law_text(law) == (
        "1.0 GiB + 64 KiB a row + 8.0 KiB a copied prompt row (within 0%)"
    )
    assert decoder_layer_report.memory_law(rows[:3], "gather-varlen") is None


def test_utilisation_counts_what_ran_and_what_was_replicated(tmp_path):
    row = FACTS | {
        "gpu": "NVIDIA H200", "pass": "policy_update", "dp": 1, "sp": 1, "model": "qwen3-8b",
        "num_layers": 36, "num_micro_batches": 1, "micro_batch": 4, "prompt_len": 8192,
        "flops": 989e12, "flop_ratio": 2.5, "seconds": 2.0,
    }  # fmt: skip
    rows = [row | {"provider": "shared"}, row | {"provider": "verl-torch-fa2", "flops": 2.5 * 989e12}]
    text = model_update_report.text([*rows, row | {"provider": "shared", "micro_batch": 2}], markdown_table)
    assert "micro-batch 4: shared | 2.00 | 0.99 | 494 | 50% | 125% |" in text
    assert "micro-batch 4: verl-torch-fa2 | 2.00 | 2.47 | 1236 | 125% | 125% |" in text
    assert text.index("micro-batch 2") < text.index("micro-batch 4")
    model_update_report.draw(rows, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").stat().st_size > 1000


def test_a_sanitizer_run_that_did_not_finish_is_no_success():
    row = FACTS | {
        "tool": "memcheck",
        "path": 90,
        "head_dim": 64,
        "completed": True,
        "errors": 0,
        "seconds": 7,
    }
    text = checks_report.sanitizer([row, row | {"path": 80, "errors": None}], markdown_table)
    assert "| memcheck | sm_90a | 64 | 0 | 7 |" in text
    assert "| memcheck | sm_80 | 64 | did not finish | 7 |" in text


def test_build_times_come_from_ninja_s_log():
    one = (
        "# ninja log v5\n0\t9000\t1\tobj/a.cu.o\tx\n100\t12000\t1\tobj/b.cu.o\tx\n12000\t13000\t1\t_C.so\tx\n"
    )
    assert build_time.times_of(one) == (
        {"obj/a.cu.o": (0, 9000), "obj/b.cu.o": (100, 12000), "_C.so": (12000, 13000)}, 13000,
    )  # fmt: skip
    assert build_time.times_of(one + "5\t700\t1\tobj/a.cu.o\tx\n")[1] is None  # built in two runs


def test_gains_are_of_fixed_cells_and_leave_out_what_was_not_measured(tmp_path):
    demo = {
        "case": {"model": "a model", "num_groups": 2, "num_responses": 8},
        "groups": [{"prompt": 90, "responses": [4, 5]}, {"prompt": 100, "responses": [9]}],
        "variants": {"replicated": {"total_seconds": 6.0}, "shared": {"total_seconds": 1.5}},
    }  # fmt: skip
    text = gains_report.text(demo, tmp_path, markdown_table)
    assert (
        " on a CPU: 2 prompts of 90 to 100 tokens, 8 responses of 4 to 9 to each | 6.0 s | 1.5 s | 4.0x |"
        in text
    )
    assert "Against" not in text
    assert "On one a GPU" in text and text.count("\n|") == 2
    case = CASE | {"N": 28, "P": 16384, "R": 2048}
    rows = kernel_rows(CASE | {"N": 28}, ours_sm90a=(9.0, 9.0))
    rows += kernel_rows(case, ours_sm90a=(20.0, 80.0), fa2_replicated=(200.0, 600.0), flex=(50.0, 90.0))
    (tmp_path / "nvidia_h200").mkdir()
    (tmp_path / "nvidia_h200" / "kernels.json").write_text(json.dumps(rows))
    text = gains_report.text(demo, tmp_path, markdown_table)
    assert "a prompt of 16,384, 28 responses of 2,048 | 800 ms | 100 ms | 8.0x |" in text
    slow = kernel_rows(CASE, ours_sm90a=(10.0, 10.0), flex=(9.0, 10.0))
    (tmp_path / "nvidia_h200" / "kernels_full.json").write_text(json.dumps(slow))
    cell = {"model": "qwen3-1.7b", "groups": 8, "P": 4096, "N": 8, "R": 512}
    updates = [
        {"case": cell, "provider": name, "time_ms": ms, "timed_rows": count, "repeats": 1}
        for name, ms, count in (("trl-replicated-sdpa", 800.0, 4), ("trl-shared", 200.0, 64))
    ]
    (tmp_path / "nvidia_h200" / "trl_updates.json").write_text(json.dumps(updates))
    text = gains_report.text(demo, tmp_path, markdown_table)
    assert "(4 replicated of 64 rows timed, scaled to all; one round) | 800 ms | 200 ms | 4.0x |" in text
    assert "0.95 to 0.95 times as fast, behind in 1 of 1, by 5.0 %" in " ".join(text.split())
    (tmp_path / "nvidia_h200" / "decoder_layer.json").write_text(json.dumps(layer_rows()))
    words = " ".join(gains_report.text(demo, tmp_path, markdown_table).split())
    assert (
        "is 1.40 to 1.40 times as fast (median 1.40, ahead in 1 of 1; that way is FlashAttention-4's in 0)"
        in words
    )
    assert (
        "0.90 to 1.10 times as fast (median 1.10, ahead in 2 of 3; that way is FlashAttention-4's in 3)"
        in words
    )
