"""A virtual environment for some clients, with this project installed as a wheel, as a user would."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["Environment"]

ROOT = Path(__file__).resolve().parents[2]
TORCH = os.environ.get("TORCH_VERSION", "2.13.0")
DEEPSPEED = os.environ.get("DEEPSPEED_VERSION", "0.19.8")


class Environment:
    """A folder with Python, torch, DeepSpeed, this project and what the clients in it need.

    Attributes:
        folder: Where it lies. An existing one is kept; only this project is installed anew.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def bin(self) -> Path:
        """The folder of its programs."""
        return self.folder / "bin"

    def make(
        self, packages: Sequence[str], without: Sequence[str], removed: Sequence[str], wheel: Path
    ) -> None:
        """Install torch first and hold it, then DeepSpeed and the clients, then this project without its requirements.

        Requirements of the packages called ``without`` are left out. Where torch is a CPU build, the folders that match
        ``removed`` are taken out of the installed packages.
        """
        if not (self.bin / "python").exists():
            _run([sys.executable, "-m", "venv", str(self.folder)])
        hold = self.folder / "constraints.txt"
        if not hold.exists():
            self._pip("setuptools>=77,<81", "wheel", "numpy", "ninja", "py-cpuinfo", "packaging")
            self._pip(f"torch=={TORCH}", *os.environ.get("TORCH_ARGS", "").split())
            hold.write_text(f"torch=={TORCH}\n")
        if without:
            self._pip("--no-deps", *packages)
            packages = self._requirements(packages, without)
        self._pip("-c", str(hold), "--no-build-isolation", f"deepspeed=={DEEPSPEED}", *packages)
        if removed and "+cpu" in self.versions(["torch"])["torch"]:
            for path in (
                found
                for pattern in removed
                for found in self.folder.glob(f"lib/python*/site-packages/{pattern}")
            ):
                shutil.rmtree(path)
        self._pip("--no-deps", "--force-reinstall", str(wheel))

    def _requirements(self, packages: Sequence[str], without: Sequence[str]) -> list[str]:
        """Return what installed packages ask for on this machine, but for ``without``."""
        text = "import sys; from importlib.metadata import requires; print(*map(requires, sys.argv[1:]), sep='\\n')"
        found = self._printed(text, packages)
        wanted = (Requirement(each) for line in found.splitlines() for each in ast.literal_eval(line) or ())
        return [
            f"{each.name}{each.specifier}"
            for each in wanted
            if each.name.lower().replace("_", "-") not in without
            and (each.marker is None or each.marker.evaluate({"extra": ""}))
        ]

    def _printed(self, program: str, words: Sequence[str]) -> str:
        command = [self.bin / "python", "-c", program, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def _pip(self, *arguments: str) -> None:
        _run([str(self.bin / "python"), "-m", "pip", "install", "-q", *arguments])

    def versions(self, names: Sequence[str]) -> dict[str, str]:
        """Return the installed version of each package."""
        program = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
        return dict(zip(names, self._printed(program, names).split(), strict=True))

    def variables(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the environment variables of a program: this environment's programs first, no GPU, no network."""
        kept = {
            key: value
            for key, value in os.environ.items()
            if key not in ("PYTHONPATH", "VIRTUAL_ENV", "DEEPSPEED_MUON")
        }
        own = {
            "PATH": f"{self.bin}{os.pathsep}{kept.get('PATH', os.defpath)}",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_EXTENSIONS_DIR": str(self.folder / "torch_extensions"),
            "HF_HOME": str(self.folder / "huggingface"),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "WANDB_MODE": "disabled",
        }
        return {**kept, **own, **more}


def build_wheel(folder: Path) -> Path:
    """Build this project's wheel from a copy of the tree, since setuptools leaves files where it runs."""
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    wanted = [
        name
        for name in files
        if name.startswith(("deepspeed_muon", "ops/", "setup.py", "pyproject", "README", "LICENSE"))
    ]
    for name in filter(None, wanted):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to(os.readlink(ROOT / name))
        else:
            target.write_bytes((ROOT / name).read_bytes())
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    _run([*wheel, "-w", str(folder), str(source)])
    (built,) = folder.glob("*.whl")
    return built


def _run(command: Sequence[str]) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, check=True)
