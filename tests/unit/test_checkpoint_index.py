"""The index is untrusted: whatever is not plainly a checkpoint of this format is refused before a file is opened."""

from __future__ import annotations

import copy
import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from deepspeed_muon.checkpoint.consolidate import ShardFile, pack, remove_stale, shard_name
from deepspeed_muon.checkpoint.files import file_digest, lock, unlock
from deepspeed_muon.checkpoint.index import ParameterRecord, load_index, sealed_json
from deepspeed_muon.checkpoint.sources import ConsolidatedSource
from deepspeed_muon.errors import CheckpointError
from deepspeed_muon.tools import convert

FILE = "muon-0123456789ab-00000.safetensors"

INDEX: dict[str, Any] = {
    "format": "deepspeed_muon.consolidated",
    "version": 1,
    "versions": {},
    "groups": [{"lr": 0.1}],
    "files": {FILE: {"bytes": 4096, "sha256": "0" * 64}},
    "parameters": {
        "w": {
            "shape": [4, 3],
            "algorithm": "muon",
            "step": 3,
            "group": 0,
            "tensors": {"fp32": FILE, "momentum_buffer": FILE},
        }
    },
}


def seal(folder: Path, content: Any) -> None:
    """Write an index with the checksum of its content."""
    text = sealed_json(content)
    if isinstance(content, dict) and "version" in content:
        text = json.dumps({**json.loads(text), "version": content["version"]}).encode()
    (folder / "muon_index.json").write_bytes(text)


def refused(folder: Path, content: Any) -> str:
    """Return why an index with this content, or this text, is refused."""
    if isinstance(content, str):
        (folder / "muon_index.json").write_text(content)
    else:
        seal(folder, content)
    with pytest.raises(CheckpointError, match=r"muon_index\.json") as caught:
        load_index(folder)
    return str(caught.value)


def changed(path: list[Any], value: Any) -> dict[str, Any]:
    content = copy.deepcopy(INDEX)
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return content


def test_the_example_is_accepted(tmp_path: Path) -> None:
    seal(tmp_path, INDEX)
    assert load_index(tmp_path).parameters["w"].numel == 12


@pytest.mark.parametrize(
    "name",
    ["../muon-0123456789ab-00000.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", FILE + "\n"],
)
def test_file_names_stay_inside(tmp_path: Path, name: str) -> None:
    content = changed(["files"], {name: INDEX["files"][FILE]})
    content["parameters"]["w"]["tensors"] = {"fp32": name, "momentum_buffer": name}
    assert "not the name of a shard" in refused(tmp_path, content)


@pytest.mark.parametrize(
    "shape",
    [[1 << 40, 1 << 40], [-4, -3], [0, 3], [4.5, 3], ["4", 3], [1] * 65, [True, 12], [1000, 1000], None],
)
def test_absurd_shapes(tmp_path: Path, shape: Any) -> None:
    message = refused(tmp_path, changed(["parameters", "w", "shape"], shape))
    assert "w" in message or FILE in message


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["version"], 2),
        (["format"], "pytorch"),
        (["extra"], 1),
        (["parameters", "w", "algorithm"], "sgd"),
        (["parameters", "w", "step"], -1),
        (["parameters", "w", "step"], 10**30),
        (["parameters", "w", "group"], 1),
        (["parameters", "w", "tensors"], {"fp32": FILE}),
        (["parameters", "w", "tensors"], {"fp32": FILE, "momentum_buffer": FILE.replace("00000", "00001")}),
        (["parameters", "w", "tensors"], {"fp32": FILE, "momentum_buffer": FILE, "exp_avg": FILE}),
        (["files", FILE, "sha256"], "abc"),
        (["files", FILE, "bytes"], -1),
        (["files", FILE, "bytes"], 95),
    ],
)
def test_inconsistencies(tmp_path: Path, path: list[str], value: Any) -> None:
    refused(tmp_path, changed(path, value))


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"format": 1}', "\x00"])
def test_not_an_index(tmp_path: Path, text: str) -> None:
    refused(tmp_path, text)


def test_what_no_reader_takes_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of more parameters than an index may have ended well, and its set could not be restored."""
    monkeypatch.setattr("deepspeed_muon.checkpoint.index.MAX_BYTES", 1000)
    with pytest.raises(CheckpointError, match="bytes, more than the 1000 that are read"):
        sealed_json({"parameters": {str(number): {} for number in range(100)}})


def test_files_are_packed_in_order() -> None:
    tensors = {f"fp32/p{i}": (size,) for i, size in enumerate((10, 10, 100, 1, 1))}
    assert [list(shard.values()) for shard in pack(tensors, 80)] == [[(10,), (10,)], [(100,)], [(1,), (1,)]]
    assert pack({}, 80) == []


def test_a_streamed_file_is_a_safetensors_file(tmp_path: Path) -> None:
    tensors: dict[str, tuple[int, ...]] = {"fp32/a": (3, 5), "exp_avg/ü.b": (), "fp32/c": (4,)}
    content = torch.randn(20)
    path = tmp_path / FILE
    shard = ShardFile(path, tensors)
    for piece in content.split(7):
        assert not path.exists()
        shard.write(piece)
    record = shard.finish()
    assert record.bytes == path.stat().st_size and record.sha256 == file_digest(path)
    loaded = load_file(path)
    assert torch.equal(loaded["fp32/a"], content[:15].view(3, 5))
    assert torch.equal(loaded["exp_avg/ü.b"], content[15])
    assert torch.equal(loaded["fp32/c"], content[16:])


def test_only_files_of_ours_are_removed(tmp_path: Path) -> None:
    stay = {FILE, "model.safetensors", "muon-notes.safetensors"}
    for name in (*stay, f".{FILE}.0123456789ab.tmp", shard_name("a" * 12, 7)):
        (tmp_path / name).write_text("")
    remove_stale(tmp_path, lambda name: name != FILE)
    assert {path.name for path in tmp_path.iterdir()} == stay


def test_damage_to_the_header_is_found_even_if_the_checksum_fits(tmp_path: Path) -> None:
    """An attacker can write a matching checksum; the header is parsed by safetensors, which bounds it."""
    (tmp_path / FILE).write_bytes((1 << 60).to_bytes(8, "little") + b"x" * 4088)
    content = changed(["files", FILE, "sha256"], file_digest(tmp_path / FILE))
    seal(tmp_path, content)
    with pytest.raises(CheckpointError, match=FILE):
        ConsolidatedSource(tmp_path).verify(0, 1)


def test_row_moments_must_fit(tmp_path: Path) -> None:
    """NorMuon's rows: as many as the record says, there if and only if it says so, and never more than elements."""
    tensors = {"fp32": FILE, "momentum_buffer": FILE, "row_second_moment": FILE}

    def with_rows(rows: int | None, *keys: str, tensors: dict[str, str] = tensors) -> dict[str, Any]:
        content = changed(["parameters", "w", "tensors"], tensors)
        content["parameters"]["w"] |= {"row_keys": list(keys)} | ({} if rows is None else {"rows": rows})
        return content

    fitting = with_rows(4, "row_second_moment")
    seal(tmp_path, fitting)
    record = load_index(tmp_path).parameters["w"]
    assert record.shape_of("row_second_moment") == (4,) and record.shape_of("fp32") == (4, 3)
    assert "holds" in refused(tmp_path, with_rows(None)) and "holds" in refused(tmp_path, with_rows(4))
    assert "holds" in refused(tmp_path, changed(["parameters", "w", "rows"], 4))
    assert "13 rows of moments do not fit" in refused(tmp_path, with_rows(13, "row_second_moment"))
    for keys in (["other"], ["row_second_moment"] * 2):
        assert "row_keys" in refused(tmp_path, with_rows(4, *keys))
    fitting["files"][FILE]["bytes"] = 4 * (12 + 12 + 3)
    assert "its tensors need 112" in refused(tmp_path, fitting)


def test_the_grid_of_blocks_is_written_only_where_heads_do_not_say_it() -> None:
    """Releases that do not know the keys refuse an index that has them."""
    plain = {"shape": (4, 3), "algorithm": "muon", "step": 0, "group": 0, "tensors": {"fp32": FILE}}
    written = ParameterRecord(heads=2, **plain).model_dump(exclude_defaults=True)
    assert not {"grid", "transposed"} & written.keys()
    divided = ParameterRecord(heads=3, grid=((), (1, 1, 1)), transposed=True, **plain)
    again = ParameterRecord.model_validate_json(divided.model_dump_json())
    assert again == divided and again.grid == ((), (1, 1, 1)) and again.transposed


# Two conversions into one folder wrote into the same temporary folder, and each removed the other's files.


def saved_by_adamw(folder: Path) -> None:
    """Write what DeepSpeed saves of a model at stage 0 after one step of AdamW."""
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    folder.mkdir()
    content = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "global_steps": 1}
    torch.save(content, folder / "mp_rank_00_model_states.pt")


def test_the_second_to_finish_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_by_adamw(tmp_path / "step1")
    out = tmp_path / "out" / "universal"
    write = convert.consolidate_files

    def write_with_another_conversion_meanwhile(*args: Any, **reading: Any) -> Any:
        index = write(*args, **reading)
        monkeypatch.setattr(convert, "consolidate_files", write)
        convert.convert_to_universal(tmp_path / "step1", out)
        return index

    monkeypatch.setattr(convert, "consolidate_files", write_with_another_conversion_meanwhile)
    with pytest.raises(CheckpointError, match="not empty"):
        convert.convert_to_universal(tmp_path / "step1", out)
    source = ConsolidatedSource(out / "zero")
    assert source.verify(0, 1) == [] and set(source.parameters) == {"weight", "bias"}
    assert sorted(path.name for path in out.parent.iterdir()) == ["latest_universal", "universal"]


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    """Only folders of conversions to the same place, and only those whose lock no living process holds."""
    saved_by_adamw(tmp_path / "step1")
    out = tmp_path / "out" / "universal"
    names = (".universal.0123456789ab.tmp", ".universal.aaaaaaaaaaaa.tmp", ".universal2.0123456789ab.tmp")
    killed, running, of_another = folders = [out.parent / name for name in names]
    for folder in folders:
        (folder / "zero").mkdir(parents=True)
    locked = lock(running)
    assert locked is not None
    convert.convert_to_universal(tmp_path / "step1", out)
    unlock(locked)
    assert not killed.exists() and running.exists() and of_another.exists() and (out / "zero").is_dir()


def test_a_set_of_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """Each file is read again after all of them were opened."""
    content = copy.deepcopy(INDEX)
    content["files"], content["parameters"] = {}, {}
    names = [f"p{number:02d}" for number in range(80)]
    for number, name in enumerate(names):
        file = shard_name("0123456789ab", number)
        shard = ShardFile(tmp_path / file, {f"fp32/{name}": (4, 3)})
        shard.write(torch.full((12,), float(number)))
        content["files"][file] = shard.finish().model_dump()
        content["parameters"][name] = {**INDEX["parameters"]["w"], "step": 0, "tensors": {"fp32": file}}
    seal(tmp_path, content)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Descriptors are given out from the lowest free one on: as many as these are free below the limit.
    free = sorted(set(range(4096)) - {int(name) for name in os.listdir("/proc/self/fd")})[:32]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1] + 1, limits[1]))
    try:
        source = ConsolidatedSource(tmp_path)
        assert source.verify(0, 1) == []
        values = [source.read(name, "fp32", 5, 1).item() for name in names]
        source.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert values == list(range(80))
