"""A Gemma-4-31B-shaped stack on one long shared prompt: forward and backward with gradient checkpointing.

    python benchmarks/gemma4_stack.py --out benchmarks/results/nvidia_h200/gemma4_stack.json

Real layer shapes (five sliding layers of head dim 256 to one global layer of head dim 512), random weights
and tokens, bf16. Measured: time and peak memory of one step on the pack, and on the replicated rows
(padding-free, the same attention kernels) for as many responses as --replicated names, the last of which is
all of them: where it runs out of memory, the layer and the allocation are recorded, beside an estimate (the
line through the peaks of the runs that fit). Log-probs of the first response on the pack are compared with
those of a replicated row, and these with the same row on the sm_80 kernels, which add in another order: what
rounding alone does. report.py turns the JSON into the README's block.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from built_from import library_of
from records import write_record

ROOT = Path(__file__).resolve().parents[1]
SHAPES: dict[str, dict[str, Any]] = {
    # With 60 layers these are 30.7 billion parameters.
    "gemma4-31b": {
        "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504, "num_attention_heads": 32,
        "num_key_value_heads": 16, "num_global_key_value_heads": 4, "sliding_window": 1024,
    },
    "tiny": {
        "vocab_size": 199, "hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_global_key_value_heads": 1, "sliding_window": 16,
    },
}  # fmt: skip
FINAL_SOFTCAP = 30.0


def build(options: argparse.Namespace) -> Any:
    """The stack with random weights, in training mode, with checkpointing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from flash_attn.integrations import transformers as dualkv

    layer_types = [
        "sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(options.num_layers)
    ]
    config = AutoConfig.for_model(
        "gemma4_text", **SHAPES[options.shape], num_hidden_layers=options.num_layers, layer_types=layer_types,
        head_dim=256, global_head_dim=512, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        final_logit_softcapping=FINAL_SOFTCAP, max_position_embeddings=262144,
    )  # fmt: skip
    dualkv.register()
    torch.manual_seed(0)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, options.dtype), attn_implementation="dualkv"
        )
    # The softmax scale is 1: random q and k whose norms have weights of 1 make scores of standard deviation
    # sqrt(head_dim), each softmax picks one or two keys, and rounding errors of the first layer decide which
    # in the last. With these weights scores have a standard deviation of 1.
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, layer.self_attn.head_dim**-0.5)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class Steps:
    """One step, packed or replicated, on the same tokens: minus the mean log-prob of the responses."""

    def __init__(self, model: Any, options: argparse.Namespace) -> None:
        import torch

        self.model, self.options, self.device = model, options, torch.device(options.device)
        generator = torch.Generator().manual_seed(1)

        def tokens(count: int) -> Any:
            return torch.randint(3, model.config.vocab_size, (count,), generator=generator)

        self.prompt = tokens(options.prompt_len)
        self.responses = [tokens(options.response_len) for _ in range(options.num_responses)]
        self.layer: int | None = None  # the one that runs, for reports
        for index, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(lambda *_, index=index: setattr(self, "layer", index))

    def packed(self) -> tuple[int, Any]:
        """Tokens in the pack, log-probs of the first response."""
        from flash_attn.integrations.transformers import log_probs_of_batch
        from flash_attn.shared_prompt import pack, unpack_responses

        batch = pack([self.prompt] * len(self.responses), self.responses, device=self.device)
        found = log_probs_of_batch(self.model, batch, compute_entropy=False).log_probs
        found.mean().neg().backward()
        return batch.input_ids.numel(), unpack_responses(found.detach(), batch)[0]

    def replicated(self, num_responses: int) -> tuple[int, Any]:
        """The same of whole rows, one after the other without padding."""
        tokens, found = self._log_probs(num_responses)
        found.mean().neg().backward()
        return tokens, found.detach()[: self.options.response_len]

    def first_row_on_sm80(self) -> Any:
        """Log-probs of the first response in a row of its own, by the sm_80 kernels."""
        import torch

        forced = os.environ.get("FLASH_ATTN_FORCE_ARCH")
        os.environ["FLASH_ATTN_FORCE_ARCH"] = "80"
        try:
            with torch.no_grad():
                return self._log_probs(1)[1].float().cpu()
        finally:
            os.environ["FLASH_ATTN_FORCE_ARCH"] = forced or ""

    def _log_probs(self, num_responses: int) -> tuple[int, Any]:
        """Tokens of the rows, log-probs of their responses."""
        import torch

        from flash_attn.shared_prompt import log_probs

        p, r = self.options.prompt_len, self.options.response_len
        rows = [torch.cat([self.prompt, response]) for response in self.responses[:num_responses]]
        ids = torch.cat(rows).to(self.device)
        ends = torch.arange(0, ids.numel() + 1, p + r, device=self.device, dtype=torch.int32)
        positions = torch.arange(p + r, device=self.device).repeat(num_responses)
        hidden = self.model.model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, cu_seq_lens_q=ends,
            cu_seq_lens_k=ends, max_length_q=p + r, max_length_k=p + r,
        ).last_hidden_state[0]  # fmt: skip
        labels = (torch.arange(ids.numel(), device=self.device) % (p + r) >= p).nonzero()[:, 0]
        weight = self.model.get_output_embeddings().weight
        return ids.numel(), log_probs(
            hidden, ids[labels], weight, pred_index=labels - 1, softcap=FINAL_SOFTCAP, compute_entropy=False
        ).log_probs


def measured(steps: Steps, name: str, step: Callable[[], tuple[int, Any]], repeats: int) -> dict[str, Any]:
    """The row of one way: time of the last repeat and peak memory, or where memory ran out."""
    import torch

    cuda = steps.device.type == "cuda"
    row: dict[str, Any] = {"name": name}
    for repeat in range(repeats):
        steps.model.zero_grad(set_to_none=True)
        gc.collect()
        if cuda:
            if repeat == 0:  # later ones find the allocator's memory mapped
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        begin = time.perf_counter()
        try:
            row["tokens"], first = step()
            if cuda:
                torch.cuda.synchronize()
            row["time_s"] = None if steps.options.no_times else time.perf_counter() - begin
            row["first_log_probs"] = first.float().cpu()
        except torch.cuda.OutOfMemoryError as error:
            row["error"] = str(error).split(". ")[0]
            row["layer"] = steps.layer
            row["module"] = where(error)
        if cuda:
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            row["allocated_before_gib"] = torch.cuda.memory_allocated() / 2**30
        if "error" in row:
            break
    print({k: v for k, v in row.items() if k != "first_log_probs"}, flush=True)
    return row


def where(error: BaseException) -> str:
    """Function of the model in which an exception was raised, "" where it was none (backward)."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "modeling_" in code.co_filename:
            found = getattr(code, "co_qualname", code.co_name)  # qualified from Python 3.11 on
        trace = trace.tb_next
    return found


def estimate(rows: Sequence[dict[str, Any]], tokens: int) -> float | None:
    """Peak of a run of `tokens` from the line through the last two runs that fit."""
    fit = [(r["tokens"], r["peak_gib"]) for r in rows if "error" not in r and "peak_gib" in r]
    if len(fit) < 2:
        return None
    (t0, m0), (t1, m1) = fit[-2:]
    return m1 + (m1 - m0) / (t1 - t0) * (tokens - t1)


def comparison(replicated: Any, packed: Any, other: Any | None) -> dict[str, float]:
    """Root mean square differences of the first response's log-probs, and their standard deviation."""
    found = {"std": replicated.std(), "packed": (packed - replicated).square().mean().sqrt()}
    if other is not None:
        found["sm80"] = (other - replicated).square().mean().sqrt()
    return {name: float(value) for name, value in found.items()}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that is measured, as report.py reads it."""
    import torch

    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    import flash_attn

    model = build(options)
    steps = Steps(model, options)
    machine: dict[str, Any] = {"commit": None}
    backends = {}
    if options.device == "cuda":
        from run import environment

        machine = environment() | {"memory_gib": torch.cuda.mem_get_info()[1] / 2**30}
        backends = {str(d): flash_attn.backend("cuda", head_dim=d) for d in (256, 512)}
    names = ("shape", "num_layers", "prompt_len", "response_len", "num_responses", "dtype")
    total = options.num_responses * (options.prompt_len + options.response_len)
    record: dict[str, Any] = {
        "machine": machine,
        "case": {name: getattr(options, name) for name in names},
        "parameters": sum(p.numel() for p in model.parameters()),
        "backends": backends,
        "replicated": [],
        "replicated_tokens": total,
        "replicated_estimate_gib": None,
        "log_probs": None,
    }
    packed_first = None
    if options.resume and options.out and Path(options.out).exists():
        earlier = json.loads(Path(options.out).read_text())
        if earlier["case"] == record["case"] and earlier["machine"]["commit"] == machine["commit"]:
            record = earlier
    if "packed" not in record:
        record["packed"] = measured(steps, "packed", steps.packed, options.repeats)
        packed_first = record["packed"].pop("first_log_probs", None)
        save(record, options.out)
    done = {row["name"] for row in record["replicated"]}
    for count in [n for n in options.replicated if f"replicated, {n}" not in done]:
        row = measured(steps, f"replicated, {count}", lambda n=count: steps.replicated(n), options.repeats)
        first = row.pop("first_log_probs", None)
        if first is not None and packed_first is not None and record["log_probs"] is None:
            other = steps.first_row_on_sm80() if "cuda-sm90a" in backends.values() else None
            record["log_probs"] = comparison(first, packed_first, other)
            print(record["log_probs"], flush=True)
        record["replicated"].append(row)
        record["replicated_estimate_gib"] = estimate(record["replicated"], total)
        save(record, options.out)  # after every run, so that one cut short is not lost
    return record


def save(record: dict[str, Any], out: str | None) -> None:
    if out:
        write_record(out, record)


def text(record: dict[str, Any], markdown_table: Callable[[list[tuple[str, ...]]], str]) -> str:
    """The README's block."""
    case, machine, packed = record["case"], record["machine"], record["packed"]
    lines: list[tuple[str, ...]] = [("", "tokens", "peak GiB", "forward + backward s")]

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        seconds = "-" if row["time_s"] is None else f"{row['time_s']:.1f}"
        return f"{row['tokens']:,}", f"{row['peak_gib']:.1f}", seconds

    lines.append(("packed", *cells(packed)))
    for row in record["replicated"]:
        if "error" not in row:
            lines.append((f"{row['name']} of {case['num_responses']} rows", *cells(row)))
    guess = record["replicated_estimate_gib"]
    estimated = "-" if guess is None else f"{guess:.0f} (estimate)"
    lost = next((row for row in record["replicated"] if "error" in row), None)
    if not any(row.get("tokens") == record["replicated_tokens"] for row in record["replicated"]):
        lines.append(("replicated, all rows", f"{record['replicated_tokens']:,}", estimated, "-"))
    out = ""
    if lost is not None:
        place = f"layer {lost['layer']}" + (f", `{lost['module']}`" if lost["module"] else "")
        rows = lost["name"].removeprefix("replicated, ")
        out = f"\n\nThe replicated step on {rows} rows ran out of memory in {place}: {lost['error']}."
    kernels = ", ".join(f"head dim {d}: {name}" for d, name in record["backends"].items())
    billions = f"{record['parameters'] / 1e9:.1f} billion"
    prompt, responses = (
        f"{case['prompt_len']:,}",
        f"{case['num_responses']} responses of {case['response_len']}",
    )
    gpu = f"{machine['gpu']} ({machine['memory_gib']:.0f} GiB), torch {machine['torch']}, {machine['date']}"
    gpu += library_of([machine])
    found = record["log_probs"]
    same = ""
    if found is not None:
        same = (
            f"Log-probs of the first response (standard deviation {found['std']:.2f}): root mean square "
            f"difference between the pack and a replicated row {found['packed']:.1e}"
        )
        if "sm80" in found:
            same += f", between that row on the sm_90a and on the sm_80 kernels {found['sm80']:.1e}"
        same = textwrap.fill(same + ".", 118)
    return f"""\
{case["num_layers"]} layers of Gemma-4-31B's shapes, five sliding to one global, {billions} random parameters,
{case["dtype"]}, gradient checkpointing; one prompt of {prompt} tokens, {responses}.
{gpu};
{kernels}.
{same}

{markdown_table(lines)}{out}"""


def draw(record: dict[str, Any], path: Path) -> None:
    """Peak memory, measured and estimated, beside what the GPU has."""
    from plotting import COLORS, REPLICATED, pyplot

    plt = pyplot()
    bars = {"packed": record["packed"]["peak_gib"]}
    bars |= {row["name"]: row["peak_gib"] for row in record["replicated"] if "error" not in row}
    if record["replicated_estimate_gib"] is not None:
        bars["replicated, all\n(estimate)"] = record["replicated_estimate_gib"]
    figure, axis = plt.subplots(figsize=(6, 3))
    colors = [COLORS["ours"], *[REPLICATED] * (len(bars) - 1)]
    axis.bar(list(bars), list(bars.values()), 0.6, color=colors)
    memory = record["machine"]["memory_gib"]
    axis.axhline(memory, color="black", linewidth=1, linestyle="--")
    axis.text(-0.4, memory, f"the GPU's {memory:.0f} GiB", va="bottom", fontsize=8)
    axis.set_ylabel("peak GiB")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="gemma4-31b")
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--prompt-len", type=int, default=65536)
    parser.add_argument("--response-len", type=int, default=512)
    parser.add_argument("--num-responses", type=int, default=8)
    parser.add_argument(
        "--replicated", type=int, nargs="*", default=[1, 2, 8], help="rows of replicated runs"
    )
    parser.add_argument("--repeats", type=int, default=1, help="steps of each run; the last is timed")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-times", action="store_true", help="memory only: other work runs on the GPU")
    parser.add_argument("--out", default=None, help="JSON file")
    parser.add_argument("--resume", action="store_true", help="leave out the runs that --out holds already")
    options = parser.parse_args()
    if options.device.startswith("cuda"):
        from needs_gpu import require_gpu

        require_gpu()
    sys.path[:0] = [str(ROOT)]
    record = run(options)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
