"""Lets programs that expect GPUs run their ranks on a CPU. It knows nothing of Muon.

- Accelerate finds no backend there and takes each rank for a run of its own. A program of one's own says
  ``PartialState(backend="gloo")``; a program that must not be changed gets the same from here.
- Lightning refuses DeepSpeed on anything but CUDA. Here its refusal is left out.
- OpenRLHF imports flash-attn, which cannot be built without CUDA, for ring attention, and asks CUDA for its device.
- axolotl loads each rank's model to the GPU of the rank's number.
- DeepSpeed compiles an operator for all-reduce in shared memory, which takes minutes and leaves files behind. Here gloo
  reduces.

The folder of this file is on ``PYTHONPATH``, and Python imports the file when it starts.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any


@contextmanager
def _accelerate(module: Any) -> Iterator[None]:
    yield
    original = module.PartialState._prepare_backend

    def prepare(state: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: Any = None) -> Any:
        backend_name, kind = original(state, cpu, sagemaker_dp, backend)
        return ("gloo" if backend_name is None and "LOCAL_RANK" in os.environ else backend_name), kind

    module.PartialState._prepare_backend = prepare


@contextmanager
def _lightning(module: Any) -> Iterator[None]:
    yield
    module.CUDAAccelerator = object  # every accelerator is one
    # A CPU has no index, which Lightning would check and hand to DeepSpeed.
    module._validate_device_index_selection = lambda devices: None
    module.argparse = SimpleNamespace(Namespace=lambda **_: Namespace())


@contextmanager
def _deepspeed(module: Any) -> Iterator[None]:
    yield
    module.build_shm_op = lambda: None


@contextmanager
def _openrlhf(module: Any) -> Iterator[None]:
    import torch

    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    names = ("flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed")
    sys.modules.update({name: _Unavailable(name) for name in names})
    yield
    for name in names:
        del sys.modules[name]  # transformers looks for it, and must not find it


@contextmanager
def _axolotl(module: Any) -> Iterator[None]:
    yield
    original = module.ModelLoader._set_device_map_config

    def without_device_map(loader: Any) -> None:
        original(loader)
        loader.model_kwargs.pop("device_map", None)

    module.ModelLoader._set_device_map_config = without_device_map


class _Unavailable(ModuleType):
    """A module whose members may be imported but not used."""

    __path__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


CHANGES = {
    "accelerate.state": _accelerate,
    "lightning.fabric.strategies.deepspeed": _lightning,
    "lightning.pytorch.strategies.deepspeed": _lightning,
    "openrlhf.models.ring_attn_utils": _openrlhf,
    "axolotl.loaders.model": _axolotl,
    "deepspeed.comm.torch": _deepspeed,
}


class _WhenImported:
    """A finder that is asked first for every module, and changes those of the table around their import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        change = CHANGES.get(name)
        if change is None:
            return None
        finders = (finder for finder in sys.meta_path if finder is not self)
        spec = next(
            (candidate for locator in finders if (candidate := locator.find_spec(name, path, target))), None
        )
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            with change(module):
                execute(module)

        spec.loader.exec_module = execute_and_change
        return spec


sys.meta_path.insert(0, _WhenImported())
