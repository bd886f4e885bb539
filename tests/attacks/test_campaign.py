"""Mutated checkpoints through the verbs, by a campaign of its own process; and what judges them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attacks.mutations import CHECKPOINTS, MUTATORS, mutation
from attacks.neutral import NEUTRAL_MUTATORS
from attacks.reports import read, summary
from attacks.sandbox import Outcome
from attacks.source import Edit, Expect, Fifo, Link, Mutation, Source, write
from attacks.verdicts import FAILURES, clear, judge

ROOT = Path(__file__).parents[2]
NEUTRAL = ",".join(mutator.__name__ for _, mutator in NEUTRAL_MUTATORS)


def campaign(out: Path, *arguments: object, seconds: float = 500) -> list[dict[str, object]]:
    """Run a campaign, whose summary pytest shows if it fails; its reports."""
    command = [sys.executable, "-m", "tests.attacks.campaign", "--out", str(out), *map(str, arguments)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    assert out.exists(), ran.stderr
    print(ran.stdout)
    return read(out)


def python(program: str, directory: Path, **environment: str) -> str:
    """What a program prints that gets a directory; in a process of its own, since it forks."""
    environment["PYTHONPATH"] = f"{ROOT / 'tests'}:{ROOT / 'src'}"
    ran = subprocess.run(
        [sys.executable, "-c", program, str(directory)], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def failures(reports: list[dict[str, object]]) -> list[dict[str, object]]:
    assert reports
    return [report for report in reports if report["verdict"] in FAILURES]


@pytest.mark.slow
def test_a_few_mutated_checkpoints_are_read_or_refused(tmp_path: Path) -> None:
    reports = campaign(
        tmp_path / "out", "--checkpoints", CHECKPOINTS[0], "--count", 6, "--verbs", "load_experts,explain"
    )
    assert len(reports) == 12
    assert not failures(reports)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_mutated_checkpoints_are_answered_or_refused_by_every_verb(checkpoint: str, tmp_path: Path) -> None:
    assert not failures(campaign(tmp_path / "out", "--checkpoints", checkpoint, "--count", 1, "--seed", 500))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_hundreds_of_mutated_checkpoints_are_answered_or_refused(tmp_path: Path) -> None:
    assert not failures(campaign(tmp_path / "out", "--count", 270, "--jobs", os.cpu_count(), seconds=7000))


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_neutral_edits_leave_every_answer_bitwise_identical(checkpoint: str, tmp_path: Path) -> None:
    reports = campaign(tmp_path / "out", "--checkpoints", checkpoint, "--count", 2, "--kinds", NEUTRAL)
    assert not failures(reports)
    assert any(report["verdict"] == "same" for report in reports)


@pytest.mark.slow
def test_the_attacks_would_work_on_a_reader_that_trusts(tmp_path: Path) -> None:
    """Code and pickles of the mutators run where somebody lets them, and the sandbox sees it."""
    program = f"""
import json, sys
from pathlib import Path
from attacks.mutations import mutation
from attacks.sandbox import run
from attacks.source import Source, write
def code(path, layer):
    from transformers import AutoTokenizer
    return str(AutoTokenizer.from_pretrained(path, trust_remote_code=True))
def pickled(path, layer):
    import torch
    return str([torch.load(file, weights_only=False) for file in Path(path).glob("*.[bcp]*") if file.suffix != ".py"])
source = Source.of({CHECKPOINTS[0]!r})
for verb in (code, pickled):
    for seed in range(6):
        home = Path(sys.argv[1]) / f"{{verb.__name__}}{{seed}}"
        home.mkdir()
        write(source, mutation(source, seed, (verb.__name__,)).edits, home / source.name)
        print(verb.__name__, json.dumps(run(verb, home / source.name, 0, 60.0).did))
"""
    printed = python(program, tmp_path, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    for verb in ("code", "pickled"):
        assert any(line.startswith(verb) and "ran code of the checkpoint" in line for line in printed.splitlines())


@pytest.mark.parametrize(
    "checkpoint", [CHECKPOINTS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS[1:])]
)
def test_every_mutator_changes_every_checkpoint_by_its_seed_alone(checkpoint: str, tmp_path: Path) -> None:
    source = Source.of(checkpoint)
    for kind in MUTATORS:
        for seed in range(2):
            first, second = (mutation(source, seed, (kind,)) for _ in range(2))
            assert first == second
            assert first.edits
    assert len({mutation(source, seed).text for seed in range(100)}) > 80


def test_write_makes_a_copy_with_the_edits(tmp_path: Path) -> None:
    source = Source.of(CHECKPOINTS[0])
    edits = (Edit("a/b", b"x"), Edit("config.json", None), Edit("../other/c", b"y"), Edit("pipe", Fifo()))
    write(source, (*edits, Edit("tokenizer.json", Link("../other/c"))), tmp_path / "copy")
    assert (tmp_path / "copy" / "a" / "b").read_bytes() == b"x"
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == b"y"
    assert (tmp_path / "copy" / "pipe").is_fifo()
    assert not (tmp_path / "copy" / "config.json").exists()
    assert (tmp_path / "copy" / source.shards[0]).read_bytes() == source.files[source.shards[0]]


ENDS = {
    "answer": "return 'fine'",
    "refused": "from polymoe.errors import CheckpointError; raise CheckpointError('config.json', expected='x')",
    "raised": "raise KeyError('weight')",
    "crashed": "import os; os.abort()",
    "hung": "import time; time.sleep(60)",
    "busy": "while True: pass",
    "parent": "import subprocess; subprocess.Popen(['sleep', '987'], start_new_session=True); return ''",
    "memory": "bytearray(16 << 40)",
    "forbidden": "open('canary', 'w').close(); import os; os.system('true')",
}


def test_the_sandbox_tells_how_a_verb_ended(tmp_path: Path) -> None:
    verbs = "\n".join(f"def {name}(path, layer):\n    {body}" for name, body in ENDS.items())
    program = f"""
import json, sys
from pathlib import Path
from attacks.sandbox import run
{verbs}
for name in {list(ENDS)}:
    home = Path(sys.argv[1]) / name
    (home / "checkpoint").mkdir(parents=True)
    limit = 0.3 if name in ("hung", "busy") else 60.0
    print(json.dumps(run(globals()[name], home / "checkpoint", 0, limit).to_dict()))
"""
    printed = python(program, tmp_path)
    found = {name: json.loads(line) for name, line in zip(ENDS, printed.splitlines(), strict=True)}
    assert {name: found[name]["ended"] for name in ENDS if name != "forbidden"} == {
        "answer": "answer", "refused": "refused", "raised": "raised", "crashed": "crashed", "hung": "hung",
        "busy": "hung", "parent": "answer", "memory": "raised",
    }  # fmt: skip
    assert found["answer"]["answer"] == "fine"
    assert found["raised"]["error"] == "KeyError"
    assert found["crashed"]["error"] == "SIGABRT"
    assert (found["hung"]["blocked"], found["busy"]["blocked"]) == (True, False)
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if "sleep\0987" in _content(path)]
    assert found["memory"]["error"] == "MemoryError"
    assert [text.split()[0] for text in found["forbidden"]["did"]] == ["os.system", "ran"]


def _content(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # a process that has ended
        return ""


REFUSAL = Outcome("refused", message="error: sums/config.json: hidden_size: expected an integer, got 'x'\n  hint: y")


@pytest.mark.parametrize(
    ("expect", "outcome", "verdict"),
    [
        (Expect.SAME, Outcome("answer", "1"), "same"),
        (Expect.SAME, Outcome("answer", "2"), "changed"),
        (Expect.SAME, REFUSAL, "changed"),
        (Expect.SAME_OR_REFUSED, REFUSAL, "refused"),
        (Expect.SAME_OR_REFUSED, Outcome("answer", "2"), "changed"),
        (Expect.REFUSED, Outcome("answer", "1"), "accepted"),
        (Expect.REFUSED, Outcome("answer", "2"), "accepted"),
        (Expect.ANYTHING, Outcome("answer", "2"), "answered"),
        (Expect.ANYTHING, Outcome("raised", error="KeyError"), "raised"),
        (Expect.ANYTHING, Outcome("answer", "1", did=("os.system",)), "forbidden"),
        (Expect.ANYTHING, Outcome("refused", message="error: expected a number"), "vague"),
        (Expect.ANYTHING, Outcome("refused", message="error: config.json: " + "x" * 10_000), "vague"),
        (Expect.ANYTHING, Outcome("refused", message="Traceback (most recent call last)\nerror: config.json"), "vague"),
    ],
)
def test_verdicts(expect: Expect, outcome: Outcome, verdict: str) -> None:
    assert judge(Mutation("x", "y", (), expect), "run", outcome, Outcome("answer", "1"), ["config.json"]) == verdict


def test_a_verb_that_refuses_the_original_refuses_all_of_it() -> None:
    neutral = Mutation("x", "y", (), Expect.SAME)
    assert judge(neutral, "run", REFUSAL, REFUSAL, ["config.json"]) == "refused"
    assert judge(neutral, "run", Outcome("answer", "1"), REFUSAL, []) == "changed"


def test_what_the_original_does_is_no_attack() -> None:
    outcome = Outcome("answer", "1", did=("subprocess.Popen python",))
    assert judge(Mutation("x", "y", ()), "run", outcome, outcome, []) == "same"


def test_explain_cannot_see_the_bytes_of_tensors() -> None:
    assert (
        judge(Mutation("x", "y", (), Expect.REFUSED), "explain", Outcome("answer", "1"), Outcome("answer", "1"), [])
        == "same"
    )
    assert clear("a warning\nerror: model.layers.3.x: expected y", [])
    assert clear("error: tokenizer: expected one that encodes the prompts, got a search error: too many retries", [])
    assert not clear("a search error: model.layers.3", [])


def test_a_summary_counts_verdicts_and_names_the_commands(tmp_path: Path) -> None:
    case = {"checkpoint": "sums", "verb": "run", "kind": "any_value", "change": "config.json: x = 1"}
    case |= {"did": [], "error": "", "at": "", "message": "", "seconds": 0.1}
    good, bad = case | {"seed": 1, "verdict": "same"}, case | {"seed": 2, "verdict": "raised", "error": "KeyError"}
    (tmp_path / "out").write_text(f"{json.dumps(good)}\n{json.dumps(bad)}\n" + '{"cut')
    text = summary(read(tmp_path / "out"))
    assert "2 cases, 2 mutated checkpoints, 1 failures of 1 kinds" in text
    assert "1 raised KeyError" in text
    assert "--case sums:2 --kinds any_value --verbs run" in text
