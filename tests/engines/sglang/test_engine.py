"""Whole SGLang engines on the CPU answer sums with polymoe's experts; ``scripts/test --engines`` installs SGLang."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.common import changed
from safetensors.torch import load_file, save_file

from polymoe.checkpoint.quantize import quantize_checkpoint
from support import requantized
from support.sglang_engine import PROMPTS, environment
from support.stacked import MODELS

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="scripts/test --engines has it"),
    pytest.mark.timeout(2700),  # a start takes 20 s, and minutes on a busy machine
]

ENGINE = Path(__file__).parents[2] / "support" / "sglang_engine.py"
GPT_OSS = MODELS / "sums-gpt-oss-mxfp4"
SUMS = ["579", "15", "377", "1000", "25"]
# The backend by whose name tests/support/sglang_cpu has attention with sinks.
SINKS = {"attention_backend": "triton", "disable_hybrid_swa_memory": True}
FORMATS = ["BF16", "FP8 in blocks", "FP8, one scale", "FP8 by channel", "FP8 of ModelOpt", "INT4 in groups of 32"]


def ask(
    model: Path,
    *,
    polymoe: str = "require",
    variables: dict[str, str] | None = None,
    updates: tuple[tuple[str, Path], ...] = (),
    **options: Any,
) -> dict[str, Any]:
    """Run one engine; by default polymoe must take all of its experts."""
    job = {"model": str(model), "options": options, "updates": [(source, str(path)) for source, path in updates]}
    done = subprocess.run(
        [sys.executable, str(ENGINE), json.dumps(job)],
        env=environment(options.get("tp_size", 1), {"POLYMOE": polymoe, **(variables or {})}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=900,
        start_new_session=True,  # SGLang ends all processes of its session when one fails
    )
    last = [line for line in done.stdout.splitlines() if line.startswith('{"answers"')]
    found = json.loads(last[-1]) if last else {"answers": []}
    return {**found, "log": done.stdout}


def answers(found: dict[str, Any]) -> list[str]:
    assert found["answers"], found["log"][-4000:]
    return found["answers"]


def lines(found: dict[str, Any]) -> list[str]:
    """What polymoe says."""
    return [line.partition("polymoe 0")[2] for line in found["log"].splitlines() if "polymoe 0" in line]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the checkpoint of a format, once."""
    directory = tmp_path_factory.mktemp("formats")

    def write(format: str) -> Path:
        path = directory / format.replace(" ", "-")
        return path if path.exists() else requantized.write(format, path)

    return write


def lacking(source: Path, target: Path) -> Path:
    """The same checkpoint without one tensor of one expert."""
    path = shutil.copytree(source, target)
    name = "model.layers.3.mlp.experts.2.up_proj.weight_scale"
    for file in path.glob("*.safetensors"):
        save_file({n: t for n, t in load_file(file).items() if n != name}, file, metadata={"format": "pt"})
    index = path / "model.safetensors.index.json"
    if index.exists():
        index.write_text(index.read_text().replace(f'"{name}"', '"none"'))
    return path


def test_gpt_oss_answers() -> None:
    found = ask(GPT_OSS, **SINKS)
    assert answers(found) == SUMS
    (line,) = lines(found)
    assert "and all layers like it: mxfp4, " in line
    assert "reference" in line
    assert "MiB packed for each layer on this rank; SGLang's own choice: Mxfp4MoEMethod on auto" in line


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_answers(written: Callable[[str], Path], format: str) -> None:
    assert answers(ask(written(format))) == SUMS


@pytest.mark.parametrize("format", ["int4_g32", "int4_g128", "fp8_block128"])
def test_files_of_quantize_are_loaded_by_sglang(written: Callable[[str], Path], tmp_path: Path, format: str) -> None:
    """SGLang's own parameters and loaders take every name and shape; polymoe computes."""
    quantize_checkpoint(written("BF16"), format, tmp_path / "out")
    assert answers(ask(tmp_path / "out")) == SUMS


def test_two_ranks_of_tensor_parallelism_answer(written: Callable[[str], Path]) -> None:
    found = ask(written("INT4 in groups of 32"), tp_size=2)
    assert answers(found) == SUMS
    (line,) = lines(found)  # of the first rank only
    assert "tp=2" in line


def test_two_ranks_that_attend_to_their_own_requests_answer(written: Callable[[str], Path]) -> None:
    """Their experts get the tokens of both, and padding; a rank without requests runs too."""
    found = ask(written("BF16"), tp_size=2, dp_size=2, enable_dp_attention=True)
    assert answers(found) == SUMS
    (line,) = lines(found)
    assert "tp=2" in line


def test_two_ranks_of_expert_parallelism_answer() -> None:
    found = ask(GPT_OSS, tp_size=2, ep_size=2, **SINKS)
    assert answers(found) == SUMS
    (line,) = lines(found)
    assert "E=4 " in line
    assert "ep=2" in line


@pytest.mark.parametrize("model", ["gpt-oss", "FP8 by channel"])
def test_weights_updated_from_disk_answer_as_a_fresh_start(
    written: Callable[[str], Path], tmp_path: Path, model: str
) -> None:
    path, options = (GPT_OSS, SINKS) if model == "gpt-oss" else (written(model), {})
    other = changed(path, tmp_path / "other")
    fresh = answers(ask(other, **options))
    assert fresh != SUMS
    found = ask(path, updates=(("disk", other), ("disk", path), ("disk", other)), **options)
    assert answers(found) == SUMS
    assert [succeeded for succeeded, _ in found["updated"]] == [True] * 3, found["updated"]
    assert found["after"] == [fresh, SUMS, fresh]


def test_weights_updated_from_tensors_answer_on_two_ranks(written: Callable[[str], Path], tmp_path: Path) -> None:
    """An engine that started with dummy weights, as one that is trained with."""
    path = written("BF16")
    other = changed(path, tmp_path / "other")
    found = ask(path, updates=(("tensors", other), ("tensors", path)), tp_size=2, load_format="dummy")
    assert answers(found) != SUMS
    assert [succeeded for succeeded, _ in found["updated"]] == [True] * 2, found["updated"]
    assert found["after"] == [answers(ask(other)), SUMS]


def test_sglang_does_not_run_on_half_updated_experts(written: Callable[[str], Path]) -> None:
    path = written("BF16")
    found = ask(path, updates=(("lacking", path),))
    said = "model.layers.1.mlp.experts: expected an update of all tensors of a layer's experts before the next request"
    assert f"UnsupportedProblem: {said}, got none, or not all parts, of w13_weight" in found["log"]
    assert not found["answers"]


def test_an_update_from_a_checkpoint_without_one_tensor_fails(written: Callable[[str], Path], tmp_path: Path) -> None:
    """SGLang 0.5.17 wants to load the weights before again, but reads the same checkpoint once more, and ends."""
    path = written("FP8 by channel")
    found = ask(path, updates=(("disk", lacking(path, tmp_path / "lacking")),))
    assert "CheckpointError: model.layers.3.mlp.experts: w13_weight_scale: expected all experts" in found["log"]
    assert not found["answers"]


def test_dummy_weights_run() -> None:
    assert len(answers(ask(GPT_OSS, load_format="dummy", **SINKS))) == len(PROMPTS)


def test_layers_that_the_user_leaves_to_sglang(written: Callable[[str], Path]) -> None:
    found = ask(written("BF16"), polymoe="1", variables={"POLYMOE_LAYERS": "!1-2"})
    assert answers(found) == SUMS
    said = lines(found)
    assert len(said) == 3  # one for the layers that run, one for each name of the others
    assert sum("leaves model.layers." in line and "POLYMOE_LAYERS: expects !1-2" in line for line in said) == 2


def test_sglang_runs_what_polymoe_does_not(written: Callable[[str], Path]) -> None:
    """With the reason in one line: no backend of this name runs on a CPU."""
    found = ask(written("BF16"), polymoe="1", variables={"POLYMOE_BACKEND": "triton"})
    assert answers(found) == SUMS
    (line,) = lines(found)
    assert "leaves model.layers.0.mlp.experts, and all layers like it, to SGLang: " in line
    assert "triton: " in line


def test_a_backend_that_the_user_names_is_sglangs(written: Callable[[str], Path]) -> None:
    found = ask(written("BF16"), polymoe="1", moe_runner_backend="triton")
    assert answers(found) == SUMS
    (line,) = lines(found)
    assert line.endswith("to SGLang: --moe-runner-backend: expects auto, got triton")


def test_off_is_off(written: Callable[[str], Path]) -> None:
    found = ask(written("BF16"), polymoe="0")
    assert answers(found) == SUMS
    assert not lines(found)


def test_require_makes_standing_aside_an_error(written: Callable[[str], Path]) -> None:
    found = ask(written("BF16"), variables={"POLYMOE_LAYERS": "0"})
    assert not found["answers"]
    assert "UnsupportedProblem: model.layers.1.mlp.experts: expected experts that polymoe runs" in found["log"]


def test_what_fails_when_the_plug_in_is_loaded_fails_at_the_first_layer(written: Callable[[str], Path]) -> None:
    """SGLang only logs it."""
    found = ask(written("BF16"), polymoe="perhaps")
    assert not found["answers"]
    assert "Failed to execute general plugin: polymoe" in found["log"]
    failed = found["log"].partition("Scheduler hit an exception")[2]
    assert "polymoe.errors.ArgumentError: POLYMOE" in failed


def test_a_checkpoint_without_one_tensor_of_one_expert_is_refused(
    written: Callable[[str], Path], tmp_path: Path
) -> None:
    path = lacking(written("FP8 by channel"), tmp_path / "lacking")
    found = ask(path)
    assert "CheckpointError: model.layers.3.mlp.experts: w13_weight_scale: expected all experts" in found["log"]
    assert "got 9 of 10 parts" in found["log"]


def test_experts_whose_names_sglang_does_not_know_are_refused(written: Callable[[str], Path]) -> None:
    """SGLang 0.5.17 loads nothing, and says nothing: its Qwen3-MoE knows no names of compressed-tensors' MXFP4."""
    found = ask(written("MXFP4"))
    assert "CheckpointError: model.layers.0.mlp.experts: w13_weight, w2_weight: expected all experts" in found["log"]
