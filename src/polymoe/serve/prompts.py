"""PromptReader: chat templates and tokenization, with a limit on characters, in threads beside the event loop.

Transformers renders and tokenizes in the event loop, where a long prompt stops every other request.
"""

from __future__ import annotations

import inspect
from typing import Any

from polymoe.engines.transformers.untrusted import reading
from polymoe.errors import CheckpointError
from polymoe.serve.call_queue import CallQueue
from polymoe.serve.errors import refusal
from polymoe.serve.limits import Limits
from polymoe.serve.messages import read_messages

__all__ = ["LARGE_BYTES", "Preparation", "PromptReader", "longest_token"]

LARGE_BYTES = 64 * 1024
"""Requests above this size are prepared in threads of their own, so that the others do not wait for them."""


def longest_token(tokenizer: Any) -> int:
    """Number of characters of the tokenizer's longest token, as its vocabulary spells it.

    A prompt of n tokens has at most n times as many characters, unless the tokenizer drops some.
    """
    return max(map(len, tokenizer.get_vocab()))


class Preparation:
    """The threads in which requests are checked and tokenized."""

    def __init__(self) -> None:
        self._small, self._large = (CallQueue(f"polymoe {size} prompts", threads=2) for size in ("small", "large"))

    @property
    def busy(self) -> bool:
        """Whether a thread works on a request."""
        return self._small.busy or self._large.busy

    async def run(self, size: int, fn: Any, *args: Any) -> Any:
        """The result of ``fn(*args)``, called in a thread.

        Args:
            size: of the request in bytes.
            fn: what to call, with its arguments.
        """
        return await (self._large if size > LARGE_BYTES else self._small).async_submit(fn, *args)


class PromptReader:
    """From what a request says to the tokens of its prompt. The methods may be called in any thread.

    Args:
        tokenizer: of the model, one of Transformers'.
        limits: of every request.
        device: where the tokens are needed; None for plain lists, as continuous batching needs them.
    """

    def __init__(self, tokenizer: Any, limits: Limits, device: Any) -> None:
        self._tokenizer, self._limits, self._device = tokenizer, limits, device
        # The first call sets what calls change in the tokenizer, which threads must not do at the same time.
        tokenizer("")

    def of_text(self, prompt: str) -> Any:
        """The tokenizer's output for a plain prompt.

        Raises:
            HTTPException: 400 for too many characters or tokens, for none, and if the tokenizer fails.
        """
        return self._tokenize(prompt)

    def of_chat(self, said: dict[str, Any]) -> Any:
        """The tokenizer's output for the fields of a chat, as :func:`~polymoe.serve.requests.check_fields` returns
        them.

        Raises:
            HTTPException: 400 for messages that cannot be read, fields that the chat template does not know, too many
                characters or tokens, and if the tokenizer fails.
        """
        tools = said.get("tools") if said.get("tool_choice") != "none" else None
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise refusal("this checkpoint has no chat template; /v1/completions takes a plain prompt") from error
        messages = read_messages(said["messages"], template)
        self._limits.check_characters(sum(len(message["content"]) for message in messages))
        extra = dict(said.get("chat_template_kwargs", {}))
        if "reasoning_effort" in said:
            if "reasoning_effort" in extra:
                raise refusal("chat_template_kwargs must not set reasoning_effort too", param="chat_template_kwargs")
            extra["reasoning_effort"] = said["reasoning_effort"]
        self._check_names(extra, template)
        if tools and "tools" not in template:
            raise refusal("tools must be omitted: this checkpoint's chat template does not know them", param="tools")
        try:
            prompt = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **extra
            )
        except Exception as error:  # a template can fail in any way, and what it reads is the request's
            raise refusal(f"the chat template rejects the messages: {error}", param="messages") from error
        return self._tokenize(prompt, add_special_tokens=False)  # the template has written them

    def _check_names(self, extra: dict[str, Any], template: str) -> None:
        own = {*inspect.signature(self._tokenizer.apply_chat_template).parameters, "messages", "conversations"}
        own |= self._tokenizer.special_tokens_map.keys()
        for name in extra:
            field = "reasoning_effort" if name == "reasoning_effort" else "chat_template_kwargs"
            if name in own:
                raise refusal(f"chat_template_kwargs must not set {name}", param=field)
            if name not in template:
                raise refusal(f"this checkpoint's chat template does not know {name[:80]}", param=field)

    def _tokenize(self, prompt: str, **options: Any) -> Any:
        self._limits.check_characters(len(prompt))
        try:
            with reading("prompt", "one that the checkpoint's tokenizer reads"):
                tokens = self._tokenizer(prompt, **options)
        except CheckpointError as error:  # such as a regular expression that backtracks too far on this prompt
            raise refusal(f"the checkpoint's tokenizer cannot read this prompt: {error.got}") from error
        # Only then tensors: those of millions of tokens take a second, in which no other thread of Python runs.
        self._limits.bound(len(tokens["input_ids"]), None)
        if self._device is None:
            return tokens
        return tokens.convert_to_tensors("pt", prepend_batch_axis=True).to(self._device)
