"""Counts what makes the host wait for a GPU, in processes whose tensors are all on the CPU.

Which tensors a GPU would have is followed from call to call: parameters, gradients and partitions, all that is made
with ``device=...``, and all that is computed from any of these. Of the functions of torch, those that return a number
or a tensor whose shape depends on values wait, and so does every copy between the host and the device: a tensor that is
made of Python's numbers, an index on the host, ``cpu()``.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import deepspeed_muon
from deepspeed_muon.math.newton_schulz import divisors
from deepspeed_muon.step import runner as step_runner
from deepspeed_muon.step.check import DeferredCheck
from tests.support import training

# Functions that read values of the tensors that they are given.
_READING = {
    *("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__contains__"),
    *(
        "equal",
        "allclose",
        "is_nonzero",
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
    ),
    *("bincount", "repeat_interleave", "all_gather_object", "broadcast_object_list"),
}
_MADE_OF_NUMBERS = {"tensor", "as_tensor", "asarray", "from_numpy"}


class HostWaits(TorchFunctionMode):
    """Counts while :attr:`counting` is set; it must be on from the start, to know what is made for the device.

    Attributes:
        counting: Whether a step is counted.
        counts: Whose code waits, ``deepspeed_muon`` or ``deepspeed``, and in which function of torch, to how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counting = False
        self.counts: Counter[tuple[str, str]] = Counter()
        # The storages, which are kept alive so that no other one gets their address.
        self._on_device: dict[int, Any] = {}

    def put(self, tensors: Iterable[Any]) -> None:
        """Count tensors as ones on the device."""
        for tensor in tree_leaves(list(tensors)):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._on_device[storage._cdata] = storage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func)).removesuffix(".default")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name in ("__get__", "__set__", "untyped_storage") or not isinstance(func, Callable):
            return func(*args, **kwargs)
        is_on_device = [self._is_on_device(tensor) for tensor in tensors]
        device = kwargs.get("device")
        if isinstance(device, str) and device == "cpu":  # the host's own, which our code names by this text
            device = None
        if name == "to" and device is None and len(args) > 1 and isinstance(args[1], (torch.device, str)):
            device = args[1]
        if self._waits(name, args, kwargs, any(is_on_device), all(is_on_device), device is not None):
            self._count(name)
        result = func(*args, **kwargs)
        copies = name in ("cpu", "to") and self.counting
        if copies and isinstance(result, Tensor) and (name == "cpu") == is_on_device[0]:
            result = result.clone()  # on a GPU it is another tensor
        if name not in _READING and (device is not None or any(is_on_device)):
            self.put([result])
        return result

    def _waits(
        self, name: str, args: Any, kwargs: Any, some: bool, all_on_device: bool, names_device: bool
    ) -> bool:
        """Return whether the host waits; ``some`` and ``all_on_device`` say where the arguments' tensors are."""
        if name == "repeat_interleave":
            repeats = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
            return some and isinstance(repeats, Tensor)
        if name in _READING:
            return some
        if name == "to" or name in _MADE_OF_NUMBERS:
            return names_device and not some
        if name in ("copy_", "_foreach_copy_"):
            return some and not all_on_device
        if name in ("__getitem__", "__setitem__", "index_put_") and self._is_on_device(args[0]):
            indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
            return any(index.dtype == torch.bool or not self._is_on_device(index) for index in indices)
        return False

    def _is_on_device(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._on_device

    def _count(self, name: str) -> None:
        """Count a wait for the project whose code calls torch."""
        frame: Any = sys._getframe(2)
        while frame is not None and self.counting:
            module = frame.f_globals.get("__name__", "")
            project = module.partition(".")[0]
            if project in ("deepspeed_muon", "deepspeed"):
                where = f"{name} in {module.removeprefix(project + '.')}:{frame.f_lineno}"
                self.counts[project, where] += 1
                return
            frame = frame.f_back


def tensors_of(*objects: Any) -> list[Tensor]:
    """Return the tensors in objects of DeepSpeed: in their attributes, and in the lists and dictionaries of these."""
    tensors = []
    for attribute in (value for thing in objects for value in vars(thing).values()):
        for leaf in tree_leaves(attribute):
            tensors += [leaf] if isinstance(leaf, Tensor) else []
    return tensors


class OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    device = SimpleNamespace(type="cuda")


def divisors_on_a_gpu(x: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Return the norms as on a GPU: on a CPU alone the host looks whether one of them is small."""
    return divisors(x.as_subclass(OnGpu) if x.device.type == "cpu" else x, dim).as_subclass(Tensor)


def count_waits(
    rank: int, world_size: int, *, kind: str = "toy", steps: int = 3, **settings: Any
) -> dict[str, int]:
    """Return where the host waits in the last of some steps of an engine, as often as it does."""
    with (
        HostWaits() as waits,
        mock.patch.object(step_runner, "ResultCheck", DeferredCheck),
        mock.patch("deepspeed_muon.math.newton_schulz.divisors", divisors_on_a_gpu),
        mock.patch("deepspeed_muon.variants.muon_eq.divisors", divisors_on_a_gpu),
    ):
        engine = training.make_engine(training.ds_config(**settings), kind)
        optimizer = deepspeed_muon.muon_optimizer(engine)
        for step in range(steps):
            tokens, targets = training.batch(step, rank)
            engine.backward(engine(tokens, targets))
            params = list(engine.module.parameters())
            waits.put(
                [params, [param.grad for param in params], [getattr(p, "ds_tensor", None) for p in params]]
            )
            waits.put(tensors_of(engine.optimizer))
            waits.put([group["params"] for group in optimizer.param_groups])
            waits.put([list(entry.values()) for entry in optimizer.state.values()])
            waits.counting = step == steps - 1
            engine.step()
        waits.counting = False
    return {f"{project}: {where}": count for (project, where), count in waits.counts.items()}
