"""Offload and master weights in half precision, and what DeepSpeed's offload to NVMe gets wrong.

**To the CPU.** ZeRO's wrappers accept DeepSpeed's own optimizers only. Twin-flow (``ratio``) and
``bf16_master_weights_and_grads`` need an optimizer that updates partitions on the CPU and in half precision. Ours does,
but the wrappers compare its class with ``DeepSpeedCPUAdam``. AdamW on the CPU is DeepSpeed's native operator, which is
compared with a reference before it is used.

**Steps with NVMe** (stage 3). DeepSpeed swaps one sub-group in, calls the optimizer, and swaps the sub-group out again.
Sub-groups consist of complete parameters, so a step never needs two of them at once. Two things go wrong:

- The gradient of a parameter that does not begin at a multiple of 128 elements of its partition is not read back, and
  no error says so: the disk is read without a cache, which needs aligned buffers. So no gradient is swapped here. All
  of them are in the buffer in which they were accumulated anyway, and a sub-group that is swapped in gets a copy.
- With pipelining, masters and state keep referring to buffers of the swapper, which contain another sub-group by then.
  A save would write that one to its files, and a load would read it.

**Checkpoints with NVMe.** Beside its usual files DeepSpeed saves a copy of each rank's swap files, and a load copies
them back. Four things go wrong:

- A save into a folder that has such a copy raises, so that a killed run could never save the same tag again.
- The first rank writes the tag to ``latest`` while other ranks are still copying.
- A copy that is incomplete, or that belongs to another save than the usual files do, is loaded without an error.
- A load ignores the usual files of the optimizer: step counts, settings of the param groups, and all state that is in
  memory (small sub-groups, row state of variants, momentum of less than 32 bits) start anew. Swapped state is never
  read.

So here a save first removes an earlier copy and writes a list of the swap files beside them, which is copied too. The
ranks wait for each other before ``latest`` is written. A load checks the list before it changes anything, and reads the
usual files afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
from deepspeed.ops.adam import fused_adam
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.offload_states import offload_optimizer_states, reload_optimizer_states
from deepspeed.runtime.zero.utils import get_mapping_to_flat_buffer

from deepspeed_muon.checkpoint.deepspeed_files import SavedTag
from deepspeed_muon.checkpoint.files import refusing
from deepspeed_muon.checkpoint.parameters import host_of, optimizer_of
from deepspeed_muon.engine.patching import Original
from deepspeed_muon.engine.workarounds.state_links import LOST_LINKS
from deepspeed_muon.engine.zero.views import View, Zero3View, Zero12View, ZeroView, view_of
from deepspeed_muon.errors import CheckpointError, InstallationError
from deepspeed_muon.math.updates import AdamStep, AdamTensors
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.reference import ReferenceMuon

# Number of elements in the check of the native AdamW: whole SIMD vectors of every width, and a remainder.
_CHECKED = 1043

# Lists the swap files of a save, among them.
_LIST = "deepspeed_muon.json"


def offload_device(engine: DeepSpeedEngine, section: str = "offload_optimizer") -> str:
    """Return where ZeRO offloads to: ``none``, ``cpu`` or ``nvme``.

    Args:
        engine: A ``DeepSpeedEngine``.
        section: ``offload_optimizer`` or ``offload_param``.
    """
    offload = getattr(engine._config.zero_config, section)
    return "none" if offload is None else OffloadDeviceEnum(offload.device).value


def master_dtype(engine: DeepSpeedEngine) -> torch.dtype:
    """Return the dtype of the master weights according to the configuration."""
    if engine.bf16_master_weights_and_gradients():
        return torch.bfloat16
    return torch.float16 if engine.fp16_master_weights_and_gradients() else torch.float32


def adopt(engine: DeepSpeedEngine, optimizer: Muon, wrapping: contextlib.ExitStack) -> None:
    """Prepare our optimizer, which is made and not wrapped yet, for ZeRO's wrapper.

    Args:
        engine: The engine whose optimizer is about to be wrapped.
        optimizer: A :class:`deepspeed_muon.optimizer.Muon`.
        wrapping: Undoes, once the wrapper is made, what only its making needs.
    """
    optimizer.managed = True
    for group in optimizer.param_groups:
        # BF16_Optimizer plans an exchange of its own for groups with this key. Binding puts it back.
        group.pop("use_muon", None)
    # DeepSpeed requires its CPU Adam of client optimizers. Ours calls the operator behind it.
    engine.zero_force_ds_cpu_optimizer = lambda: False
    if engine.bf16_optimizer_states():
        optimizer.use_bf16_states()
    if offload_device(engine) == "none":
        return
    is_twin_flow = engine._config.zero_config.offload_optimizer.ratio < 1.0
    if is_twin_flow:
        # The wrapper's AdamW adds keys to our groups, so what they had is recorded now.
        wrapping.callback(
            _take_all, engine, optimizer, [(group, frozenset(group)) for group in optimizer.param_groups]
        )
        for group in optimizer.param_groups:
            group.setdefault("amsgrad", False)
    if is_twin_flow or master_dtype(engine) != torch.float32:
        for module in (stage3, stage_1_and_2):
            wrapping.enter_context(mock.patch.object(module, "DeepSpeedCPUAdam", type(optimizer)))


def _take_all(
    engine: DeepSpeedEngine, optimizer: Muon, group_keys: Sequence[tuple[dict[str, Any], frozenset[str]]]
) -> None:
    """Give our optimizer the sub-groups that twin-flow leaves on the device.

    The wrapper makes a ``torch.optim.AdamW`` of our groups for them, which adds keys.
    """
    if engine.optimizer is not None:
        engine.optimizer.backup_optimizer = optimizer
    for group, keys in group_keys:
        for extra in [key for key in group if key not in keys]:
            del group[extra]


def offload_states(original: Original, view: View, *args: object, **kwargs: object) -> object:
    """Release our working memory, and let the wrapper move our optimizer's state.

    Stage 3 moves two tensors of ``FusedAdam``'s state only, and keeps copies of them in it. So our class stands in for
    ``FusedAdam`` during the call, and the function with which stages 1 and 2 move any state for stage 3's own. Stage 3
    would also look for the weights in the order of the model, and for frozen ones, which are not in its buffer.
    """

    def mapping(_: Any) -> Any:
        return get_mapping_to_flat_buffer([param.ds_tensor for group in view.params for param in group])  # type: ignore[attr-defined]

    # Before the original, which returns free memory to the device at its end.
    view.optimizer.release_memory()
    with (
        mock.patch.object(fused_adam, "FusedAdam", type(view.optimizer)),
        mock.patch.object(stage3, "offload_adam_states", offload_optimizer_states),
        mock.patch.object(stage3, "get_mapping_to_flat_buffer", mapping),
    ):
        return original(*args, **kwargs)


def reload_states(original: Original, view: ZeroView, *args: object, **kwargs: object) -> None:
    """Take back what :func:`offload_states` moved, and capture CUDA graphs again."""
    moved = []  # host tensors, which must not be freed before the original has waited for the copies

    def reload(*args: object, **kwargs: object) -> None:
        moved.append(reload_optimizer_states(*args, **kwargs))

    # Stage 3 would look for copies of FusedAdam's state.
    with mock.patch.object(stage3, "reload_adam_states", reload):
        original(*args, **kwargs)
    if isinstance(view, Zero12View) and LOST_LINKS.is_needed:
        view.link_params()
    view.optimizer.capture_graphs()


class CpuAdam:
    """Calls the operator behind ``DeepSpeedCPUAdam``, without that class's parameters and state."""

    def __init__(self, *, decoupled: bool, master: torch.dtype, moments: torch.dtype) -> None:
        """Load the operator, building it on first use, and compare two steps of it with the reference.

        Args:
            decoupled: AdamW when true, Adam with an L2 term when false.
            master: Dtype of the parameters and gradients that it will get.
            moments: Dtype of both moments.

        Raises:
            InstallationError: If it can be neither loaded nor built, or its result is not the reference's.
        """
        try:
            from deepspeed.ops.adam import DeepSpeedCPUAdam
            from deepspeed.ops.op_builder import CPUAdamBuilder

            self._op: Any = CPUAdamBuilder().load()
            # The operator stores its settings under a number, and the class counts the numbers.
            self._number = DeepSpeedCPUAdam.optimizer_id
            DeepSpeedCPUAdam.optimizer_id += 1
        except Exception as error:
            raise InstallationError(f"DeepSpeed's cpu_adam operator is not available: {error}") from error
        weakref.finalize(self, self._op.destroy_adam, self._number)
        self._check(decoupled, master, moments)

    def __call__(self, tensors: Sequence[AdamTensors], *, settings: AdamStep) -> None:
        """Update parameters and both moments in place; see :func:`deepspeed_muon.math.updates.adam_step_`."""
        numbers = (settings.lr, *settings.betas, settings.eps, settings.weight_decay)
        # Settings that are stored anew get the powers of the betas from the number of the step. Otherwise the operator
        # multiplies those of its last step once more, which rounds differently: a resumed run would differ in its last
        # bits.
        self._op.create_adam(self._number, *numbers, settings.decoupled, False)
        for of_param in tensors:
            assert all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in of_param)
            # True: with bias correction
            self._op.adam_update(self._number, settings.step, *numbers, True, *of_param)

    def _check(self, decoupled: bool, master: torch.dtype, moments: torch.dtype) -> None:
        """Compare two steps on random numbers with the float64 reference."""
        generator = torch.Generator().manual_seed(0)
        param = (0.02 * torch.randn(_CHECKED, generator=generator)).to(master)
        exp_avg, exp_avg_sq = torch.zeros(2, _CHECKED, dtype=moments)
        reference = ReferenceMuon({}, adam_lr=0.01, eps=1e-8, weight_decay=0.1 if decoupled else 0.0)
        expected = param.double()
        error = 0.0
        for step in (1, 2):
            grad = torch.randn(_CHECKED, generator=generator).to(master)
            settings = AdamStep(0.01, (0.9, 0.95), 1e-8, 0.1, step, decoupled)
            # Adam's L2 term is decay as a term of the gradient.
            gradient = grad.double() if decoupled else grad + 0.1 * expected
            reference.step({"param": expected}, {"param": gradient})
            try:
                self([(param, grad, exp_avg, exp_avg_sq)], settings=settings)
            except RuntimeError as failed:
                raise InstallationError(
                    f"DeepSpeed's cpu_adam operator does not take {master} with moments in {moments}: {failed}"
                ) from failed
            error = max(error, float((param.double() - expected).abs().max()))
        # Two steps of about 0.01. Each one rounds a parameter of at most 0.1 (half of eps, relative), and its update
        # holds a few roundings of the moments. The error of a wrong formula is of the size of an update.
        unit = torch.finfo(master).eps * 0.1 + torch.finfo(moments).eps * 0.02 * 8
        if not error <= unit:
            raise InstallationError(
                f"DeepSpeed's cpu_adam operator differs from the reference by {error:.1e} (allowed {unit:.1e})"
            )


def _copy_in(engine: DeepSpeedEngine, tag_folder: Path) -> Path:
    """Return where DeepSpeed copies this rank's swap files to."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return tag_folder / "offloaded_tensors" / f"rank{dp_index_to_str(rank)}"


def _swap_files(folder: Path) -> dict[str, int]:
    """Return the sizes of the swap files that DeepSpeed copies: all but gradients."""
    return {
        path.name: path.stat().st_size for path in folder.glob("*.tensor.swp") if "gradient" not in path.name
    }


def prepare_save(engine: DeepSpeedEngine, tag_folder: Path, save_id: str) -> None:
    """Remove an earlier copy of this rank's swap files, and list the files for the next one."""
    swap_folder = view_of(engine.optimizer).swap_folder
    if swap_folder is None:
        return
    with refusing(str(tag_folder)):
        if (copy := _copy_in(engine, tag_folder)).exists():
            shutil.rmtree(copy)
        (swap_folder / _LIST).write_text(json.dumps({"save": save_id, "files": _swap_files(swap_folder)}))


def swap_in(original: Original, view: Zero3View, sub_group_id: int, *args: object, **kwargs: object) -> None:
    """Swap a sub-group in, and give its master the gradient."""
    original(sub_group_id, *args, **kwargs)
    master = view.masters[sub_group_id]
    master.grad = view.accumulated(sub_group_id).to(master.device, master.dtype, copy=True)


def write_back(
    original: Original, view: Zero3View, sub_group_id: int, write_opt_state: bool, write_gradients: bool
) -> None:
    """Use a gradient that the program has set (``safe_set_full_grad``)."""
    grad = view.masters[sub_group_id].grad
    if write_gradients and grad is not None:
        view.accumulated(sub_group_id).copy_(grad)
    original(sub_group_id, write_opt_state, write_gradients)


def swap_out(original: Original, view: Zero3View, sub_group_id: int, *args: object, **kwargs: object) -> None:
    """Swap a sub-group out, and let its tensors be empty from then on, with pipelines too."""
    original(sub_group_id, *args, **kwargs)
    view.release(sub_group_id)


def wait_for_copies(original: Original, view: View, *args: object, **kwargs: object) -> object:
    """Wait until all ranks have copied their swap files, before a save continues."""
    if host_of(view.optimizer).save_id is not None:
        view.optimizer.ranks.all_gather(None, purpose="copies of swap files in a save")
    return original(*args, **kwargs)


def check_copy(
    engine: DeepSpeedEngine, tag_folder: Path, saved: SavedTag | None, save_id: str | None, state: bool
) -> None:
    """Check that a checkpoint offloads to NVMe as the engine does, and that this rank's copy is of that save.

    Args:
        engine: The engine that is about to load.
        tag_folder: The folder of the checkpoint.
        saved: What is known of it.
        save_id: The id of the save in this rank's usual files.
        state: Whether the optimizer's state is to be loaded.

    Raises:
        CheckpointError: If it does not, with the remedy.
    """
    view, copy = view_of(engine.optimizer), _copy_in(engine, tag_folder)
    if view.swap_folder is None:
        if (tag_folder / "offloaded_tensors").exists() and state:
            raise CheckpointError(
                f"{tag_folder}: saved with offload to NVMe, which this engine does not use: load it with "
                f"zero_optimization.offload_optimizer.device nvme, at stage 3 and on the same ranks"
            )
        return
    assert isinstance(view, Zero3View)
    if not state or saved is None:
        raise CheckpointError(
            f"{tag_folder}: with offload to NVMe engine.load_checkpoint continues what deepspeed_muon saved, with the "
            f"optimizer's state: load weights alone into the model, before deepspeed.initialize"
        )
    if not copy.is_dir():
        raise CheckpointError(
            f"{tag_folder}: has no {copy.relative_to(tag_folder)}: the run that saved it did not offload to NVMe, or a "
            f"save was killed. Load it with zero_optimization.offload_optimizer.device cpu, or load another tag"
        )
    with refusing(str(copy)):
        listed = json.loads((copy / _LIST).read_text()) if (copy / _LIST).exists() else {}
        files, sizes = listed.get("files", {}), _swap_files(copy)
    if listed.get("save") != save_id or any(sizes.get(name) != size for name, size in files.items()):
        raise CheckpointError(f"{copy}: cut short, or of another save: a save was killed; load another tag")
    before = saved.record.get("optimizer", {}).get("momentum_dtype")
    now = optimizer_of(engine).config.momentum_dtype
    if before != now:
        raise CheckpointError(
            f"{tag_folder}: was saved with optimizer.params.momentum_dtype {before!r}, this engine has {now!r}: with "
            f"offload to NVMe a momentum is not converted. Set it as that run had"
        )
    if missing := view.master_files() - files.keys():
        raise CheckpointError(
            f"{copy}: has no {', '.join(sorted(missing))}. DeepSpeed numbers parameters by process: load in a new one "
            f"that makes its engines as the saved run did, with the same sub_group_size"
        )


def load_the_rest(engine: DeepSpeedEngine, load_dir: str | os.PathLike[str], tag: object) -> None:
    """Load the usual files of the optimizer, and swap in what they say. Must be called by all ranks.

    The swapper then knows our state, whose files DeepSpeed has copied back.
    """
    if view_of(engine.optimizer).swap_folder is not None:
        engine.optimizer.checkpoint_event_prologue()
        engine._load_zero_checkpoint(load_dir, tag, load_optimizer_states=True)
        engine.optimizer.checkpoint_event_epilogue()
