"""The package as pip and other projects see it: metadata, version, wheel, and imports without a GPU."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import flash_attn

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SKIP = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"}
HIDE_TORCH = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"


def python(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The sources that a build reads, in a folder with a space, so that no build leaves traces here."""
    folder = tmp_path_factory.mktemp("a path") / "flash attn"
    folder.mkdir()
    ignored = {"__pycache__", "results", "build"}
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    for top in ("flash_attn", "csrc", "hopper"):
        for path in (ROOT / top).rglob("*"):
            if (
                path.is_file()
                and not ignored.intersection(path.parts)
                and path.suffix not in (".so", ".o", ".pyc")
            ):
                target = folder / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> Path:
    """The wheel without kernels, built by the backend itself."""
    out = tmp_path_factory.mktemp("wheel")
    build = f"from setuptools import build_meta; print(build_meta.build_wheel({str(out)!r}))"
    python("-c", build, cwd=checkout, **SKIP)
    (path,) = out.glob("*.whl")
    return path


def test_metadata_is_static_and_needs_no_torch(checkout, tmp_path):
    """A resolver may ask for it where torch is absent (uv, pdm, pip --dry-run)."""
    assert "dynamic" not in PROJECT
    prepare = (
        f"from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    )
    python("-c", HIDE_TORCH + prepare, cwd=checkout)
    (folder,) = tmp_path.glob("*.dist-info")
    found = email.message_from_string((folder / "METADATA").read_text())
    assert (found["Name"], found["Version"]) == ("flash-attn", PROJECT["version"])
    required = {r for r in found.get_all("Requires-Dist") if "extra ==" not in r}
    assert required == {"torch>=2.10", "einops", "packaging"}
    assert found["License-Expression"] == "BSD-3-Clause"


def test_one_version():
    assert flash_attn.__version__ == PROJECT["version"]
    stated = re.findall(r"2\.8\.\d\+dualkv\.[\d.]*\d", (ROOT / "README.md").read_text())
    assert stated and set(stated) == {PROJECT["version"]}


@pytest.mark.parametrize("specifier", ["==2.8.3", ">=2.3.3", ">=2.1.1,<2.8.4", "<=2.8.3"])
def test_the_version_passes_the_pins_of_other_projects(specifier):
    """openrlhf and verl pin ==2.8.3, transformers wants >=2.3.3, TransformerEngine a window below 2.8.4."""
    assert SpecifierSet(specifier).contains(Version(PROJECT["version"]))


def test_the_version_compares_as_others_compare_it():
    """TransformerEngine and megatron-core compare Version objects, which see the local part; yunchang
    compares strings."""
    assert Version("2.7.3") < Version(flash_attn.__version__) < Version("2.8.4")
    assert not flash_attn.__version__ < "2.6.3"


def test_a_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"flash_attn-{PROJECT['version']}-py3-none-any.whl"
    assert {name.split("/")[0] for name in names} <= {
        "flash_attn",
        "flash_attn_2_cuda.py",
        f"flash_attn-{PROJECT['version']}.dist-info",
    }
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "flash_attn").rglob("*.py")}
    assert sources <= set(names)
    assert "flash_attn/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


FAKE_LIBRARY = b"\x7fELF\0GLIBC_2.17\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBCXX_3.4.29\0CXXABI_1.3.9\0"


def test_a_wheel_with_a_library_says_which_linux_it_needs(checkout, tmp_path):
    """Built by the backend, the compiler's part replaced."""
    library = tmp_path / "library.so"
    library.write_bytes(FAKE_LIBRARY)
    script = (
        "import pathlib, sys\n"
        "sys.path.insert(0, 'csrc/flash_attn')\n"
        "import build_support\n"
        f"build_support.build = lambda options, folder: pathlib.Path({str(library)!r})\n"
        "sys.argv = ['setup.py', '-q', 'bdist_wheel', '--dist-dir', sys.argv[1]]\n"
        "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__file__': 'setup.py'})\n"
    )
    env = {"FLASH_ATTN_CUDA_ARCHS": "80", "FLASH_ATTENTION_SKIP_CUDA_BUILD": ""}
    python("-c", script, str(tmp_path / "dist"), cwd=checkout, **env)
    (path,) = (tmp_path / "dist").glob("*.whl")
    tag = f"manylinux_2_34_{os.uname().machine}"
    assert path.name == f"flash_attn-{PROJECT['version']}-py3-none-{tag}.whl"
    with zipfile.ZipFile(path) as archive:
        assert archive.read("flash_attn/_C.so") == FAKE_LIBRARY
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/WHEEL")]
        lines = archive.read(name).decode().splitlines()
    assert f"Tag: py3-none-{tag}" in lines and "Root-Is-Purelib: false" in lines


@pytest.mark.parametrize(
    ("needs", "tag"),
    [
        (["GLIBC_2.17"], "manylinux_2_17_x86_64"),
        (["GLIBC_2.2.5", "GLIBC_2.28", "GLIBCXX_3.4.24"], "manylinux_2_28_x86_64"),
        (["GLIBC_2.17", "GLIBCXX_3.4.30"], "manylinux_2_35_x86_64"),
        (["GLIBC_2.3.4", "CXXABI_1.3.12"], "manylinux_2_31_x86_64"),
        (["GLIBC_2.99"], "linux_x86_64"),
        ([], "linux_x86_64"),
    ],
)
def test_platform_tags(needs, tag, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "csrc" / "flash_attn"))
    import manylinux

    library = tmp_path / "library.so"
    library.write_bytes(b"\0" + b"\0".join(name.encode() for name in [*needs, ""]))
    assert manylinux.platform_tag(library, "linux_x86_64") == tag
    assert manylinux.platform_tag(library, "macosx_14_0_arm64") == "macosx_14_0_arm64"


def test_an_installed_wheel_is_the_distribution_that_others_look_for(wheel, tmp_path):
    """After `pip install --no-deps`: which distribution owns the module flash_attn, and does it run?"""
    python(
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path),
        str(wheel),
        cwd=tmp_path,
    )
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import flash_attn, importlib.metadata as m\n"
        "import torch\n"
        "from flash_attn import flash_attn_func\n"
        "q = torch.randn(1, 5, 2, 8)\n"
        "print(flash_attn.__file__, m.packages_distributions()['flash_attn'], m.version('flash-attn'))\n"
        "print(tuple(flash_attn_func(q, q, q, causal=True).shape))\n"
    )
    output = python("-c", script, cwd=tmp_path, PYTHONPATH="").stdout.splitlines()
    assert output[0].startswith(str(tmp_path)) and "'flash-attn'" in output[0]
    assert output[0].endswith(PROJECT["version"])
    assert output[1] == "(1, 5, 2, 8)"


def test_transformers_finds_the_version_that_it_wants():
    """is_flash_attn_2_available() without its last clause, which asks for a GPU."""
    owners = metadata.packages_distributions().get("flash_attn")
    if owners is None:
        pytest.skip("flash_attn runs from a folder that is not installed")
    assert "flash-attn" in [owner.lower().replace("_", "-") for owner in owners]
    assert Version(metadata.version("flash-attn")) >= Version("2.3.3")
    utils = pytest.importorskip("transformers.utils")
    import torch

    assert utils.is_flash_attn_2_available() == torch.cuda.is_available()


def test_importing_needs_no_gpu_and_loads_no_library():
    script = (
        "import sys, torch\n"
        "def asked(*_): raise RuntimeError('nothing may be asked on import')\n"
        "torch.cuda.is_available = torch.cuda.init = torch.ops.load_library = asked\n"
        "import flash_attn, flash_attn.shared_prompt, flash_attn.bert_padding\n"
        "print(sorted(m for m in ('transformers', 'triton', 'trl', 'verl') if m in sys.modules))\n"
    )
    assert python("-c", script, cwd=ROOT, PYTHONPATH=str(ROOT)).stdout == "[]\n"


def test_the_sdist_has_what_a_build_needs(checkout, tmp_path):
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    python("-c", HIDE_TORCH + build, cwd=checkout, **SKIP)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.split("/", 1)[1] for name in file.getnames() if "/" in name}
    assert {
        "pyproject.toml",
        "setup.py",
        "LICENSE",
        "csrc/flash_attn/params.h",
        "flash_attn/__init__.py",
    } <= names
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*.h")}
    assert sources - names == {n for n in sources if n.startswith("csrc/cutlass/include")}
