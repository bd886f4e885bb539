"""Chat: history, how replies end, and what does not change the history."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

from polymoe.engines.transformers import load
from polymoe.engines.transformers.chat import Chat
from polymoe.engines.transformers.generator import Generator
from polymoe.engines.transformers.replies import ReplyPart
from polymoe.errors import ArgumentError, CheckpointError
from support.packed_model import CHECKPOINT


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(*load(CHECKPOINT, device="cpu"))


def ignore(_: ReplyPart) -> None:
    pass


def test_a_conversation(generator: Generator) -> None:
    chat = Chat(generator, system="Add.", temperature=0)
    parts: list[ReplyPart] = []
    turn = chat.ask("123+456=", parts.append)
    assert (turn.reply.content, turn.ended, turn.tokens, turn.kept) == ("579", "stop", 4, True)
    assert [part.text for part in parts] == ["5", "7", "9"]
    assert chat.ask("7-9=", ignore).reply.content == "-2"
    said = [(message["role"], message["content"]) for message in chat.messages]
    assert said == [
        ("system", "Add."), ("user", "123+456="), ("assistant", "579"), ("user", "7-9="), ("assistant", "-2"),
    ]  # fmt: skip
    chat.clear()
    assert chat.messages == [{"role": "system", "content": "Add."}]


def test_the_template_sees_the_whole_conversation(generator: Generator, monkeypatch: Any) -> None:
    """With one that asks for the sum of the last answer and the last message."""
    template = "{{ messages[-2].content if messages | length > 1 else 100 }}+{{ messages[-1].content }}="
    monkeypatch.setattr(generator.tokenizer, "chat_template", template)
    chat = Chat(generator)
    assert [chat.ask(text, ignore).reply.content for text in ("23", "7", "200")] == ["123", "130", "330"]


def test_a_reply_is_stopped(generator: Generator) -> None:
    chat = Chat(generator)
    turn = chat.ask("123+456=", lambda _: chat.stop())
    assert (turn.reply.content, turn.ended, turn.tokens, turn.kept) == ("57", "interrupted", 2, True)
    assert chat.messages[-1]["content"] == "57"
    assert chat.ask("1+1=", ignore).ended == "stop"  # the next one is not


def test_an_interrupt_without_an_answer_leaves_no_trace(generator: Generator, monkeypatch: Any) -> None:
    chat = Chat(generator)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generator.model, "generate", interrupted)
    turn = chat.ask("123+456=", ignore)
    assert (turn.ended, turn.kept, chat.messages) == ("interrupted", False, [])


def test_replies_are_cut_off_at_the_limit(generator: Generator) -> None:
    assert Chat(generator, max_tokens=2).ask("123+456=", ignore).ended == "length"
    assert Chat(generator, max_tokens=4).ask("123+456=", ignore).ended == "stop"  # the end token is the last


def test_a_conversation_that_is_too_long(generator: Generator) -> None:
    chat = Chat(generator)
    with pytest.raises(ArgumentError, match="fewer tokens than the context's 256"):
        chat.ask("1+" * 200, ignore)
    assert chat.messages == []


def test_a_base_model_is_refused(generator: Generator, monkeypatch: Any) -> None:
    monkeypatch.setattr(generator.tokenizer, "chat_template", None)
    with pytest.raises(CheckpointError, match="expected a chat template"):
        Chat(generator)
    monkeypatch.setattr(generator.tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(CheckpointError, match="roles must alternate"):
        Chat(generator).ask("1", ignore)
