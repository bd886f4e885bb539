"""Whole vLLM engines on the CPU answer sums with polymoe's experts; ``scripts/test --engines`` installs vLLM."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.common import changed
from safetensors.torch import load_file, save_file

from polymoe.checkpoint import Checkpoint
from polymoe.checkpoint.quantize import DIALECTS_OF, quantize_checkpoint
from polymoe.checkpoint.shard import Shard
from polymoe.engines.serving.preview import ENGINES, preview
from polymoe.engines.serving.settings import EngineSettings
from polymoe.engines.serving.stand_aside import LayerPlan
from support import requantized
from support.stacked import CPU, MODELS
from support.vllm_engine import PROMPTS

pytest.importorskip("vllm", reason="scripts/test --engines has it")

ENGINE = Path(__file__).parents[2] / "support" / "vllm_engine.py"
SUMS = ["579", "15", "377", "1000", "25"]
ONE_PROCESS = {"distributed_executor_backend": "uni"}
QUANTIZED = [(f, dialect) for f, dialects in DIALECTS_OF.items() for dialect in dialects if dialect != "gpt-oss"]
NO_MLA = {"VLLM_MLA_DISABLE": "1"}  # on a CPU, vLLM's MLA takes the sizes of DeepSeek's own models only

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Run one engine; by default polymoe must take all of its experts."""
    with subprocess.Popen(
        [sys.executable, str(ENGINE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdin is not None
        assert run.stdout is not None

        def ask(
            model: Path,
            *,
            reload: tuple[Path, ...] = (),
            sent: tuple[tuple[Path, str], ...] = (),
            ranks: int = 1,
            again: int = 0,
            others: dict[str, str] | None = None,
            polymoe: str = "require",
            **changes: Any,
        ) -> dict[str, Any]:
            environment = {"POLYMOE": polymoe, **changes.pop("environment", {})}
            options = {**ONE_PROCESS, **changes} if "tensor_parallel_size" not in changes else changes
            job = {"model": str(model), "options": options, "environment": environment, "reload": [*map(str, reload)]}
            job |= {
                "ranks": ranks,
                "again": again,
                "others": others or {},
                "sent": [(str(path), without) for path, without in sent],
            }
            run.stdin.write(json.dumps(job) + "\n")  # type: ignore[union-attr]
            run.stdin.flush()  # type: ignore[union-attr]
            return json.loads(run.stdout.readline())  # type: ignore[union-attr]

        yield ask
        run.stdin.close()


def answers(found: dict[str, Any]) -> list[list[str]]:
    assert not found["error"], found["log"][-4000:]
    return found["answers"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write the checkpoint of a format, once."""
    directory = tmp_path_factory.mktemp("formats")

    def write(format: str) -> Path:
        path = directory / format
        return path if path.exists() else requantized.write(format, path)

    return write


@pytest.mark.parametrize(
    ("model", "environment"), [("sums-gpt-oss-mxfp4", {}), ("sums-mixtral-awq", {}), ("sums-kimi-k2-int4", NO_MLA)]
)
def test_bundled_checkpoints_answer(ask: Ask, model: str, environment: dict[str, str]) -> None:
    found = ask(MODELS / model, environment=environment)
    assert answers(found) == [SUMS]
    (line,) = [line for line in found["log"].splitlines() if "polymoe 0" in line]
    assert "and all layers like it: " in line
    assert "reference" in line
    assert "MiB packed for each layer on this rank; vLLM's own choice: none" in line


@pytest.mark.parametrize("format", [f for f in requantized.FORMATS if f != "MXFP4"])
def test_every_format_answers(ask: Ask, written: Callable[[str], Path], format: str) -> None:
    assert answers(ask(written(format))) == [SUMS]


@pytest.mark.parametrize(("format", "dialect"), [way for way in QUANTIZED if way[0] != "mxfp4"])
def test_files_of_quantize_are_loaded_by_vllm(
    ask: Ask, written: Callable[[str], Path], tmp_path: Path, format: str, dialect: str
) -> None:
    """vLLM's own parameters and loaders take every name and shape; polymoe computes, as vLLM has no kernels here."""
    quantize_checkpoint(written("BF16"), format, tmp_path / "out", dialect=dialect)
    assert answers(ask(tmp_path / "out")) == [SUMS]


@pytest.mark.parametrize("by", ["requantized", "quantize"])
def test_mxfp4_answers_as_vllm_does_with_the_dequantized_weights(
    ask: Ask, written: Callable[[str], Path], tmp_path: Path, by: str
) -> None:
    """The model was not trained for it, and a sum may be wrong."""
    path = tmp_path / "out" if by == "quantize" else written("MXFP4")
    if by == "quantize":
        quantize_checkpoint(written("BF16"), "mxfp4", path)
    dequantized = requantized.write("BF16", tmp_path / "dequantized", source=path)
    theirs = ask(dequantized, polymoe="0")
    assert "polymoe" not in theirs["log"]
    assert answers(ask(path)) == answers(theirs)


@pytest.mark.parametrize("split", [{}, {"enable_expert_parallel": True}], ids=["tp", "ep"])
@pytest.mark.parametrize("model", ["sums-gpt-oss-mxfp4", "sums-kimi-k2-int4", "FP8 in blocks"])
def test_two_ranks_answer(ask: Ask, written: Callable[[str], Path], model: str, split: dict[str, Any]) -> None:
    path = MODELS / model if model.startswith("sums") else written(model)
    found = ask(path, tensor_parallel_size=2, environment=NO_MLA, **split)
    assert answers(found) == [SUMS]
    (line,) = [line for line in found["log"].splitlines() if "polymoe 0" in line]  # of the first rank only
    assert ("ep=2" if split else "tp=2") in line
    shard = Shard.of(1, 2) if split else Shard.of(2)  # what `polymoe explain --engine` says without vLLM
    (row,) = preview(Checkpoint.open(path), ENGINES["vllm"], CPU, EngineSettings(), shard)
    assert isinstance(row.verdict, LayerPlan)
    assert row.verdict.selection.summary() in line


@pytest.mark.parametrize("split", [{}, {"enable_expert_parallel": True}], ids=["tp", "ep"])
def test_two_data_parallel_ranks_answer(ask: Ask, split: dict[str, Any]) -> None:
    """Each gets the other's tokens too, of which there are fewer. Without expert parallelism they split each expert."""
    found = ask(MODELS / "sums-gpt-oss-mxfp4", ranks=2, **split)
    assert answers(found) == [SUMS]
    assert found["others"] == [[SUMS[2:]]]
    (line,) = [line for line in found["log"].splitlines() if "polymoe 0" in line]  # of the first rank only
    assert ("ep=2" if split else "tp=2") in line


def test_a_rank_that_plans_otherwise_is_refused(ask: Ask) -> None:
    found = ask(MODELS / "sums-gpt-oss-mxfp4", ranks=2, others={"POLYMOE_ROLE": "decode"})
    assert "PlanError: model.layers.0.mlp.experts: expected the same plan on all ranks of the group" in found["error"]
    assert "role decode" in found["error"]


def test_awq_answers_on_two_expert_parallel_ranks(ask: Ask) -> None:
    model = MODELS / "sums-mixtral-awq"
    assert answers(ask(model, tensor_parallel_size=2, enable_expert_parallel=True)) == [SUMS]


@pytest.mark.parametrize("model", ["sums-gpt-oss-mxfp4", "FP8 by channel"])
def test_reloaded_weights_answer_as_a_fresh_start(
    ask: Ask, written: Callable[[str], Path], tmp_path: Path, model: str
) -> None:
    path = MODELS / model if model.startswith("sums") else written(model)
    other = changed(path, tmp_path / "other")
    (fresh,) = answers(ask(other))
    assert fresh != SUMS
    assert answers(ask(path, reload=(other, path, other))) == [SUMS, fresh, SUMS, fresh]


@pytest.mark.parametrize("format", ["INT4 in groups of 32", "FP8 by channel", "NVFP4"])
def test_weights_in_16_bits_are_quantized_as_they_arrive(
    ask: Ask, written: Callable[[str], Path], tmp_path: Path, format: str
) -> None:
    """By reload_weights, which reads files in 16 bits, and sent to load_weights in buckets."""
    good, other = written("BF16"), changed(written("BF16"), tmp_path / "other")
    (fresh,) = answers(ask(requantized.write(format, tmp_path / "fresh", source=other)))
    assert fresh != SUMS
    found = ask(written(format), reload=(other, good), sent=((other, ""), (good, "")))
    assert answers(found) == [SUMS, fresh, SUMS, fresh, SUMS]


def in_16_bits(path: Path, directory: Path) -> Path:
    """gpt-oss in BF16: the experts' tensors as Transformers stores them, all others as they are."""
    checkpoint, found = Checkpoint.open(path), {}
    for file in path.glob("*.safetensors"):
        found |= {name: t for name, t in load_file(file).items() if not name.endswith(("_blocks", "_scales"))}
    for layer in checkpoint.layers:
        gate_up, down = checkpoint.weights(layer).dequantize(torch.bfloat16)
        rows = torch.stack(gate_up.chunk(2, 1), 2).flatten(1, 2)  # gate and up alternate
        found[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = rows.mT.contiguous()
        found[f"model.layers.{layer}.mlp.experts.down_proj"] = down.mT.contiguous()
    directory.mkdir()
    save_file(found, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("split", [{}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}], ids=["", "ep"])
def test_experts_with_biases_get_new_weights_in_16_bits(ask: Ask, tmp_path: Path, split: dict[str, Any]) -> None:
    path = MODELS / "sums-gpt-oss-mxfp4"
    other = changed(path, tmp_path / "other")
    (fresh,) = answers(ask(other, **split))  # sums of ranks are rounded otherwise
    assert fresh != SUMS
    new, good = in_16_bits(other, tmp_path / "new"), in_16_bits(path, tmp_path / "good")
    found = ask(path, reload=(new, path, new), sent=((good, ""), (new, "")), **split)
    assert answers(found) == [SUMS, fresh, SUMS, fresh, SUMS, fresh]


def test_new_weights_of_a_model_with_a_layer_in_16_bits(
    ask: Ask, written: Callable[[str], Path], tmp_path: Path
) -> None:
    good, other = written("BF16"), changed(written("BF16"), tmp_path / "other")
    start = requantized.write("FP8 by channel", tmp_path / "start", plain=(1,))
    (fresh,) = answers(ask(requantized.write("FP8 by channel", tmp_path / "fresh", source=other, plain=(1,))))
    assert fresh != SUMS
    found = ask(start, reload=(other, good), sent=((other, ""), (good, "")))
    assert answers(found) == [SUMS, fresh, SUMS, fresh, SUMS]


@pytest.mark.parametrize("split", [{}, {"enable_expert_parallel": True}], ids=["tp", "ep"])
def test_two_ranks_quantize_their_part(
    ask: Ask, written: Callable[[str], Path], tmp_path: Path, split: dict[str, Any]
) -> None:
    format, other = "INT4 in groups of 32", changed(written("BF16"), tmp_path / "other")
    (fresh,) = answers(ask(requantized.write(format, tmp_path / "fresh", source=other)))
    found = ask(written(format), reload=(other, written("BF16")), tensor_parallel_size=2, **split)
    assert answers(found) == [SUMS, fresh, SUMS]


@pytest.mark.parametrize("without", ["layers.1.mlp.experts.2.up_proj", "layers.1.mlp.experts."])
def test_vllm_does_not_run_on_half_of_the_new_weights(ask: Ask, written: Callable[[str], Path], without: str) -> None:
    found = ask(written("FP8 by channel"), sent=((written("BF16"), without),))
    assert "expected new weights of all layers before the next request" in found["log"]
    assert "model.layers.1.mlp.experts" in found["log"]
    assert found["error"]


BALANCED: dict[str, Any] = {
    "ranks": 2,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "eplb_config": {"num_redundant_experts": 3, "window_size": 8, "step_interval": 8},
}


@pytest.mark.parametrize(("format", "use_async"), [("FP8 in blocks", False), ("NVFP4", True)])
def test_answers_while_experts_move_between_ranks(
    ask: Ask, written: Callable[[str], Path], format: str, use_async: bool
) -> None:
    """Five experts and three copies; each rank holds four, and others after each eight steps: at once, or layer by
    layer, exchanged by another thread."""
    config = {**BALANCED["eplb_config"], "use_async": use_async}
    found = ask(written(format), again=2, **{**BALANCED, "eplb_config": config})
    assert answers(found) == [SUMS] * 3
    assert found["others"] == [[SUMS[2:]] * 3]
    held = [line.partition("experts held: ")[2] for line in found["log"].splitlines() if "experts held: " in line]
    assert len(held) == 3
    assert len(set(held)) > 1
    assert "E=8 (4 from 0) A=2" in found["log"]


def test_layers_of_two_formats_do_not_move(ask: Ask, tmp_path: Path) -> None:
    found = ask(requantized.write("FP8 by channel", tmp_path / "mixed", plain=(1,)), **BALANCED)
    assert (
        "UnsupportedProblem: load balancing of experts (EPLB): expected the same tensors in every layer"
        in found["error"]
    )


def test_new_weights_are_refused_where_experts_move(ask: Ask, written: Callable[[str], Path]) -> None:
    found = ask(written("FP8 in blocks"), reload=(written("FP8 in blocks"),), **BALANCED)
    assert "expected experts where they were loaded, got load balancing of experts (EPLB)" in found["log"]
    assert found["error"]


def test_a_compiled_engine_answers(ask: Ask) -> None:
    assert answers(ask(MODELS / "sums-gpt-oss-mxfp4", enforce_eager=False)) == [SUMS]


def test_experts_in_host_memory_answer_also_after_a_reload(ask: Ask, tmp_path: Path) -> None:
    path = MODELS / "sums-gpt-oss-mxfp4"
    other = changed(path, tmp_path / "other")
    (fresh,) = answers(ask(other))
    memory = {"POLYMOE_EXPERT_MEMORY": "4slots"}
    found = ask(path, reload=(other, path), environment=memory)
    assert answers(found) == [SUMS, fresh, SUMS]
    assert "4 of 8 experts in slots on cpu" in found["log"]


@pytest.mark.parametrize("split", [{}, {"enable_expert_parallel": True}], ids=["tp", "ep"])
def test_ranks_have_slots_of_their_own(ask: Ask, written: Callable[[str], Path], split: dict[str, Any]) -> None:
    """Also where new weights arrive in 16 bits, sent in buckets."""
    memory = {"POLYMOE_EXPERT_MEMORY": "2slots"}
    sent = ((written("BF16"), ""),)
    found = ask(written("FP8 by channel"), sent=sent, tensor_parallel_size=2, environment=memory, **split)
    assert answers(found) == [SUMS, SUMS]
    assert "2 of " in found["log"]
    assert "experts in slots on cpu" in found["log"]


def test_dummy_weights_run(ask: Ask, written: Callable[[str], Path]) -> None:
    for path in (MODELS / "sums-gpt-oss-mxfp4", written("NVFP4"), written("GPTQ")):
        (found,) = answers(ask(path, load_format="dummy"))
        assert len(found) == len(PROMPTS)


def test_layers_that_the_user_leaves_to_vllm(ask: Ask, written: Callable[[str], Path]) -> None:
    found = ask(written("BF16"), polymoe="1", environment={"POLYMOE_LAYERS": "!1-2"})
    assert answers(found) == [SUMS]
    lines = [line.partition("polymoe 0")[2] for line in found["log"].splitlines() if "polymoe 0" in line]
    assert len(lines) == 3  # one for the layers that run, one for each name of the others
    assert sum("leaves model.layers." in line and "POLYMOE_LAYERS: expects !1-2" in line for line in lines) == 2


def test_require_makes_standing_aside_an_error(ask: Ask, written: Callable[[str], Path]) -> None:
    found = ask(written("BF16"), environment={"POLYMOE_LAYERS": "0"})
    assert "UnsupportedProblem: model.layers.1.mlp.experts: expected experts that polymoe runs" in found["error"]


def test_vllm_runs_what_polymoe_does_not(ask: Ask, written: Callable[[str], Path]) -> None:
    """With the reason in one line: no backend of this name runs on a CPU."""
    found = ask(written("BF16"), polymoe="1", environment={"POLYMOE_BACKEND": "triton"})
    assert answers(found) == [SUMS]
    (line,) = [line for line in found["log"].splitlines() if "polymoe 0" in line]
    assert "WARNING" in line
    assert "leaves model.layers.0.mlp.experts, and all layers like it, to vLLM: " in line
    assert "triton: " in line


def test_a_checkpoint_without_one_tensor_of_one_expert_is_refused(
    ask: Ask, written: Callable[[str], Path], tmp_path: Path
) -> None:
    path = shutil.copytree(written("FP8 by channel"), tmp_path / "lacking")
    index = path / "model.safetensors.index.json"
    lacking = "model.layers.3.mlp.experts.2.up_proj.weight_scale"
    for file in path.glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in load_file(file).items() if name != lacking}
        save_file(tensors, file, metadata={"format": "pt"})
    if index.exists():
        index.write_text(index.read_text().replace(f'"{lacking}"', '"none"'))
    found = ask(path)
    assert "CheckpointError: model.layers.3.mlp.experts: w13_weight_scale: expected all experts" in found["error"]
    assert "got 9 of 10 parts" in found["error"]
