"""Known models on one GPU, as `polymoe models` lists them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

import polymoe
from polymoe.checkpoint.known_models import known_models
from polymoe.errors import ArgumentError
from polymoe.explanation.models import models

INT4 = "Qwen/Qwen3-30B-A3B-GPTQ-Int4"
all_models = cache(models)


@pytest.fixture
def int4_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models take seconds."""
    monkeypatch.setattr("polymoe.explanation.models.known_models", lambda: {INT4: known_models()[INT4]})


def test_every_known_model_is_there_and_what_fits_comes_first() -> None:
    found = all_models("rtx4090", 8192)
    assert sorted(one.name for one in found) == sorted(known_models())
    fits = [one.fits for one in found]
    assert fits == sorted(fits, reverse=True)
    assert 3 < sum(fits) < len(fits) / 4
    fitting = [one.explanation.weight_bytes for one in found if one.fits]
    assert fitting == sorted(fitting, reverse=True)
    gpus = [one.gpus or 100 for one in found if not one.fits]
    assert gpus == sorted(gpus)


@pytest.mark.usefixtures("int4_alone")
def test_by_hand() -> None:
    """INT4 in groups of 128: 4.125 bits for each of 48 layers of 128 experts of three 2048 x 768 matrices, 8 of which a
    token reads; 2.87 GiB of other weights in 16 bits, less 593.5 MiB of embeddings; 96 KiB of cache for a token."""
    (one,) = models("rtx4090")
    expert = 3 * 2048 * 768 * (4 + 16 / 128) / 8
    dense, unread = 3_082_186_752, 151_936 * 2048 * 2
    assert one.explanation.weight_bytes == 48 * 128 * expert + dense
    room = 24_564 * 2**20 * 0.95 - one.explanation.weight_bytes
    assert one.explanation.cache_tokens == room // (48 * 2 * 4 * 128 * 2)
    floor_us = (48 * 8 * expert + dense - unread) / 1.008e6
    assert one.floor_tokens_per_second == pytest.approx(1e6 / floor_us, rel=0.01)
    assert one.tokens_per_second is not None
    assert one.floor_tokens_per_second is not None
    assert one.tokens_per_second < one.floor_tokens_per_second
    assert (one.backends, one.proof) == (("triton",), "unrun")


@pytest.mark.usefixtures("int4_alone")
def test_context_that_has_no_room() -> None:
    found = [one for context in (8192, 100_000) for one in models("rtx4090", context)]
    assert [(one.fits, one.gpus) for one in found] == [(True, 1), (False, 1)]


@pytest.mark.parametrize(
    ("device", "context", "said"),
    [("cpu", 1, "device: expected a GPU"), ("rtx4091", 1, "rtx4090"), ("h200", 0, "context: expected at least 1")],
)
def test_bad_input(device: str, context: int, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        models(device, context)


def test_the_command(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polymoe.explanation.models.models", all_models)
    code, out, _ = cli("models", "--device", "rtx4090")
    assert code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    assert len(rows) == len(known_models())
    assert not [row for row in rows if not all(row)]
    assert f"{sum(row[4] != 'does not fit' for row in rows)} of {len(rows)} models fit on one rtx4090 with 8,192" in out
    found = json.loads(cli("models", "--device", "rtx4090", "--json")[1])["models"]
    assert [one["model"] for one in found] == [row[0] for row in rows]
    assert [one["proven"] for one in found[:1]] == ["never tested on rtx4090"]


def test_variants_that_fit_are_named() -> None:
    fit = polymoe.explain("Qwen/Qwen3-30B-A3B", device="rtx4090").fit
    assert (INT4, "int4_g128") in fit.variants
    assert all("Coder" not in name and "2507" not in name for name, _ in fit.variants)
    assert f"in other formats it fits: {fit.variants[0][0]} ({fit.variants[0][1]}), " in fit.line()
    assert polymoe.explain("Qwen/Qwen3-30B-A3B", device="h200").fit.variants == ()


def test_ids_are_found_whatever_their_case() -> None:
    assert polymoe.explain("qwen/qwen3-30b-a3b", device="h200").name == "Qwen/Qwen3-30B-A3B"
