"""The scripts of the repository as modules."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.support.native_ops import REPOSITORY


def load_script(name: str) -> ModuleType:
    """Import ``scripts/<name>.py``."""
    specification = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    assert specification is not None and specification.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)  # dataclasses look it up
    specification.loader.exec_module(module)
    return module
