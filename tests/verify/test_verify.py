"""verify: good on every family as it is stored, and failing where a byte, a reader or a backend is wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polymoe.errors import ArgumentError, CheckpointNotFound, FormatError
from polymoe.formats import QuantTensor
from polymoe.verify import verify
from support.configs import CONFIGS
from support.written import LAYER, Library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return Library(tmp_path_factory.mktemp("library"))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_as_it_is_stored(library: Library, name: str) -> None:
    report = verify(library(name), tokens=(1, 5), device="cpu")
    assert report.ok, json.dumps(report.to_dict(), indent=1)
    assert [row.layer for row in report.layers] == [LAYER]
    assert [(row.backend, row.tokens) for row in report.backends if not row.rejected] == [
        ("reference", 1),
        ("reference", 5),
    ]
    assert all(0 < row.error < 6e-3 for row in report.backends if not row.rejected)


@pytest.mark.parametrize("tokens", [(), (0,), (1, 10**9)])
def test_token_counts(library: Library, tokens: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="tokens: expected counts from 1 to 65536"):
        verify(library("gpt-oss-mxfp4"), tokens=tokens, device="cpu")


def test_a_config_alone_holds_no_experts(library: Library) -> None:
    with pytest.raises(CheckpointNotFound, match="name a directory that contains them"):
        verify(library("gpt-oss-mxfp4") / "config.json", device="cpu")


def test_a_wrong_decoder_is_noticed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nibbles exchanged: packing and repacking agree with each other, the second reading does not."""
    from polymoe.formats import tensor

    right = tensor.decode
    monkeypatch.setattr(
        tensor, "decode", lambda codes, element, dtype: right((codes << 4) | (codes >> 4), element, dtype)
    )
    report = verify(library("gpt-oss-mxfp4"), tokens=(1,), device="cpu")
    (row,) = report.layers
    assert not report.ok
    assert (row.repacked, row.second_reading) == (8, 0)
    assert row.oracle_error > 0.1


def test_a_lossy_reader_is_noticed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    from polymoe.checkpoint.dialects import DIALECTS

    dialect = type(DIALECTS["gpt_oss"])
    right = dialect.read

    def lossy(self, tensors, shape, hint=None):  # type: ignore[no-untyped-def]
        q = right(self, tensors, shape, hint)
        return QuantTensor(q.codes & 0x77, q.encoding, q.scales)

    monkeypatch.setattr(dialect, "read", lossy)
    (row,) = verify(library("gpt-oss-mxfp4"), tokens=(1,), device="cpu").layers
    assert (row.repacked, row.second_reading) == (0, 0)


def test_a_wrong_activation_is_noticed(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    from polymoe.activations import SwiGLU

    monkeypatch.setattr(SwiGLU, "__call__", lambda self, gate, up: torch.nn.functional.silu(gate) * up)
    report = verify(library("gpt-oss-mxfp4"), tokens=(1,), device="cpu")
    assert not report.ok
    assert report.layers[0].second_reading == 8
    assert report.layers[0].oracle_error > 1e-3


def test_a_damaged_scale_is_refused(library: Library, tmp_path: Path) -> None:
    source = library("gpt-oss-mxfp4")
    tensors = load_file(source / "model.safetensors")
    name = f"model.layers.{LAYER}.mlp.experts.down_proj_scales"
    tensors[name][3, 0, 0] = 0xFF
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"down_proj.*NaN"):
        verify(tmp_path, device="cpu")


def test_a_wrong_shape_is_named(library: Library, tmp_path: Path) -> None:
    source = library("glm-4.5-air-nvfp4-ct")
    tensors = load_file(source / "model.safetensors")
    name = next(n for n in sorted(tensors) if n.endswith("experts.3.down_proj.weight_global_scale"))
    tensors[name] = tensors[name].reshape(1, 1)
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=re.escape(f"{name}: expected shape [] or [1], got [1, 1]")):
        verify(tmp_path, device="cpu")


def test_a_config_alone_has_nothing_to_verify(library: Library, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((library("gpt-oss-mxfp4") / "config.json").read_text())
    with pytest.raises(CheckpointNotFound, match="at least one layer"):
        verify(tmp_path)
