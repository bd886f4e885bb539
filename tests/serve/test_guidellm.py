"""guidellm against the server; skipped where guidellm is not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from support.serving import CHECKPOINT, running_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("guidellm") is None, reason="needs guidellm")]


def test_guidellm_measures_the_server(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with running_server(api_key=None) as server:
        arguments = [
            "--backend", f"kind=openai_http,target={server.url}", "--profile", "kind=synchronous",
            "--constraint", "kind=max_requests,count=4", "--tokenizer", f"kind=hf_auto,model={CHECKPOINT}",
            "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8", "--output", f"kind=json,path={out}",
        ]  # fmt: skip
        ran = subprocess.run(["guidellm", "run", *arguments, "--disable-console"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    [benchmark] = json.loads(out.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (4, 0, 0)
