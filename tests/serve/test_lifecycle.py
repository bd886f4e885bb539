"""Starting and ending a server: addresses that cannot be used, and signals at any moment."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from polymoe.errors import ArgumentError, CheckpointNotFound
from polymoe.layer.routing_trace import RoutingTrace
from polymoe.serve import serve
from polymoe.serve.http_server import bind
from support.serving import CHECKPOINT, COMMAND, SERVE, UNENDING, server_process, user

# --- Starting ---------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with bind("127.0.0.1", 0) as taken:  # as another server does while it loads
        port = taken.getsockname()[1]
        with pytest.raises(ArgumentError, match=rf"127\.0\.0\.1:{port}.*in use"):
            serve(tmp_path / "no checkpoint", port=port)


@pytest.mark.parametrize(("host", "port"), [("no such host", 0), ("127.0.0.1", 70_000), ("192.0.2.1", 0)])
def test_an_address_that_is_not_ours_is_said(host: str, port: int, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=host):
        serve(tmp_path / "no checkpoint", host=host, port=port)


def test_another_port_does_not_help_where_the_address_is_not_ours() -> None:
    with pytest.raises(ArgumentError, match=r"^host: expected an address of this machine, got '192\.0\.2\.1'$"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize(
    "wrong", [{"grace_s": -1}, {"max_tokens": 0}, {"max_request_bytes": 0}, {"max_concurrent_requests": 0}], ids=str
)
def test_empty_limits_are_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        serve(tmp_path / "no checkpoint", port=0, **wrong)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("", "not empty, got an empty one"),
        (" \n", "got nothing but white space"),
        ("secret\n", "without white space around it, got white space before or after"),
        ("\tsecret", "white space"),
        ("sécret", "printable ASCII"),
        ("se\ncret", "printable ASCII"),
    ],
)
def test_a_key_that_no_client_can_send_is_refused(
    key: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    with pytest.raises(ArgumentError, match=says):
        serve(tmp_path / "no checkpoint", port=0, api_key=key)
    monkeypatch.setenv("POLYMOE_API_KEY", key)
    code, _, err = cli("serve", tmp_path, "--port", 0)
    assert code == 2
    assert says in err
    assert key.strip() not in err or not key.strip()


@pytest.mark.parametrize("origin", ["example.com", "https://", "https://a.b/", "ftp://a.b", "https://[", "null"])
def test_what_is_no_origin_is_refused(tmp_path: Path, origin: str) -> None:
    with pytest.raises(ArgumentError, match="cors_origins"):
        serve(tmp_path / "no checkpoint", port=0, cors_origins=["*", "https://a.b:8443", origin])


def test_the_command_line(cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Names that vLLM and SGLang give their options, and what one process cannot do."""
    import polymoe.cli.serve
    import polymoe.serve

    asked: dict[str, Any] = {}
    monkeypatch.setattr(polymoe.serve, "serve", lambda path, **given: asked.update(given))
    monkeypatch.setattr(polymoe.cli.serve, "_exit", sys.exit)
    named = ("--served-model-name", "m", "--max-new-tokens", 5, "--cors-origins", "https://a.b,*")
    assert cli("serve", tmp_path, *named, "--no-continuous-batching")[0] == 0
    assert (asked["name"], asked["max_tokens"], asked["cors_origins"]) == ("m", 5, ("https://a.b", "*"))
    assert asked["continuous_batching"] is False
    code, _, err = cli("serve", tmp_path, "--tensor-parallel-size", 2)
    assert code == 2
    assert "--device-map auto" in err
    assert "vllm serve MODEL --tensor-parallel-size 2" in err
    code, _, err = cli("serve", tmp_path, "--no-continuous-batching", "--graphs")
    assert (code, "need --continuous-batching" in err) == (2, True)


@pytest.mark.parametrize("option", [("--graphs",), ("--cache-memory", 0.5), ("--continuous-batching",)])
def test_what_only_a_gpu_has_is_refused_before_a_model_is_loaded(cli: Any, tmp_path: Path, option: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    code, _, err = cli("serve", tmp_path, "--device", "cpu", "--port", 0, *option)
    assert (code, f"{option[0]}: expected a GPU, got a model on the CPU" in err) == (2, True), err


def test_the_limit_on_descriptors_is_read_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="max_concurrent_requests"):
        serve(tmp_path / "no checkpoint", port=0, max_concurrent_requests=10**9)


def test_an_open_server_without_a_key_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for host, key, warned in (("0.0.0.0", None, True), ("0.0.0.0", "key", False), ("127.0.0.1", None, False)):
        caplog.clear()
        with pytest.raises(CheckpointNotFound):
            serve(tmp_path / "no checkpoint", host=host, port=0, api_key=key)
        assert ("no API key" in caplog.text) == warned


# --- Ending -----------------------------------------------------------------------------------------------------------


STUCK = """
import time
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssModel
forward = GptOssModel.forward
def first_then_none(*args, **kwargs):
    GptOssModel.forward = lambda *_, **__: time.sleep(600)
    return forward(*args, **kwargs)
GptOssModel.forward = first_then_none
"""
"""Loading computes two tokens, and no other forward pass ends."""

SLOW = """
import time
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssModel
forward = GptOssModel.forward
def slowly(*args, **kwargs):
    time.sleep(0.05)
    return forward(*args, **kwargs)
GptOssModel.forward = slowly
"""
"""No answer of 250 tokens ends within twelve seconds, on whatever machine."""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "busy", "code"), [(signal.SIGTERM, True, 143), (signal.SIGINT, False, 0)])
def test_the_command_ends_with_one_line(number: signal.Signals, busy: bool, code: int) -> None:
    with server_process(SLOW + COMMAND) as (running, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=60)
        assert client.completions.create(model=CHECKPOINT.name, prompt="1+2=").choices[0].text == "3"
        streams = [iter(unending(client)) for _ in range(4 * busy)]
        if busy:
            next(streams[0])
        start = time.monotonic()
        running.send_signal(number)
        out, err = running.communicate(timeout=20)
    assert time.monotonic() - start < 5
    assert (running.returncode, out) == (code, ""), err
    before, _, after = err.partition("stopped\n")
    assert ("Traceback" in before, "leak" in before, after) == (False, False, "")
    for stream in streams:  # none of them looks like a whole answer
        with pytest.raises(openai.APIError, match="server"):
            assert all(chunk.choices[0].finish_reason is None for chunk in stream)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_routing_is_recorded_until_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    """Of two clients at once: every token of both went through each layer, but for the last ones."""
    recorded, used = tmp_path / "routing.safetensors", []
    command = COMMAND.replace("--grace 0", f"--grace 0 --record-routing {recorded}")
    with server_process(command) as (running, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=60)

        def ask(prompt: str) -> None:
            for _ in range(2):
                answer = client.completions.create(model=CHECKPOINT.name, prompt=prompt)
                assert answer.usage is not None
                used.append(answer.usage.prompt_tokens + answer.usage.completion_tokens - 1)

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in ("1+2=", "498-971=")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not recorded.exists()
        running.send_signal(number)
        _, err = running.communicate(timeout=20)
    assert "Traceback" not in err
    trace = RoutingTrace.load(recorded)
    assert len(used) == len(trace.layers) == 4
    for layer in range(4):
        assert int(trace.tokens_C[trace.layers_C == layer].sum()) == sum(used)
    assert all(0 < len(call.needed) <= 2 * call.tokens for call in trace.calls())


@pytest.mark.slow
def test_a_server_that_nobody_asked_records_no_routing(tmp_path: Path) -> None:
    recorded = tmp_path / "routing.safetensors"
    command = COMMAND.replace("--grace 0", f"--grace 0 --record-routing {recorded}")
    with server_process(command) as (running, _):
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=20)
    assert running.returncode == 128 + signal.SIGTERM
    assert "error" not in out + err
    assert not recorded.exists()


def test_what_is_recorded_needs_calls_that_no_graph_replays(cli: Any, tmp_path: Path) -> None:
    new = tmp_path / "routing"
    with pytest.raises(ArgumentError, match="record_routing: expected no CUDA graphs"):
        serve(tmp_path / "no checkpoint", port=0, graphs=True, record_routing=new)
    for verb in ("serve", "run"):
        code, out, err = cli(verb, CHECKPOINT, "--graphs", "--record-routing", new)
        assert (code, out, "leave --graphs out" in err) == (2, "", True)
    assert not new.exists()


def test_a_file_for_routing_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="record_routing: expected a new file"):
        serve(tmp_path / "no checkpoint", port=0, record_routing=tmp_path)


def test_no_steps_are_captured_while_routing_is_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Made(Exception):
        pass

    def refuse(*_: Any, **given: Any) -> None:
        raise Made(given["graphs"])

    monkeypatch.setattr("polymoe.engines.transformers.load", lambda *_, **__: (None, None))
    monkeypatch.setattr("polymoe.serve.app.ModelServer", refuse)
    for recorded, graphs in ((tmp_path / "routing", False), (None, None)):
        with pytest.raises(Made) as made:
            serve(CHECKPOINT, port=0, record_routing=recorded)
        assert made.value.args == (graphs,)


def unending(client: openai.OpenAI) -> Any:
    fields: Any = {**UNENDING, "max_tokens": 250}
    return client.chat.completions.create(model=CHECKPOINT.name, messages=user("1+2"), stream=True, **fields)


def admitted(url: str) -> int:
    """Generations that a server works on, and those that wait."""
    text = httpx.get(f"{url}/metrics", headers={"authorization": "Bearer key"}, timeout=60).text
    return sum(int(float(value)) for value in re.findall(r"^polymoe_requests_(?:running|waiting) (\S+)$", text, re.M))


@pytest.mark.slow
def test_ends_in_the_middle_of_a_long_prompt() -> None:
    """A forward pass cannot be interrupted: clients that wait for it get an error, and the process ends without it."""
    refused: list[openai.APIStatusError] = []
    with server_process(STUCK + SERVE) as (running, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=300)

        def ask() -> None:
            with pytest.raises(openai.InternalServerError) as error:
                client.completions.create(model=CHECKPOINT.name, prompt="1+2=")
            refused.append(error.value)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        while admitted(url) < len(threads):
            assert running.poll() is None
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=120)  # the forward pass would take 600 s
        for thread in threads:
            thread.join()
    assert (running.returncode, out) == (0, "ended\n")
    assert "Traceback" not in err
    assert [error.status_code for error in refused] == [503] * 3


def test_wrong_paths_and_ports_are_refused_before_slow_imports() -> None:
    """Neither torch nor Transformers, which take seconds to import, is imported."""
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        for words, expected in ((["/no/such/dir"], "CheckpointNotFound"), ([".", "--port", port], "ArgumentError")):
            code = (
                "import sys; from polymoe.cli import app\n"
                f"try: app(['serve', *{words}], standalone_mode=False)\n"
                "except Exception as e: print(type(e).__name__, {'torch', 'transformers'} & set(sys.modules))\n"
            )
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert done.stdout == f"{expected} set()\n"
