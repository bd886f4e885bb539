"""Chat templates: the same text and tokens as Transformers', and an end to every hostile one."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from jinja2 import TemplateError
from transformers import AutoTokenizer

from polymoe.engines.transformers import chat_template, load_tokenizer
from polymoe.errors import ArgumentError, CheckpointError, UnsupportedProblem
from support.packed_model import CHECKPOINT

CHAT = [{"role": "user", "content": "1+2="}, {"role": "assistant", "content": "3", "tool_calls": None}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
EVERYTHING = """
{%- for message in messages %}{{ message.role }}: {{ message.content | trim }}{{ eos_token }}
{%- if 'tool_calls' in message %}calls{% endif %}{% endfor %}
{{- tools | tojson(indent=1) }}{{ documents | length if documents }}{{ extra }}
{%- if add_generation_prompt %}assistant:{% endif %}"""


@pytest.fixture(scope="module")
def theirs() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT, trust_remote_code=False)


@pytest.fixture(scope="module")
def ours() -> Any:
    return load_tokenizer(CHECKPOINT)


def render(tokenizer: Any, template: str, **options: Any) -> str:
    return tokenizer.apply_chat_template(CHAT[:1], chat_template=template, tokenize=False, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokenize": False},
        {"add_generation_prompt": True, "return_tensors": "pt"},
        {"chat_template": EVERYTHING, "tools": [TOOL], "documents": [{"title": "a"}], "extra": "é\ud800"},
        {"chat_template": EVERYTHING, "continue_final_message": True, "tokenize": False},
        {"return_dict": False, "truncation": True, "max_length": 2},
    ],
    ids=lambda options: ",".join(options),
)
def test_the_same_as_transformers(theirs: Any, ours: Any, options: dict[str, Any]) -> None:
    if "extra" in options:
        options = {**options, "tokenize": False}
    expected = theirs.apply_chat_template(CHAT, **options)
    got = ours.apply_chat_template(CHAT, **options)
    assert str(got) == str(expected)
    assert str(ours.apply_chat_template([CHAT, CHAT], **options)) == str(
        theirs.apply_chat_template([CHAT, CHAT], **options)
    )


def test_tools_may_be_functions(theirs: Any, ours: Any) -> None:
    def add(a: int, b: int) -> int:
        """
        Adds.

        Args:
            a: one
            b: two
        """
        return a + b

    assert render(ours, EVERYTHING, tools=[add]) == render(theirs, EVERYTHING, tools=[add])


def test_the_method_looks_like_transformers(theirs: Any, ours: Any) -> None:
    assert inspect.signature(ours.apply_chat_template) == inspect.signature(theirs.apply_chat_template)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        again.chat_template = "again"
        assert again.apply_chat_template(CHAT, tokenize=False) == "again"
    assert ours.apply_chat_template(CHAT, tokenize=False) == "1+2="


# --- Hostile templates ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('refused') }}",
        "{% include 'config.json' %}",
        "{% import 'os' as os %}{{ os }}",
        "{{ (",
    ],
)
def test_no_way_out_of_the_sandbox(ours: Any, template: str) -> None:
    with pytest.raises(TemplateError, match="chat template: expected") as error:
        render(ours, template)
    assert isinstance(error.value, CheckpointError)


def test_attributes_that_are_not_there_stay_empty(ours: Any) -> None:
    assert render(ours, "[{{ lipsum.__globals__ }}{{ messages | attr('__class__') }}]") == "[]"
    assert "{" not in render(ours, "{{ '%s' | format(messages.__class__) }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 11 }}",
        "{{ 'a' | center(10 ** 11) }}",
        "{{ '%099999999999d' | format(1) }}",
        pytest.param(
            "{% set n = namespace(x='a') %}{% for _ in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
            marks=pytest.mark.slow,
        ),
        "{{ 'a' * (2 ** 24 + 1) }}",
    ],
)
def test_memory_and_length_are_bounded(ours: Any, template: str) -> None:
    with pytest.raises(TemplateError, match=r"MemoryError|more than 16777216 characters|too much memory"):
        render(ours, template)
    assert render(ours, "ok") == "ok"


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        pytest.param("{{ 9 ** (9 ** 9) }}", marks=pytest.mark.slow),
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    ],
    ids=["loops", "power", "recursion"],
)
def test_time_is_bounded(ours: Any, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert render(ours, "ok") == "ok"  # the process runs
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.5)
    start = time.monotonic()
    with pytest.raises(TemplateError, match=r"more than 0\.5 s|RecursionError"):
        render(ours, template)
    assert time.monotonic() - start < 5
    monkeypatch.undo()
    assert render(ours, "ok") == "ok"  # another process has replaced the one that was killed


@pytest.mark.slow
def test_a_process_whose_owner_was_killed_ends_by_itself() -> None:
    """In the middle of a template without end, it does not notice that its pipes are closed."""
    renderer = chat_template._Renderer()
    try:
        worker = renderer._started()
        assert worker.stdin is not None
        request = {"template": ENDLESS, "special_tokens": {}, "arguments": {"conversation": CHAT}}
        print(json.dumps(request), file=worker.stdin, flush=True)
        worker.wait(60)
        assert worker.returncode == -signal.SIGALRM
    finally:
        renderer.stop()


def test_the_process_has_no_secrets_and_writes_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has a few variables of the environment, and does not import from the directory that it was started in."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit")
    renderer = chat_template._Renderer()
    try:
        assert renderer.render("ok", {}, {"conversation": CHAT}) == "ok"
        assert renderer._worker is not None
        environment = Path(f"/proc/{renderer._worker.pid}/environ")
        if environment.exists():
            assert b"HF_TOKEN" not in environment.read_bytes()
            limits = Path(f"/proc/{renderer._worker.pid}/limits").read_text()
            assert "Max file size             0 " in limits
    finally:
        renderer.stop()
    assert renderer._worker is None


# --- Calls that cannot be rendered elsewhere ------------------------------------------------------------------------


def test_messages_that_json_cannot_hold(ours: Any) -> None:
    with pytest.raises(ArgumentError, match="a object"):
        ours.apply_chat_template([{"role": "user", "content": object()}])


@pytest.mark.parametrize("name", ["return_assistant_tokens_mask", "sanitize_control_tokens"])
def test_arguments_that_need_the_template(ours: Any, name: str) -> None:
    if name not in inspect.signature(ours.apply_chat_template).parameters:
        pytest.skip("not in this version of Transformers")
    with pytest.raises(UnsupportedProblem, match=name):
        ours.apply_chat_template(CHAT, **{name: True})
