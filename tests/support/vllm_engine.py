"""Runs whole vLLM engines on the CPU: one process forked for each, so that vLLM is imported once.

``python vllm_engine.py`` reads jobs from stdin, as JSON lines, and answers each with a line: the answers, vLLM's log,
and the error if there was one. A job: the model's directory, arguments of ``LLM``, environment variables, and
directories to reload weights from.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

PROMPTS = ("123+456=", "7+8=", "500-123=", "999+1=", "42-17=")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DISABLE_COMPILE_CACHE": "1",  # keys of polymoe's plans would stay in it
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}


def answers(llm: Any) -> list[str]:
    """Greedy answers to :data:`PROMPTS`."""
    from vllm import SamplingParams

    found = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    return [output.outputs[0].text for output in found]


def run(job: dict[str, Any]) -> list[list[str]]:
    """Start an engine and ask it, and again after each reload."""
    from vllm import LLM

    given = {"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 8, "disable_log_stats": True}
    llm = LLM(job["model"], **{**given, **job.get("options", {})})
    found = [answers(llm)]
    for path in job.get("reload", ()):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        found.append(answers(llm))
    return found


def _child(job: dict[str, Any], log: str, results: Any) -> None:
    with open(log, "w", buffering=1) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        os.environ.update(job.get("environment", {}))
        try:
            results.send({"answers": run(job), "error": ""})
        except BaseException as error:
            traceback.print_exc()
            results.send({"answers": [], "error": f"{type(error).__name__}: {error}"})
        sys.stdout.flush()
        os._exit(0)  # vLLM's threads and atexit handlers may wait for each other


def main() -> None:
    """Answer the jobs of stdin."""
    os.environ.update(ENVIRONMENT)
    import vllm  # noqa: F401
    from vllm import LLM  # noqa: F401

    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryDirectory() as directory:
            log = str(Path(directory) / "log")
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_child, args=(job, log, theirs))
            process.start()
            theirs.close()
            try:
                found = ours.recv()
            except EOFError:
                found = {"answers": [], "error": f"the process ended with {process.exitcode}"}
            process.join(30)
            if process.is_alive():
                process.kill()
            print(json.dumps({**found, "log": Path(log).read_text(errors="replace")}), flush=True)


if __name__ == "__main__":
    main()
