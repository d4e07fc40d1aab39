"""What DeepSpeed keeps to itself is touched in ``engine/`` alone; pyproject.toml's contracts check the imports."""

from __future__ import annotations

import ast
import sys
import textwrap

import pytest

from deepspeed_muon.ops import builder
from tests.support.harness import run_command
from tests.support.native_ops import REPOSITORY

PACKAGE = REPOSITORY / "deepspeed_muon"

# The names that our code gives to DeepSpeed's objects: its engine, and its optimizer around ours.
OBJECTS = {"engine", "wrapper", "zero"}

# The functions that reach an attribute by name.
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}


def private_accesses(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and text of every private attribute of an object in ``OBJECTS`` that a module touches."""
    accesses = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            target, name = node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
            target, attribute = node.args[:2]
            name = attribute.value if isinstance(attribute, ast.Constant) else ""
        else:
            continue
        private = name.startswith("_") and not name.endswith("__")
        last = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        if private and last.lstrip("_") in OBJECTS:
            accesses.append((node.lineno, ast.unparse(node)))
    return accesses


def test_private_attributes_of_deepspeed_are_touched_in_engine_alone() -> None:
    accesses = [
        f"{path.relative_to(REPOSITORY)}:{line}: {text}"
        for folder in (PACKAGE, REPOSITORY / "ops")
        for path in sorted(folder.rglob("*.py"))
        if PACKAGE / "engine" not in path.parents
        for line, text in private_accesses(ast.parse(path.read_text()))
    ]
    assert not accesses, "\n".join(accesses)


@pytest.mark.native
def test_an_import_loads_and_starts_nothing_and_a_built_library_no_tools_of_the_build() -> None:
    """They cost a process seconds: no program is started, neither tools nor torch's build code are imported."""
    program = """
        import sys
        started = []
        import torch, deepspeed
        sys.addaudithook(lambda event, args: started.append(args) if event == "subprocess.Popen" else None)
        import deepspeed_muon
        from deepspeed_muon.ops import builder
        assert not builder.loaded()
        builder.load()
        assert torch.ops.deepspeed_muon.unpack_apply_
        assert not started and "torch.utils.cpp_extension" not in sys.modules, started
        assert not [name for name in sys.modules if name.startswith("deepspeed_muon.tools")]
        print(sys.argv[1:])
    """
    builder.load()
    # The arguments are the program's, and nothing here parses them.
    done = run_command([sys.executable, "-c", textwrap.dedent(program), "--help", "deepspeed_muon"])
    assert done.stdout.endswith("['--help', 'deepspeed_muon']\n")


# Functions of torch that make a tensor of torch's default dtype, on its default device, unless they are told.
MAKES_TENSORS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}


def test_every_new_tensor_has_its_dtype_and_device() -> None:
    """Programs change both defaults, and AdamW's count of steps was a bf16 number then."""
    calls = [
        (f"{path.relative_to(PACKAGE)}:{node.lineno}", {keyword.arg for keyword in node.keywords})
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in MAKES_TENSORS
    ]
    assert len(calls) > 30 and [where for where, given in calls if not {"dtype", "device"} <= given] == []
