"""Where caches are, and programs without such a place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polymoe.common.environment import cache_directory

LOAD = """
import logging, os, pwd, torch
for named in (None, "~nouser/c"):
    if not os.fork():
        break
    assert os.wait()[1] == 0
else:
    os._exit(0)
def missing(*_): raise KeyError
pwd.getpwuid = pwd.getpwnam = missing
if named:
    os.environ["POLYMOE_CACHE"] = named
logging.basicConfig(level=logging.WARNING)
from polymoe.layer.experts import FusedExperts
from polymoe.problem.activations import SwiGLU
from polymoe.problem.tensors import ExpertWeights
weights = ExpertWeights.quantize(torch.randn(2, 64, 32), torch.randn(2, 32, 32), "mxfp4")
for _ in range(2):
    FusedExperts.from_weights(weights, SwiGLU(), top_k=1, device="cpu")
import polymoe
polymoe.explain("openai/gpt-oss-20b", device="h200")
"""


def test_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLYMOE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_directory() == Path("/home/me/.cache/polymoe")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_directory() == Path("/var/cache/polymoe")
    monkeypatch.setenv("POLYMOE_CACHE", "~/c")
    assert cache_directory() == Path("/home/me/c")


@pytest.mark.skipif(sys.platform == "win32", reason="processes are forked")
def test_without_a_home_directory_polymoe_works_and_says_so_once() -> None:
    """Without a name for the cache, and with one below a home that nobody has: each in a fork."""
    here = {k: v for k, v in os.environ.items() if k not in ("HOME", "POLYMOE_CACHE", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", LOAD], env=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("nothing is cached; POLYMOE_CACHE names another directory") == 2
