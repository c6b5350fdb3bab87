"""Times all providers on the named cases, interleaved in one process, and writes JSON rows for report.py.

    python benchmarks/run.py --cases quick --out benchmarks/results/h200/kernels.json
    python benchmarks/run.py --cases main,head_dims,plain --providers ours-sm90a,fa2-two-call --out FILE

Every provider is first checked on a ragged small case against fp32 (relative rms below 2e-2); a wrong one is
reported in its rows' "error" and not timed.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from datetime import datetime, timezone
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from cases import CASES, PLAIN, Case, PlainCase  # noqa: E402
from needs_gpu import require_gpu  # noqa: E402
from providers import PROVIDERS, Pair, Problem  # noqa: E402
from providers_plain import plain_providers  # noqa: E402
from records import earlier, merged, write_rows  # noqa: E402
from timing import Memory, as_graph, interleaved, memory  # noqa: E402

TOLERANCE = 2e-2
PASSES = ("fwd", "bwd")


def commit(root: Path = ROOT) -> str:
    """What FLASH_ATTN_COMMIT says, else the checkout's commit, with "+changes" where its sources differ.

    report.py refuses figures of such a state.
    """
    sources = (":(top)", ":(top,exclude)benchmarks/results", ":(top,exclude)README.md")
    changed = ["status", "--porcelain", "--untracked-files=no", "--", *sources]
    runs = [
        subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
        for arguments in (["rev-parse", "HEAD"], changed)
    ]
    if "FLASH_ATTN_COMMIT" in os.environ or any(run.returncode for run in runs):
        return os.environ.get("FLASH_ATTN_COMMIT") or "unknown"
    return runs[0].stdout.strip() + ("+changes" if runs[1].stdout.strip() else "")


def environment(device: torch.device | str = "cuda") -> dict[str, Any]:
    """What belongs beside a figure measured on this device."""
    from flash_attn import _backend

    facts = {
        "gpu": "cpu",
        "torch": torch.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    if torch.device(device).type != "cuda":
        return facts
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.split()
    loaded = _backend._load_library() is None
    return facts | {
        "gpu": torch.cuda.get_device_name(device),
        "driver": driver[0] if driver else "unknown",
        "cuda": torch.version.cuda,
        "library": torch.ops.flash_attn_cuda.build_id() if loaded else "not built",
    }


def reference(problem: Problem) -> list[Tensor]:
    """out, dq, dk, dv in fp32 with an explicit mask."""
    p, lens, window_left = problem.case.prompt_len, problem.case.response_lens, problem.case.window_left
    device = problem.q.device
    index = torch.arange(problem.case.total, device=device)
    owner = torch.repeat_interleave(torch.tensor([p, *lens], device=device))  # 0: the prompt
    mask = (index[None] <= index[:, None]) & ((index[None] < p) | (owner[None] == owner[:, None]))
    if window_left >= 0:
        position = torch.cat([torch.arange(p), *(torch.arange(p, p + r) for r in lens)]).to(device)
        mask &= position[None] >= position[:, None] - window_left
    leaves = [x.float().detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    groups = problem.case.num_heads // problem.case.num_heads_k
    q, k, v = leaves[0], *(x.repeat_interleave(groups, 1) for x in leaves[1:])
    scores = torch.einsum("ihd,jhd->hij", q, k) * problem.scale
    out = torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)
    return [out.detach(), *torch.autograd.grad(out, leaves, problem.dout.float())]


def packed(pair: Pair) -> list[Tensor]:
    """out, dq, dk, dv of a provider in the problem's packing; out alone where it has no backward."""
    forward, backward = pair
    unpack_out = getattr(forward, "packed", lambda x: x)
    unpack_grads = getattr(backward, "packed", lambda x: x)
    return [unpack_out(forward()), *(unpack_grads(backward()) if backward else ())]


def what_is_wrong(name: str, case: Case) -> str | None:
    """None where the results are right on a small ragged case with the same heads, dtype and head dim."""
    window = min(case.window_left, 99)
    small = replace(case, num_responses=3, prompt_len=300, response_len=200, num_groups=1, window_left=window)
    try:
        problem = Problem(small)
        want = reference(problem)
        got = packed(PROVIDERS[name](problem))
        for label, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=len(got) > 1):
            error = float((x.detach().float() - y).norm() / y.norm())
            if not error < TOLERANCE:
                return f"{label} is wrong: relative rms error {error:.1e}"
    except Exception as error:  # a provider that does not run here is a result
        return short(error)
    return None


def checked(name: str, case: Case, library: str, folder: Path | None) -> str | None:
    """`what_is_wrong`, or what an earlier process with the same library wrote down in `folder`."""
    if folder is None:
        return what_is_wrong(name, case)
    kind = (name, library, case.head_dim, case.num_heads_k, case.dtype, case.window_left, case.ragged)
    path = folder / "-".join(map(str, kind))
    if not path.exists():
        found = what_is_wrong(name, case)
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(found or "")
    return path.read_text() or None


def warm(cases: Iterable[Case], names: Iterable[str], library: str, folder: Path | None) -> None:
    """Checks every provider, and runs it once on every case, so that what it compiles lies in its cache."""
    for case in cases:
        for name in names:
            wrong = checked(name, case, library, folder)
            if wrong is None:
                try:
                    forward, backward = PROVIDERS[name](Problem(case))
                    forward(), backward and backward()
                    torch.cuda.synchronize()
                except Exception as error:
                    wrong = short(error)
            print(f"{name} {case.row()}: {wrong or 'right'}", flush=True)
            forward = backward = None
            clean()


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


APART_GIB = 8.0  # a provider that holds more (replicated rows) is timed by itself, and let go


def time_case(case: Case, names: Iterable[str], repeats: int, wrong: dict[str, str]) -> list[dict[str, Any]]:
    pairs: dict[str, Pair] = {}
    rows: list[dict[str, Any]] = []
    used: dict[tuple[str, str], Memory] = {}

    def failed(name: str, error: str) -> None:
        rows.extend(dict(case=case.row(), provider=name, error=error) | {"pass": d} for d in PASSES)

    def measure(pairs: dict[str, Pair], graphs: bool = False, **marks: Any) -> None:
        for index, direction in enumerate(PASSES):
            calls = {}
            for name, pair in pairs.items():
                call = pair[index]
                if call is None:
                    continue
                try:
                    calls[name] = as_graph(call) if graphs else call
                except Exception as error:
                    row = dict(case=case.row(), provider=name, graph=True, error=short(error))
                    rows.append(row | {"pass": direction})
            warmup = 1 if case.small else 0  # `memory` ran every call
            for name, timing in interleaved(calls, repeats, warmup).items():
                row = dict(case=case.row(), provider=name, graph=graphs, **asdict(timing), **marks)
                row |= {"pass": direction, "tflops": case.flops(direction) / timing.time_ms / 1e9}
                row |= {key: round(value, 3) for key, value in asdict(used[name, direction]).items()}
                plan = getattr(pairs[name][0], "plan", None)
                if plan is not None and direction == "fwd" and not graphs:
                    row["plan_ms"] = interleaved({"plan": plan}, repeats)["plan"].time_ms
                rows.append(row)
                print_row(row)

    problem = Problem(case)
    inputs = torch.cuda.memory_allocated()
    for name in names:
        if name in wrong:
            failed(name, wrong[name])
            continue
        pair = call = None
        try:
            gc.collect()
            others = (torch.cuda.memory_allocated() - inputs) / 2**30  # of the providers before
            pair = PROVIDERS[name](problem)
            gc.collect()
            held = (torch.cuda.memory_allocated() - inputs) / 2**30 - others
            for direction, call in zip(PASSES, pair, strict=True):
                if call is not None:
                    used[name, direction] = memory(call)
                    used[name, direction].peak_gib -= others
            if held > APART_GIB:
                measure({name: pair}, apart=True)
            else:
                pairs[name] = pair
        except Exception as error:
            failed(name, short(error))
            clean()
    pair = call = None
    for graphs in (False, True) if case.small else (False,):
        measure(pairs, graphs)
    return rows


def time_plain(case: PlainCase, repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    stream = torch.cuda.Stream()
    for graphs in (False, True) if case.seqlen <= 1024 else (False,):  # short ones: launches count
        with torch.cuda.stream(stream):
            pairs = plain_providers(case)
        torch.cuda.synchronize()
        for index, direction in enumerate(("fwd", "bwd")):
            calls = {}
            for name, pair in pairs.items():
                try:
                    calls[name] = as_graph(pair[index], stream) if graphs else pair[index]
                except Exception as error:
                    row = dict(case=case.row(), provider=name, graph=graphs, error=short(error))
                    rows.append(row | {"pass": direction})
                    print(name, rows[-1]["error"], flush=True)
            with torch.cuda.stream(stream):
                timings = interleaved(calls, repeats)
            for name, timing in timings.items():
                row = dict(case=case.row(), provider=name, graph=graphs, **asdict(timing))
                row |= {"pass": direction, "tflops": case.flops(direction) / timing.time_ms / 1e9}
                rows.append(row)
                print_row(row)
    return rows


def print_row(row: dict[str, Any]) -> None:
    case = " ".join(f"{k}={v}" for k, v in row["case"].items() if k not in ("dtype", "H", "Hk"))
    graph = " graph" if row.get("graph") else ""
    print(
        f"{case:34s} {row['pass']} {row['provider']:20s}{graph} {row['time_ms']:9.3f} ms "
        f"{row['tflops']:6.0f} TFLOP/s  [{row['p20_ms']:.3f}, {row['p80_ms']:.3f}] {row.get('peak_gib', '')}",
        flush=True,
    )


def matmul_tflops() -> float:
    """The chip's ceiling in the same minute: a dense bf16 product of random matrices."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / interleaved({"matmul": lambda: x @ x}, 10)["matmul"].time_ms / 1e9


SHARED_CASE = re.compile(r"(\d+:){2}\d+(:\d+){0,3}|(\d+:){6}(bf16|fp16)(:\d+)?")  # N:P:R..., the last: groups
PLAIN_CASE = re.compile(r"plain:\d+:\d+:(causal|full):\d+")


def cases_of(names: str) -> list[Case | PlainCase]:
    """The cases that `--cases` names, each once, in its order; the program ends at what is none."""
    cases: list[Case | PlainCase] = []
    for name in names.split(","):
        if name == "plain":
            cases += PLAIN
        elif PLAIN_CASE.fullmatch(name):
            batch, seqlen, mask, head_dim = name.split(":")[1:]
            cases.append(PlainCase(int(batch), int(seqlen), mask == "causal", head_dim=int(head_dim)))
        elif name in CASES:
            cases += CASES[name]
        elif SHARED_CASE.fullmatch(name):
            sizes = (int(part) if part.isdigit() else part for part in name.split(":"))
            cases.append(Case(*sizes))  # type: ignore[arg-type]
        else:
            known = f"or one of {', '.join(CASES)}, plain"
            sys.exit(f"a case is N:P:R[:H:Hk:d[:dtype]], plain:B:S:causal|full:d, {known}, got {name!r}")
    return list(dict.fromkeys(cases))


def expanded(spec: str) -> list[str]:
    """A pattern as the providers that it fits; a name stays as it is."""
    name, _, where = spec.partition("@")
    found = [known for known in PROVIDERS if fnmatch(known, name)] if "*" in name else [name]
    return [f"{known}@{where}" if where else known for known in found]


def runs_on(spec: str, case: Case | PlainCase) -> bool:
    """NAME, or NAME@WHERE+WHERE: only at those head dims or N:P:R."""
    _, _, where = spec.partition("@")
    if not where or isinstance(case, PlainCase):
        return True
    places = {str(case.head_dim), f"{case.num_responses}:{case.prompt_len}:{case.response_len}"}
    return bool(places.intersection(where.split("+")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        default="quick",
        help=f"{', '.join(CASES)}, plain; or N:P:R[:H:Hk:d[:dtype]]; or plain:B:S:causal:d, plain:B:S:full:d",
    )
    parser.add_argument(
        "--providers",
        default=",".join(PROVIDERS),
        help="NAME, *-two-call, or NAME@128+28:4096:2048: only at these head dims or N:P:R",
    )
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--no-check", action="store_true")
    parser.add_argument("--checks", type=Path, help="folder of earlier checks of the same library")
    parser.add_argument("--warm", action="store_true", help="check, compile and run once; no times")
    parser.add_argument("--out", default=None, help="JSON file")
    parser.add_argument("--resume", action="store_true", help="keep --out, leave out what this library ran")
    args = parser.parse_args()
    specs = [spec for part in args.providers.split(",") for spec in expanded(part)]
    names = [spec.partition("@")[0] for spec in specs]
    unknown = set(names) - set(PROVIDERS)
    if unknown:
        sys.exit(f"--providers must be of {', '.join(PROVIDERS)}, got {', '.join(sorted(unknown))}")
    cases = cases_of(args.cases)
    require_gpu()
    facts = environment()
    print(facts, flush=True)
    if args.warm:
        warm((case for case in cases if isinstance(case, Case)), names, facts["library"], args.checks)
        return
    facts["matmul_tflops"] = round(matmul_tflops())
    print(f"matmul {facts['matmul_tflops']} TFLOP/s", flush=True)
    rows, others = earlier(args.out, facts) if args.resume else ([], [])

    def save() -> None:  # after every case, so that a run cut short is not lost
        if args.out:
            write_rows(args.out, merged(others, [facts | row for row in rows]))

    found: dict[tuple[str, int, str, int, int, bool], str | None] = {}
    for case in cases:
        measured = {row["provider"] for row in rows if row["case"] == case.row()}
        asked = [name for name, spec in zip(names, specs, strict=True) if runs_on(spec, case)]
        left = [name for name in asked if name not in measured]
        if isinstance(case, PlainCase):
            rows += [] if measured else time_plain(case, args.repeats)
        elif left:
            wrong: dict[str, str] = {}
            for name in left if not args.no_check else ():
                key = (name, case.head_dim, case.dtype, case.num_heads_k, case.window_left, case.ragged)
                if key not in found:
                    found[key] = checked(name, case, facts["library"], args.checks)
                    if found[key]:
                        print(f"{name} d={case.head_dim}: {found[key]}", flush=True)
                if found[key] is not None:
                    wrong[name] = str(found[key])
            clean()
            gc.freeze()  # modules and compiled code: collecting then takes no time
            added = {"added": True} if measured else {}  # beside rows of an earlier process
            rows += [row | added for row in time_case(case, left, args.repeats, wrong)]
        save()
        clean()


if __name__ == "__main__":
    main()
