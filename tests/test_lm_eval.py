"""The documented command of lm-eval against our server; skipped where lm-eval is not installed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_documented_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from serve_and_ask import KEY, running_server

    lines = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8").replace("\\\n", "")
    command = re.search(r"^\$ OPENAI_API_KEY=none lm_eval (.*)$", lines, re.MULTILINE)
    assert command is not None
    with running_server(str(ROOT / "models" / "sums-gpt-oss-mxfp4")) as url:
        words = shlex.split(
            command[1].replace("http://127.0.0.1:8000", url).replace("packed", str(tmp_path / "packed"))
        )
        env = {**os.environ, "OPENAI_API_KEY": KEY, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        asked = [sys.executable, "-m", "lm_eval", *words, "--limit", "40"]
        run = subprocess.run(asked, env=env, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    compare = [sys.executable, "examples/lm_eval/compare.py", str(tmp_path / "packed"), str(tmp_path / "packed")]
    said = subprocess.run(compare, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^A +(100|9\d|8\d)\.", said, re.MULTILINE)
    assert "A - B +0.00 points" in said
    assert "40 questions; 0 were answered" in said
