"""Saves that fail: ``python -m tests.faults.runner WORK [--full]`` writes WORK/results.json.

Each case is a save into a folder that holds a complete set of step 1, of an engine (or of DeepSpeed's files, for the
command line) that is at step 2, with one fault. The processes are forked from one that has imported everything but
started no thread, so a case takes tenths of a second; nothing is shared between two of them. Then every folder is
verified and restored, and power cuts at every moment of the save are laid out on a model of a disk.

Further cases kill ``engine.save_checkpoint`` with ``consolidate_on_save``: at every call below its folder, and at
moments that no call marks, in the middle of what torch writes. The folder holds a whole checkpoint: of the step before,
for a save at a new tag, or of another run at the same step and tag. Last, one rank or both are killed within loads.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from deepspeed_muon import __main__ as cli
from deepspeed_muon.checkpoint import consolidate, load_index, restore
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.ops.builder import load as load_ops
from deepspeed_muon.tools.convert import consolidate_files, verify_folder
from deepspeed_muon.transport import ranks
from tests.faults.disk import Disk, worst_folders
from tests.faults.injector import Fault, Injector, describe
from tests.support import training
from tests.support.checkpoints import STATES, engine_for, train_step, trained_for

INDEX, MIXTURE = "muon_index.json", "NEITHER: a mixture"
SHARD_BYTES = 24_000
"""Gives each of two ranks more than one file, and files of more than one piece."""
LIMIT = 60.0
"""Seconds after which a process counts as one that hangs; a case takes tenths of a second."""

SAVERS = {"API, 1 rank": 1, "API, 2 ranks": 2, "command line": 1}
TAGS = {"save_checkpoint, new tag": "second", "save_checkpoint, same tag": "t"}
"""Tag of the save that is killed; the folder holds one with the tag ``t``."""
ANOTHER_RUN = "save_checkpoint, same tag"
KILLS = 50
"""How often a save at each tag is killed at a moment that no call marks."""
RANKS = {**SAVERS, **dict.fromkeys(TAGS, 2)}


@dataclass(frozen=True)
class Case:
    """One save with one fault.

    Attributes:
        way: Key of :data:`RANKS`.
        fault: What fails; ``None`` for the run that counts the calls.
        what: The call in words.
        phase: How far the save is when the call is made.
        folder: Where everything of the case lies.
    """

    saver: str
    fault: Fault | None
    call_name: str
    phase: str
    folder: Path

    @property
    def target(self) -> Path:
        """The folder of the set; the first save of all makes it."""
        return self.folder / ("a/b/c" if self.phase == "first save" else "set")


# ------------------------------------------------------------------------------------------------------------ processes


def fork_ranks(world_size: int, folder: Path, fn: Callable[[int], Any], *, group: bool = True) -> list[Any]:
    """Run ``fn(rank)`` in forked processes and return what each did: its result, an error, ``died`` or ``hangs``."""
    folder.mkdir(parents=True, exist_ok=True)
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            _child(rank, world_size, folder, fn, group)
        pids.append(pid)
    deadline = time.monotonic() + LIMIT
    outcomes = []
    for rank, pid in enumerate(pids):
        while not os.waitpid(pid, os.WNOHANG)[0]:
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                outcomes.append({"hangs": True})
                break
            time.sleep(0.005)
        else:
            # A rank that is killed while it writes leaves an empty file.
            file = folder / f"outcome{rank}.json"
            text = file.read_text() if file.exists() else ""
            outcomes.append(json.loads(text) if text else {"died": True})
    return outcomes


def _child(rank: int, world_size: int, folder: Path, fn: Callable[[int], Any], group: bool) -> None:
    try:
        output = os.open(folder / f"output{rank}.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.environ.update(WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size))
        if group:
            store = dist.FileStore(str(folder / "store"), world_size)
            wait = timedelta(seconds=LIMIT / 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)
            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        try:
            said: dict[str, Any] = {"result": fn(rank)}
        except BaseException as error:
            traceback.print_exc()
            said = {"error": type(error).__name__, "message": str(error)}
        (folder / f"outcome{rank}.json").write_text(json.dumps(said))
        if group and "error" not in said:
            dist.barrier()
    finally:
        sys.stdout.flush()
        os._exit(0)


def prepare_process() -> None:
    """Import what the children need, without starting a thread."""
    torch.set_num_threads(1)
    # A rank that died here has closed its connections: nobody else can still be on the way.
    ranks._GRACE = 0.2
    # It leaves 66 MB a rank in /dev/shm for ever.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    with contextlib.suppress(ImportError):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    load_ops()


# ------------------------------------------------------------------------------------------------------------ the saves


def trained(rank: int, world_size: int, steps: int, *, seed: int = 0, on_save: bool = False) -> Any:
    params = {"consolidate_on_save": True} if on_save else None
    return trained_for(rank, world_size, 2, steps, seed=seed, params=params)


def make_sets(work: Path) -> None:
    """Write the sets of both steps, for every way to save, and DeepSpeed's files for the command line."""

    def save(rank: int, world_size: int) -> None:
        engine = trained(rank, world_size, 1)
        consolidate(engine, work / f"old{world_size}", shard_bytes=SHARD_BYTES)
        train_step(engine, 1, rank, world_size)
        consolidate(engine, work / f"new{world_size}", shard_bytes=SHARD_BYTES)
        if world_size == 1:
            engine.save_checkpoint(str(work / "saved"))

    for world_size in (1, 2):
        outcomes = fork_ranks(
            world_size, work / f"made{world_size}", lambda rank, size=world_size: save(rank, size)
        )
        assert all("result" in outcome for outcome in outcomes), outcomes
    for saver, tag in TAGS.items():

        def save_before(
            rank: int, target: str = str(work / saver), *, another_run: bool = tag == "t"
        ) -> None:
            engine = trained(rank, 2, 2 if another_run else 1, seed=5 if another_run else 0, on_save=True)
            engine.save_checkpoint(target, tag="t")

        outcomes = fork_ranks(2, work / f"made {saver}", save_before)
        assert all("result" in outcome for outcome in outcomes), outcomes


def run_case(work: Path, case: Case) -> list[dict[str, Any]]:
    """Carry out one save; return what its processes said."""
    world_size, fault = RANKS[case.saver], case.fault
    case.folder.mkdir(parents=True)
    if case.saver in TAGS:
        shutil.copytree(work / case.saver, case.target)
    elif case.phase != "first save":
        shutil.copytree(work / f"old{world_size}", case.target)

    def save(rank: int) -> Any:
        on_save = case.saver in TAGS
        engine = None if case.saver == "command line" else trained(rank, world_size, 2, on_save=on_save)
        target = case.target
        if fault is not None and (fault.action, fault.rank) == ("not shared", rank):
            target = case.folder / "own"
        Injector(case.folder, rank, case.folder / "log.jsonl", fault).install()
        if on_save:
            start = time.monotonic()
            engine.save_checkpoint(str(target), tag=TAGS[case.saver])
            (case.folder / f"seconds{rank}").write_text(str(time.monotonic() - start))
            return 0
        if engine is None:
            arguments = ["checkpoint", "consolidate", str(work / "saved"), str(target)]
            return cli.main([*arguments, "--shard-bytes", str(SHARD_BYTES)])
        consolidate(engine, target, shard_bytes=SHARD_BYTES)
        return 0

    said = fork_ranks(world_size, case.folder / "ranks", save, group=case.saver != "command line")
    if fault is not None and fault.action == "folder gone":
        Path(f"{case.target}-gone").rename(case.target)
    return said


def read_log(case: Case) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (case.folder / "log.jsonl").read_text().splitlines()]


def actions(kind: str, collective: bool, phase: str) -> list[str]:
    """Return how a call may fail."""
    if collective:
        return ["lost", "done, lost", "kill"]
    if phase == "index" and kind != "rename":
        return [*actions(kind, collective, ""), "shard gone", *(["folder gone"] if kind == "open" else [])]
    more = {"open": ["ENOSPC"], "write": ["ENOSPC"], "rename": ["done, EIO"], "fsync": ["done, EIO"]}
    return ["EIO", *more.get(kind, more.get(kind.removesuffix(" folder"), [])), "kill"]


def phases(log: Sequence[dict[str, Any]]) -> list[str]:
    """Return how far a save is at each of its calls, in the order in which they returned."""
    reached, phase = [], "start"
    for entry in log:
        call = describe(entry)
        if phase == "start" and call == "open shard aside":
            phase = "shards"
        elif call == "open index aside":
            phase = "index"
        reached.append(phase)
        if call == "rename index aside":
            phase = "committed"
    return reached


def all_cases(work: Path) -> tuple[list[Case], list[Case]]:
    """Count the calls of saves without a fault; return those, and a case for each call and way to fail."""
    faultless, cases = [], []
    for saver in RANKS:
        for phase in ("first save", "none") if saver == "command line" else ("none",):
            case = Case(saver, None, "nothing", phase, work / "cases" / saver.replace(" ", "_") / phase)
            said = run_case(work, case)
            assert all(rank.get("result") == 0 for rank in said), said
            faultless.append(case)
            cases += cases_of(case)
            if saver == "API, 2 ranks":
                cases += [
                    Case(
                        saver, Fault(rank, -1, False, "not shared"), f"folder of rank {rank}", "start", folder
                    )
                    for rank, folder in enumerate((case.folder.parent / "own0", case.folder.parent / "own1"))
                ]
    return faultless, cases


def cases_of(faultless: Case) -> list[Case]:
    """Return a case for each call of a save and each way in which it may fail."""
    log = read_log(faultless)
    first = faultless.phase == "first save"
    cases = []
    for entry, phase in zip(log, phases(log), strict=True):
        collective = not entry["path"]
        given = actions(entry["kind"], collective, phase)
        for action in given if faultless.saver in SAVERS else ["kill"]:
            fault = Fault(entry["rank"], entry["number"], collective, action)
            name = (
                f"{'c' if collective else 'f'}{entry['number']}-{action.replace(', ', '-')}-{entry['rank']}"
            )
            folder = faultless.folder.parent / f"{'first-' if first else ''}{name}"
            reached = faultless.phase if first else phase
            cases.append(Case(faultless.saver, fault, describe(entry), reached, folder))
    return cases


AROUND_THE_COMMIT = {
    ("rename index aside", 0, "EIO"),
    ("rename index aside", 0, "kill"),
    ("fsync folder", 0, "EIO"),
    ("collective all_reduce", 0, "lost"),
    ("collective all_reduce", 1, "kill"),
    ("listdir", 0, "EIO"),
    ("unlink shard", 0, "kill"),
}
"""What always runs, on two ranks: the calls between the rename of the index and the end."""


def trimmed(cases: Sequence[Case]) -> list[Case]:
    """Choose few cases: around the commit, and one for each other kind of call."""
    chosen: list[Case] = []
    seen: set[Any] = set()
    # Those of the command line first, which train nothing; then a stride without a common factor with the number of
    # cases, so that neighbours differ in call, way and action.
    order = sorted(
        range(len(cases)),
        key=lambda number: (cases[number].saver != "command line", number * 37 % len(cases)),
    )
    for case in (cases[number] for number in order):
        assert case.fault is not None
        call = (case.call_name, case.fault.rank, case.fault.action)
        around = case.saver == "API, 2 ranks" and case.phase in ("index", "committed")
        wanted = around and call in AROUND_THE_COMMIT
        wanted |= case.call_name.endswith("latest") and "new tag" in case.saver
        wanted |= "gone" in case.fault.action or case.fault.action == "not shared"
        word = case.call_name.replace(" folder", "-folder").removeprefix("collective ").split()[0]
        kind = call if wanted else word
        if (wanted or case.phase != "committed") and kind not in seen:
            seen.add(kind)
            chosen.append(case)
    return chosen


# ----------------------------------------------------------------------------------------- what is left


def state_of(engine: Any) -> dict[str, Any]:
    """Masters and state by name."""
    masters = {f"fp32/{name}": tensor for name, tensor in training.full_masters(engine).items()}
    for key in STATES:
        masters |= {f"{key}/{name}": tensor for name, tensor in training.full_states(engine, key).items()}
    return {name: tensor.clone() for name, tensor in masters.items()}


class Judge:
    """Says whether a folder holds the old set or the new one, by verifying it and restoring it into an engine."""

    def __init__(self, work: Path) -> None:
        self._engine = engine_for(2, seed=7)
        train_step(self._engine, 0, 0, 1)
        self._work = work
        self._states: dict[str, dict[str, Any]] = {}
        for name in ("old1", "new1", "old2", "new2", ANOTHER_RUN):
            restore(self._engine, work / name)
            self._states[name] = state_of(self._engine)

    def _age(self, folder: Path, old: str, new: str) -> str:
        """Restore a folder; return which of two states it holds to the last bit, or what is wrong."""
        try:
            restore(self._engine, folder)
        except CheckpointError as error:
            return f"NEITHER: {error}"
        state = state_of(self._engine)
        for age, name in (("old", old), ("new", new)):
            expected = self._states[name]
            if state.keys() == expected.keys() and all(torch.equal(state[n], expected[n]) for n in expected):
                return age
        return MIXTURE

    def left(self, folder: Path, world_size: int) -> str:
        """Return ``old``, ``new``, or what is wrong."""
        try:
            steps = verify_folder(folder).progress.global_steps
        except CheckpointError as error:
            return f"NEITHER: {error}"
        age = self._age(folder, f"old{world_size}", f"new{world_size}")
        is_consistent = steps == self._engine.global_steps == {"old": 1, "new": 2}.get(age)
        return age if is_consistent or age.startswith("NEITHER") else MIXTURE

    def left_of_run(self, case: Case) -> tuple[str, list[str]]:
        """Return what ``restore`` takes from the folder of ``save_checkpoint``, and what each tag's files become."""
        states = (ANOTHER_RUN if TAGS[case.saver] == "t" else "old2", "new2")
        left, converted = self._age(case.target, *states), []
        for tag in sorted(path for path in case.target.iterdir() if path.is_dir()):
            out = case.folder / f"converted-{tag.name}"
            # Files of two saves must be refused.
            with contextlib.suppress(CheckpointError):
                consolidate_files(tag, out)
                converted.append(self._age(out, *states))
        return left, converted

    def after(self, case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """Judge a case: what is left, what power cuts would have left, and whether the next save clears up."""
        assert case.fault is not None
        wrong = [f"rank {rank} hangs" for rank, said in enumerate(ranks) if "hangs" in said]
        if case.saver in TAGS:
            left, converted = self.left_of_run(case)
            wrong += {left, *converted} - {"old", "new"}
        else:
            world_size, is_first = RANKS[case.saver], case.phase == "first save"
            is_empty = is_first and not (case.target / INDEX).exists()
            left = "nothing" if is_empty else self.left(case.target, world_size)
            before = "nothing" if is_first else "old"
            wrong += {left, *self.power_cuts(case, world_size)[0]} - {before, "new"}
            wrong += self._untrue(case.fault, ranks, left, before)
            consolidate_files(self._work / "saved", case.target, shard_bytes=SHARD_BYTES)
            if leftovers(case.target) or self.left(case.target, 1) != "new":
                wrong.append("the next save does not clear up")
        call = {"saver": case.saver, **asdict(case.fault), "call": case.call_name, "phase": case.phase}
        return {**call, "ranks": ranks, "left": left, "wrong": wrong}

    def power_cuts(self, case: Case, world_size: int) -> tuple[set[str], list[str]]:
        """Verify the worst folders of every moment; return all that was left, and what is left at the end."""
        left, last = set(), []
        entries = [entry for entry in read_log(case) if entry["path"]]
        is_first = case.phase == "first save"
        disk = Disk(None if is_first else self._work / f"old{world_size}", case.target, case.folder)
        for done, content in worst_folders(entries, disk, INDEX):
            text = "nothing" if is_first and content is None else verified(case.folder / "cut", content)
            left.add(f"{text} (after {done} calls)" if text.startswith("NEITHER") else text)
            if done == len(entries):
                last.append(text)
        return left, last

    @staticmethod
    def _untrue(fault: Fault, ranks: list[dict[str, Any]], left: str, before: str) -> list[str]:
        """Say which rank died, raised another error, or said what is not so."""
        wrong = []
        for rank, said in enumerate(ranks):
            message = said.get("message", "")
            if "died" in said and (fault.action, fault.rank) != ("kill", rank):
                wrong.append(f"rank {rank} died")
            if said.get("error", "CheckpointError") != "CheckpointError":
                wrong.append(f"rank {rank} raised {said['error']}: {message}")
            if "untouched" in message and left != before:
                wrong.append(f"rank {rank} says that the old set is there")
            if ("is in place" in message or said.get("result") == 0) and left != "new":
                wrong.append(f"rank {rank} says that the new set is there")
        return wrong


def verified(folder: Path, content: dict[str, bytes] | None) -> str:
    """Lay out a folder and say which set it holds."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, data in (content or {}).items():
        (folder / name).write_bytes(data)
    try:
        return {1: "old", 2: "new"}[verify_folder(folder).progress.global_steps]
    except CheckpointError as error:
        return f"NEITHER: {error}"


def kill_in_time(work: Path, faultless: Case, kills: int) -> tuple[list[Case], list[Any]]:
    """Kill saves at moments spread over their duration, until so many were killed inside of the save."""
    seconds = max(float((faultless.folder / f"seconds{rank}").read_text()) for rank in (0, 1))
    cases, said = [], []
    for number in range(4 * kills):
        if len(cases) == kills:
            break
        # A stride that shares no factor with the number of kills: any few of them are spread over the save.
        after = seconds * (number * 37 % kills + 0.5) / kills
        folder = faultless.folder.parent / f"time{number}"
        fault = Fault(number % 2, -1, False, "kill", after=after)
        case = Case(faultless.saver, fault, "any moment", "none", folder)
        outcome = run_case(work, case)
        if "died" in outcome[fault.rank]:
            cases.append(case)
            said.append(outcome)
    return cases, said


def killed_loads(work: Path, stages: Sequence[int], stride: int) -> list[dict[str, Any]]:
    """Kill rank 0, rank 1 or both in collectives of a restore, of which ``stride`` skips some; judge each case."""
    results = []
    for stage in stages:
        folder = work / "loads" / str(stage)
        log = folder / "log.jsonl"

        def load(rank: int, faults: Sequence[Fault] = (), *, stage: int = stage, log: Path = log) -> None:
            engine = trained_for(rank, 2, stage, 1)
            for fault in faults or [None]:
                if fault is None or fault.rank == rank:
                    Injector(log.parent, rank, log, fault).install()
            restore(engine, work / "new2")

        folder.mkdir(parents=True)
        said = fork_ranks(2, folder / "without a fault", load)
        assert all("result" in outcome for outcome in said), said
        entries = [json.loads(line) for line in log.read_text().splitlines()]
        collectives = [entry["number"] for entry in entries if entry["rank"] == 0 and not entry["path"]]
        for number in collectives[::stride]:
            dying = ((0,), (1,), (0, 1))[number % 3]
            faults = [Fault(rank, number, True, "kill") for rank in dying]
            said = fork_ranks(2, folder / str(number), functools.partial(load, faults=faults))
            wrong = [f"rank {rank} hangs" for rank, outcome in enumerate(said) if "hangs" in outcome]
            if tuple(rank for rank, outcome in enumerate(said) if "died" in outcome) != dying:
                wrong.append(f"not only {dying} died")
            # A survivor is told, or had finished before.
            errors = {outcome.get("error", "RankMissingError") for outcome in said}
            wrong += sorted(errors - {"RankMissingError", "CheckpointError"})
            if verify_folder(work / "new2").progress.global_steps != 2:
                wrong.append("the set has changed")
            results.append({"stage": stage, "number": number, "ranks": said, "wrong": wrong})
    return results


def leftovers(folder: Path) -> set[str]:
    """Return the files that the index does not name."""
    return {path.name for path in folder.iterdir()} - {INDEX, *load_index(folder).files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, help="an empty folder")
    parser.add_argument("--full", action="store_true", help="every call and action, not a choice of them")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    prepare_process()
    make_sets(work)
    faultless, cases = all_cases(work)
    chosen = cases if arguments.full else trimmed(cases)
    said = [run_case(work, case) for case in chosen]
    for case in faultless:
        if case.saver in TAGS:
            killed, outcome = kill_in_time(work, case, KILLS if arguments.full else 2)
            chosen, said = [*chosen, *killed], [*said, *outcome]
    loads = killed_loads(work, range(4), 1) if arguments.full else killed_loads(work, [3], 4)
    start_alone(work)
    judge = Judge(work)
    without = {}
    for case in faultless:
        if case.saver in TAGS:
            assert judge.left_of_run(case)[0] == "new"
            continue
        cuts, last = judge.power_cuts(case, RANKS[case.saver])
        left = judge.left(case.target, RANKS[case.saver])
        without[f"{case.saver}, {case.phase}"] = {
            "left": left,
            "power cuts": sorted(cuts),
            "at the end": last,
        }
    outcomes = [judge.after(case, ranks) for case, ranks in zip(chosen, said, strict=True)]
    (work / "results.json").write_text(
        json.dumps({"without a fault": without, "cases": outcomes, "loads": loads})
    )


def start_alone(work: Path) -> None:
    """Make this process the only rank of a group; nothing can be forked any more."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1")
    dist.init_process_group("gloo", store=dist.FileStore(str(work / "store"), 1), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


if __name__ == "__main__":
    main()
