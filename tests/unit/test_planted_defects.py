"""Texts of the planted defects are where the tables say: one that moved would be planted by nobody."""

from __future__ import annotations

import pytest

from tests.support.native_ops import REPOSITORY
from tests.support.planted import planted


@pytest.mark.parametrize(
    "defect", planted("planted_defects.toml")["defect"], ids=lambda defect: defect["harm"]
)
def test_every_text_is_in_its_file_once(defect: dict[str, str]) -> None:
    assert (REPOSITORY / defect["file"]).read_text().count(defect["old"]) == 1
    path, _, function = defect["test"].partition("::")
    assert f"def {function.partition('[')[0]}" in (REPOSITORY / path).read_text()


def test_every_text_of_a_kernel_is_in_its_sources() -> None:
    folder = REPOSITORY / "ops" / "csrc"
    headers = "".join(
        header.read_text() for header in (*folder.glob("include/*.h"), *folder.glob("cuda/*.cuh"))
    )
    for defect in (defect for table in planted("planted_kernel_defects.toml").values() for defect in table):
        (source,) = folder.rglob(f"{defect['source']}.c*")
        assert defect["old"] in (headers if source.suffix == ".cu" else "") + source.read_text(), defect
