"""Rules of the house that nobody can be asked to remember: sizes, words, imports, docstrings, real tests."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 450  # about 400
MAX_FUNCTION = 70  # lines behind its docstring: a screen
MAX_BYTES = 2**20
FRAMEWORKS = {"transformers", "trl", "verl", "openrlhf", "peft", "accelerate", "datasets", "vllm"}
# A kernel's main loop is one function and may be one long file.
LONG_FILES = re.compile(r"(csrc/flash_attn/src/sm80|hopper)/\w*(mainloop|_mma)\.h")
CODE = {".py", ".h", ".cuh", ".cu", ".cpp"}
# Split, so that this file does not contain what it looks for.
FORBIDDEN = {
    "an unfinished place": r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    "a path of somebody's machine": r"(?<![\w.])/(wo" + r"rk|ro" + r"ot|ho" + r"me|tm" + r"p)/\w",
    "a hidden failure": r"pragma: no " + r"cover|except:\s*(pass|\.\.\.)",
}


def tracked() -> list[Path]:
    """Files of the repository (new ones too), without what .gitignore names."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        paths = [ROOT / name for name in output.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        folders = ("flash_attn", "csrc", "hopper", "tests", "benchmarks", "examples", "docs")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts)


FILES = tracked()
CODE_FILES = [path for path in FILES if path.suffix in CODE]
PACKAGE = [path for path in CODE_FILES if path.suffix == ".py" and path.is_relative_to(ROOT / "flash_attn")]
CXX = [path for path in CODE_FILES if path.suffix != ".py"]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> set[str]:
    """Dotted names of every module that a Python file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_files_have_one_job_and_fit_in_the_head():
    lines = {name(path): len(path.read_text().splitlines()) for path in CODE_FILES}
    long = {path: n for path, n in lines.items() if n > MAX_LINES and not LONG_FILES.fullmatch(path)}
    assert not long, f"over {MAX_LINES} lines: {long}"


def test_functions_fit_a_screen():
    long = []
    for path in CODE_FILES:
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            # A Triton kernel's main loop is one function.
            kernel = any("jit" in ast.unparse(x) for x in getattr(node, "decorator_list", ()))
            if isinstance(node, ast.FunctionDef) and not kernel:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if lines > MAX_FUNCTION:
                    long.append(f"{name(path)}: {node.name}, {lines}")
    assert not long, f"over {MAX_FUNCTION} lines: {long}"


def test_every_code_file_says_what_it_is():
    silent = []
    for path in CODE_FILES:
        text = path.read_text().lstrip()
        if path.suffix == ".py":
            explained = not text or ast.get_docstring(ast.parse(text)) is not None
        else:
            explained = text.startswith(("//", "/*"))
        if not explained:
            silent.append(name(path))
    assert not silent, f"files without opening lines: {silent}"


@pytest.mark.parametrize("what", FORBIDDEN)
def test_words_that_do_not_belong_here(what):
    found = [
        f"{name(path)}:{i}: {line.strip()[:80]}"
        for path in FILES
        if path.suffix in CODE | {".md", ".toml", ".txt", ""} and path.name != "LICENSE"
        for i, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if re.search(FORBIDDEN[what], line)
    ]
    assert not found, f"{what}: {found}"


def test_public_functions_and_classes_have_docstrings():
    silent = []
    for path in PACKAGE:
        if path.name.startswith("_"):
            continue
        for node in ast.parse(path.read_text()).body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and ast.get_docstring(node) is None:
                silent.append(f"{name(path)}: {node.name}")
    assert not silent, f"without a docstring: {silent}"


def test_only_integrations_know_frameworks():
    """The core needs torch only, and never imports an adapter."""
    guilty = []
    for path in PACKAGE:
        if "integrations" in path.parts:
            continue
        for module in imported(path):
            if module.split(".")[0] in FRAMEWORKS or module.startswith("flash_attn.integrations"):
                guilty.append(f"{name(path)} imports {module}")
    assert not guilty, guilty


def test_there_is_one_reference():
    """One file computes what attention should be; tests and benchmarks import it."""
    assert [name(p) for p in CODE_FILES if p.name.startswith("reference")] == ["flash_attn/reference.py"]


@pytest.mark.parametrize("path", [p for p in CXX if p.suffix in (".cu", ".cuh", ".h")], ids=name)
def test_device_code_sees_no_torch(path):
    wrong = re.findall(r"#\s*include\s*[<\"](?:torch|ATen|c10)/[^>\"]*[>\"]", path.read_text())
    if path.name in ("check.h", "tensors.h"):  # host headers: the stable ABI only
        wrong = [
            line for line in wrong if "torch/csrc/stable/" not in line and "torch/headeronly/" not in line
        ]
    assert not wrong, wrong


def test_host_code_uses_the_stable_abi_only():
    pattern = re.compile(r"\b(at|c10)::|pybind11|Python\.h|torch/(extension|library|all)\.h|<ATen/")
    guilty = [f"{name(p)}: {m.group()}" for p in CXX for m in [pattern.search(p.read_text())] if m]
    assert not guilty, guilty


def test_generated_files_and_large_files_are_not_committed():
    cutlass = [name(p) for p in FILES if p.is_relative_to(ROOT / "csrc" / "cutlass")]
    assert cutlass in ([], ["csrc/cutlass/README.md"])
    assert not [name(p) for p in FILES if p.suffix in (".so", ".o", ".whl", ".gguf", ".safetensors")]
    assert not [name(p) for p in FILES if p.stat().st_size > MAX_BYTES]


EXPECTING = re.compile("raises|assert|require|gradcheck|opcheck|set_sync_debug_mode")


def functions_of_tests() -> dict[str, list[ast.FunctionDef]]:
    """Test files' functions by the file's name."""
    found = {}
    for path in CODE_FILES:
        if path.suffix == ".py" and path.is_relative_to(ROOT / "tests"):
            nodes = ast.walk(ast.parse(path.read_text()))
            found[name(path)] = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return found


def can_fail(function: ast.FunctionDef, failing: set[str]) -> bool:
    """Whether it asserts, expects an error, or calls a function of the tests that does."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).split(".")[-1]
            if called in failing or EXPECTING.search(called):
                return True
            if any(k.arg == "check" and getattr(k.value, "value", None) is True for k in node.keywords):
                return True
    return False


def test_tests_can_fail():
    files = functions_of_tests()
    helpers = [f for functions in files.values() for f in functions if not f.name.startswith("test_")]
    failing: set[str] = set()
    while new := {f.name for f in helpers if f.name not in failing and can_fail(f, failing)}:
        failing |= new
    idle = [
        f"{path}::{function.name}"
        for path, functions in files.items()
        for function in functions
        if function.name.startswith("test_") and not can_fail(function, failing)
    ]
    assert not idle, f"tests that cannot fail: {idle}"


def test_errors_are_tested_with_their_text():
    """A wrong argument must be refused for the reason that is meant."""
    ours = r"(ValueError|TypeError|NotImplementedError|RuntimeError)"
    bare = [
        f"{path}:{node.lineno}"
        for path, functions in functions_of_tests().items()
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and re.fullmatch(rf"pytest\.raises\({ours}\)", ast.unparse(node))
    ]
    assert not bare, f"pytest.raises without match: {bare}"
