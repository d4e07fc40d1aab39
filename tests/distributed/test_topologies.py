"""One checkpoint for every layout: saved at one (stage, data, tensor, expert, pipeline), the same bits at another.

Each change goes two ways: by the API, ``consolidate`` and ``restore``; and by the command line, from DeepSpeed's own
files. Both sets must hold the same, and both must restore it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_muon import __main__ as cli
from deepspeed_muon.checkpoint import consolidate, load_index, restore
from deepspeed_muon.checkpoint.layout_record import RECORD_KEY
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools.convert import consolidate_files
from tests.support import pipelines, topologies, training
from tests.support.checkpoints import tensors_of
from tests.support.comparisons import relative, within
from tests.support.layout_records import inner_state
from tests.support.thinning import full, usual
from tests.support.topology_changes import BLOCKS_BY_ADAM, CHANGES, TOPOLOGIES, on
from tests.support.training import assert_same_bits

CORE: dict[str, Any] = {
    "tensor 2 to AutoTP 2": [pytest.mark.compat],
    "experts over 4 to 2": [pytest.mark.compat],
}
# The universal format, for which the loader must be one of ZeRO's.
UNIVERSAL = [
    "tensor 2 to data 3",
    "data 3 to tensor 2",
    "experts over 2 to 1",
    "experts over 1 to 4",
    "2 stages to 3",
]


# Ranks that share a matrix add in another order, and the iteration enlarges that in the directions of small singular
# values; AutoTP's layers multiply in fp32, the others in float64. See test_tensor_parallel.
NEXT_STEP = 1e-3


def replicas(ranks: int, topology: dict[str, Any]) -> int:
    """Return how many ranks see different data; all of them where the size is that of the experts."""
    return ranks if topology["kind"] in ("experts", "autoep") else ranks // topology["size"]


@pytest.mark.parametrize(
    "change",
    [pytest.param(name, marks=CORE.get(name, [pytest.mark.full])) for name in CHANGES],
)
def test_the_same_bits_on_another_topology(ranks: Any, tmp_path: Path, change: str) -> None:
    (size, topology), (to_size, to_topology) = CHANGES[change]
    saved = topologies.together(ranks(size).run(topologies.save, folder=str(tmp_path), topology=topology))
    sets = [tmp_path / "set", tmp_path / "by_command"]
    assert cli.main(["checkpoint", "consolidate", str(tmp_path / "saved"), str(sets[1])]) == 0
    by_api, by_command = map(tensors_of, sets)
    assert_same_bits({"set": by_api}, {"set": by_command})
    for name, tensor in saved["fp32"].items():
        assert torch.equal(by_api[f"fp32/{name}"].double(), tensor), name
    assert load_index(sets[0]).parameters.keys() == saved["fp32"].keys()
    results = ranks(to_size).run(topologies.load, folders=list(map(str, sets)), topology=to_topology)
    for loaded in map(topologies.together, zip(*results, strict=True)):
        topologies.assert_same_state(loaded, saved)
        if replicas(size, topology) == replicas(to_size, to_topology):
            for name, value in saved["next"].items():
                within(
                    relative(loaded["next"][name], value, saved["fp32"][name]), NEXT_STEP, f"path of {name}"
                )


@pytest.mark.full
@pytest.mark.time_limit(900)
@pytest.mark.parametrize("model", TOPOLOGIES)
def test_all_changes(ranks: Any, tmp_path: Path, model: str) -> None:
    """The set that any topology saves is at any other the set that this one saves, also after one more step."""
    (size, first), *_ = TOPOLOGIES[model]
    folders = [str(tmp_path / "set")]
    saved = topologies.together(ranks(size).run(topologies.save, folder=str(tmp_path), topology=first))
    for number, (size, topology) in enumerate(TOPOLOGIES[model][1:]):
        folders.append(str(tmp_path / str(number)))
        again = {"folders": folders[:1], "again": folders[-1], "topology": topology}
        ranks(size).run(topologies.load, **again)
        assert_same_bits({"set": tensors_of(Path(folders[-1]))}, {"set": tensors_of(Path(folders[0]))})
    for number, (size, topology) in enumerate(TOPOLOGIES[model]):
        by_rank = ranks(size).run(topologies.load, folders=folders, topology=topology)
        loaded = list(map(topologies.together, zip(*by_rank, strict=True)))
        for state in loaded:
            topologies.assert_same_state(state, saved)
            assert_same_bits(state, loaded[number], "next")


@pytest.mark.parametrize("change", usual(UNIVERSAL, {"experts over 1 to 4"}))
def test_universal_checkpoints(ranks: Any, tmp_path: Path, change: str) -> None:
    (size, topology), (to_size, to_topology) = CHANGES[change]
    saved = topologies.together(ranks(size).run(topologies.save, folder=str(tmp_path), topology=topology))
    words = ["--input_folder", str(tmp_path / "saved" / "t"), "--output_folder", str(tmp_path / "universal")]
    assert cli.main(["checkpoint", "universal", *words]) == 0
    arguments = {"folders": [str(tmp_path)], "topology": to_topology}
    loaded = ranks(to_size).run(topologies.load, universal=True, **arguments)
    topologies.assert_same_state(topologies.together([rank[0] for rank in loaded]), saved)


def save_tied_shards(rank: int, world_size: int, *, folder: str) -> None:
    """Save a tied embedding of which both stages have a shard on each tensor-parallel rank; restore and save again."""
    for seed, name in ((0, "set"), (1, "again")):
        pipeline, _ = pipelines.make_pipeline("tied", 2, 2)
        weight = pipeline.tied_modules["shared"].weight
        column = pipeline._grid.get_slice_parallel_rank()
        # All elements of the shard differ from those of the other one.
        values = torch.arange(weight.numel()).view(weight.shape).float() + 1000 * seed
        weight.data = values.chunk(2, dim=1)[column].contiguous()
        weight.tensor_model_parallel, weight.partition_dim = True, 1
        config = training.ds_config(1, accumulation=pipelines.MICRO_BATCHES)
        engine = training.initialize(pipeline, config)
        if seed:
            restore(engine, f"{folder}/set")
        consolidate(engine, f"{folder}/{name}")


def test_a_tied_embedding_in_shards(ranks: Any, tmp_path: Path) -> None:
    """Its shards on one stage were taken for replicas of those on the other, and no save was possible."""
    ranks(4).run(save_tied_shards, folder=str(tmp_path))
    saved = tensors_of(tmp_path / "set")
    full_weight = saved["fp32/tied_modules.shared.weight"]
    assert torch.equal(full_weight.flatten(), torch.arange(full_weight.numel()).float())
    assert_same_bits({"set": tensors_of(tmp_path / "again")}, {"set": saved})


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("none", "hold different values, and nothing says that they hold different slices of it"),
        full("no dimension", "marked as a shard without the dimension"),
    ],
)
def test_shards_without_marks_are_refused(ranks: Any, tmp_path: Path, mark: str, said: str) -> None:
    """Shards that AdamW trains need no mark to train."""
    size, topology = on(2, "megatron", 1, 2, mark=mark, params=BLOCKS_BY_ADAM)
    for text in ranks(size).run(topologies.failing, folder=str(tmp_path), topology=topology):
        assert text.startswith("CheckpointError: parameter blocks.") and said in text, text


@pytest.mark.full
def test_a_pipeline_without_zero(ranks: Any, tmp_path: Path, capsys: Any) -> None:
    """DeepSpeed keeps its fp32 weights by layers; the command line says so, and what to do."""
    size, topology = on(2, "pipeline", 0, 2)
    ranks(size).run(topologies.save, folder=str(tmp_path), topology=topology)
    assert cli.main(["checkpoint", "consolidate", str(tmp_path / "saved"), str(tmp_path / "out")]) == 2
    assert "keeps its weights by layers" in capsys.readouterr().err


def without_a_slice(record: dict[str, Any], cut: list[Any]) -> None:
    record["groups"][0]["parameters"].remove(cut[0])


def different_ranges(record: dict[str, Any], cut: list[Any]) -> None:
    for entry in cut:
        ranges = entry["tensor_slice"]["ranges"]
        entry["tensor_slice"]["ranges"] = [[0, stop - start] for start, stop in ranges]


def no_slice(record: dict[str, Any], cut: list[Any]) -> None:
    for entry in cut:
        entry["tensor_slice"]["shape"][entry["tensor_slice"]["dim"]] = 3


def is_cut(entry: dict[str, Any]) -> bool:
    tensor_slice = entry["tensor_slice"]
    return tensor_slice["ranges"] != [[0, tensor_slice["shape"][tensor_slice["dim"]]]]


@pytest.mark.full
def test_records_of_shards_are_not_trusted(ranks: Any, tmp_path: Path) -> None:
    size, topology = on(2, "megatron", 1, 2)
    ranks(size).run(topologies.save, folder=str(tmp_path), topology=topology)
    path = sorted((tmp_path / "saved" / "t").glob("*optim_states.pt"))[-1]
    original = path.read_bytes()
    for change, said in (
        (without_a_slice, "do not make up the full tensor"),
        (different_ranges, "do not make up the full tensor"),
        (lambda record, cut: record["groups"][0].update(rank=7), "there are files of ranks"),
        (no_slice, "not a slice"),
    ):
        content = torch.load(path, weights_only=False)
        record = inner_state(content)[RECORD_KEY]
        # The rank has slices of these parameters, and copies of the rest.
        change(record, list(filter(is_cut, record["groups"][0]["parameters"])))
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=said):
            consolidate_files(tmp_path / "saved", tmp_path / "out")
        path.write_bytes(original)
