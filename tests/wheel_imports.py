"""Every name that the wheels of other packages take from flash-attn, with the arguments they call it with.

    python tests/wheel_imports.py [PACKAGE==VERSION ...]   # downloads wheels, writes data/wheel_imports.json

A row: package, version, module, name (null: the module itself), keywords and the most positional arguments of
its calls, guarded (in a try that catches ImportError), files. tests/test_wheel_imports.py checks all rows.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "data" / "wheel_imports.json"
PACKAGES = [
    "trl==1.16.0", "verl==0.9.1", "openrlhf==0.11.2", "transformers==5.10.4", "transformers==5.17.0",
    "transformers==5.23.0", "accelerate==1.15.0", "peft==0.21.2", "ring-flash-attn==0.1.8", "yunchang==0.6.4",
    "transformer-engine==2.20.2", "megatron-core==0.16.1", "diffusers==0.42.1", "ms-swift==4.6.0",
    "axolotl==0.19.0", "xtuner==0.2.0", "flash-linear-attention==0.6.0", "vllm==0.11.0", "vllm==0.33.0",
]  # fmt: skip
ROOTS = ("flash_attn", "flash_attn_2_cuda")
OF_OTHERS = ("flash_attn.cute",)  # flash-attn-4's


@dataclass
class Use:
    module: str
    name: str | None
    guarded: bool = True  # all of its imports are
    keywords: set[str] = field(default_factory=set)
    positional: int = 0
    files: set[str] = field(default_factory=set)


def is_ours(module: str | None) -> bool:
    if module is None or module.split(".")[0] not in ROOTS:
        return False
    return not any(module == other or module.startswith(other + ".") for other in OF_OTHERS)


class Collector(ast.NodeVisitor):
    """The uses in one file."""

    def __init__(self, file: str, uses: dict[tuple[str, str | None], Use]) -> None:
        self.file, self.uses = file, uses
        self.names: dict[str, tuple[str, str]] = {}  # local name -> module, name
        self.modules: dict[str, str] = {}  # local dotted name -> module
        self.guards = 0

    def use(self, module: str, name: str | None, imports: bool = True) -> Use:
        use = self.uses.setdefault((module, name), Use(module, name))
        use.files.add(self.file)
        if imports and not self.guards:
            use.guarded = False
        return use

    def visit_Try(self, node: ast.Try) -> None:
        catches = [ast.unparse(h.type) if h.type is not None else "Exception" for h in node.handlers]
        guard = any("ImportError" in c or "ModuleNotFound" in c or "Exception" in c for c in catches)
        self.guards += guard
        for child in node.body:
            self.visit(child)
        self.guards -= guard
        for child in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(child)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or not is_ours(node.module):
            return
        assert node.module is not None
        for alias in node.names:
            if is_ours(f"{node.module}.{alias.name}"):
                self.use(node.module, alias.name)
                self.names[alias.asname or alias.name] = (node.module, alias.name)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if is_ours(alias.name):
                self.use(alias.name, None)
                self.modules[alias.asname or alias.name] = alias.name
                if alias.asname is None:
                    self.modules[alias.name.split(".")[0]] = alias.name.split(".")[0]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        found = self.attribute(node)
        if found is not None:
            self.use(*found)
        self.generic_visit(node)

    def attribute(self, node: ast.expr) -> tuple[str, str] | None:
        """module, name of `alias.name`."""
        if not isinstance(node, ast.Attribute):
            return None
        module = self.modules.get(ast.unparse(node.value))
        if module is None or any(f"{m}.".startswith(f"{module}.{node.attr}.") for m in self.modules.values()):
            return None
        return (module, node.attr) if is_ours(f"{module}.{node.attr}") else None

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        found = self.names.get(function.id) if isinstance(function, ast.Name) else self.attribute(function)
        if found is not None and not any(isinstance(a, ast.Starred) for a in node.args):
            use = self.use(*found, imports=False)
            use.keywords |= {k.arg for k in node.keywords if k.arg is not None}
            use.positional = max(use.positional, len(node.args))
        self.generic_visit(node)


def rows_of_wheel(wheel: Path, package: str, version: str) -> Iterator[dict[str, Any]]:
    uses: dict[tuple[str, str | None], Use] = {}
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".py"):
                continue
            source = archive.read(name).decode("utf-8", "replace")
            if any(root in source for root in ROOTS):
                collector = Collector(name, uses)
                tree = ast.parse(source)
                for node in ast.walk(tree):  # imports may stand behind their uses, in functions
                    if isinstance(node, ast.ImportFrom | ast.Import):
                        collector.guards = 1
                        collector.visit(node)
                        collector.guards = 0
                collector.visit(tree)
    for (module, name), use in sorted(uses.items(), key=lambda item: (item[0][0], item[0][1] or "")):
        yield {
            "package": package, "version": version, "module": module, "name": name, "guarded": use.guarded,
            "keywords": sorted(use.keywords), "positional": use.positional, "files": sorted(use.files),
        }  # fmt: skip


def main() -> None:
    packages = sys.argv[1:] or PACKAGES
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for requirement in packages:
            package, version = requirement.split("==")
            target = Path(folder) / requirement
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
            subprocess.run([*command, "-d", str(target), requirement], check=True)
            (wheel,) = target.glob("*.whl")
            found = list(rows_of_wheel(wheel, package, version))
            print(requirement, len(found), "names")
            rows += found or [{"package": package, "version": version, "module": None}]
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
