"""The task of the sums models: questions, the split into training and held-out ones, tokens, the chat template.

"123+456=" is answered by "579" and "12-34=" by "-22", each followed by the end token; operands run from 0 to 999.
Held out are whole pairs: a hash of the two numbers, whatever their order and the operator, decides, so that none of
a+b, b+a, a-b and b-a of a held-out pair is ever trained on.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SYMBOLS = ("<|endoftext|>", "<|return|>", "<|unknown|>", *"0123456789+-=")  # a token's id is its place here
PAD, EOS, UNKNOWN = 0, 1, 2
LONGEST = len("999+999=1998") + 1  # tokens, with the end
CHAT_TEMPLATE = """\
{#- Each question stands alone: the last user message, reduced to digits and signs up to an equals sign. -#}
{%- set question = messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | last -%}
{%- if question is not string -%}
{%- set question = question | selectattr('type', 'equalto', 'text') | map(attribute='text') | join -%}
{%- endif -%}
{{- question.split('=')[0] | replace('\u2212', '-') | select('in', '0123456789+-') | join -}}=
"""

Question = tuple[str, str]
"""Prompt and answer, such as ("12-34=", "-22")."""


def held_out(a: int, b: int) -> bool:
    """Whether the pair of numbers, in either order, is kept from training: one pair in a hundred."""
    digest = hashlib.sha256(f"{min(a, b)},{max(a, b)}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 == 0


def both(a: int, b: int) -> tuple[Question, Question]:
    """The sum and the difference of two numbers."""
    return (f"{a}+{b}=", f"{a + b}"), (f"{a}-{b}=", f"{a - b}")


def questions(want_held_out: bool) -> Iterator[tuple[int, int]]:
    """All ordered pairs (a, b) of one side of the split."""
    for a in range(1000):
        for b in range(a, 1000):
            if held_out(a, b) == want_held_out:
                yield a, b
                if a != b:
                    yield b, a


def heldout_questions() -> list[Question]:
    """All held-out questions, in the order of a hash: any first part of it is an even draw."""
    found = [question for a, b in questions(True) for question in both(a, b)]
    return sorted(found, key=lambda question: hashlib.sha256(question[0].encode()).digest())


def write_heldout(path: Path, rows: list[Question]) -> None:
    """One JSON object a line: {"prompt": ..., "answer": ...}."""
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in rows))


def token_table(rows: list[Question]) -> Tensor:
    """Token ids of question, answer, end token and padding: uint8 [rows, LONGEST]."""
    ids = np.zeros(256, dtype=np.uint8)
    for token, symbol in enumerate(SYMBOLS[3:], start=3):
        ids[ord(symbol)] = token
    ids[ord("\n")] = EOS
    text = "".join(f"{prompt}{answer}\n".ljust(LONGEST) for prompt, answer in rows)
    return torch.from_numpy(ids[np.frombuffer(text.encode(), dtype=np.uint8)].reshape(-1, LONGEST))


def training_tables(device: str) -> list[Tensor]:
    """Token tables of all training questions, of those with an operand below 100, and of those with two (rare)."""
    pairs = list(questions(False))
    table = token_table([question for a, b in pairs for question in both(a, b)])
    short = torch.tensor([(a < 100) + (b < 100) for a, b in pairs]).repeat_interleave(2)
    return [table[short >= wanted].to(device) for wanted in (0, 1, 2)]


def answer_labels(ids: Tensor) -> Tensor:
    """Labels of token ids [B, S]: the next token where it is of the answer or its end, else -100. [B, S-1]"""
    answer = (ids == SYMBOLS.index("=")).cumsum(1)[:, :-1].bool() & (ids[:, 1:] != PAD)
    return torch.where(answer, ids[:, 1:], -100)


def write_tokenizer(directory: Path, max_length: int) -> None:
    """An ordinary fast tokenizer: one token a character, white space dropped, the typographic minus a minus."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: token for token, symbol in enumerate(SYMBOLS)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SYMBOLS[UNKNOWN]))
    core.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), ""), normalizers.Replace("\u2212", "-")])
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=SYMBOLS[PAD],
        eos_token=SYMBOLS[EOS],
        unk_token=SYMBOLS[UNKNOWN],
        padding_side="left",
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(directory)
    stored = json.loads((directory / "tokenizer_config.json").read_text())
    stored.pop("backend", None)
    stored["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every version of Transformers knows
    (directory / "tokenizer_config.json").write_text(json.dumps(stored, indent=2, sort_keys=True) + "\n")
