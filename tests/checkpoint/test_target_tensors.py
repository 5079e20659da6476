"""Weight containers: values equal to what transformers saved, and an error for every kind of damage."""

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from speccompile.checkpoint.tensors import open_tensors
from speccompile.errors import CheckpointError
from tests.checkpoint.builders import edit_json, write_llama


def assert_same(source, state):
    assert sorted(source.names()) == sorted(state)
    for name, value in state.items():
        assert source.shape(name) == tuple(value.shape)
        assert source.dtype(name) == value.dtype
        assert torch.equal(source.get(name), value)


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_equal_the_saved_model(tmp_path, shard, dtype):
    model = write_llama(tmp_path, shard=shard, dtype=dtype)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    source = open_tensors(tmp_path)
    assert_same(source, model.state_dict())
    assert all(f.is_file() for f in source.files())
    name = "model.layers.1.mlp.up_proj.weight"
    assert (tmp_path / source.where(name)).is_file()


def write_bin_shards(folder, state):
    names = list(state)
    shards = {"pytorch_model-00001.bin": names[::2], "pytorch_model-00002.bin": names[1::2]}
    for file, held in shards.items():
        torch.save({n: state[n] for n in held}, folder / file)
    weight_map = {n: f for f, held in shards.items() for n in held}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("sharded", [False, True])
def test_bin_equals_the_saved_state(tmp_path, sharded):
    state = {"a": torch.randn(3, 4), "b": torch.randn(5).half(), "c": torch.arange(4)}
    if sharded:
        write_bin_shards(tmp_path, state)
    else:
        torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(open_tensors(tmp_path), state)


def test_safetensors_are_preferred_to_bin(tmp_path):
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert open_tensors(tmp_path).get("a").tolist() == [1.0, 1.0]


class Unsafe:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.mark.parametrize("legacy", [False, True])
def test_bin_that_holds_code_or_is_legacy_is_refused(tmp_path, capsys, legacy):
    content = {"a": torch.zeros(2)} if legacy else {"a": Unsafe()}
    torch.save(content, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*safetensors"):
        open_tensors(tmp_path)
    assert "code ran" not in capsys.readouterr().out


def test_truncated_bin_and_non_tensor_entries_are_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(2), "step": 3}, path)
    with pytest.raises(CheckpointError, match="'step'"):
        open_tensors(tmp_path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_tensors(tmp_path)


def test_truncated_safetensors_names_the_tensor(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated.*'b'"):
        open_tensors(tmp_path)


def raw_safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated or not"),
        (b"\xff" * 8, "truncated or not"),
        (raw_safetensors(b"{not json"), "bad safetensors header"),
        (raw_safetensors(b'{"a": 3}'), "bad safetensors header"),
        (raw_safetensors(b'{"a": {"dtype": "F32", "shape": [2]}}'), "bad safetensors header"),
        (
            raw_safetensors(b'{"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}', b"0" * 8),
            "'a'.*F99",
        ),
        (
            raw_safetensors(b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', b"0" * 8),
            "'a'.*shape",
        ),
        (
            raw_safetensors(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', b"0" * 9),
            "1 bytes after",
        ),
        (
            raw_safetensors(
                b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},'
                b'"b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
                b"0" * 8,
            ),
            "cannot be read",
        ),
    ],
)
def test_bad_safetensors_header(tmp_path, content, message):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
        open_tensors(tmp_path)


def test_missing_shard_names_file_and_tensor(tmp_path):
    write_llama(tmp_path, shard="20KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"{lost.name}.*missing shard.*weight"):
        open_tensors(tmp_path)


def index_of(tmp_path):
    write_llama(tmp_path, shard="20KB")
    path = tmp_path / "model.safetensors.index.json"
    return path, json.loads(path.read_text())["weight_map"]


def test_tensor_missing_from_its_shard(tmp_path):
    path, weight_map = index_of(tmp_path)
    edit_json(path, weight_map={**weight_map, "model.extra": weight_map["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"model-.*'model\.extra' is missing"):
        open_tensors(tmp_path)


def test_tensor_that_the_index_does_not_know(tmp_path):
    path, weight_map = index_of(tmp_path)
    del weight_map["model.norm.weight"]
    edit_json(path, weight_map=weight_map)
    with pytest.raises(CheckpointError, match=r"model-.*'model\.norm\.weight' is not placed"):
        open_tensors(tmp_path)


@pytest.mark.parametrize("weight_map", [{}, {"a": "../other.safetensors"}, {"a": 3}])
def test_bad_index(tmp_path, weight_map):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"index\.json.*weight_map"):
        open_tensors(tmp_path)


def test_nothing_and_ambiguous_folders(tmp_path):
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        open_tensors(tmp_path)
    with pytest.raises(CheckpointError, match="no such"):
        open_tensors(tmp_path / "none")
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(CheckpointError, match="2 files"):
        open_tensors(tmp_path)
    assert open_tensors(tmp_path / "x.safetensors").names() == ["a"]
    with pytest.raises(CheckpointError, match="'zzz' is missing"):
        open_tensors(tmp_path / "x.safetensors").get("zzz")
