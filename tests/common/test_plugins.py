"""Backends and layouts of another package, as an installed distribution registers them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "tests/support/toy_plugin"
SUMS = "models/sums-gpt-oss-mxfp4"

PROGRAM = f"""
import contextlib, io, json, sys, warnings
said = []
warnings.showwarning = lambda message, *_: said.append(str(message))

import polymoe, polymoe.backends, polymoe.layouts
found = {{"by importing": "toy_plugin" in sys.modules}}
from polymoe.layouts import LAYOUTS
found["natural"], found["of layouts"] = type(LAYOUTS["natural"]).__module__, said[:]
from polymoe.backends import BACKENDS
found["backends"], found["layouts"], found["warnings"] = list(BACKENDS), list(LAYOUTS), said[:]

import torch
experts = polymoe.load_experts({SUMS!r}, layer=1, device="cpu", backend="inverter")
plain = polymoe.load_experts({SUMS!r}, layer=1, device="cpu", backend="reference")
x = torch.randn(5, 192).bfloat16()
ids, weights = torch.randint(0, 8, (5, 2)), torch.rand(5, 2)
found["same"] = [torch.equal(experts(x, ids, weights), plain(x, ids, weights))]
found["same"] += [torch.equal(a.up.codes, b.up.codes) for a, b in zip(experts.weights, plain.weights)]
found["packed"] = [experts.packed.layout, plain.packed.layout]

from polymoe.cli import main
for name, options in (("named", ["--backend", "inverter"]), ("auto", ["--json"])):
    sys.argv = ["polymoe", "explain", {SUMS!r}, "--device", "cpu", *options]
    with contextlib.redirect_stdout(io.StringIO()) as stdout, contextlib.suppress(SystemExit):
        main()
    found[name] = stdout.getvalue()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What a process finds that has the plug-ins, asked once."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(PLUGIN)])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_importing_polymoe_loads_none(found: dict[str, Any]) -> None:
    assert found["by importing"] is False


def test_load_experts_takes_a_named_one(found: dict[str, Any]) -> None:
    assert found["backends"][:5] == ["reference", "torch", "triton", "cuda", "flashinfer"]
    assert found["backends"][-1] == "inverter"
    assert found["layouts"][-1] == "inverted"
    assert found["packed"] == ["inverted", "natural"]
    assert found["same"] == [True] * 9  # the results, and the codes of each expert


def test_what_is_broken_or_taken_is_a_warning_with_its_name(found: dict[str, Any]) -> None:
    for text in (
        "plug-in 'broken' (toy_plugin_that_is_not_here:plugin) of polymoe.backends is not used: ModuleNotFoundError",
        "plug-in 'empty' (toy_plugin:nothing) of polymoe.backends is not used: TypeError: it has neither",
        "plug-in 'taken': backend 'triton' is not used, because the name is taken",
    ):
        assert sum(text in said for said in found["warnings"]) == 1
    assert found["natural"] == "polymoe.layouts.natural"
    assert any("plug-in 'taken': layout 'natural' is not used" in said for said in found["of layouts"])


def test_the_command_line_takes_it(found: dict[str, Any], cli: Callable[..., tuple[int, str, str]]) -> None:
    assert "layout inverted" in found["named"]
    assert "inverter" in found["named"]
    code, _, err = cli("explain", ROOT / SUMS, "--device", "cpu", "--backend", "inverter")  # where it is not installed
    assert code == 2
    assert "known: " in err
    assert "inverter" not in err.split("known: ")[1]


def test_auto_does_not_take_what_was_not_measured_here(found: dict[str, Any]) -> None:
    """Kernels of other packages are foreign, however fast they say that they are."""
    (row,) = json.loads(found["auto"])["rows"]
    (candidate,) = [c for c in row["candidates"] if c["backend"] == "inverter"]
    assert candidate["accepted"]
    assert row["plan"]["layout"] == "dequantized"
