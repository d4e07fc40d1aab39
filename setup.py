"""Builds the native operators ahead of their first use if asked to, and installs the switch; see pyproject.toml.

``DS_BUILD_MUON=1 pip install --no-build-isolation .`` builds them. Without it nothing here may import torch, because
pip runs this file in an environment that has none.
"""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup

SWITCH = Path("deepspeed_muon", "switch")


class InstallSwitch(Command):
    """Puts what ``DEEPSPEED_MUON=1`` needs beside the packages, also where they are installed as editable."""

    description = "install the switch"
    user_options = ()

    def initialize_options(self):
        """Begin with no files."""
        self.outfiles = []

    def finalize_options(self):
        """Find nothing: the folder is known when the packages are installed."""

    def run(self):
        """Copy the files of the switch to the folder of the packages."""
        folder = self.get_finalized_command("install_lib").install_dir
        self.mkpath(folder)
        for name in ("deepspeed_muon.pth", "_deepspeed_muon_switch.py"):
            target, _ = self.copy_file(str(SWITCH / name), folder)
            self.outfiles.append(target)

    def get_outputs(self):
        """Return the files that were written."""
        return self.outfiles


class WithSwitch(Distribution):
    """Has data to install, which an editable installation asks by another name than the others."""

    def has_data(self):
        """Return whether the command install_data has anything to do."""
        return True


def native_operators():
    """Return setup()'s arguments for the native operators: none unless DS_BUILD_MUON is 1."""
    if os.environ.get("DS_BUILD_MUON", "0") != "1":
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
    except ImportError:
        sys.exit("DS_BUILD_MUON=1 needs torch while building: pip install --no-build-isolation .")
    root = Path(__file__).resolve().parent
    found = importlib.util.spec_from_file_location(
        "muon_toolchain", root / "deepspeed_muon" / "ops" / "toolchain.py"
    )
    toolchain = sys.modules[found.name] = importlib.util.module_from_spec(found)
    found.loader.exec_module(toolchain)
    spec = toolchain.machine_spec()
    extension = (CUDAExtension if spec.with_cuda else CppExtension)(
        name=f"deepspeed_muon.ops.{toolchain.prebuilt_name(spec)}",
        # setuptools wants paths below this folder.
        sources=[os.path.relpath(source, root) for source in spec.sources],
        include_dirs=list(spec.include_dirs),
        extra_compile_args={"cxx": list(spec.cxx_flags), "nvcc": list(spec.nvcc_flags)},
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
    }


arguments = native_operators()
commands = {"install_data": InstallSwitch, **arguments.pop("cmdclass", {})}
# install_data runs only where there are data files.
setup(**arguments, cmdclass=commands, distclass=WithSwitch, data_files=[("", [])])
