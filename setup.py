"""Installs the switch beside the packages; see pyproject.toml."""

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


# install_data runs only where there are data files.
setup(cmdclass={"install_data": InstallSwitch}, distclass=WithSwitch, data_files=[("", [])])
