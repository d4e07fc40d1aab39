"""Pages name what is there, and figures are those that were measured; ``make docs`` follows the links."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import deepspeed_muon
from benchmarks import study
from tests.support.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    said = {
        re.sub(r"%\w", "", text)
        for path in [*(ROOT / "deepspeed_muon").rglob("*.py"), *(ROOT / "ops").glob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if (text := literal(node))
    }
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    messages = re.findall(r"^\| `([^`]*)` \|", page, re.MULTILINE)
    # DeepSpeed's and torch's
    foreign = ("Either train_batch_size", "Expected 3 lr_lambdas", "FutureWarning", "deepspeed_shm_comm")
    ours = [message for message in messages if not message.startswith(foreign)]
    phrases = {phrase.strip(" ;?") for message in ours for phrase in message.split("...")} - {""}
    assert len(messages) >= 17
    assert not {phrase for phrase in phrases if not any(phrase in text for text in said)}


def test_the_files_that_the_architecture_page_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([\w/]+(?:/|\.py|\.md|\.txt|\.toml))`", page)
    assert len(named) > 25
    roots = (ROOT, ROOT / "deepspeed_muon")
    assert not [name for name in named if not any((root / name).exists() for root in roots)]


def literal(node: ast.AST) -> str:
    """Return the constant text of a string, without what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(piece.value for piece in node.values if isinstance(piece, ast.Constant))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


ROWS = json.loads((ROOT / "benchmarks" / "results" / "study.json").read_text())


def test_quoted_losses_are_those_of_the_study() -> None:
    """The pages quote losses of ``study.json`` and ``variants.md`` in ``benchmarks/results/``, and no others.

    Blocks of code are left out: the tutorial shows the output of its own runs.
    """
    measured = {study.mean_and_deviation(ROWS["rows"], optimizer) for optimizer in study.GRIDS}
    text = (ROOT / "benchmarks" / "results" / "variants.md").read_text()
    variants = {
        f"{float(mean):.3f} ± {float(error):.3f}"
        for mean, error in re.findall(r"(\d\.\d{4}) ± (\d\.\d{4})", text)
    }
    texts = {page: re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL) for page in PAGES}
    quoted = {page: set(re.findall(r"\d\.\d{3} ± \d\.\d{3}", text)) for page, text in texts.items()}
    assert measured <= quoted[ROOT / "docs" / "measured.md"]
    assert quoted[ROOT / "README.md"] < measured
    for page, text in texts.items():
        assert quoted[page] <= measured | variants, page
        cells = re.split(r"[|\n]", text)
        assert not [cell for cell in cells if re.search(r"loss.*\b[1-9]\.\d{3,4}\b(?! ±)", cell)], page


def test_the_page_of_the_package_names_its_exports() -> None:
    public = [name for name in deepspeed_muon.__all__ if name != "__version__"]
    assert load_script("build_docs").public_names() == public
