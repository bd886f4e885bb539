"""quantize_checkpoint: its files load as load(experts=) would have it, all else is copied, and nothing is half done."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from polymoe.checkpoint import Checkpoint, write_checkpoint
from polymoe.checkpoint import quantize as module
from polymoe.checkpoint.quantize import DIALECTS_OF, quantize_checkpoint
from polymoe.errors import ArgumentError, CheckpointError, FormatError
from polymoe.formats import FORMATS
from polymoe.problem.tensors import Expert
from support.configs import config
from support.requantized import SOURCE
from support.written import damaged, patch_config, random_layer, without

WAYS = [(format, dialect) for format, dialects in DIALECTS_OF.items() for dialect in dialects if dialect != "gpt-oss"]
SMALL = {"hidden": 256, "intermediate": 128, "experts": 4, "top_k": 2, "layers": 2}
BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stacked, transposed, with gate and up interleaved, and biases."""
    path = tmp_path_factory.mktemp("gpt-oss") / "bf16"
    described = config("gpt-oss-bf16", **SMALL)
    file = path.with_name("config.json")
    file.write_text(json.dumps(described))
    opened = Checkpoint.open(file)
    # An odd number of bytes comes before wider elements; the order of names would leave those unaligned.
    others = {
        BIAS: torch.randn(6).bfloat16(),
        "a": torch.arange(3, dtype=torch.uint8),
        "model.norm.weight": torch.ones(4),
    }
    return write_checkpoint(path, described, {n: random_layer(opened, n) for n in opened.layers}, other_tensors=others)  # type: ignore[arg-type]


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def require_equal(got: Expert, wanted: Expert, ulps: float) -> None:
    for name in ("gate_bias", "up_bias", "down_bias"):
        theirs = getattr(wanted, name)
        assert (theirs is None) == (getattr(got, name) is None)
        assert theirs is None or torch.equal(getattr(got, name), theirs)
    assert got.projections.keys() == wanted.projections.keys()
    for name, matrix in wanted.projections.items():
        parts = got.projections[name].parts()
        assert matrix.encoding == got.projections[name].encoding
        assert parts.keys() == matrix.parts().keys()
        for part, tensor in matrix.parts().items():
            if part == "global_scale" and ulps:
                torch.testing.assert_close(parts[part], tensor, rtol=ulps * 2.0**-23, atol=0)
            else:
                assert parts[part].dtype == tensor.dtype
                assert raw(parts[part]) == raw(tensor), (name, part)


def require_quantized(source: Path, out: Path, format: str, *, ulps: float = 0) -> None:
    wanted, got = Checkpoint.open(source, experts=format), Checkpoint.open(out)
    assert got.layers_here == wanted.layers
    for layer in wanted.layers:
        assert got.weights(layer).spec.format == format
        for e in range(wanted.moe.experts):
            require_equal(got.weights(layer).expert(e), wanted.weights(layer).expert(e), ulps)
    others = wanted.dense_tensors(as_stored=True)
    assert set(got.dense_tensors(as_stored=True)) == set(others)
    for name in others:
        assert got.files.header(name) == wanted.files.header(name)
        assert raw(got.files.get(name)) == raw(wanted.files.get(name))
    for file in source.iterdir():
        if file.name != "config.json" and ".safetensors" not in file.name:
            assert (out / file.name).read_bytes() == file.read_bytes()
    changed = json.loads((out / "config.json").read_text())
    changed.pop("quantization_config")
    assert changed == json.loads((source / "config.json").read_text())
    assert not list(out.glob(".*"))
    assert not list(out.parent.glob(f".{out.name}*"))


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize(("format", "dialect"), WAYS)
def test_experts_are_those_of_quantizing_while_loading(bf16: Path, tmp_path: Path, format: str, dialect: str) -> None:
    report = quantize_checkpoint(bf16, format, tmp_path / "out", dialect=dialect)
    # compressed-tensors stores the reciprocal of NVFP4's global scale, which rounds.
    require_quantized(bf16, tmp_path / "out", format, ulps=1 if (format, dialect) == WAYS[1] else 0)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["format"], report["dialect"], len(report["layers"])) == (format, dialect, 4)


def test_ways_are_known() -> None:
    assert WAYS[1] == ("nvfp4", "compressed-tensors")
    assert len(WAYS) == 8


def test_gpt_oss_in_its_own_dialect(gpt_oss: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    report = quantize_checkpoint(gpt_oss, "mxfp4", out)
    assert report["dialect"] == "gpt-oss"
    require_quantized(gpt_oss, out, "mxfp4")
    with safe_open(out / "model-00002-of-00003.safetensors", "pt") as file:
        blocks = file.get_slice("model.layers.0.mlp.experts.gate_up_proj_blocks")
        assert (blocks.get_dtype(), blocks.get_shape()) == ("U8", [4, 256, 8, 16])
        assert file.metadata() == {"format": "pt"}


def test_wide_elements_come_first(gpt_oss: Path, tmp_path: Path) -> None:
    quantize_checkpoint(gpt_oss, "mxfp4", tmp_path / "out")
    data = (tmp_path / "out" / "model-00001-of-00003.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, size in (("model.norm.weight", 4), (BIAS, 2)):
        assert header[name]["data_offsets"][0] % size == 0


def test_the_report_has_the_error_of_each_projection_and_its_worst_expert(bf16: Path, tmp_path: Path) -> None:
    report = quantize_checkpoint(bf16, "int4_g128", tmp_path / "out")
    before, after = Checkpoint.open(bf16), Checkpoint.open(tmp_path / "out")
    each = []
    for e in range(before.moe.experts):
        wanted, got = (c.weights(2).expert(e).down.dequantize().double() for c in (before, after))
        each.append(float((got - wanted).norm() / wanted.norm()))
    found = report["layers"][2]["down"]
    assert found["error"] == pytest.approx((sum(x * x for x in each) / len(each)) ** 0.5, abs=1e-5)
    assert found["worst_expert"] == max(range(len(each)), key=each.__getitem__)
    assert found["worst_error"] == pytest.approx(max(each), abs=1e-5)


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_files(bf16: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    quantize_checkpoint(bf16, "int4_g32", whole)
    code = (
        "import sys; from polymoe.checkpoint.quantize import quantize_checkpoint\n"
        "print(1, flush=True); quantize_checkpoint(*sys.argv[1:])"
    )
    generator = random.Random(5)
    for killed in range(5):
        run = subprocess.Popen([sys.executable, "-c", code, bf16, "int4_g32", out], stdout=subprocess.PIPE)
        assert run.stdout is not None
        run.stdout.readline()  # imported
        if killed < 4:
            time.sleep(generator.uniform(0.02, 0.3))
            run.send_signal(signal.SIGKILL)
        run.wait()
        run.stdout.close()
        if out.exists():
            break
    assert contents(out) == contents(whole)
    assert not list(tmp_path.glob(".*"))


class Stop(Exception):
    """As a kill: nothing is tidied afterwards."""


@pytest.mark.parametrize("calls", range(1, 12, 2))
def test_a_run_that_stops_anywhere_continues(
    bf16: Path, tmp_path: Path, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before the n-th file is renamed to its name; shards that are whole are not made again."""
    out, left, done = tmp_path / "out", [calls], list[str]()
    replace_ = os.replace

    def replace(source: Any, target: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Stop
        replace_(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(Stop):
            quantize_checkpoint(bf16, "mxfp4", out, progress=done.append)
    assert not out.exists()
    again: list[str] = []
    quantize_checkpoint(bf16, "mxfp4", out, progress=again.append)
    assert len(done) + len(again) <= 5 + 1  # one shard at most is made twice
    require_quantized(bf16, out, "mxfp4")


def test_another_job_does_not_continue(bf16: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module._Job, "_finish", lambda *_: (_ for _ in ()).throw(Stop()))
        with pytest.raises(Stop):
            quantize_checkpoint(bf16, "mxfp4", tmp_path / "out")
    with pytest.raises(CheckpointError, match="unfinished run from the same files to the same format, got another"):
        quantize_checkpoint(bf16, "int4_g32", tmp_path / "out")
    quantize_checkpoint(bf16, "mxfp4", tmp_path / "out")


def test_two_runs_into_one_directory(bf16: Path, tmp_path: Path) -> None:
    out, met = tmp_path / "out", list[str]()

    def second(_: str) -> None:
        with pytest.raises(CheckpointError, match=r"(?s)one run at a time, got another that is writing it.*wait for"):
            quantize_checkpoint(bf16, "mxfp4", out)
        met.append("refused")

    quantize_checkpoint(bf16, "mxfp4", out, progress=second)
    assert len(met) == 5
    require_quantized(bf16, out, "mxfp4")


def test_a_directory_that_exists_is_left_alone(bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(ArgumentError, match=r"(?s)^out: expected a new directory, got .*, which exists.*give another"):
        quantize_checkpoint(bf16, "mxfp4", tmp_path)
    assert contents(tmp_path) == {"mine": b"kept"}


@pytest.mark.parametrize("where", ["reserved", "written"])
def test_a_full_disk(bf16: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, made = tmp_path / "out", list[str]()

    def full(*_: Any) -> None:
        if len(made) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if where == "reserved":
            patch.setattr(module.os, "posix_fallocate", full, raising=False)
        else:
            write_ = module._ShardFile.write
            patch.setattr(module._ShardFile, "write", lambda *args: (full(), write_(*args))[1])
        full_ = r"No space left on device: [\d.]+ [KM]iB are needed for this file: '.*\.out\.quantizing/model-00003-of"
        with pytest.raises(OSError, match=full_):
            quantize_checkpoint(bf16, "mxfp4", out, progress=made.append)
    assert not out.exists()
    assert len(list((tmp_path / ".out.quantizing").glob("*.safetensors"))) == 2
    assert not list((tmp_path / ".out.quantizing").glob(".*.new"))
    made.clear()
    quantize_checkpoint(bf16, "mxfp4", out, progress=made.append)
    assert len(made) == 3
    require_quantized(bf16, out, "mxfp4")


def test_nan_is_named_and_what_is_complete_goes(bf16: Path, tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    source = damaged(bf16, tmp_path / "nan", lambda tensors: tensors[name][5].fill_(float("nan")))
    with pytest.raises(FormatError, match=r"(?s)layers\.2\.mlp\.experts\.3\.up_proj.*finite.*NaN.*fetch or convert"):
        quantize_checkpoint(source, "mxfp4", tmp_path / "out")
    # Another source is another job.
    assert {p.name for p in tmp_path.iterdir()} - {".out.lock"} == {"nan"}


def test_sizes_that_the_format_does_not_allow(tmp_path: Path) -> None:
    described = config("gpt-oss-bf16", **{**SMALL, "intermediate": 96})
    (tmp_path / "config.json").write_text(json.dumps(described))
    opened = Checkpoint.open(tmp_path / "config.json")
    source = write_checkpoint(tmp_path / "in", described, {n: random_layer(opened) for n in opened.layers})  # type: ignore[misc]
    with pytest.raises(
        CheckpointError, match=r"(?s)multiples of int4_g128's groups of 128.*F=96.*these sizes allow mxfp4"
    ):
        quantize_checkpoint(source, "int4_g128", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "in"]


@pytest.mark.parametrize(
    ("format", "dialect", "message"),
    [
        ("mxfp6", None, "format: expected mxfp4 or nvfp4 or .*, got 'mxfp6'"),
        ("int4_g32", "modelopt", "dialect: expected compressed-tensors for int4_g32 of qwen3_moe, got 'modelopt'"),
        ("mxfp4", "gpt-oss", "dialect: expected compressed-tensors for mxfp4 of qwen3_moe, got 'gpt-oss'"),
    ],
)
def test_formats_and_dialects(bf16: Path, tmp_path: Path, format: str, dialect: str | None, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        quantize_checkpoint(bf16, format, tmp_path / "out", dialect=dialect)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["nvfp4", "int4_g32", "fp8_block128", "mxfp8"])
def test_gpt_oss_in_other_formats(gpt_oss: Path, tmp_path: Path, format: str) -> None:
    """A module for each projection of each expert, with its bias."""
    quantize_checkpoint(gpt_oss, format, tmp_path / "out")
    require_quantized(gpt_oss, tmp_path / "out", format, ulps=format == "nvfp4")


def test_experts_that_are_quantized_already(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)experts in 16 bits, got fp8_block128.*load as they are"):
        quantize_checkpoint(SOURCE, "mxfp4", tmp_path / "out")


def test_other_weights_that_are_quantized_already(bf16: Path, tmp_path: Path) -> None:
    source = shutil.copytree(bf16, tmp_path / "in")
    described = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers"]}
    patch_config(source, quantization_config=described)
    with pytest.raises(
        CheckpointError, match=r"(?s)got one whose config describes quantized weights.*release in 16 bits"
    ):
        quantize_checkpoint(source, "mxfp4", tmp_path / "out")


def test_a_dense_model(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match="llama"):
        quantize_checkpoint(tmp_path / "in", "mxfp4", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_shard_that_is_missing(bf16: Path, tmp_path: Path) -> None:
    source = damaged(bf16, tmp_path / "in", without("layers.3.mlp.experts.1.down_proj.weight"))
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.experts\.1\.down_proj"):
        quantize_checkpoint(source, "mxfp4", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("name", ["17.up_proj.weight", "1.up_proj.other"])
def test_a_tensor_among_the_experts_that_is_not_theirs(bf16: Path, tmp_path: Path, name: str) -> None:
    """It would be copied as it is, beside experts in another format."""
    name = f"model.layers.2.mlp.experts.{name}"
    source = damaged(bf16, tmp_path / "in", lambda tensors: tensors.update({name: torch.ones(4, 4)}))
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: expected tensors of the experts that .*\n  hint"):
        quantize_checkpoint(source, "mxfp4", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_a_link_is_copied_as_the_file_that_it_leads_to(bf16: Path, tmp_path: Path) -> None:
    source = shutil.copytree(bf16, tmp_path / "in")
    (tmp_path / "elsewhere").write_text("x")
    (source / "notes.txt").symlink_to(tmp_path / "elsewhere")
    quantize_checkpoint(source, "mxfp4", tmp_path / "out")
    copied = tmp_path / "out" / "notes.txt"
    assert (copied.read_text(), copied.is_symlink()) == ("x", False)


def test_a_directory_that_cannot_be_created(bf16: Path) -> None:
    with pytest.raises(ArgumentError, match="out: expected a directory that can be created, got /proc/nope/x: No such"):
        quantize_checkpoint(bf16, "mxfp4", "/proc/nope/x")


def test_a_path_below_a_file(bf16: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArgumentError, match=r"(?s)out: expected a new directory, got a path below .*which is a file"):
        quantize_checkpoint(bf16, "mxfp4", tmp_path / "file" / "out")


DOCUMENT = (Path(__file__).parents[2] / "docs" / "quantizing.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(\w+)` \| (.+?) \| ([\d.]+) \| ([\d.]+) \|", DOCUMENT, flags=re.M)


def test_the_document_has_each_format_and_its_dialects() -> None:
    assert {name: tuple(re.findall(r"`([\w-]+)`", text)) for name, text, *_ in ROWS} == DIALECTS_OF


@pytest.mark.parametrize(("format", "_", "bits", "error"), ROWS)
def test_bits_and_errors_of_the_document(format: str, _: str, bits: str, error: str) -> None:
    weights = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    matrix = FORMATS[format].quantize(weights)
    assert f"{8 * matrix.nbytes / weights.numel():.3f}" == bits
    assert f"{float((matrix.dequantize() - weights).norm() / weights.norm()):.3f}" == error
