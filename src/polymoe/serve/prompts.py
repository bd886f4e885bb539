"""PromptReader: chat templates and tokenization, with a limit on characters, in threads beside the event loop.

Transformers renders and tokenizes in the event loop, where a long prompt stops every other request.
"""

from __future__ import annotations

import inspect
from typing import Any

from polymoe.common.untrusted import reading
from polymoe.errors import CheckpointError
from polymoe.serve.errors import refusal
from polymoe.serve.limits import Limits
from polymoe.serve.messages import read_messages
from polymoe.serve.requests import ChatRequest

START = 16
"""Of a prompt with more characters than this times the context, the start is tokenized first."""


def longest_token(tokenizer: Any) -> int:
    """Number of characters of the tokenizer's longest token, as its vocabulary spells it.

    A prompt of n tokens has at most n times as many characters, unless the tokenizer drops some.
    """
    return max(map(len, tokenizer.get_vocab()))


class PromptReader:
    """From what a request says to the tokens of its prompt. The methods may be called in any thread."""

    def __init__(self, tokenizer: Any, limits: Limits) -> None:
        self._tokenizer, self._limits = tokenizer, limits
        # The first call sets what calls change in the tokenizer, which threads must not do at the same time.
        tokenizer("")

    def of_completion(self, prompt: Any) -> list[list[int]]:
        """The prompts of a completion: one or several, each a text or token ids.

        Raises:
            HTTPException: 400 for too many characters, unknown tokens, and if the tokenizer fails.
        """
        one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [self._tokens(each) for each in ([prompt] if one else prompt)]

    def of_chat(self, request: ChatRequest) -> list[int]:
        """The prompt of a chat.

        Raises:
            HTTPException: 400 for messages that cannot be read, fields that the chat template does not know, too many
                characters, and if the tokenizer fails.
        """
        tools = None if request.tool_choice == "none" else request.tools
        try:
            template = self._tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise refusal("this checkpoint has no chat template; /v1/completions takes a plain prompt") from error
        messages = read_messages(request.messages or [], template)
        self._limits.check_characters(sum(len(message["content"]) for message in messages))
        extra = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            if "reasoning_effort" in extra:
                raise refusal("chat_template_kwargs must not set reasoning_effort too", param="chat_template_kwargs")
            extra["reasoning_effort"] = request.reasoning_effort
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

    def _tokens(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenize(prompt)
        self._limits.check_tokens("prompt", prompt)
        return prompt

    def _check_start(self, prompt: str) -> None:
        """Refuse a prompt that is much too long before all of it is tokenized, which may take gigabytes."""
        context = self._limits.context
        if context is None or len(prompt) <= START * context:
            return
        tokens = len(self._tokenizer(prompt[: START * context])["input_ids"])
        if tokens > 2 * context:
            raise refusal(
                f"the first {START * context} of the prompt's {len(prompt)} characters have {tokens} tokens, but "
                f"prompt and answer share a context of {context}",
                code="context_length_exceeded",
            )

    def _tokenize(self, prompt: str, **options: Any) -> list[int]:
        self._limits.check_characters(len(prompt))
        try:
            with reading("prompt", "one that the checkpoint's tokenizer reads"):
                self._check_start(prompt)
                return self._tokenizer(prompt, **options)["input_ids"]
        except CheckpointError as error:  # such as a regular expression that backtracks too far on this prompt
            raise refusal(f"the checkpoint's tokenizer cannot read this prompt: {error.got}") from error
