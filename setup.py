"""Build script: metadata is static in pyproject.toml; this only adds the CUDA library where one is built.

What is built, and when: csrc/flash_attn/build_support.py. The library holds no Python symbols: one wheel
serves every Python (tag py3-none-<platform>; the platform is the oldest Linux that has what it needs).
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "csrc" / "flash_attn"))

import build_support  # noqa: E402
import manylinux  # noqa: E402

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel  # type: ignore[no-redef]

COMPILES = {"build", "build_ext", "bdist_wheel", "install", "develop", "editable_wheel"}


class BuildLibrary(build_ext):
    """flash_attn/_C.so, compiled by ninja in build/cuda (kept, so that the next build is incremental)."""

    def get_ext_filename(self, ext_name: str) -> str:
        return str(Path(*ext_name.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        options = build_support.options_from_env()
        assert options is not None, "without a library there is no extension"
        try:
            library = build_support.build(options, ROOT / "build" / "cuda")
        except build_support.BuildError as error:
            raise ExecError(f"flash_attn: {error}") from None
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, target)


class Wheel(bdist_wheel):
    """py3-none-<platform> with the library, py3-none-any without."""

    def get_tag(self) -> tuple[str, str, str]:
        if not self.distribution.ext_modules:
            return ("py3", "none", "any")
        platform = super().get_tag()[2]
        build = self.get_finalized_command("build_ext")
        library = Path(build.get_ext_fullpath("flash_attn._C"))  # type: ignore[attr-defined]
        return ("py3", "none", manylinux.platform_tag(library, platform) if library.exists() else platform)


def extensions() -> list[Extension]:
    if not COMPILES.intersection(sys.argv):  # metadata and sdists need no GPU, nvcc or torch
        return []
    try:
        options = build_support.options_from_env()
    except build_support.BuildError as error:
        sys.exit(f"flash_attn: {error}")
    return [Extension("flash_attn._C", sources=[])] if options else []


os.chdir(ROOT)
setup(ext_modules=extensions(), cmdclass={"build_ext": BuildLibrary, "bdist_wheel": Wheel})
