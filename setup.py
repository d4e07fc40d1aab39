"""Builds the native operators ahead of their first use if asked to; everything else stands in pyproject.toml.

``DS_BUILD_MUON=1 pip install --no-build-isolation .`` builds them. Without it nothing here may import torch, because
pip runs this file in an environment that has none.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import setup


def native_operators():
    """Return setup()'s arguments for the native operators: none unless DS_BUILD_MUON is 1."""
    if os.environ.get("DS_BUILD_MUON", "0") != "1":
        return {}
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension
    except ImportError:
        sys.exit("DS_BUILD_MUON=1 needs torch while building: pip install --no-build-isolation .")
    root = Path(__file__).resolve().parent
    found = importlib.util.spec_from_file_location(
        "muon_toolchain", root / "deepspeed_muon" / "ops" / "toolchain.py"
    )
    toolchain = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(toolchain)
    extension = toolchain.setuptools_extension(toolchain.machine_spec(torch), "deepspeed_muon.ops", root)
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
    }


setup(**native_operators())
