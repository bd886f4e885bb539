"""Replies: the answer, the reasoning and the tool calls in generated tokens.

Transformers' response parser reads them, as in its own server. It follows a declarative template: Transformers' own for
the model type, or the one that :func:`set_response_template` has for gpt-oss. A checkpoint's template is not used:
nothing bounds the time to match its regular expressions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from types import SimpleNamespace
from typing import Any, Literal

from tokenizers.decoders import DecodeStream
from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    get_response_template,
    response_events_to_chunks,
)

log = getLogger("polymoe")

_TAKES_TOOLS = "tools" in inspect.signature(build_response_parser).parameters  # not in Transformers 5.17

_HARMONY: Mapping[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {  # so called by all versions of Transformers that polymoe takes
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


def set_response_template(tokenizer: Any, config: Any = None) -> None:
    """Replace a tokenizer's ``response_template`` by the one of its chat format.

    That is polymoe's for gpt-oss, or None, with which Transformers takes its own for the model type. Where that is for
    another chat format than the checkpoint's, all text up to the end token is the answer.
    """
    format = str(getattr(tokenizer, "chat_template", None))
    tokenizer.response_template = _HARMONY if "<|channel|>" in format else None
    if tokenizer.response_template is not None or config is None:
        return
    model: Any = SimpleNamespace(config=config)
    usual = get_response_template(tokenizer, model)
    anchors = [] if usual is None else usual.get("start_anchor", [])
    anchors = [anchors] if isinstance(anchors, str) else anchors
    if anchors and not any(anchor.strip() in format for anchor in anchors):
        close = {} if tokenizer.eos_token is None else {"close": tokenizer.eos_token}
        tokenizer.response_template = {
            "defaults": {"role": "assistant"}, "start_anchor_pattern": r"\Z", "fields": {"content": close},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """A piece of a reply, in the order in which the model generates them.

    Attributes:
        kind: what it belongs to.
        text: its text; of a tool call ``name(arguments)``.
        name, arguments: of a tool call; the arguments are JSON, if the model keeps to it.
    """

    kind: Literal["content", "reasoning", "tool_call"]
    text: str
    name: str = ""
    arguments: str = ""


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
        tools: that the prompt has, as a chat template takes them. Their parameters have types, by which Transformers
            reads arguments that are not JSON.
    """

    def __init__(
        self, model: Any, tokenizer: Any, prompt_ids: Sequence[int], *, raw: bool = False, tools: Any = None
    ) -> None:
        self._tokenizer = tokenizer.backend_tokenizer
        typed = {"tools": tools} if tools and _TAKES_TOOLS else {}
        self._parser = None if raw else build_response_parser(tokenizer, model, list(prompt_ids), **typed)
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
                text = f"{chunk.name}({chunk.arguments})"
                parts.append(ReplyPart("tool_call", text, chunk.name, chunk.arguments))
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
