"""Names and patterns of files: the same matches as Python's, and an answer at once for those that Python hangs on."""

from __future__ import annotations

import random
import re
import time

import pytest

from polymoe.checkpoint.patterns import LONGEST_NAME, LONGEST_PATTERN, check_name, compile_regexes
from polymoe.checkpoint.scheme import exact_or_regex, matcher
from polymoe.errors import CheckpointError

MODULES = [
    "lm_head",
    "model.embed_tokens",
    "model.layers.0.mlp.gate_proj",
    "model.layers.3.mlp.gate",
    "model.layers.3.mlp.experts.0.gate_proj",
    "model.layers.13.mlp.experts.15.down_proj",
    "model.layers.3.mlp.experts",
    "model.layers.3.mlp.shared_experts.up_proj",
    "model.layers.3.self_attn.q_a_proj",
    "model.language_model.layers.3.self_attn.o_proj",
    "vision_tower.blocks.0.attn.qkv",
]
PATTERNS = [
    "lm_head",
    ".*lm_head.*",
    ".*self_attn.*",
    ".*mlp.gate$",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    r"model\.layers\.(3|13)\.mlp\.experts\..*",
    r"model\.layers\.[0-9]+\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    r"(?:vision_tower|mm_projector)\b.*",
    "^(?!.*experts).*$",
    r"^(?!.*\.mlp\.experts(?:\.|$)).*$",
    r"^(?!.*(?:self_attn\.(?:q_a_proj|o_proj)|vision_tower\..*)$).*$",
    r"(?!lm_head)(?!.*[)|]).*_proj",
    r"^(?!.*language_model\.layers\.)",
    "re",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regular_expressions_match_as_in_python(pattern: str) -> None:
    (matches,) = compile_regexes([pattern], "a list")
    assert [matches(module) for module in MODULES] == [bool(re.match(pattern, module)) for module in MODULES]


HANGING = [
    "(a+)+$",
    "(a|a)*$",
    "(a|aa)+$",
    "(.*a){25}b",
    "a?" * 40 + "a" * 40 + "b",
    "((a*)*)*b",
    "^(?!(a+)+$).*b",
    ".*.*.*.*.*.*.*.*.*b",
]


@pytest.mark.parametrize("pattern", HANGING)
def test_regular_expressions_that_hang_python_are_matched_at_once(pattern: str) -> None:
    (matches,) = compile_regexes([pattern], "a list")
    start = time.process_time()
    assert not matches("a" * (LONGEST_NAME - 1) + "!")
    assert time.process_time() - start < 1


def test_the_largest_regular_expressions_are_matched_in_a_moment() -> None:
    """As much work as the limits allow: text and expression of full length, with states that RE2 cannot keep."""
    matches = compile_regexes(["(?:(?:a|b)?){0,700}(?:(?:[ab])?){0,700}c"] * 2, "a list")
    start = time.process_time()
    assert not any(fits("ab" * (LONGEST_NAME // 2)) for fits in matches)
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["("], "missing"),
        ([r"(a)\1"], "invalid escape sequence"),
        (["(?<=a)b"], "invalid perl operator"),
        (["a(?!b)"], "invalid perl operator"),
        (["(?!a)b|c"], "invalid perl operator"),
        (["(?!a"], "invalid perl operator"),
        (["(?!(?!a))"], "invalid perl operator"),
        (["(a{1000}){1000}"], "invalid repetition size"),
        ([""], "1 to 2000 printable characters"),
        (["a" * (LONGEST_PATTERN + 1)], "1 to 2000 printable characters"),
        (["a\x1b[2J"], "1 to 2000 printable characters"),
        (["\ud800"], "1 to 2000 printable characters"),
        (["[a-c]{900}"] * 30, "at most 10000 instructions"),
        (["a"] * 257, "at most 256 regular expressions, got 257"),
    ],
)
def test_regular_expressions_that_are_refused(patterns: list[str], message: str) -> None:
    with pytest.raises(CheckpointError, match=r"^config\.json: ignore: expected (.|\n)*" + message):
        compile_regexes(patterns, "config.json: ignore")


def test_names_in_lists_match_as_one_regular_expression_over_them() -> None:
    """The rule of lists of modules, with an expression that has time for short ones."""
    draw = random.Random(1)
    for _ in range(3000):
        pattern = "".join(draw.choices(["a", "b", ".", "*", ".a", "*."], k=draw.randrange(1, 6)))
        module = ".".join(draw.choices(["a", "b", "ab", "ba"], k=draw.randrange(1, 5)))
        ends = pattern[:-1] if len(pattern) > 1 and pattern.endswith("*") and pattern[-2] != "." else pattern
        inner = ".*".join(map(re.escape, ends.split("*")))
        expected = re.fullmatch(rf"(?:.*\.)?(?:{inner})(?:\..*)?", module) is not None
        assert matcher([pattern], "a list")(module) is expected, (pattern, module)


def test_long_lists_are_matched_at_once() -> None:
    stars = ["*a" * 7 + "b*c"] * 200
    start = time.process_time()
    assert not matcher(stars, "a list")("model." + "a" * (LONGEST_NAME - 6))
    assert not matcher([f"model.layers.{i}.mlp" for i in range(100_000)], "a list")("model.a.b.c.d.e.f.g.h.i.j")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("patterns", "got"), [(["layers.*.mlp"] * 201, "201, of up to 1"), (["a", "*".join("a" * 10)], "1, of up to 9")]
)
def test_too_many_stars_are_refused(patterns: list[str], got: str) -> None:
    with pytest.raises(CheckpointError, match=f"at most 200 patterns with stars, of at most 8 each, got {got}"):
        matcher(patterns, "a list")


def test_a_module_is_in_a_list_or_matches_it() -> None:
    found = exact_or_regex(["lm_head", "re:.*gate$"], "a list")
    assert [found(name) for name in ("lm_head", "lm_head.x", "layers.1.gate")] == [True, False, True]


@pytest.mark.parametrize("name", ["", "a" * (LONGEST_NAME + 1), "a\nb", "a\x1b[2Jb", "\ud800", "a\u202eb", None, 3])
def test_names_that_are_refused(name: object) -> None:
    with pytest.raises(CheckpointError, match="1 to 500 printable characters") as refusal:
        check_name(name, "model.safetensors.index.json")
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 200


def test_names_that_are_taken() -> None:
    assert check_name("model.layers.0.mlp.experts.0.gate_proj.weight", "x").startswith("model.")
    assert check_name("モデル.層.0", "x") == "モデル.層.0"
