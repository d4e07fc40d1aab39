"""What a release has beside the packages (scripts/wheel_check.sh trains with a wheel): switch, version and links."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.harness import run_command
from tests.support.native_ops import REPOSITORY
from tests.support.scripts import load_script


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
