"""Replies: the answer, the reasoning and the tool calls in generated tokens.

Transformers' response parser reads them, as in its own server. It follows a declarative template: the tokenizer's own
``response_template``, or Transformers' for the model type. :func:`add_response_template` has one more, for gpt-oss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Literal

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    response_events_to_chunks,
)

__all__ = ["ParsedReply", "ReplyPart", "ReplyReader", "add_response_template", "read_reply"]

log = getLogger("polymoe")

_HARMONY: Mapping[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "reasoning_content": {
            "open_pattern": r"<\|channel\|>analysis\s*<\|message\|>",
            "close": ["<|end|>", "<|return|>", "<|call|>"],
            "repeats": True,
            "join": "\n",
        },
        # The arguments stay text, which is all that clients of OpenAI's API get. What is not JSON passes.
        "tool_calls": {
            "open_pattern": r"to=(?:functions\.)?(?P<name>[^\s<]+)[^<]*"
            r"(?:<\|(?:channel|constrain)\|>[^<]*)*<\|message\|>",
            "close": ["<|call|>", "<|end|>", "<|return|>"],
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        # A commentary without a recipient is what the model tells the user before it calls tools.
        "content": {
            "open_pattern": r"<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>[^<]*)?<\|message\|>",
            "close": ["<|return|>", "<|end|>", "<|call|>"],
            "repeats": True,
            "join": "\n\n",
        },
    },
}
"""Of gpt-oss. Format: https://cookbook.openai.com/articles/openai-harmony"""


def add_response_template(tokenizer: Any) -> None:
    """Give a tokenizer that has no ``response_template`` the one of its chat format, if polymoe knows it."""
    template = getattr(tokenizer, "chat_template", None)
    if getattr(tokenizer, "response_template", None) is None and "<|channel|>" in str(template):
        tokenizer.response_template = _HARMONY


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """A piece of a reply, in the order in which the model generates them.

    Attributes:
        kind: what it belongs to.
        text: its text; of a tool call ``name(arguments)``.
    """

    kind: Literal["content", "reasoning", "tool_call"]
    text: str


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A whole reply.

    Attributes:
        content: the answer.
        reasoning: what the model thought before it; empty where nothing is marked as such.
        tool_calls: each as ``name(arguments)``.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[str, ...] = ()

    @classmethod
    def of_parts(cls, parts: Iterable[ReplyPart]) -> ParsedReply:
        """Join the parts of one reply."""
        found = list(parts)
        text = {kind: "".join(p.text for p in found if p.kind == kind) for kind in ("content", "reasoning")}
        calls = tuple(p.text for p in found if p.kind == "tool_call")
        return cls(text["content"].strip(), text["reasoning"].strip(), calls)


class ReplyReader:
    """From the tokens of one reply, as they are generated, to its parts.

    Args:
        model, tokenizer: as :func:`polymoe.engines.transformers.load` returns them.
        prompt_ids: tokens of the prompt, which may begin the reply, for example with ``<think>``.
        raw: all text is content.
    """

    def __init__(self, model: Any, tokenizer: Any, prompt_ids: Sequence[int], *, raw: bool = False) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        self._parser = None if raw else build_response_parser(tokenizer, model, list(prompt_ids))
        self._closed: set[str] = set()
        # The end is not text, and a template that Transformers has for the model type may not know this tokenizer's.
        config = getattr(model, "generation_config", None)
        ends = getattr(config, "eos_token_id", None)
        self._ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
        # The parser needs special tokens, which mark the parts.
        self._stream = DecodeStream(skip_special_tokens=self._parser is None)

    def feed(self, ids: Iterable[int]) -> list[ReplyPart]:
        """The parts that are complete with these tokens. Text may be held back until more of it is known."""
        parts: list[ReplyPart] = []
        for token in ids:
            if token in self._ends:
                continue
            text = self._stream.step(self._tokenizer, int(token))
            if not text:
                continue
            if self._parser is not None:
                parts += self._parsed(text)
            else:
                parts.append(ReplyPart("content", text))
        return parts

    def finish(self) -> list[ReplyPart]:
        """The parts that were held back until the end."""
        return [] if self._parser is None else self._parsed(None)

    def _parsed(self, text: str | None) -> list[ReplyPart]:
        """Parts of further text, or of the end."""
        assert self._parser is not None
        try:
            events = self._parser.finalize()[1] if text is None else self._parser.feed(text)
            return [part for event in events for part in self._parts(event)]
        except Exception as error:  # of a tool call that is not JSON, or is cut off; the rest is shown unchanged
            log.warning("the reply cannot be parsed (%s); the rest is shown as generated", str(error).split("\n")[0])
            self._parser = None
            return [] if text is None else [ReplyPart("content", text)]

    def _parts(self, event: dict[str, Any]) -> list[ReplyPart]:
        parts: list[ReplyPart] = []
        for chunk in response_events_to_chunks([event]):
            if isinstance(chunk, ToolCall):
                parts.append(ReplyPart("tool_call", f"{chunk.name}({chunk.arguments})"))
            else:
                parts.append(ReplyPart("reasoning" if isinstance(chunk, ReasoningText) else "content", str(chunk)))
        if event["type"] == "region_close":
            self._closed.add(event["field"])
        elif parts and event["field"] in self._closed:  # the same kind again: a paragraph of its own
            self._closed.remove(event["field"])
            return [ReplyPart(parts[0].kind, "\n\n"), *parts]
        return parts


def read_reply(
    model: Any, tokenizer: Any, prompt_ids: Sequence[int], reply_ids: Sequence[int], *, raw: bool = False
) -> ParsedReply:
    """A whole reply, from its tokens; the arguments are those of :class:`ReplyReader`."""
    reader = ReplyReader(model, tokenizer, prompt_ids, raw=raw)
    return ParsedReply.of_parts([*reader.feed(reply_ids), *reader.finish()])
