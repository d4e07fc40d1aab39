"""The installed distribution: both packages are there, typed, and of the version that the code states."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

import deepspeed_muon
from tests.support.harness import run_command
from tests.support.native_ops import REPOSITORY
from tests.support.scripts import load_script


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what a wheel is made from; setuptools leaves build/ and *.egg-info where it runs."""
    folder = tmp_path_factory.mktemp("wheel") / "source"
    folder.mkdir()
    for name in ("deepspeed_muon", "ops"):
        shutil.copytree(
            REPOSITORY / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    options = ["-q", "--no-deps", "--no-build-isolation", "-w", source.parent]
    run_command(["python", "-m", "pip", "wheel", *options, source])
    (path,) = source.parent.glob("*.whl")
    return path


def test_version_is_stated_once(wheel: Path) -> None:
    assert wheel.name.startswith(f"deepspeed_muon-{deepspeed_muon.__version__}-")


def test_a_wheel_holds_every_module_and_nothing_else(source: Path, wheel: Path) -> None:
    expected = set()
    for top, installed in (("deepspeed_muon", "deepspeed_muon"), ("ops", "deepspeed_muon/ops")):
        paths = (path for path in (source / top).rglob("*") if path.is_file())
        expected |= {f"{installed}/{path.relative_to(source / top)}" for path in paths}
    # What DEEPSPEED_MUON=1 needs lies beside the packages.
    expected |= {"deepspeed_muon.pth", "_deepspeed_muon_switch.py"}
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected
    (scripts,) = (name for name in names if name.endswith("/entry_points.txt"))
    assert b"deepspeed-muon = deepspeed_muon.__main__:run" in zipfile.ZipFile(wheel).read(scripts)


@pytest.mark.parametrize(
    ("value", "imported"), [("1", "['_deepspeed_muon_switch']"), ("0", "[]"), ("False", "[]"), ("", "[]")]
)
def test_the_switch_imports_nothing_where_python_starts(value: str, imported: str) -> None:
    """Every Python process under the variable pays for it, also those that never import DeepSpeed."""
    folder = REPOSITORY / "deepspeed_muon" / "switch"
    program = (
        f"import os, sys; before = set(sys.modules); sys.path.insert(0, {str(folder)!r})\n"
        f"exec(open({str(folder / 'deepspeed_muon.pth')!r}).read())\n"
        f"print(sorted(set(sys.modules) - before))\n"
    )
    done = run_command(["python", "-B", "-I", "-S", "-c", program], env={"DEEPSPEED_MUON": value})
    assert done.stdout.strip() == imported


def test_the_switch_stays_on_where_it_failed(tmp_path: Path) -> None:
    """A program that had caught the error of an unsupported DeepSpeed trained with DeepSpeed's own Muon."""
    (tmp_path / "deepspeed.py").write_text("")
    (tmp_path / "deepspeed_muon.py").write_text(
        "import deepspeed\ndef register():\n    raise ImportError('needs')\n"
    )
    program = (
        f"import sys; sys.path[:0] = {[str(tmp_path), str(REPOSITORY / 'deepspeed_muon' / 'switch')]}\n"
        f"import _deepspeed_muon_switch\n"
        f"for attempt in range(2):\n"
        f"    try: import deepspeed\n"
        f"    except ImportError as error: print(error)\n"
        f"sys.modules['deepspeed_muon'].register = lambda: print('registered')\n"
        f"import deepspeed; print('_DeepSpeedFinder' in str(sys.meta_path))"
    )
    done = run_command(["python", "-B", "-I", "-S", "-c", program])
    assert done.stdout.split() == ["needs", "needs", "registered", "False"]


def test_citation_and_changelog_have_the_version_of_the_code() -> None:
    faults = load_script("release_version").faults
    assert not faults(REPOSITORY)
    assert faults(REPOSITORY, "v0.0.1")[0].startswith("the tag is v0.0.1")


def test_a_release_has_links_to_the_project() -> None:
    """The wheel's metadata had none."""
    links = load_script("absolute_links").with_links
    project = links((REPOSITORY / "pyproject.toml").read_text(), "https://github.com/a/b", "v1.0")
    assert '[project.urls]\nRepository = "https://github.com/a/b"\nDocumentation = "https://github' in project
