"""A virtual environment for some clients, with this project installed as a wheel, as a user would."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["Environment", "build_wheel"]

ROOT = Path(__file__).resolve().parents[2]
TORCH = os.environ.get("TORCH_VERSION", "2.13.0")
DEEPSPEED = os.environ.get("DEEPSPEED_VERSION", "0.19.8")


class Environment:
    """A folder with Python, torch, DeepSpeed, this project and what the clients in it need.

    Attributes:
        folder: Where it is. One that exists is used again; only this project is installed anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"

    def make(
        self, packages: Sequence[str], without: Sequence[str], removed: Sequence[str], wheel: Path
    ) -> None:
        """Install torch first and pin it, then DeepSpeed and the clients, then this project without its requirements.

        Requirements of the packages called ``without`` are left out. Where torch is a CPU build, the folders that match
        ``removed`` are deleted from the installed packages.
        """
        if not (self.bin / "python").exists():
            _run([sys.executable, "-m", "venv", str(self.folder)])
        constraints = self.folder / "constraints.txt"
        if not constraints.exists():
            self._pip("setuptools>=77,<81", "wheel", "numpy", "ninja", "py-cpuinfo", "packaging")
            self._pip(f"torch=={TORCH}", *os.environ.get("TORCH_ARGS", "").split())
            constraints.write_text(f"torch=={TORCH}\n")
        if without:
            self._pip("--no-deps", *packages)
            packages = self._requirements(packages, without)
        self._pip("-c", str(constraints), "--no-build-isolation", f"deepspeed=={DEEPSPEED}", *packages)
        if "+cpu" in self.versions(["torch"])["torch"]:
            for pattern in removed:
                for path in self.folder.glob(f"lib/python*/site-packages/{pattern}"):
                    shutil.rmtree(path)
        self._pip("--no-deps", "--force-reinstall", str(wheel))

    def _requirements(self, packages: Sequence[str], without: Sequence[str]) -> list[str]:
        """Return what installed packages require on this machine, except ``without``."""
        text = "import sys; from importlib.metadata import requires; print(*map(requires, sys.argv[1:]), sep='\\n')"
        lines = self._printed(text, packages).splitlines()
        requirements = (Requirement(text) for line in lines for text in ast.literal_eval(line) or ())
        return [
            f"{requirement.name}{requirement.specifier}"
            for requirement in requirements
            if requirement.name.lower().replace("_", "-") not in without
            and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
        ]

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Return the installed version of each package."""
        program = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
        return dict(zip(names, self._printed(program, names).split(), strict=True))

    def _printed(self, program: str, words: Sequence[str]) -> str:
        command = [self.bin / "python", "-c", program, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def _pip(self, *arguments: str) -> None:
        _run([str(self.bin / "python"), "-m", "pip", "install", "-q", *arguments])

    def variables(self) -> dict[str, str]:
        """Return the environment variables of a program: this environment's programs first, no GPU, no network."""
        dropped = ("PYTHONPATH", "VIRTUAL_ENV", "DEEPSPEED_MUON")
        return {
            **{key: value for key, value in os.environ.items() if key not in dropped},
            "PATH": f"{self.bin}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_EXTENSIONS_DIR": str(self.folder / "torch_extensions"),
            "HF_HOME": str(self.folder / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "WANDB_MODE": "disabled",
        }


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the last commit in ``folder``, since setuptools leaves files where it runs."""
    source = folder / "source"
    source.mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "x"], cwd=source, input=archive, check=True)
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    _run([*wheel, "-w", str(folder), str(source)])
    (path,) = folder.glob("*.whl")
    return path


def _run(command: Sequence[str]) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True)
