"""Run lm-eval's tasks against a server, with lm-eval's own client, prompts, metrics and table.

https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from polymoe.common.install_command import install_hint
from polymoe.errors import ArgumentError, MissingDependency, ServerError
from polymoe.evaluate.server import Server

__all__ = ["run_tasks"]

_ENDPOINTS = {
    "chat": ("local-chat-completions", "/chat/completions"),
    "completions": ("local-completions", "/completions"),
}


def run_tasks(
    tasks: Sequence[str],
    *,
    server: Server,
    model: str | None = None,
    endpoint: str = "chat",
    include_path: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    system: str | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], str]:
    """Return lm-eval's results for its tasks, as values for JSON and as its table.

    Args:
        tasks: names, as ``lm_eval ls tasks`` lists them. Their data must be cached, or the Hub reachable.
        server: the server to ask; ``retries`` and ``concurrency`` are passed on.
        model: its name on the server; None for the server's only model.
        endpoint: "chat", for tasks that generate, or "completions".
        include_path: a directory with further tasks.
        num_fewshot, limit, system: lm-eval's options of these names.
        sampling: fields that replace those of each task's requests.

    Raises:
        MissingDependency: without lm-eval and its packages for servers.
        ArgumentError: for a task that lm-eval does not know, or whose data cannot be found.
        ServerError: if the server cannot be reached or refuses.
    """
    try:
        import aiohttp as aiohttp
        import tenacity as tenacity  # type: ignore[import-not-found]
        from lm_eval import simple_evaluate  # type: ignore[import-not-found]
        from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]
        from lm_eval.utils import make_table  # type: ignore[import-not-found]
    except ImportError as error:
        raise MissingDependency("polymoe eval --tasks", got=str(error), hint=install_hint("lm-eval")) from error

    kind, path = _ENDPOINTS[endpoint]
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [name for name in tasks if not manager.match_tasks([name])]
    if unknown:
        raise ArgumentError("tasks", expected="tasks of lm-eval", got=", ".join(unknown), hint="lm_eval ls tasks")
    arguments = {
        "model": server.model(model),
        "base_url": server.base_url + path,
        "num_concurrent": server.concurrency,
        "max_retries": server.retries + 1,
        "timeout": int(server.timeout_s),
        "tokenizer_backend": None,
        "tokenized_requests": False,
    }
    with _api_key(server.api_key), _errors(server, tasks):
        results: Any = simple_evaluate(
            model=kind,
            model_args=arguments,
            tasks=list(tasks),
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=endpoint == "chat",
            system_instruction=system,
            gen_kwargs=dict(sampling) if sampling else None,
            log_samples=False,
        )
        return json.loads(json.dumps(results, default=str)), make_table(results)


@contextmanager
def _errors(server: Server, tasks: Sequence[str]) -> Iterator[None]:
    """Translate errors that lm-eval passes through: missing data, and a failing server."""
    import aiohttp
    from datasets.exceptions import DatasetsError  # type: ignore[import-not-found]

    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ServerError(server.base_url, expected="answers", got=str(error) or type(error).__name__) from error
    except (DatasetsError, OSError) as error:  # aiohttp's connection errors are OSErrors too
        raise ArgumentError(
            f"--tasks {','.join(tasks)}",
            expected="tasks whose data is available",
            got=str(error),
            hint="download the data on a machine with access to the Hub, or use a file of questions",
        ) from error


@contextmanager
def _api_key(key: str) -> Iterator[None]:
    """Set the only variable from which lm-eval reads the key."""
    before = os.environ.get("OPENAI_API_KEY")
    os.environ["OPENAI_API_KEY"] = key
    try:
        yield
    finally:
        if before is None:
            del os.environ["OPENAI_API_KEY"]
        else:
            os.environ["OPENAI_API_KEY"] = before
