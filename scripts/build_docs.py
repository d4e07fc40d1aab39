"""Builds the site of the documentation into ``.cache/site``, follows every link in it, and opens pages in a browser.

    python scripts/build_docs.py    # needs mkdocs; `make docs` makes an environment that has it

Warnings are errors. Where Chromium or Chrome is installed, some pages are opened in it, and must show their heading
without an error of a script. The sources are laid out as in the repository, so every relative link leads to the same
file there and on the site; a page with the public names, filled from the docstrings, is added.
"""

from __future__ import annotations

import ast
import functools
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / ".cache" / "docs_source"
SITE = ROOT / ".cache" / "site"

# What pages are, and what pages link to.
COPIED = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    "SECURITY.md",
    "CITATION.cff",
    "docs",
    "deepspeed_muon/reference.py",
    "benchmarks/NOTES.md",
    "benchmarks/results",
    "tests/regressions",
    "ds_configs",
    "examples",
    "scripts/docs_diagrams.js",
    "scripts/docs_tables.css",
)
MERMAID = Path(sys.prefix) / "mermaid" / "package" / "dist" / "mermaid.min.js"  # where `make docs` puts it


class Page(HTMLParser):
    """The links and anchors of an HTML page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what a tag links to and what it can be linked by."""
        given = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := given.get(key))}
        link = given.get("href") if tag in ("a", "link") else given.get("src")
        if link is not None:
            self.links.append(link)


def broken_links(site: Path) -> Iterator[str]:
    """Yield each link of a site that leads to no file, or to no anchor in its page, as ``page: link``."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are absolute
        for link in page.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            target = (path.parent / unquote(url.path)).resolve() if url.path else path
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(url.fragment)
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (anchor and target in pages and anchor not in anchors):
                yield f"{path.relative_to(site.resolve())}: {link}"


def public_names() -> list[str]:
    """Return ``deepspeed_muon.__all__``, without importing the package."""
    tree = ast.parse((ROOT / "deepspeed_muon" / "__init__.py").read_text())
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    )
    return [name for name in ast.literal_eval(value) if not name.startswith("_")]


def lay_out() -> None:
    """Write the sources of the site."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for name in COPIED:
        source, target = ROOT / name, SOURCE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.json.gz"))
        else:
            shutil.copy(source, target)
    shutil.copy(MERMAID, SOURCE / "scripts")
    api = ["# Python", "", "What `import deepspeed_muon` offers.", ""]
    for name in public_names():
        api += [f"::: deepspeed_muon.{name}", ""]
    (SOURCE / "docs" / "api.md").write_text("\n".join(api))


# A page, and what a reader must see on it: a heading, and a part of its text or elements.
OPENED = {
    "": ("deepspeed_muon", "Muon for models trained with DeepSpeed ZeRO"),
    "docs/settings/": ("Settings", "adjust_lr_fn"),
    "docs/api/": ("Python", "consolidate"),
    "docs/clients/": ("Programs that you cannot edit", "DEEPSPEED_MUON"),
    "docs/how_it_works/": ("How it works", "ReferenceMuon"),
    "docs/architecture/": ("Architecture", "messageLine0"),
}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


def faults_in_browser(site: Path, browser: str) -> Iterator[str]:
    """Serve a site on this machine, open pages of it in a headless browser, and yield what is wrong with them."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        for page, texts in OPENED.items():
            with tempfile.TemporaryDirectory() as profile:
                command = [
                    browser,
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    f"--user-data-dir={profile}",
                ]
                command += ["--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"]
                command.append(f"http://127.0.0.1:{server.server_port}/{page}")
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            yield from (f"{page}: {text!r} is not shown" for text in texts if text not in done.stdout)
            yield from (f"{page}: {line}" for line in done.stderr.splitlines() if "Uncaught" in line)
    finally:
        server.shutdown()


def main() -> int:
    """Build and check; return 1 if something is wrong with the pages, or mkdocs' status."""
    lay_out()
    built = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q"], cwd=ROOT)
    if built.returncode:
        return built.returncode
    broken = list(broken_links(SITE))
    for link in broken:
        print("broken:", link)
    pages = len(list(SITE.rglob("*.html")))
    print(f"{SITE}: {pages} pages, {len(broken)} broken links")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("no Chromium here: the pages were not opened in a browser")
        return 1 if broken else 0
    faults = list(faults_in_browser(SITE, browser))
    for fault in faults:
        print("in the browser:", fault)
    print(f"{len(OPENED)} pages opened in {browser}, {len(faults)} faults")
    return 1 if broken or faults else 0


if __name__ == "__main__":
    sys.exit(main())
