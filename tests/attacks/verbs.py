"""The ways into a checkpoint. Each reads the one in ``path`` on the CPU, and returns what it computed, as text.

They run in a process of their own whose stdout and stderr are files (:mod:`attacks.sandbox`), and import polymoe when
they are called.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["READS_NO_WEIGHTS", "VERBS", "Refused"]

PROMPT = "1234567890123456789012345678+456="
"""Long enough for expressions that backtrack."""
CONTEXT = 256
"""Tokens, of every checkpoint."""


class Refused(Exception):
    """The verb ended with exit code 1; its message is on stderr."""


def load_experts(path: str, layer: int) -> str:
    """One layer, and its answer to random tokens."""
    import torch

    import polymoe

    experts = polymoe.load_experts(path, layer=layer, device="cpu")
    spec = experts.problem.spec
    generator = torch.Generator().manual_seed(7)
    x_TH = torch.randn(6, spec.hidden, generator=generator)
    ids_TA = torch.arange(6)[:, None] * torch.tensor([[1, 3]]) % spec.experts
    return _digest(experts(x_TH, ids_TA, torch.rand(6, 2, generator=generator)))


def engine_load(path: str, layer: int) -> str:
    """A whole model, and its logits for a few tokens. Model and tokenizer are Transformers': what they raise when they
    are called is a part of the answer."""
    import torch

    from polymoe.engines.transformers import load

    model, tokenizer = load(path, device="cpu")
    try:
        ids = tokenizer([PROMPT], return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            # run and serve refuse more than the context. A tokenizer may make 340,000 tokens of the prompt, and no more
            # than the time that the model takes for them would be measured.
            return f"{ids.tolist()} {_digest(model(input_ids=ids[:, :CONTEXT]).logits)}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def explain(path: str, layer: int) -> str:
    """``polymoe explain``."""
    return _command("explain", path, "--device", "h200", "--json")


def verify(path: str, layer: int) -> str:
    """``polymoe verify``."""
    report = json.loads(_command("verify", path, "--layer", layer, "--tokens", "1,4", "--device", "cpu", "--json"))
    return json.dumps(
        [{key: row[key] for key in row if key != "time_us"} for row in report["layers"] + report["backends"]]
    )


def bench(path: str, layer: int) -> str:
    """``polymoe bench --checkpoint``."""
    # Of the number of repeats only the times depend.
    text = _command(
        "bench", "--checkpoint", path, "--layer", layer, "--tokens", "2", "--device", "cpu", "--commit", "0", "--json"
    )
    keys = ("case", "backend", "format", "activations", "tokens", "error", "error_exact")
    return json.dumps([{key: row.get(key) for key in keys} for row in json.loads(text)])


def run(path: str, layer: int) -> str:
    """``polymoe run``."""
    return _command("run", path, PROMPT, "--max-tokens", "8", "--device", "cpu")


def serve(path: str, layer: int) -> str:
    """``polymoe serve`` until it is ready, one answer, and SIGTERM; the port must be closed then."""
    port, answer = "", "none"

    def ask() -> None:
        nonlocal port, answer
        while "serving on http://127.0.0.1:" not in (said := Path("stderr").read_text(errors="replace")):
            time.sleep(0.005)
        port = said.split("serving on http://127.0.0.1:")[1].split()[0]
        try:
            answer = _answer(port)
        except Exception as error:
            answer = f"none, but {error!r}"
        os.kill(os.getpid(), signal.SIGTERM)

    from polymoe.cli import serve as command

    # The command ends its process at once, with the signal's exit status. This process has its result to write.
    command._exit = sys.exit
    threading.Thread(target=ask, daemon=True).start()
    _command("serve", path, "--port", "0", "--device", "cpu", ends=128 + signal.SIGTERM)
    if not answer.startswith(("200", "4")):
        raise AssertionError(f"the server answered: {answer}")
    with socket.socket() as other:
        if other.connect_ex(("127.0.0.1", int(port))) == 0:
            raise AssertionError("the port is still open")
    return answer


def _answer(port: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    answer = json.loads(reply.read())
    return f"{reply.status} {answer['choices'][0]['message'] if reply.status == 200 else answer}"


def _command(*args: object, ends: int = 0) -> str:
    """What a command of ``polymoe`` prints on stdout. ``ends``: its exit code."""
    from polymoe.cli import main

    sys.argv = ["polymoe", *map(str, args)]
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    if code in (1, 2):  # of an argument that does not fit the checkpoint, such as a layer's number of ranks
        raise Refused
    if code != ends:
        raise AssertionError(f"exit code {code}")
    return Path("stdout").read_text()


def _digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(__import__("torch").uint8).numpy().tobytes()).hexdigest()


VERBS: dict[str, Callable[[str, int], str]] = {
    "load_experts": load_experts,
    "explain": explain,
    "verify": verify,
    "load": engine_load,
    "run": run,
    "serve": serve,
    "bench": bench,
}
"""By name."""
READS_NO_WEIGHTS = frozenset({"explain"})
"""Verbs that cannot see what is wrong with the bytes of a tensor."""
