"""Build script. Metadata is static in pyproject.toml; this file only adds the CUDA library when one is to be built."""

from setuptools import setup

setup()
