"""Tries another DeepSpeed: what deepspeed_muon depends on there, whether the guard admits it, and the compat tests.

    scripts/canary.py --source 0.19.8                     a release
    scripts/canary.py --source git+https://...            what pip understands
    scripts/canary.py --source ../DeepSpeed               a checkout, or an archive of the source
    scripts/canary.py --source ... --guard-only           without the tests, which take minutes

Makes an environment (``--folder``, kept for the next time), installs the DeepSpeed that is tested there, then the other
one, and prints the difference of the functions that are replaced, called or relied on and of the lines that set the
attributes that are read. Ends with 1 if the guard refuses it or a test fails.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Return 1 if the other DeepSpeed is refused or fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", help="a release, a folder, an archive or a URL")
    parser.add_argument("--tested", default="0.19.8", help="the release to compare it with")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-canary", help="the environment")
    parser.add_argument("--guard-only", action="store_true", help="run no tests")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)  # inside the environment
    options = parser.parse_args()
    if options.facts:
        print(json.dumps(facts()))
        return 0
    if options.source is None:
        parser.error("--source is required")
    environment = Environment(options.folder)
    environment.make(options.tested)
    environment.install(options.tested)
    tested = environment.facts()
    environment.install(options.source)
    new = environment.facts()
    changed = differences(tested, new)
    print("".join(changed))
    print(
        f"{sum(line.startswith('+++ ') for line in changed)} of {len(tested['facts'])} functions and attributes differ"
    )
    print(f"DeepSpeed {new['version']} against {tested['version']}:", new["guard"] or "the guard admits it")
    if new["guard"] or options.guard_only:
        return int(bool(new["guard"]))
    passed, report = environment.tests()
    print(report)
    return int(not passed)


class Environment:
    """An environment with torch and this package, in which one DeepSpeed after the other is installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.python = self.folder / "bin" / "python"

    def make(self, deepspeed: str, **variables: str) -> None:
        """Make it with a DeepSpeed release, if it is not there yet; ``variables`` are those of setup_env.sh."""
        ready = self.folder / ".ready"
        if not ready.exists():
            command = [ROOT / "scripts" / "setup_env.sh", self.folder, deepspeed]
            subprocess.run(command, check=True, env={**os.environ, **variables})
            ready.touch()

    def install(self, source: str) -> None:
        """Put another DeepSpeed in the place of the one that is installed; torch stays."""
        requirement = str(Path(source).absolute()) if Path(source).exists() else source
        if re.fullmatch(r"[\d.]+\w*", source):
            requirement = f"deepspeed=={source}"
        hold = ["-q", "--no-build-isolation", "--constraint", str(self.folder / "constraints.txt")]
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "install", *hold]
        subprocess.run([*pip, "--upgrade", "--force-reinstall", "--no-deps", requirement], check=True)
        subprocess.run([*pip, "deepspeed"], check=True)  # what it needs

    def run(self, *command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a Python program with the package of this repository, and with native builds of its own."""
        version = subprocess.run(
            [self.python, "-c", "from importlib.metadata import version as v; print(v('deepspeed'), v('torch'))"],
            check=True, capture_output=True, text=True,
        ).stdout.split()  # fmt: skip
        variables = {
            "PYTHONPATH": str(ROOT),
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "TORCH_EXTENSIONS_DIR": str(self.folder / "torch_extensions" / "-".join(version)),
        }
        given = {
            "cwd": ROOT,
            "env": {**os.environ, **variables},
            "capture_output": True,
            "text": True,
            **options,
        }
        return subprocess.run([self.python, *command], **given)

    def facts(self) -> dict[str, Any]:
        """Return :func:`facts` of the DeepSpeed that is installed."""
        done = self.run(__file__, "--facts")
        if done.returncode:
            return {"version": "?", "guard": done.stderr.strip().splitlines()[-1], "facts": {}}
        return json.loads(done.stdout.strip().splitlines()[-1])

    def tests(self, *which: str) -> tuple[bool, str]:
        """Return whether tests pass, by default those marked ``compat``, and what pytest says of failures."""
        self.run("-m", "tests.support.native_ops")
        chosen = [*(which or ("-m", "compat and not full")), "-q", "-rfE", "--no-header", "--tb=line"]
        spread = ["-n", os.environ.get("JOBS", "3"), "--dist", "loadfile", "--no-loadscope-reorder"]
        done = self.run("-m", "pytest", *chosen, *spread)
        told = done.stdout.strip().splitlines()
        failures = [line[:300] for line in told if line.startswith(("FAILED", "ERROR"))]
        return done.returncode == 0, "\n".join([*failures, told[-1] if told else done.stderr[-2000:]])


def facts() -> dict[str, Any]:
    """Return what this package depends on in the DeepSpeed of this process, as text, and what the guard says of it."""
    import deepspeed

    guard = ""
    try:
        import deepspeed_muon  # noqa: F401
    except Exception as error:  # then its modules are there, but not the package
        guard = f"{type(error).__name__}: {error}"
    modules = ("hooks", "patching", "views")
    hooks, patching, views = (sys.modules.get(f"deepspeed_muon.engine.{name}") for name in modules)
    if hooks is None or patching is None or views is None:
        raise SystemExit(guard)
    texts = {patching.name_of(*each): patching.source_of(*each) for each in hooks.watched_functions()}
    for wrapper, view in views.WRAPPERS.items():
        classes = (each for each in wrapper.__mro__ if each.__module__.startswith("deepspeed."))
        code = "".join(map(inspect.getsource, classes))
        for name in sorted(views.read_by(view)):
            uses = rf".*(?:self\.{name}\b[^=\n()]*=[^=]|def {name}\b).*\n"
            texts[f"{wrapper.__name__}: {name}"] = "".join(sorted(set(re.findall(uses, code))))
    return {"version": deepspeed.__version__, "guard": guard, "facts": texts}


def differences(tested: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Return the lines of a unified diff of all facts."""
    lines: list[str] = []
    for name in sorted({*tested["facts"], *new["facts"]}):
        texts = (each["facts"].get(name, "").splitlines(keepends=True) for each in (tested, new))
        labels = (f"{name} in DeepSpeed {each['version']}" for each in (tested, new))
        lines += difflib.unified_diff(*texts, *labels)
    return lines


if __name__ == "__main__":
    sys.exit(main())
