"""Workarounds for defects of DeepSpeed that every optimizer has: a module for each family, a constant for each defect.

A :class:`~deepspeed_muon.engine.patching.Workaround` has its hooks, and is off from the first release on that somebody
has seen to be right. Nothing else knows single workarounds: ``engine/`` installs :data:`HOOKS` inside of its own hooks,
so that :mod:`deepspeed_muon.engine.step` reads as if DeepSpeed were right. ``scripts/planted_defects.py --workarounds``
switches each of them off and runs the test that then has to fail.
"""

from deepspeed_muon.engine.patching import Workaround
from deepspeed_muon.engine.workarounds import checkpoints, experts, gradients, loss_scale, norm, references

LOOKED_AT = "0.19.8"
"""The newest release for which somebody has looked which workarounds it needs."""

WORKAROUNDS = {
    f"{module.__name__.rpartition('.')[2]}.{name}": value
    for module in (checkpoints, experts, gradients, loss_scale, norm, references)
    for name, value in vars(module).items()
    if isinstance(value, Workaround)
}
"""Every workaround, by the module and name of its constant."""

NEEDED = [workaround for workaround in WORKAROUNDS.values() if workaround.is_needed]

HOOKS = tuple(dict.fromkeys(hook for workaround in NEEDED for hook in workaround.hooks))
"""What is replaced in engines with our optimizer. Of two rows for one method the later one calls the earlier one."""
