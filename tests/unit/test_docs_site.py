"""The script that builds the site of the documentation finds broken links, and pages that a browser cannot show."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.native_ops import REPOSITORY

found = importlib.util.spec_from_file_location("build_docs", REPOSITORY / "scripts" / "build_docs.py")
assert found is not None and found.loader is not None
build_docs = importlib.util.module_from_spec(found)
found.loader.exec_module(build_docs)
BROWSER = next(filter(None, map(shutil.which, build_docs.BROWSERS)), None)


def write(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<html><body>{body}</body></html>")


def test_links_to_missing_files_and_anchors_are_found(tmp_path: Path) -> None:
    write(
        tmp_path / "index.html", '<a href="a/">.</a><a href="a/#there">.</a><a href="https://x.org/y">.</a>'
    )
    write(tmp_path / "a" / "index.html", '<h1 id="there">.</h1><a href="#there">.</a><img src="../no.png">')
    write(tmp_path / "b" / "index.html", '<a href="../a/#gone">.</a><a href="../c/">.</a>')
    assert set(build_docs.broken_links(tmp_path)) == {
        "a/index.html: ../no.png",
        "b/index.html: ../a/#gone",
        "b/index.html: ../c/",
    }


def test_the_page_of_the_package_names_what_it_exports() -> None:
    import deepspeed_muon

    assert build_docs.public_names() == [n for n in deepspeed_muon.__all__ if n != "__version__"]


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.full
def test_a_browser_finds_missing_text_and_failing_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        build_docs, "OPENED", {"": ("Title", "written by a script"), "bad/": ("Title", "not there")}
    )
    script = "document.body.append('written by' + ' a script')"
    write(tmp_path / "index.html", f"<h1>Title</h1><script>{script}</script>")
    write(tmp_path / "bad" / "index.html", "<h1>Title</h1><script>missing()</script>")
    faults = list(build_docs.faults_in_browser(tmp_path, BROWSER))
    assert (
        len(faults) == 2 and "'not there' is not shown" in faults[0] and "missing is not defined" in faults[1]
    )


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: `make docs` has it")
@pytest.mark.full
def test_the_site_builds() -> None:
    subprocess.run([sys.executable, "scripts/build_docs.py"], cwd=REPOSITORY, check=True)
