"""Backends and layouts of another package, as an installed distribution registers them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "tests/support/toy_plugin"
SUMS = "models/sums-gpt-oss-mxfp4"


def python(*args: str, installed: bool = True) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "src"), *([str(PLUGIN)] if installed else [])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, cwd=ROOT, check=False)


LOAD = f"""
import torch, polymoe
experts = polymoe.load_experts({SUMS!r}, layer=1, device="cpu", backend="inverter")
plain = polymoe.load_experts({SUMS!r}, layer=1, device="cpu", backend="reference")
x = torch.randn(5, 192).bfloat16()
ids, weights = torch.randint(0, 8, (5, 2)), torch.rand(5, 2)
assert torch.equal(experts(x, ids, weights), plain(x, ids, weights))
assert (experts.packed.layout, plain.packed.layout) == ("inverted", "natural")
for one, other in zip(experts.weights, plain.weights):
    assert torch.equal(one.up.codes, other.up.codes)
print(list(polymoe.backends.BACKENDS), list(polymoe.layouts.LAYOUTS)[-1])
"""


def test_load_experts_takes_a_named_one() -> None:
    done = python("-c", LOAD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['reference', 'triton', 'cuda', 'inverter'] inverted"


def test_what_is_broken_or_taken_is_a_warning_with_its_name() -> None:
    done = python("-c", "from polymoe.backends import BACKENDS; from polymoe.layouts import LAYOUTS; print(*BACKENDS)")
    assert done.returncode == 0
    assert done.stdout.split() == ["reference", "triton", "cuda", "inverter"]
    for text in (
        "plug-in 'broken' (toy_plugin_that_is_not_here:plugin) of polymoe.backends is not used: ModuleNotFoundError",
        "plug-in 'empty' (toy_plugin:nothing) of polymoe.backends is not used: TypeError: it has neither",
        "plug-in 'taken': backend 'triton' is not used, because the name is taken",
    ):
        assert done.stderr.count(text) == 1
    done = python("-c", "from polymoe.layouts import LAYOUTS; print(type(LAYOUTS['natural']).__module__)")
    assert done.stdout.strip() == "polymoe.layouts.natural"
    assert "plug-in 'taken': layout 'natural' is not used" in done.stderr


def test_importing_polymoe_loads_none() -> None:
    code = "import sys, polymoe; import polymoe.backends, polymoe.layouts; print('toy_plugin' in sys.modules)"
    done = python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_the_command_line_takes_it() -> None:
    args = ("-m", "polymoe", "explain", SUMS, "--device", "cpu", "--backend", "inverter")
    done = python(*args)
    assert done.returncode == 0, done.stderr
    assert "layout inverted" in done.stdout
    assert "inverter" in done.stdout
    done = python(*args, installed=False)
    assert done.returncode == 2
    assert "known: " in done.stderr
    assert "inverter" not in done.stderr.split("known: ")[1]


def test_auto_does_not_take_what_was_not_measured_here() -> None:
    """Kernels of other packages are foreign, however fast they say that they are."""
    done = python("-m", "polymoe", "explain", SUMS, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    (candidate,) = [c for c in row["candidates"] if c["backend"] == "inverter"]
    assert candidate["accepted"]
    assert row["plan"]["layout"] == "natural"
