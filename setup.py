"""Build script: metadata is static in pyproject.toml; this only adds the CUDA library where one is built."""

from setuptools import setup

setup()
