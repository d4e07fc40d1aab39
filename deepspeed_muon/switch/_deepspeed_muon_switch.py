"""Registers deepspeed_muon as soon as the program imports DeepSpeed, because DEEPSPEED_MUON is set.

An installation puts this file and ``deepspeed_muon.pth`` into ``site-packages``. Python reads the ``.pth`` file when it
starts, so this works in every process that inherits the variable, whichever launcher started it. Only ``sys`` is
imported, because every Python process pays for it; a program that never imports DeepSpeed is not affected.
"""

import sys

TYPE_CHECKING = False  # importing it from typing would take longer than the rest of this file
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _DeepSpeedFinder:
    """A meta path finder that registers deepspeed_muon when ``deepspeed`` is executed, and then removes itself.

    It is not removed when a program only searches for DeepSpeed's spec, as Accelerate does.
    """

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != "deepspeed":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                break
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: "ModuleType") -> None:
            execute(module)
            import deepspeed_muon

            # It has none yet if the program is importing deepspeed_muon, which imports DeepSpeed.
            if hasattr(deepspeed_muon, "register"):
                deepspeed_muon.register()
            # If anything above raised, a program that catches it and imports DeepSpeed again gets the same error.
            if self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if "deepspeed" not in sys.modules:
    sys.meta_path.insert(0, _DeepSpeedFinder())
