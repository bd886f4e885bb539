from __future__ import annotations

import copy
import pickle

import pytest

from polymoe import errors
from polymoe.errors import CheckpointError, CheckpointNotFound, FormatError, PolymoeError, nearest, quoted

TREE = {
    "CheckpointError": ("PolymoeError", ValueError),
    "CheckpointNotFound": ("CheckpointError", FileNotFoundError),
    "FormatError": ("PolymoeError", ValueError),
    "ArgumentError": ("PolymoeError", ValueError),
    "UnsupportedProblem": ("PolymoeError", NotImplementedError),
    "PlanError": ("PolymoeError", RuntimeError),
    "VerificationError": ("PolymoeError", RuntimeError),
    "ServerError": ("PolymoeError", ConnectionError),
    "MissingDependency": ("PolymoeError", ImportError),
}
CLASSES = [getattr(errors, name) for name in TREE]


@pytest.mark.parametrize("name", TREE)
def test_each_error_is_ours_and_the_built_in_a_caller_expects(name: str) -> None:
    parent, builtin = TREE[name]
    assert getattr(errors, name).__bases__ == (getattr(errors, parent), builtin)


def test_no_error_is_left_out() -> None:
    """Of the tree above, of the names exported, and of the tree drawn in the module's docstring."""
    defined = {n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, PolymoeError)}
    assert defined == {*TREE, "PolymoeError"} == set(errors.__all__) - {"nearest", "printable", "quoted", "renamed"}
    drawn = [line.strip(" │├└─") for line in (errors.__doc__ or "").splitlines()]
    for name, (_, builtin) in TREE.items():
        assert any(line.startswith(f"{name} ({builtin.__name__})") for line in drawn)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({}, "a.scales"),
        ({"expected": "[8, 6]"}, "a.scales: expected [8, 6]"),
        ({"got": "[8, 5]"}, "a.scales: got [8, 5]"),
        ({"expected": "[8, 6]", "got": "[8, 5]"}, "a.scales: expected [8, 6], got [8, 5]"),
        ({"hint": "look again"}, "a.scales\n  hint: look again"),
        (
            {"expected": "[8, 6]", "got": "[8, 5]", "hint": "look again"},
            "a.scales: expected [8, 6], got [8, 5]\n  hint: look again",
        ),
    ],
)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_messages(kind: type[PolymoeError], facts: dict[str, str], message: str) -> None:
    """The same form for all: OSError and ImportError would otherwise write their own."""
    assert str(kind("a.scales", **facts)) == message


def test_the_facts_can_be_read() -> None:
    error = FormatError("a.scales", expected="x", got="y", hint="z")
    assert (error.where, error.expected, error.got, error.hint) == ("a.scales", "x", "y", "z")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_errors_cross_process_boundaries(kind: type[PolymoeError]) -> None:
    error = kind("a.scales", expected="x", got="y", hint="z")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert (str(again), again.hint) == (str(error), "z")


def test_a_missing_checkpoint_is_caught_as_a_missing_file() -> None:
    with pytest.raises(OSError, match="no/such/place: expected a directory"):
        raise CheckpointNotFound("no/such/place", expected="a directory")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("mxpf4", "did you mean 'mxfp4'? known: mxfp4, nvfp4"),
        ("zzz", "known: mxfp4, nvfp4"),
        ("", "known: mxfp4, nvfp4"),
    ],
)
def test_nearest(name: str, hint: str) -> None:
    assert nearest(name, ["nvfp4", "mxfp4"]) == hint


def test_messages_do_not_control_a_terminal() -> None:
    """Nor do they hold what no stream can write; lines stay lines."""
    error = CheckpointError("a\x1b[2J\ud800", expected="x\r", got="y\u202e", hint="one\ntwo")
    assert str(error) == "a\\x1b[2J\\ud800: expected x\\r, got y\\u202e\n  hint: one\ntwo"
    assert error.where == "a\x1b[2J\ud800"
    assert str(CheckpointError("Modèle/モデル")) == "Modèle/モデル"


def test_messages_are_bounded() -> None:
    error = CheckpointError("a" * 10**6, expected="b" * 10**6, got="c\n" + "d" * 10**6, hint="e")
    assert len(str(error)) < 3100
    assert [len(line) for line in str(error).splitlines()[1:]] == [1000, len("  hint: e")]


def test_quoted_values_are_one_short_line() -> None:
    for value in ("a" * 10**6, [[1] * 1000] * 1000, {"a": {"b": ["\x1b"] * 99}}, 10**4000, ["\n" * 99]):
        assert len(quoted(value)) <= 80
        assert quoted(value).isprintable()


def test_quoted_values_are_their_repr_where_that_is_short() -> None:
    assert [quoted(v) for v in ("a'b", None, [128, 64], {"a": 1.5})] == ['"a\'b"', "None", "[128, 64]", "{'a': 1.5}"]


def test_the_nearest_of_a_huge_name_is_not_searched() -> None:
    assert nearest("mxfp" * 10**6, ["mxfp4"]) == "known: mxfp4"
