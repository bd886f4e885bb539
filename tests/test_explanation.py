from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

import polymoe
from polymoe.errors import ArgumentError, CheckpointError, CheckpointNotFound, PolymoeError
from polymoe.explanation import layer_ranges
from polymoe.machine import DEVICES

SUMS = Path(__file__).parent.parent / "models" / "sums-gpt-oss-mxfp4"


def write(path: Path, config: dict[str, object]) -> Path:
    path.write_text(json.dumps(config))
    return path


def test_a_directory() -> None:
    found = polymoe.explain(SUMS, device="cpu")
    (row,) = found.rows
    assert row.layers == (0, 1, 2, 3)
    assert row.selection.require().steps[0].backend == "reference"
    experts = polymoe.load_experts(SUMS, layer=0, device="cpu")
    assert row.packed_bytes == 4 * experts.packed.nbytes
    assert row.dequantized_bytes == 4 * 8 * 3 * 192 * 192 * 2


@pytest.mark.parametrize("device", [*DEVICES, "sm_80", "sm_121"])
def test_every_named_device(device: str) -> None:
    found = polymoe.explain(SUMS, device=device)
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["candidates"][0]["backend"] == "reference"
    assert str(found.device) in str(found)


def test_a_config_alone_explains_the_same(tmp_path: Path) -> None:
    alone = write(tmp_path / "config.json", json.loads((SUMS / "config.json").read_text()))
    assert polymoe.explain(alone, device="h200").rows == polymoe.explain(SUMS, device="h200").rows


def test_whether_it_fits() -> None:
    """Memory, backends and time come first; sizes are those of the tensors."""
    found = polymoe.explain(SUMS, device="h200")
    tensors = [f for path in SUMS.glob("*.safetensors") for f in [safe_open(path, "pt")]]
    dense = sum(f.get_tensor(name).nbytes for f in tensors for name in f.keys() if ".experts." not in name)  # noqa: SIM118
    assert found.dense is not None
    assert found.dense.total_bytes == dense
    assert found.dense.embedding_bytes == 16 * 192 * 2
    memory, backends, time = found.conclusion()
    assert memory == "fits on h200: 2.6 MiB of weights leave 124.7 GiB for the KV cache"
    assert backends == "mxfp4 experts run on cuda (measured on h200)"
    assert time.startswith("one token alone: 40.1 us in the experts (10.0 us in each of 4 layers), at least ")
    assert list(found.conclusion()) == found.to_dict()["conclusion"] == str(found).splitlines()[1:4]
    assert polymoe.explain(SUMS, device="cpu").conclusion() == ("2.6 MiB of weights", "mxfp4 experts run on reference")
    assert len(polymoe.explain(SUMS, device="h200", role="prefill").conclusion()) == 2


@pytest.mark.parametrize(
    ("memory_bytes", "tp", "conclusion"),
    [
        (2_600_000, 1, "does not fit on small: weights take 2.6 MiB of 2.5 MiB; --tp 2 does"),
        (2_600_000, 2, "fits on 2 x small: 1.3 MiB of weights leave 1.0 MiB on each for the KV cache"),
        (1_000_000, 2, "does not fit on 2 x small: weights take 1.3 MiB of 976.6 KiB on each; --tp 3 does"),
        (1000, 1, "does not fit on small: weights take 2.6 MiB of 1000 B; no tensor parallel size up to 64 does"),
    ],
)
def test_a_small_device(memory_bytes: int, tp: int, conclusion: str) -> None:
    device = replace(DEVICES["h200"], name="small", memory_bytes=memory_bytes)
    assert polymoe.explain(SUMS, device=device, tp=tp).conclusion()[0] == conclusion


def test_what_a_config_alone_cannot_say(tmp_path: Path) -> None:
    alone = write(tmp_path / "config.json", json.loads((SUMS / "config.json").read_text()))
    memory, _, time = polymoe.explain(alone, device="h200").conclusion()
    assert memory.endswith("for everything else; the size of the other weights is not in a config")
    assert "other weights" not in time


def test_ranks(tmp_path: Path) -> None:
    whole, half = polymoe.explain(SUMS, device="h200"), polymoe.explain(SUMS, device="h200", tp=2, ep=(1, 2))
    assert half.rows[0].problem.spec.intermediate == 96
    assert (half.rows[0].problem.spec.first_expert, half.rows[0].problem.spec.local_experts) == (4, 4)
    assert (half.rows[0].problem.tp, half.rows[0].problem.ep) == (2, 2)
    assert half.rows[0].packed_bytes < whole.rows[0].packed_bytes / 3.9


def test_unequal_slices_are_said(tmp_path: Path) -> None:
    config = json.loads((SUMS / "config.json").read_text()) | {"hidden_size": 2880, "intermediate_size": 2880}
    found = polymoe.explain(write(tmp_path / "config.json", config), tp=4)
    assert found.rows[0].problem.spec.intermediate == 736
    assert any("736" in note and "672" in note for note in found.notes)
    assert found.notes[0] in str(found)


def test_results_that_do_not_depend_on_the_batch() -> None:
    (row,) = polymoe.explain(SUMS, device="h200", batch_invariant=True).rows
    assert "batch invariant" in str(row.problem)
    assert {step.backend for step in row.selection.require().steps} == {"cuda"}
    assert "triton: batch-invariant results: not supported" in str(row.selection)
    (row,) = polymoe.explain(SUMS, device="rtx4090", batch_invariant=True).rows
    assert row.selection.plan is None


def test_a_named_backend_must_run_it() -> None:
    assert polymoe.explain(SUMS, device="b200", backend="reference").rows[0].selection.plan is not None
    with pytest.raises(ArgumentError, match="known: auto, cuda, reference"):
        polymoe.explain(SUMS, backend="fastest")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("no/such/place", CheckpointNotFound, "no/such/place"),
        ("README.md", CheckpointError, "config.json"),
        ("docs", CheckpointNotFound, "config.json"),
    ],
)
def test_paths_without_a_checkpoint(path: str, error: type[PolymoeError], message: str) -> None:
    target = Path(__file__).parent.parent / path
    with pytest.raises(error, match=message):
        polymoe.explain(target if target.exists() else path)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((), ""),
        ((7,), "7"),
        ((3, 4, 5, 9), "3-5, 9"),
        ((1, 3, 5, 7), "1-7 by 2"),
        ((1, 3, 4, 5), "1, 3-5"),
        ((0, 2, 4, 5, 6), "0-4 by 2, 5-6"),
    ],
)
def test_layer_ranges(layers: tuple[int, ...], text: str) -> None:
    assert layer_ranges(layers) == text
