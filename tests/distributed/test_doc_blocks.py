"""Every JSON and Python block of README, CONTRIBUTING and docs works.

A JSON block is one or more objects. An object of settings alone is ``optimizer.params``, one with ``type`` is an
``optimizer`` section, and any other is a part of DeepSpeed's configuration. It is laid over ``BASE``, without the
values that are ``"auto"`` (Accelerate fills them in), and ``deepspeed.initialize`` must accept it.

A Python block runs with the page's last configuration as ``ds_config.json``. One that uses a name of ``ELSEWHERE`` is
only compiled.
"""

from __future__ import annotations

import ast
import copy
import json
import os
import re
import sys
import traceback
import types
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from torch import nn

import deepspeed_muon
from deepspeed_muon.config.settings import MuonConfig
from tests.support.harness import run_ranks
from tests.support.models import SMALL_DECODER
from tests.support.native_ops import REPOSITORY

transformers = pytest.importorskip("transformers", "4.53", "qk_clip needs transformers 4.53")

PAGES = [
    page
    for page in (
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        *(REPOSITORY / "docs").rglob("*.md"),
    )
    if re.search(r"^```(json|python)$", page.read_text(), re.MULTILINE)
]
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.003}},
}
# Names of programs that are not installed here, and of what stands around a block.
ELSEWHERE = {"lightning", "DeepSpeedStrategy", "Fabric", "fabric", "Trainer"}


class MyMoELayer(nn.Linear):
    """Some program's layer of experts."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and text of the blocks of a page that are to work."""
    return re.findall(r"^```(json|python)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def objects(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a block."""
    values, decoder = [], json.JSONDecoder()
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        values.append(value)
        text = text[end:]
    return values


def without_auto(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_auto(item) for key, item in value.items() if item != "auto"}
    return value


def completed(given: dict[str, Any]) -> dict[str, Any]:
    """Return a whole configuration made of what a page shows."""
    if given.keys() <= MuonConfig.model_fields.keys():
        given = {"optimizer": {"type": "Muon", "params": given}}
    elif "type" in given:
        given = {"optimizer": given}
    return {**copy.deepcopy(BASE), **without_auto(given)}


def model(text: str) -> nn.Module:
    """A small Llama that also has the layers which a text names."""
    # No other layer has 160 outputs: one for each row of the embedding would make it a head.
    config = transformers.LlamaConfig(**SMALL_DECODER, vocab_size=160)
    built = transformers.LlamaForCausalLM(config)
    built.extra = nn.ModuleDict({"experts": MyMoELayer(32, 32)})
    for name, outputs in {"qkv_proj": 64, "gate_up_proj": 96, "in_proj": 384}.items():
        if name in text:
            built.extra[name] = nn.Linear(32, outputs)
    return built


def work(rank: int, world_size: int, *, pages: dict[str, list[list[str]]], folder: str) -> dict[str, str]:
    """Check the blocks of all pages, each page in a folder of its own; return the faults, by page."""
    package = types.ModuleType("my_package")
    package.modeling = types.SimpleNamespace(MyMoELayer=MyMoELayer)  # type: ignore[attr-defined]
    sys.modules["my_package"] = package
    faults = {}
    for number, (page, texts) in enumerate(pages.items()):
        os.mkdir(os.path.join(folder, str(number)))
        os.chdir(os.path.join(folder, str(number)))
        try:
            check(texts)
        except Exception:
            faults[page] = traceback.format_exc()
    return faults


def check(texts: list[list[str]]) -> None:
    """Check the blocks of one page."""
    page = "".join(text for _, text in texts)

    def engine_of(config: dict[str, Any]) -> Any:
        Path("ds_config.json").write_text(json.dumps(config))
        return deepspeed.initialize(model=model(page), config=copy.deepcopy(config))[0]

    engine = engine_of(BASE)
    deepspeed_muon.consolidate(engine, "runs/converted")
    for language, text in texts:
        if language == "json":
            for namespace in objects(text):
                engine.destroy()
                engine = engine_of(completed(namespace))
            continue
        tree = ast.parse(text)
        if ELSEWHERE & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
            continue
        namespace = {
            "deepspeed": deepspeed,
            "deepspeed_muon": deepspeed_muon,
            "torch": torch,
            "nn": nn,
            "pytest": pytest,
        }
        namespace |= {
            "engine": engine,
            "model": model(page),
            "optimizer": engine.basic_optimizer,
            "rate": 0.01,
        }
        # The blocks that follow need the process group, which a whole script destroys at its end.
        with mock.patch.object(torch.distributed, "destroy_process_group"):
            exec(compile(tree, "block", "exec"), {"__name__": "block", **namespace})
    engine.destroy()


def test_blocks_work(tmp_path: Path) -> None:
    pages = {str(page.relative_to(REPOSITORY)): [list(block) for block in blocks(page)] for page in PAGES}
    # In a process of its own: a block may change DeepSpeed.
    (faults,) = run_ranks(work, 1, {"pages": pages, "folder": str(tmp_path)}, timeout=240)
    assert not faults, "\n".join(f"{page}:\n{fault}" for page, fault in faults.items())
