"""The documented command of lm-eval against our server; skipped where lm-eval is not installed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[2]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: false, max_gen_toks: 16}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
def test_the_documented_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from serve_and_ask import KEY, running_server

    lines = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8").replace("\\\n", "")
    found = re.search(r"^\$ OPENAI_API_KEY=none lm_eval (.*)$", lines, re.MULTILINE)
    assert found is not None
    (tmp_path / "sums.yaml").write_text(TASK.format(data=ROOT / "models" / "sums-heldout.jsonl"))
    with running_server(str(ROOT / "models" / "sums-gpt-oss-mxfp4")) as url:
        words = shlex.split(found[1].replace("http://127.0.0.1:8000", url).replace("gsm8k,ifeval", "sums"))
        more = ["--include_path", str(tmp_path), "--limit", "20", "--output_path", str(tmp_path / "out.json")]
        env = {**os.environ, "OPENAI_API_KEY": KEY, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
        run = subprocess.run([sys.executable, "-m", "lm_eval", *words, *more], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    (written,) = tmp_path.rglob("out*.json")
    assert json.loads(written.read_text())["results"]["sums"]["exact_match,none"] > 0.8
