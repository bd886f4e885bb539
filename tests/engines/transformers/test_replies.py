"""Replies: parts of gpt-oss's format and of Transformers' own, streamed and whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel

pytest.importorskip("transformers")

from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.cli.serving.utils import parse_assistant_message

from polymoe.engines.transformers import load_tokenizer
from polymoe.engines.transformers.replies import ParsedReply, ReplyPart, ReplyReader, read_reply, set_response_template
from support.packed_model import CHECKPOINT

MARKS = [f"<|{name}|>" for name in ("start", "channel", "message", "end", "return", "call", "constrain", "im_end")]
QWEN3 = CHECKPOINT.parent / "sums-qwen3-fp8"
PROMPT = "<|start|>user<|message|>final?<|end|><|start|>assistant"


def tokenizer(chat_template: str) -> Any:
    """One token for each character, and one for each mark."""
    characters = {chr(i): i for i in range(128)}
    model = Tokenizer(WordLevel(characters, unk_token="?"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    model.decoder = decoders.Fuse()  # type: ignore[assignment]
    found = PreTrainedTokenizerFast(tokenizer_object=model, extra_special_tokens=MARKS)
    found.chat_template = chat_template
    set_response_template(found)
    return found


def ids(of: Any, text: str) -> list[int]:
    return of(text, add_special_tokens=False)["input_ids"]


GPT_OSS = tokenizer("{{ '<|channel|>' }}")
MODEL: Any = SimpleNamespace(config=SimpleNamespace(model_type="gpt_oss"))
THINK = "<|channel|>analysis<|message|>Hm: to=x.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THINK + "<|channel|>final<|message|>It is 3.<|return|>", ParsedReply("It is 3.", "Hm: to=x.")),
        (THINK + THINK + "<|channel|>final<|message|>3<|return|>", ParsedReply("3", "Hm: to=x.\n\nHm: to=x.")),
        (
            THINK + '<|channel|>commentary to=functions.sum <|constrain|>json<|message|>{"a": 1}<|call|>',
            ParsedReply("", "Hm: to=x.", ('sum({"a": 1})',)),
        ),
        (
            " to=functions.sum<|channel|>commentary json<|message|>no JSON<|call|>",
            ParsedReply("", "", ("sum(no JSON)",)),
        ),
        (
            "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant to=web.find code<|message|>{}<|call|>",
            ParsedReply("I add.", "", ("web.find({})",)),
        ),
        ("<|channel|>analysis<|message|>cut o", ParsedReply("", "cut o")),
        (
            "<|channel|>final<|message|>to=functions.f<|message|> is text",
            ParsedReply("to=functions.f<|message|> is text"),
        ),
        ("", ParsedReply("")),
    ],
)
def test_channels_of_gpt_oss(text: str, expected: ParsedReply) -> None:
    assert read_reply(MODEL, GPT_OSS, ids(GPT_OSS, PROMPT), ids(GPT_OSS, text)) == expected


def test_parts_arrive_with_their_tokens() -> None:
    reader = ReplyReader(MODEL, GPT_OSS, ids(GPT_OSS, PROMPT))
    assert reader.feed(ids(GPT_OSS, "<|channel|>final<|mess")) == []
    assert reader.feed(ids(GPT_OSS, "age|>A")) == [ReplyPart("content", "A")]
    assert reader.feed(ids(GPT_OSS, "<|re")) == []  # held back: it may become a mark
    assert reader.finish() == [ReplyPart("content", "<|re")]


def test_a_checkpoints_own_template_is_not_used(tmp_path: Path) -> None:
    """Its regular expressions could take for ever."""
    shutil.copytree(CHECKPOINT, tmp_path, dirs_exist_ok=True)
    own = {"start_anchor": "=", "fields": {"content": {"open_pattern": r"(\d|\d\d)+$"}}}
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"response_template": own}))
    assert load_tokenizer(tmp_path).response_template is None


def test_a_template_for_another_chat_format_is_not_used() -> None:
    """Transformers has one for Qwen3 with ChatML's marks, which the bundled model does not have."""
    config = AutoConfig.from_pretrained(QWEN3, trust_remote_code=False)
    found, model = load_tokenizer(QWEN3, config=config), SimpleNamespace(config=config)
    prompt, reply = ids(found, "498-971="), [*ids(found, "-473"), found.eos_token_id]
    assert parse_assistant_message(found, model, reply, prompt)[0] == "-473"  # type: ignore[arg-type]
    assert read_reply(model, found, prompt, reply) == ParsedReply("-473")
    found.chat_template = "<|im_start|>assistant\n"
    set_response_template(found, config)
    assert found.response_template is None


def test_without_a_template_all_text_is_content_without_marks() -> None:
    plain = tokenizer("plain")
    text = ids(plain, "<|channel|>a<|end|>b ")
    assert read_reply(MODEL, plain, ids(plain, "?"), text) == ParsedReply("ab")
    assert read_reply(MODEL, GPT_OSS, ids(GPT_OSS, "?"), text, raw=True) == ParsedReply("ab")


def test_the_end_is_no_text() -> None:
    """Also where Transformers' template for the model type knows other tokens than this tokenizer's."""
    model: Any = SimpleNamespace(
        config=SimpleNamespace(model_type="qwen3_moe"), generation_config=SimpleNamespace(eos_token_id=[5, 6])
    )
    plain = tokenizer("plain")
    plain.eos_token = "<|return|>"
    prompt = ids(plain, "1+1=")
    assert read_reply(model, plain, prompt, [*ids(plain, "2<|return|>"), 6]) == ParsedReply("2")


def test_a_tool_call_that_is_no_json_is_shown_as_generated(caplog: pytest.LogCaptureFixture) -> None:
    """Transformers' parser raises, and in a stream this would end the generation."""
    model: Any = SimpleNamespace(config=SimpleNamespace(model_type="qwen3_moe"))
    plain = tokenizer("plain")
    prompt = ids(plain, "<|im_start|>assistant\n")
    found = read_reply(model, plain, prompt, ids(plain, "A <tool_call>{</tool_call> and more"))
    assert found.content.startswith("A")
    assert "and more" in found.content
    assert "cannot be parsed" in caplog.text
    good = '<think>x</think>A<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert read_reply(model, plain, prompt, ids(plain, good)) == ParsedReply("A", "x", ("f({})",))
