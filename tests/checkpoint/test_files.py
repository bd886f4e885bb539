"""CheckpointFiles: names, headers and views of tensors; every way in which files can be wrong."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path, PureWindowsPath
from typing import Any

import pytest
import torch
from httpx import Request, Response
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from safetensors.torch import save_file

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.files import CheckpointFiles, Header
from polymoe.checkpoint.hub import locate
from polymoe.errors import CheckpointError, CheckpointNotFound

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
A = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)
B = torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16)
C = torch.tensor([0.5, 2.0]).to(torch.float8_e8m0fnu)


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_index(directory: Path, weight_map: object) -> None:
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {"model_type": "toy"})
    save_file({"a": A, "b": B, "c": C}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", {"model_type": "toy"})
    save_file({"a": A}, tmp_path / SHARDS[0])
    save_file({"b": B, "c": C}, tmp_path / SHARDS[1])
    write_index(tmp_path, {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]})
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_names_headers_and_tensors(layout: str, request: pytest.FixtureRequest) -> None:
    with CheckpointFiles.open(request.getfixturevalue(layout)) as files:
        assert files.config == {"model_type": "toy"}
        assert files.side is None
        assert files.has_tensors
        assert files.names == {"a", "b", "c"}
        assert "a" in files
        assert "d" not in files
        assert files.header("a") == Header("U8", (2, 3, 4))
        assert files.header("b") == Header("BF16", (1, 2))
        assert files.header("c") == Header("F8_E8M0", (2,))
        assert torch.equal(files.get("a"), A)
        assert torch.equal(files.get("a", 1), A[1])
        assert torch.equal(files.get("c").view(torch.uint8), C.view(torch.uint8))


def test_an_item_is_a_view_and_writing_to_it_leaves_the_file_alone(single: Path) -> None:
    with CheckpointFiles.open(single) as files:
        whole, item = files.get("a"), files.get("a", 1)
        assert item.untyped_storage().nbytes() == whole.untyped_storage().nbytes() == A.numel()
        assert item.data_ptr() == whole.data_ptr() + A[0].numel()
        whole.zero_()
    with CheckpointFiles.open(single) as files:
        assert torch.equal(files.get("a"), A)


def test_tensors_outlive_the_files(single: Path) -> None:
    with CheckpointFiles.open(single) as files:
        tensor = files.get("a")
    assert torch.equal(tensor, A)


def test_the_index_wins_over_what_else_lies_there(sharded: Path) -> None:
    save_file({"lora": B}, sharded / "adapter_model.safetensors")
    save_file({"a": A}, sharded / "consolidated-00001-of-00001.safetensors")
    save_file({"x": B}, sharded / "extra_embeddings.safetensors")
    (sharded / "original").mkdir()
    save_file({"a": A}, sharded / "original" / "model.safetensors")
    with CheckpointFiles.open(sharded) as files:
        assert files.names == {"a", "b", "c"}
        assert files.shard_of("b") == sharded / SHARDS[1]


def test_shards_without_an_index_are_read_by_their_headers(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with CheckpointFiles.open(sharded) as files:
        assert files.names == {"a", "b", "c"}


@pytest.mark.parametrize("alone", ["config.json", "saved.json"])
def test_a_config_alone(single: Path, alone: str) -> None:
    write_json(single / "hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}})
    (single / "config.json").rename(single / alone)
    files = CheckpointFiles.open(single / alone)
    assert files.config == {"model_type": "toy"}
    assert files.side == {"quantization": {"quant_algo": "NVFP4"}}
    assert not files.has_tensors
    with pytest.raises(CheckpointNotFound, match="tensor a"):
        files.get("a")


def test_config_only_reads_no_tensors(single: Path) -> None:
    (single / "model.safetensors").write_bytes(b"no safetensors at all")
    assert not CheckpointFiles.open(single, config_only=True).has_tensors


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="existing path, or a Hub id") as error:
        CheckpointFiles.open(tmp_path / "nothing")
    assert isinstance(error.value, FileNotFoundError)


def test_a_file_that_is_no_config(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: expected a directory, or a config\.json"):
        CheckpointFiles.open(single / "model.safetensors")


def test_a_directory_without_config(single: Path) -> None:
    (single / "config.json").unlink()
    with pytest.raises(CheckpointNotFound, match=r"expected a config\.json"):
        CheckpointFiles.open(single)


def test_a_path_that_cannot_be_looked_up() -> None:
    with pytest.raises(CheckpointError, match="got File name too long"):
        CheckpointFiles.open("x" * 5000)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused(single: Path, name: str) -> None:
    (single / "model.safetensors").rename(single / name)
    with pytest.raises(CheckpointError, match="convert the checkpoint to safetensors") as error:
        CheckpointFiles.open(single)
    assert name in str(error.value)


def test_pickles_beside_safetensors_and_of_trainers_do_not_matter(single: Path) -> None:
    (single / "pytorch_model.bin").write_bytes(b"pickle")
    assert CheckpointFiles.open(single).names == {"a", "b", "c"}
    (single / "pytorch_model.bin").unlink()
    (single / "model.safetensors").unlink()
    (single / "training_args.bin").write_bytes(b"pickle")
    assert not CheckpointFiles.open(single).has_tensors


@pytest.mark.parametrize(
    "outside",
    [
        "/etc/passwd.safetensors",
        "../model.safetensors",
        "sub/../../model.safetensors",
        "..\\model.safetensors",
        "C:\\model.safetensors",
        "",
        7,
    ],
)
def test_an_index_that_points_outside_is_refused(sharded: Path, outside: object) -> None:
    write_index(sharded, {"a": SHARDS[0], "b": outside, "c": SHARDS[1]})
    with pytest.raises(CheckpointError, match="inside the checkpoint's directory"):
        CheckpointFiles.open(sharded)


def test_shards_may_be_links_to_elsewhere(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blob = tmp_path_factory.mktemp("blobs") / "0123"
    (sharded / SHARDS[0]).rename(blob)
    os.symlink(blob, sharded / SHARDS[0])
    assert torch.equal(CheckpointFiles.open(sharded).get("a"), A)


@pytest.mark.parametrize("weight_map", [None, {}, ["a"]])
def test_an_index_without_a_weight_map(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        CheckpointFiles.open(sharded)


def test_an_index_of_pickles(sharded: Path) -> None:
    write_index(sharded, {"a": "pytorch_model.bin"})
    with pytest.raises(CheckpointError, match=r"a \.safetensors file"):
        CheckpointFiles.open(sharded)


def test_a_missing_shard_matters_to_those_who_need_it(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    files = CheckpointFiles.open(sharded)
    assert torch.equal(files.get("a"), A)
    assert not files.shard_of("b").exists()
    for read in (files.get, files.header):
        with pytest.raises(CheckpointNotFound, match=SHARDS[1]):
            read("b")


def test_a_missing_shard_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(CheckpointNotFound, match="expected 2 shards"):
        CheckpointFiles.open(sharded)


@pytest.mark.parametrize("extra", ["model-00003-of-00003.safetensors", "model.safetensors"])
def test_a_shard_that_the_index_does_not_mention(sharded: Path, extra: str) -> None:
    save_file({"d": B}, sharded / extra)
    with pytest.raises(CheckpointError, match="does not mention") as error:
        CheckpointFiles.open(sharded)
    assert extra in str(error.value)


def test_a_tensor_in_two_files(single: Path) -> None:
    save_file({"a": A}, single / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor a: expected in one file, got in model\.safetensors and more"):
        CheckpointFiles.open(single)


def test_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    write_index(sharded, {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1]})
    with pytest.raises(CheckpointError, match="as the index says") as error:
        CheckpointFiles.open(sharded).get("b")
    assert SHARDS[0] in str(error.value)


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_truncated_shard(sharded: Path, kept: int) -> None:
    shard = sharded / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[:kept])
    files = CheckpointFiles.open(sharded)
    with pytest.raises(CheckpointError, match="expected a complete safetensors file") as error:
        files.get("b")
    assert SHARDS[1] in str(error.value)
    assert torch.equal(files.get("a"), A)


def test_a_truncated_file_without_an_index(single: Path) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="expected a complete safetensors file"):
        CheckpointFiles.open(single)


def test_a_hub_id_fetches_config_files_only(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def snapshot_download(name: str, **options: object) -> str:
        calls.append((name, options))
        return str(single)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert CheckpointFiles.open("org/name", config_only=True, revision="main").config == {"model_type": "toy"}
    name, options = calls[0]
    assert name == "org/name"
    assert options["revision"] == "main"
    assert options["allow_patterns"] == ["config.json", "hf_quant_config.json"]
    assert CheckpointFiles.open("org/name").has_tensors
    assert "*.safetensors" in calls[1][1]["allow_patterns"]


def test_a_hub_repository_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **options: object) -> str:
        asked.append(name)
        raise LocalEntryNotFoundError("no network")

    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    for offline, says in ((False, "the Hub could not be reached: no network"), (True, "unset HF_HUB_OFFLINE")):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        for name in ("org/name", PureWindowsPath("org/name")):
            with pytest.raises(CheckpointNotFound, match=says):
                locate(name, ())
    assert set(asked) == {"org/name"}


def answer(status: int) -> Any:
    """A response of the Hub."""
    return Response(status, request=Request("GET", "http://hub"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectionError("Name or service not known"), "the Hub could not be reached: Name or service not known"),
        (RepositoryNotFoundError("404", response=answer(404)), "the Hub has no such repository, or not for you"),
        (GatedRepoError("403", response=answer(403)), "hint: accept its terms on its page and log in"),
        (HfHubHTTPError("502 Bad Gateway", response=answer(502)), "the Hub answered: 502 Bad Gateway"),
    ],
)
def test_what_the_hub_said(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **options: object) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with pytest.raises(CheckpointNotFound) as raised:
        locate("org/name", ())
    assert "not a local path, and " in str(raised.value)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("models/sums-gpt-os", "did you mean 'models/sums-gpt-oss'?"),
        ("modells/sums-gpt-oss", "did you mean 'models'?"),
        ("modles", "did you mean 'models'?"),
        ("models/sums-gpt-oss/x", None),
        ("", None),
    ],
)
def test_a_typo_in_a_path(name: str, hint: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "models" / "sums-gpt-oss").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polymoe.checkpoint.hub.HUB_ID", re.compile("never"))
    with pytest.raises(CheckpointNotFound, match="got neither") as error:
        CheckpointFiles.open(name)
    assert error.value.hint == hint


def test_a_broken_link_is_called_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointNotFound, match=r"got a broken link to .*/gone"):
        CheckpointFiles.open(link)


def test_models_of_other_kinds(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    for path in (tmp_path, tmp_path / "model-Q4_K_M.gguf"):
        with pytest.raises(CheckpointError, match="got a GGUF file"):
            CheckpointFiles.open(path)
    (tmp_path / "model-Q4_K_M.gguf").unlink()
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "openai/gpt-oss-20b"}'
    )
    with pytest.raises(CheckpointError, match="got a LoRA adapter of 'openai/gpt-oss-20b'"):
        CheckpointFiles.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}')
    with pytest.raises(CheckpointError, match="expected a mixture-of-experts model, got 'llama'"):
        Checkpoint.open(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["name", "a/b/c", "./a", "org/", "tests/nothing"])
def test_what_is_no_hub_id_is_not_asked_for(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the Hub"))
    with pytest.raises(CheckpointNotFound, match="neither"):
        CheckpointFiles.open(name)
