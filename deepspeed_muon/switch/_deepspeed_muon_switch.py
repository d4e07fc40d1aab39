"""Registers deepspeed_muon as soon as the program imports DeepSpeed, because DEEPSPEED_MUON is set.

An installation puts this file and ``deepspeed_muon.pth`` beside the installed packages. Python reads the latter when it
starts: every process that inherits the variable is switched on, whichever launcher started it. Nothing is imported here
but ``sys``, since every Python process pays for it; a program that never imports DeepSpeed does not notice.
"""

import sys

TYPE_CHECKING = False  # typing itself takes longer to import than all the rest here
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class _WhenDeepSpeedIsImported:
    """A finder that is first asked for every module, until DeepSpeed is imported.

    It stays when a program only looks whether DeepSpeed is there, as Accelerate does.
    """

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        if name != "deepspeed":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for each in others if (found := each.find_spec(name, path, target))), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: "ModuleType") -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            import deepspeed_muon

            # A program may have imported this project first, and be in the middle of it.
            if hasattr(deepspeed_muon, "register"):
                deepspeed_muon.register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if "deepspeed" not in sys.modules:
    sys.meta_path.insert(0, _WhenDeepSpeedIsImported())
