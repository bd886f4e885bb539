"""lm-eval's own tasks and client against a server; skipped where lm-eval is not installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx")

from support.evaluation import Reply, add, refused, said, serving, sums

Cli = Callable[..., tuple[int, str, str]]

TASK = """
task: small_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with one task whose data is available."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(TASK.format(data=sums(tmp_path / "sums.jsonl", 10)))
    return tmp_path / "tasks"


def test_without_lm_eval_the_extra_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, out, err = cli("eval", "--tasks", "gsm8k")
    assert (code, out) == (1, "")
    assert "pip install -e '.[lm-eval]'" in err


def test_a_task(cli: Cli, tasks: Path) -> None:
    def wrong_once(body: dict[str, Any], _: int) -> Reply:
        return said("no") if body["messages"][-1]["content"] == "3+1=" else add(body)

    with serving(wrong_once) as server:
        args = ("eval", "--tasks", "small_sums", "--include-path", tasks, "--server", server.url)
        code, out, _ = cli(*args, "--api-key", "secret", "--max-tokens", 9, "--system", "Add.", "--json")
        assert code == 0
        results = json.loads(out)
        assert results["results"]["small_sums"]["exact_match,none"] == 0.9
        assert len(server.requests) == 10
        for body in server.requests:
            assert (body["key"], body["max_tokens"], body["stop"]) == ("Bearer secret", 9, ["\n"])
            assert [m["role"] for m in body["messages"]] == ["system", "user"]
        code, out, _ = cli(*args, "--limit", 2)
        assert code == 0
        assert "small_sums" in out
        assert len(server.requests) == 12


def test_a_server_that_fails(cli: Cli, tasks: Path) -> None:
    with serving(lambda *_: refused(500)) as server:
        args = ("eval", "--tasks", "small_sums", "--include-path", tasks, "--server", server.url, "--retries", 0)
        code, _, err = cli(*args)
    assert code == 1
    assert f"error: {server.url}/v1: expected answers, got 500" in err


def test_a_task_that_is_not_known_or_not_at_hand(cli: Cli, tasks: Path) -> None:
    with serving(add) as server:
        code, _, err = cli("eval", "--tasks", "small_sums,smal_sums", "--include-path", tasks, "--server", server.url)
        assert code == 2
        assert "--tasks: expected tasks of lm-eval, got smal_sums" in err
        (tasks.parent / "sums.jsonl").unlink()
        code, _, err = cli("eval", "--tasks", "small_sums", "--include-path", tasks, "--server", server.url)
        assert code == 1
        assert "expected tasks whose data is available" in err
        assert "Traceback" not in err
