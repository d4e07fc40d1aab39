"""Ends a worker of pytest-xdist whose CUDA context a test left broken, so that only that test fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from typing import Any

import pytest
import torch


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """After an illegal address every call of CUDA fails: xdist starts a new process for the tests that follow."""
    report = yield
    if report.failed and hasattr(item.config, "workerinput") and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            sys.__stderr__.write(f"{item.nodeid} broke the CUDA context: {error}\n{report.longreprtext}\n")
            sys.__stderr__.flush()
            os._exit(1)
    return report
