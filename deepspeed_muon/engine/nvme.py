"""Offload to NVMe (stage 3): what DeepSpeed's swapper gets wrong, in steps and in checkpoints.

**Steps.** DeepSpeed swaps one sub-group in, calls the optimizer, and swaps the sub-group out again. Sub-groups consist
of complete parameters, so a step never needs two of them at once. Two things go wrong:

- The gradient of a parameter that does not begin at a multiple of 128 elements of its partition is not read back, and
  no error says so: the disk is read without a cache, which needs aligned buffers. So no gradient is swapped here. All
  of them are in the buffer in which they were accumulated anyway, and a sub-group that is swapped in gets a copy.
- With pipelining, masters and state keep referring to buffers of the swapper, which contain another sub-group by then.
  A save would write that sub-group to its files, and a load would read it.

**Checkpoints.** Besides its usual files DeepSpeed saves a copy of each rank's swap files, and a load copies them back.
Four things go wrong:

- A save into a folder that has such a copy raises, so that a killed run could never save the same tag again.
- The first rank writes the tag to ``latest`` while other ranks are still copying.
- A copy that is incomplete, or that belongs to another save than the usual files do, is loaded without an error.
- A load ignores the usual files of the optimizer: step counts, settings of the param groups, and all state that is in
  memory (small sub-groups, row state of variants, momentum of less than 32 bits) start anew. Swapped state is never
  read.

So here a save first removes an earlier copy and writes a list of the swap files beside them, which is copied as well.
The ranks wait for each other before ``latest`` is written. A load checks the list before it changes anything, and reads
the usual files afterwards.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from operator import attrgetter
from pathlib import Path
from typing import Any

from deepspeed.checkpoint.ds_to_universal import dp_index_to_str
from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_muon.checkpoint.deepspeed_files import SavedTag
from deepspeed_muon.checkpoint.files import refusing
from deepspeed_muon.checkpoint.parameters import bound_engine_of, optimizer_of
from deepspeed_muon.engine.patching import Hook, Original
from deepspeed_muon.engine.views import View, Zero3View, view_of
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.optimizer import Muon
from deepspeed_muon.step.loading import STATE_TENSORS

# The list of a save's swap files, beside them.
_LIST = "deepspeed_muon.json"

_SWAPS = attrgetter("swap_folder")


# Steps


def replace_in_swapper(view: Zero3View) -> None:
    """Make the swapper of a wrapper leave gradients alone, and swap that part of our state that it can keep."""
    # DeepSpeed would swap the row state of variants as if it had the partition's length, and a bf16 momentum as fp32.
    # After a load it would swap no state at all.
    view.swapper.swap_out_gradients = lambda *_, **__: None
    view.swapper._get_state_tensors = functools.partial(_state_to_swap, view.optimizer)


def _state_to_swap(optimizer: Muon, master: Any) -> list[Any]:
    """Return the state tensors of a partition that the swapper can keep: those with its dtype and length.

    Everything else stays in memory: row state of variants, a momentum of less than 32 bits. The lengths are not
    compared, as between two steps all that is swapped is empty. A load replaces the dict of all states.
    """
    state = optimizer.state.get(master, {})
    swapped = {key: state[key] for key in STATE_TENSORS if key in state and state[key].dtype == master.dtype}
    for key, tensor in swapped.items():
        tensor.ds_id = f"{key}-{master.ds_id}"  # the name of its file
    return list(swapped.values())


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
    """Swap a sub-group out, and leave its tensors empty, even with pipelining."""
    original(sub_group_id, *args, **kwargs)
    master: Any = view.masters[sub_group_id]
    view.swapper.swap_params_info[master.ds_id].release_memory()


def wait_for_copies(original: Original, view: View, *args: object, **kwargs: object) -> object:
    """Wait until all ranks have copied their swap files, before a save continues."""
    if bound_engine_of(view.optimizer).save_id is not None:
        view.optimizer.ranks.all_gather(None, purpose="copies of swap files in a save")
    return original(*args, **kwargs)


HOOKS = (
    # The step would find no gradient: none is swapped, because unaligned ones would not be read.
    Hook((Zero3View,), "_optimizer_states_and_gradient_swap_in", swap_in, _SWAPS),
    # safe_set_full_grad would change a copy of it.
    Hook((Zero3View,), "_writeback_swap_state", write_back, _SWAPS),
    # With pipelining, masters and state would refer to buffers of the swapper that hold another sub-group, and a save
    # would write those.
    Hook((Zero3View,), "_optimizer_states_and_gradient_swap_out", swap_out, _SWAPS),
    # DeepSpeed would write `latest` while some ranks still copy their swap files.
    Hook((Zero3View,), "checkpoint_event_epilogue", wait_for_copies, _SWAPS),
)
"""Above each row: what would be wrong without it."""


# Checkpoints


def _copy_folder(engine: DeepSpeedEngine, tag_folder: Path) -> Path:
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
        if (copy := _copy_folder(engine, tag_folder)).exists():
            shutil.rmtree(copy)
        (swap_folder / _LIST).write_text(json.dumps({"save": save_id, "files": _swap_files(swap_folder)}))


def _master_files(view: Zero3View) -> set[str]:
    """Return the names of the swap files with masters."""
    return {Path(info.tensors[0].swap_path).name for info in view.swapper.swap_params_info.values()}


def check_copy(
    engine: DeepSpeedEngine, tag_folder: Path, saved: SavedTag | None, save_id: str | None, with_state: bool
) -> None:
    """Check that checkpoint and engine both offload to NVMe or neither does, and that this rank's copy is of that save.

    Args:
        engine: The engine that is about to load.
        tag_folder: The folder of the checkpoint.
        saved: What saved it, if its files say so.
        save_id: The id of the save in this rank's usual files.
        with_state: Whether the optimizer's state is to be loaded.

    Raises:
        CheckpointError: If not, with the remedy.
    """
    view, copy = view_of(engine.optimizer), _copy_folder(engine, tag_folder)
    if view.swap_folder is None:
        if (tag_folder / "offloaded_tensors").exists() and with_state:
            raise CheckpointError(
                f"{tag_folder}: saved with offload to NVMe, which this engine does not use: load it with "
                f"zero_optimization.offload_optimizer.device nvme, at stage 3 and on the same ranks"
            )
        return
    assert isinstance(view, Zero3View)
    if not with_state or saved is None:
        raise CheckpointError(
            f"{tag_folder}: with offload to NVMe engine.load_checkpoint continues what deepspeed_muon saved, with the "
            f"optimizer's state: load weights alone into the model, before deepspeed.initialize"
        )
    with refusing(str(copy)):
        listed = json.loads((copy / _LIST).read_text()) if (copy / _LIST).exists() else {}
        files, sizes = listed.get("files", {}), _swap_files(copy)
    if listed.get("save") != save_id or any(sizes.get(name) != size for name, size in files.items()):
        raise CheckpointError(
            f"{copy}: not there, cut short, or of another save: a save was killed, or its run did not offload to NVMe. "
            f"Load another tag, or without offload to NVMe (zero_optimization.offload_optimizer.device cpu)"
        )
    before = saved.record.get("optimizer", {}).get("momentum_dtype")
    now = optimizer_of(engine).config.momentum_dtype
    if before != now:
        raise CheckpointError(
            f"{tag_folder}: was saved with optimizer.params.momentum_dtype {before!r}, this engine has {now!r}: with "
            f"offload to NVMe a momentum is not converted. Set it as that run had"
        )
    if missing := _master_files(view) - files.keys():
        raise CheckpointError(
            f"{copy}: has no {', '.join(sorted(missing))}. DeepSpeed numbers parameters by process: load in a new one "
            f"that makes its engines as the saved run did, with the same sub_group_size"
        )


def load_the_rest(engine: DeepSpeedEngine, load_dir: str | os.PathLike[str], tag: object) -> None:
    """Load the optimizer's usual files into what is swapped in. Must be called by all ranks.

    From then on the swapper knows our state, whose swap files DeepSpeed has copied back.
    """
    if view_of(engine.optimizer).swap_folder is not None:
        engine.optimizer.checkpoint_event_prologue()
        engine._load_zero_checkpoint(load_dir, tag, load_optimizer_states=True)
        engine.optimizer.checkpoint_event_epilogue()
