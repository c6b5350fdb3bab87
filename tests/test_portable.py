"""Linking for Linux of 2018: which symbols are asked for, and that what portable.cpp defines works."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[1] / "csrc" / "flash_attn"
sys.path.insert(0, str(CSRC))

import build_support  # noqa: E402
import manylinux  # noqa: E402
import old_glibc  # noqa: E402

SYMBOLS = """
   298: 0000000000090200    52 FUNC    GLOBAL DEFAULT   16 sem_init@@GLIBC_2.34
   299: 0000000000090200    52 FUNC    GLOBAL DEFAULT   16 sem_init@GLIBC_2.2.5
   467: 00000000000853c0   157 FUNC    GLOBAL DEFAULT   16 dlmopen@GLIBC_2.3.4
   469: 00000000000853c0   157 FUNC    GLOBAL DEFAULT   16 dlmopen@@GLIBC_2.34
   777: 0000000000089999    21 FUNC    GLOBAL DEFAULT   16 pthread_cond_wait@GLIBC_2.2.5
   778: 0000000000089380    21 FUNC    GLOBAL DEFAULT   16 pthread_cond_wait@@GLIBC_2.3.2
  1432: 0000000000089380  3821 FUNC    GLOBAL DEFAULT   16 closefrom@@GLIBC_2.34
"""
# Takes a stream's constructor, a shared_ptr (threads or none?) and the error of a length that is too large.
SOURCE = """
#include <dlfcn.h>
#include <pthread.h>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <vector>
extern "C" __attribute__((visibility("default"))) int answer() {
    std::ostringstream out;
    std::stringstream both;
    both << 40 << ' ' << 1;
    int x = 0, y = 0;
    both >> x >> y;
    auto shared = std::make_shared<int>(x);
    auto copy = shared;
    try {
        std::vector<std::string> many;
        many.get_allocator().allocate(size_t(-1) / 8);
    } catch (std::bad_array_new_length const&) { ++y; }
    out << *copy + y;
    pthread_t thread;
    pthread_create(&thread, nullptr, [](void* p) -> void* { return p; }, nullptr);
    pthread_join(thread, nullptr);
    return dlsym(nullptr, "malloc") != nullptr ? std::stoi(out.str()) : -1;
}
"""


def test_the_old_version_of_a_function_whose_default_is_newer_is_taken() -> None:
    moved = old_glibc.moved_symbols(SYMBOLS)
    assert moved == {"sem_init": "GLIBC_2.2.5", "dlmopen": "GLIBC_2.3.4"}
    script = old_glibc.version_script(moved | {"sem_post": "GLIBC_2.2.5"})
    assert "GLIBC_2.2.5 { global: sem_init; sem_post; };" in script


@pytest.mark.skipif(
    sys.platform != "linux" or not shutil.which("g++") or not shutil.which("readelf"), reason="needs g++"
)
def test_a_library_linked_here_loads_on_linux_of_2018(tmp_path: Path) -> None:
    source, library = tmp_path / "answer.cpp", tmp_path / "answer.so"
    source.write_text(SOURCE)
    stubs = old_glibc.write_stubs(tmp_path / "stubs", "g++")
    files = [str(source), str(CSRC / "portable.cpp")]
    flags = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-shared"]
    subprocess.run(["g++", *flags, *files, *stubs, "-o", str(library)], check=True)
    tag = manylinux.platform_tag(library, "linux_x86_64")
    assert tag in ("manylinux_2_17_x86_64", "manylinux_2_28_x86_64"), manylinux.needed_versions(library)
    assert ctypes.CDLL(str(library)).answer() == 42


def test_a_compiler_that_is_missing_or_fails_is_said(tmp_path: Path) -> None:
    with pytest.raises(build_support.BuildError, match=r"CXX=no-such-g[+][+] was not found"):
        build_support.stub_flags(tmp_path, "no-such-g++")
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho cannot link >&2\nexit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(
        build_support.BuildError, match=r"cxx -print-file-name=libc.so.6 failed:\ncannot link"
    ):
        build_support.stub_flags(tmp_path, str(compiler))
