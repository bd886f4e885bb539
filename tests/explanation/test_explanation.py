from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import polymoe
from polymoe.checkpoint.known_models import known_models
from polymoe.common.units import format_ranges
from polymoe.errors import ArgumentError, CheckpointNotFound
from polymoe.explanation import Ranks, fit_of
from polymoe.machine import DEVICES

SUMS = Path(__file__).parents[2] / "models" / "sums-gpt-oss-mxfp4"
SERVE = f": vllm serve {SUMS} --tensor-parallel-size "
CONTEXT = " (the model's longest context is 256)"


def write(path: Path, config: dict[str, object]) -> Path:
    path.write_text(json.dumps(config))
    return path


def test_a_directory() -> None:
    found = polymoe.explain(SUMS, device="cpu")
    (row,) = found.rows
    assert row.layers == (0, 1, 2, 3)
    assert row.selection.require().steps[0].backend == "torch"
    experts = polymoe.load_experts(SUMS, layer=0, device="cpu")
    assert row.memory_bytes == 4 * experts.packed.nbytes
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
    assert found.dense.unread_bytes == 16 * 192 * 2
    memory, backends, time = found.conclusion()
    assert memory == (
        "fits on h200: 2.6 MiB of weights leave 133.4 GiB for the KV cache, 280 million tokens in 16 bits" + CONTEXT
    )
    assert re.fullmatch(
        r"mxfp4 experts would use cuda \(timed on h200\): predicted \S+ to \S+ times as fast as triton, .*", backends
    )
    assert time == (
        "one token takes at least 40.3 us (at most 24,800 tokens/s): 40.1 us in the experts"
        " (10.0 us in each of 4 layers) and 0.2 us to read all other weights"
    )
    assert list(found.conclusion()) == found.to_dict()["conclusion"] == str(found).splitlines()[1:4]
    cpu = ("2.6 MiB of weights, and 13.6 MiB for dequantized experts", "mxfp4 experts would use torch")
    assert polymoe.explain(SUMS, device="cpu").conclusion() == cpu
    assert len(polymoe.explain(SUMS, device="h200", role="prefill").conclusion()) == 2


@pytest.mark.parametrize(
    ("memory_bytes", "tp", "conclusion"),
    [
        (2_600_000, 1, f"does not fit on small: weights need 2.6 MiB, one GPU has 2.5 MiB; 2 GPUs suffice{SERVE}2"),
        (
            2_600_000, 2,
            "fits on 2 x small: 1.3 MiB of weights leave 1.0 MiB on each for the KV cache, 4,280 tokens in 16 bits"
            + CONTEXT,
        ),
        (
            1_000_000, 2,
            f"does not fit on 2 x small: weights need 1.3 MiB on each, one GPU has 976.6 KiB; 3 GPUs suffice{SERVE}3",
        ),
        (
            1000, 1,
            "does not fit on small: weights need 2.6 MiB, one GPU has 1000 B; no group of up to 64 GPUs suffices",
        ),
    ],
)  # fmt: skip
def test_a_small_device(memory_bytes: int, tp: int, conclusion: str) -> None:
    device = replace(DEVICES["h200"], name="small", memory_bytes=memory_bytes)
    assert polymoe.explain(SUMS, device=device, tp=tp).conclusion()[0] == conclusion


def test_what_a_config_alone_cannot_say(tmp_path: Path) -> None:
    alone = write(tmp_path / "config.json", json.loads((SUMS / "config.json").read_text()))
    memory, _, time = polymoe.explain(alone, device="h200").conclusion()
    assert memory.endswith("for everything else; a config does not contain the size of the other weights")
    assert time == "one token takes 40.1 us in the experts (10.0 us in each of 4 layers)"
    memory, *_ = polymoe.explain(alone, device="h200", tp=2).conclusion()
    assert " on each of 2 x h200 for everything else" in memory


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hub's cache, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


def cached(hub: Path, name: str) -> Path:
    """The directory of a repository in the cache, empty."""
    repository = hub / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    return snapshot


@pytest.mark.usefixtures("hub")
class TestWithoutFiles:
    """Models whose sizes ship with the package, where nothing is cached and nothing can be fetched."""

    def test_a_known_model(self) -> None:
        found = polymoe.explain("openai/gpt-oss-20b", device="RTX 4090")
        memory, backends, time, proof = found.conclusion()
        assert memory == (
            "fits on rtx4090: 12.8 GiB of weights leave 10.0 GiB for the KV cache, 436,000 tokens in 16 bits"
            " (the model's longest context is 131,072)"
        )
        assert backends == "mxfp4 experts would use triton (never tested on rtx4090)"
        assert proof == (
            "never tested on rtx4090: kernels of the same source passed on h100, h200; `polymoe verify"
            " openai/gpt-oss-20b --layer 0 --out record.jsonl` tests one layer on yours, for a record"
        )
        assert time == (
            "one token takes at least 4.77 ms (at most 210 tokens/s): 2.35 ms in the experts"
            " (97.9 us in each of 24 layers) and 2.42 ms to read all other weights"
        )

    @pytest.mark.parametrize(
        ("name", "device", "tp", "start"),
        [
            (
                "deepseek-ai/DeepSeek-V3", "h200", 1,
                "does not fit on h200: weights need 641.0 GiB, one GPU has 140.4 GiB; 8 GPUs suffice: vllm serve",
            ),
            ("deepseek-ai/DeepSeek-V3", "h200", 8, "fits on 8 x h200: 80.1 GiB of weights leave 53.3 GiB on each for"),
            ("deepseek-ai/DeepSeek-V4-Flash", "h200", 2, "fits on 2 x h200: 75.3 GiB of weights leave 58.0 GiB on"),
            ("Qwen/Qwen3-30B-A3B-FP8", "RTX 5090", 1, "fits on rtx5090: 29.9 GiB of weights leave 385.9 MiB for the"),
        ],
    )  # fmt: skip
    def test_whether_known_models_fit(self, name: str, device: str, tp: int, start: str) -> None:
        assert polymoe.explain(name, device=device, tp=tp).conclusion()[0].startswith(start)

    def test_the_same_facts_in_json(self) -> None:
        found = polymoe.explain("openai/gpt-oss-20b", device="rtx4090")
        facts = json.loads(json.dumps(found.to_dict()))
        assert (facts["fits"], facts["tp"], facts["tp_that_fits"]) == (True, 1, None)
        assert facts["memory_bytes"] == 24564 * 2**20
        assert facts["weight_bytes"] == facts["rows"][0]["packed_bytes"] + facts["dense_bytes"]
        assert facts["cache_bytes"] == round(0.95 * facts["memory_bytes"]) - facts["weight_bytes"]
        assert facts["cache_tokens"] == facts["cache_bytes"] // facts["cache_bytes_per_token"]
        assert (facts["cache_bytes_per_token"], facts["max_context"]) == (24576, 131072)
        alone, *_, longest = facts["times"]
        assert alone["total_us"] == pytest.approx(alone["experts_us"] + alone["rest_us"], abs=0.02)
        assert alone["tokens_per_second"] == pytest.approx(1e6 / alone["total_us"], rel=1e-3)
        assert alone["experts_us"] == pytest.approx(24 * found.rows[0].selection.times[0][1].time_us, abs=0.01)
        assert (longest["tokens"], longest["total_us"]) == (16384, None)
        (row,) = facts["rows"]
        assert all(step["times"] for step in row["plan"]["steps"])
        sizes = ("format", "hidden", "intermediate", "experts", "local_experts", "top_k", "bias", "input")
        assert [row[name] for name in sizes] == ["mxfp4", 2880, 2880, 32, 32, 4, True, "16bit"]
        assert row["activation"] == "swiglu(alpha=1.702, beta=1, limit=7)"

    def test_many_tokens_multiply_longer_than_they_read(self) -> None:
        times = {time.tokens: time for time in polymoe.explain("openai/gpt-oss-20b", device="rtx4090").times}
        assert times[1].rest_us == times[128].rest_us
        assert times[1].rest_us is not None
        assert times[256].rest_us is not None
        assert times[256].rest_us > 1.5 * times[1].rest_us

    def test_an_unknown_id_says_what_is_known_and_what_to_do(self) -> None:
        with pytest.raises(CheckpointNotFound, match="no files of this repository in the Hub's cache") as error:
            polymoe.explain("openai/gpt-oss-2b")
        assert error.value.hint is not None
        assert error.value.hint.startswith("unset HF_HUB_OFFLINE, or name a directory with the checkpoint; explain kno")
        assert error.value.hint.endswith(" models without files, such as openai/gpt-oss-20b, openai/gpt-oss-120b")
        with pytest.raises(CheckpointNotFound, match="without files, such as openai/gpt-oss-20b"):
            polymoe.explain("gpt-oss-20b")

    def test_files_in_the_cache_come_first(self, hub: Path) -> None:
        """Also for a known model; with all tensors they give the size of the rest too."""
        there = cached(hub, "openai/gpt-oss-20b")
        write(there / "config.json", json.loads((SUMS / "config.json").read_text()))
        found = polymoe.explain("openai/gpt-oss-20b", device="h200")
        assert (found.rows, found.dense) == (polymoe.explain(there / "config.json", device="h200").rows, None)
        for file in SUMS.glob("model*"):
            shutil.copy(file, there)
        found = polymoe.explain("openai/gpt-oss-20b", device="h200")
        assert found.dense == polymoe.explain(SUMS, device="h200").dense
        next(there.glob("*.safetensors")).unlink()
        assert polymoe.explain("openai/gpt-oss-20b", device="h200").dense is None

    def test_a_cached_config_of_a_known_model_has_its_size(self, hub: Path) -> None:
        known = known_models()["openai/gpt-oss-20b"]
        there = cached(hub, known.name)
        write(there / "config.json", dict(known.config))
        assert polymoe.explain(known.name, device="h200").dense == known.dense


def test_how_much_faster_than_the_next_best_backend() -> None:
    """By the times of the JSON, at every token count that both have."""
    found = polymoe.explain("deepseek-ai/DeepSeek-V3", device="h200", tp=8)
    selection = found.to_dict()["rows"][0]
    mine = {time["tokens"]: time["time_us"] for step in selection["plan"]["steps"] for time in step["times"]}
    (triton,) = (c["predicted"] for c in selection["candidates"] if c["backend"] == "triton")
    factors = [p["time_us"] / mine[p["tokens"]] for p in triton]
    times = [*triton, *(time for step in selection["plan"]["steps"] for time in step["times"])]
    how = "measured" if {time["source"] for time in times if time["tokens"] in mine} == {"measured"} else "predicted"
    said = f"{min(factors):.1f} to {max(factors):.1f} times as fast as triton, the next-best backend"
    assert f"fp8_block128 experts would use cuda (timed on h200): {how} {said}" in found.conclusion()


def test_ranks() -> None:
    """The GPUs of expert parallelism are those of tensor and data parallelism: each has half of the experts, whole."""
    whole, half = polymoe.explain(SUMS, device="h200"), polymoe.explain(SUMS, device="h200", tp=2, ep=(1, 2))
    spec = half.rows[0].problem.spec
    assert (spec.intermediate, spec.first_expert, spec.local_experts) == (192, 4, 4)
    assert (half.rows[0].problem.tp, half.rows[0].problem.ep) == (1, 2)
    assert 2 * half.rows[0].packed_bytes == whole.rows[0].packed_bytes
    assert [half.to_dict()[name] for name in ("tp", "dp", "ep", "gpus")] == [2, 1, 2, 2]
    assert str(half).startswith(f"{SUMS}: gpt_oss, on h200 (sm_90), tp=2, ep=2\nfits on 2 x h200: ")


def test_data_parallel_groups_repeat_attention_and_slice_or_share_out_experts() -> None:
    one, sliced, shared = (polymoe.explain(SUMS, device="h200", dp=d, ep=e) for d, e in ((1, 1), (2, 1), (2, 2)))
    assert one.dense == sliced.dense == shared.dense
    assert [found.rows[0].problem.spec.intermediate for found in (sliced, shared)] == [96, 192]
    assert 2 * shared.rows[0].packed_bytes == one.rows[0].packed_bytes
    assert "fits on 2 x h200: " in str(shared)
    assert " tokens in 16 bits in each of 2 data parallel groups (the model's" in str(shared)


def test_experts_that_are_shared_out_take_as_many_gpus() -> None:
    """553 GiB do not fit on one GPU because eight share out the experts."""
    name = "moonshotai/Kimi-K2-Thinking"
    with pytest.raises(ArgumentError, match=r"^ep: expected a number that divides tp \* dp, which is 1"):
        polymoe.explain(name, device="h200", ep=8)
    found = polymoe.explain(name, device="h200", tp=8, ep=8)
    assert (found.rows[0].problem.spec.intermediate, found.rows[0].problem.spec.local_experts) == (2048, 48)
    assert found.conclusion()[0].startswith("fits on 8 x h200: ")


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"tp": 3}, "^tp: expected a number that divides the model's 64 attention heads, got 3"),
        ({"tp": 2, "dp": 2, "ep": 3}, "^ep: expected a number that divides tp . dp, which is 4"),
        ({"dp": 0}, "expected 1 to 4096"),
        ({"tp": (2, 2)}, "^tp rank"),
    ],
)
def test_groups_that_no_engine_starts(sizes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        polymoe.explain("openai/gpt-oss-20b", device="h200", **sizes)


GIB = 2**30
BY_HAND = [
    # name, device, tp, ep; layers * experts * matrices * bytes of a weight with its scales; rest, room, fits
    ("deepseek-ai/DeepSeek-V3", "h200", 8, 1, 58 * 256 * 3 * 7168 * 2048 * (1 + 4 / 128**2), 31.88, 53.3, True),
    ("moonshotai/Kimi-K2-Thinking", "h200", 8, 8, 60 * 384 * 3 * 7168 * 2048 * (0.5 + 2 / 32), 21.83, 64.2, True),
    (
        "openai/gpt-oss-120b",
        "rtx4090",
        1,
        1,
        36 * 128 * (3 * 2880**2 * (0.5 + 1 / 32) + 2 * 3 * 2880),
        3.96,
        -38,
        False,
    ),
    ("Qwen/Qwen3-30B-A3B-FP8", "rtx4090", 2, 1, 48 * 128 * 3 * 2048 * 768 * (1 + 2 / 128**2), 2.87, 7.8, True),
    ("nvidia/Qwen3-235B-A22B-NVFP4", "h200", 1, 1, 94 * 128 * 3 * 4096 * 1536 * (0.5 + 1 / 16), 14.92, -0.5, False),
    ("mistralai/Mixtral-8x7B-v0.1", "a100", 2, 1, 32 * 8 * 3 * 4096 * 14336 * 2, 2.99, 32.5, True),
]


@pytest.mark.parametrize(("name", "device", "tp", "ep", "experts", "rest", "room", "fits"), BY_HAND)
def test_by_hand(
    name: str, device: str, tp: int, ep: int, experts: float, rest: float, room: float, fits: bool
) -> None:
    """Bytes of the experts from the sizes in the model's config; rest, and room beside 95 % of the memory, in GiB."""
    found = polymoe.explain(name, device=device, tp=tp, ep=ep).fit
    assert found.expert_bytes == pytest.approx(experts / tp, rel=2e-4)
    assert found.weight_bytes == pytest.approx((experts + rest * GIB) / tp, rel=1e-3)
    assert found.cache_bytes is not None
    assert found.cache_bytes / GIB == pytest.approx(room, abs=0.6)
    assert found.fits is fits


@pytest.mark.parametrize("name", known_models())
def test_gpus_together_hold_at_least_the_model(name: str) -> None:
    checkpoint = known_models()[name].checkpoint()
    whole, tried = fit_of(checkpoint, DEVICES["h200"], Ranks()).weight_bytes, 0
    for tp, dp in itertools.product((1, 3, 4, 8), (1, 2)):
        for ep in {1, 2, tp, dp, tp * dp}:
            try:
                found = fit_of(checkpoint, DEVICES["h200"], Ranks.of(tp, ep, dp))
            except ArgumentError:
                continue
            assert found.weight_bytes * tp * dp >= whole, (tp, dp, ep)
            tried += 1
    assert tried > 3


@pytest.mark.parametrize("name", known_models())
def test_what_is_said_to_suffice_does(name: str) -> None:
    checkpoint = known_models()[name].checkpoint()
    for device in ("rtx4090", "h200"):
        fit = fit_of(checkpoint, DEVICES[device], Ranks())
        if fit.suffices:
            assert fit_of(checkpoint, DEVICES[device], fit.suffices).fits


def test_groups_that_repeat_attention_where_its_heads_are_too_few() -> None:
    """Llama 4 Scout has 40 heads, which 16 GPUs cannot slice, and 16 experts: one for each GPU of two groups of 8."""
    fit = polymoe.explain("meta-llama/Llama-4-Scout-17B-16E-Instruct", device="rtx4090").fit
    assert fit.suffices == Ranks(8, dp=2, ep=16)
    options = "--tensor-parallel-size 8 --data-parallel-size 2 --enable-expert-parallel"
    assert f"; 16 GPUs suffice: vllm serve {fit.name} {options}" in fit.line()
    assert [fit.to_dict()[f"{name}_that_fits"] for name in ("tp", "dp", "ep")] == [8, 2, 16]


def test_unequal_slices_are_said(tmp_path: Path) -> None:
    config = json.loads((SUMS / "config.json").read_text()) | {"hidden_size": 2880, "intermediate_size": 2880}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 8}
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
    with pytest.raises(ArgumentError, match="known: auto, cuda, "):
        polymoe.explain(SUMS, backend="fastest")


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ((), ""),
        ((7,), "7"),
        ((3, 4, 5, 9), "3-5, 9"),
        ((1, 3, 5, 7), "1, 3, 5, 7"),
        ((1, 3, 4, 5), "1, 3-5"),
        ((0, 2, 4, 5, 6), "0, 2, 4-6"),
    ],
)
def test_format_ranges(layers: tuple[int, ...], text: str) -> None:
    assert format_ranges(layers) == text


def test_slices_that_do_not_fit_are_named_in_the_sizes_that_were_asked_for() -> None:
    said = r"tp \* dp / ep, 8 \* 3 / 8: expected 3 GPUs .* 2048 is not a multiple of 3"
    with pytest.raises(ArgumentError, match=said):
        polymoe.explain("moonshotai/Kimi-K2-Thinking", device="h200", tp=8, ep=8, dp=3)
