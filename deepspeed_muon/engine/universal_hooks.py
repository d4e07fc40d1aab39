"""DeepSpeed's universal checkpoints, converted and loaded by this project where the optimizer is ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed_muon.checkpoint.host import require_all_ranks
from deepspeed_muon.checkpoint.live import collect
from deepspeed_muon.checkpoint.restore import restore_from_source
from deepspeed_muon.checkpoint.sealed import refusing
from deepspeed_muon.checkpoint.settings import Before
from deepspeed_muon.checkpoint.sources import StateSource
from deepspeed_muon.checkpoint.universal import UniversalSource, convert_to_universal, is_ours
from deepspeed_muon.engine.checkpointing import set_loss_scale_state
from deepspeed_muon.engine.hooked import memory_of
from deepspeed_muon.errors import CheckpointError

__all__ = ["convert", "load_checkpoint", "load_universal_checkpoint", "loads_universal"]


def convert(original: Callable[..., Any], args: Any) -> Any:
    """Convert a checkpoint of ours; replaces ``ds_to_universal.main``.

    Every other checkpoint goes to the original, and so does one that cannot be read: what is wrong with it is for
    DeepSpeed to say.
    """
    if not is_ours(args.input_folder):
        return original(args)
    convert_to_universal(args.input_folder, args.output_folder)
    return None


def loads_universal(engine: Any) -> bool:
    """Return whether the wrapper of ``engine`` can load universal checkpoints."""
    return hasattr(engine.optimizer, "_load_universal_checkpoint")


def load_universal_checkpoint(
    original: Callable[..., Any],
    wrapper: Any,
    checkpoint_folder: str,
    load_optimizer_states: bool = True,
    *_: Any,
    **__: Any,
) -> None:
    """Load a universal checkpoint through our layouts; replaces the wrapper's loader. All ranks must call it."""
    engine = memory_of(wrapper).engine()
    require_all_ranks(engine)
    source: StateSource | None = None
    error: Exception | None = None
    scale = None
    try:
        with refusing(str(checkpoint_folder)):
            routes = {parameter.route.name: parameter.route for parameter in collect(engine).parameters}
            source = universal = UniversalSource(checkpoint_folder, routes)
            scale = universal.loss_scale
    except Exception as caught:
        error = caught
    restore_from_source(engine, source, progress=False, state_too=load_optimizer_states, error=error)
    if scale:
        set_loss_scale_state(wrapper, dict(scale))


def load_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Load, and put back counters and schedule, which DeepSpeed sets first, if a universal checkpoint is refused."""
    if not engine.load_universal_checkpoint():
        return original(*args, **kwargs)
    before = Before(engine)
    try:
        return original(*args, **kwargs)
    except Exception as error:
        before.put_back()
        if isinstance(error, CheckpointError) and hasattr(engine.optimizer, "checkpoint_event_epilogue"):
            engine.optimizer.checkpoint_event_epilogue()  # all ranks are here: they agreed to refuse
        raise
