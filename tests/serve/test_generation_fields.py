"""What each field does to answers, by OpenAI's own client: in streams and not, alone and in shared forward passes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from support.serving import MOST_WAYS, Running, batching_server, said, user

HOT = {"temperature": 50.0, "max_tokens": 5}
ON = {"ignore_eos": True}
BOTH_WAYS = pytest.mark.parametrize(("chat", "stream"), [(False, True), (True, False)])


@pytest.fixture(scope="module", params=["sequential", "continuous batching"])
def either(request: pytest.FixtureRequest) -> Iterator[Running]:
    if request.param == "sequential":
        yield request.getfixturevalue("server")
    else:
        with batching_server() as server:
            yield server


def choices(server: Running, *, chat: bool, stream: bool, prompt: Any = "498-971=", **fields: Any) -> list[Any]:
    """The choices of an answer; those of a stream as a whole one would have them."""
    client = server.client()
    if chat:
        got: Any = client.chat.completions.create(model="sums", messages=user(prompt), stream=stream, **fields)
    else:
        got = client.completions.create(model="sums", prompt=prompt, stream=stream, **fields)
    if not stream:
        return [
            whole(choice.index, [choice], lambda c: c.message.content if chat else c.text) for choice in got.choices
        ]
    parts: dict[int, list[Any]] = {}
    for chunk in got:
        for choice in chunk.choices:
            parts.setdefault(choice.index, []).append(choice)
    return [whole(i, parts[i], lambda c: c.delta.content if chat else c.text) for i in sorted(parts)]


def whole(index: int, parts: list[Any], text: Any) -> dict[str, Any]:
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    return {
        "index": index,
        "text": "".join(text(part) or "" for part in parts),
        "finish": parts[-1].finish_reason,
        "logprobs": logprobs,
    }


# --- What ends an answer ----------------------------------------------------------------------------------------------


@MOST_WAYS
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"stop": "7"}, ("-4", "stop", 3)),
        ({"stop": ["73", "x"]}, ("-4", "stop", 4)),
        ({"max_tokens": 2, "stop": "never"}, ("-4", "length", 2)),
        ({"extra_body": {"stop_token_ids": [10]}}, ("-4", "stop", 3)),  # 7
        ({"stop": "4", "extra_body": {"min_tokens": 3}}, ("-473", "stop", 5)),
        ({"max_tokens": 7, "extra_body": ON}, (None, "length", 7)),
    ],
    ids=str,
)
def test_what_ends_an_answer(
    either: Running, fields: dict[str, Any], expected: tuple[Any, ...], chat: bool, stream: bool
) -> None:
    text, finish, tokens = said(either, chat=chat, stream=stream, **fields)
    assert (expected[0] and text, finish, tokens) == expected


@BOTH_WAYS
def test_a_minimum_length(either: Running, chat: bool, stream: bool) -> None:
    text, _, tokens = said(either, "1+2=", chat=chat, stream=stream, extra_body={"min_tokens": 4}, max_tokens=4)
    assert (text[0], len(text), tokens) == ("3", 4, 4)


# --- Which tokens -----------------------------------------------------------------------------------------------------


@BOTH_WAYS
def test_a_seed_repeats_and_top_k_and_min_p_restrict(either: Running, chat: bool, stream: bool) -> None:
    def texts(count: int = 1, seed: int | None = None, **fields: Any) -> set[str]:
        more = {} if seed is None else {"seed": seed}
        got = [said(either, chat=chat, stream=stream, **HOT, **more, extra_body=ON | fields) for _ in range(count)]
        return {text for text, *_ in got}

    assert len(texts(3)) > 1
    seeded = texts(2, seed=5)
    assert len(seeded) == 1
    assert seeded != texts(seed=6)
    greedy = texts(temperature=0)
    assert texts(top_k=1) == texts(min_p=1) == texts(top_p=1e-6) == greedy


@BOTH_WAYS
def test_penalties_and_biases(either: Running, chat: bool, stream: bool) -> None:
    flat = {"logit_bias": {str(token): -100 for token in range(13)}, "temperature": 0, **ON}

    def spread(**fields: Any) -> int:
        text, *_ = said(either, chat=chat, stream=stream, max_tokens=12, extra_body=flat | fields)
        return max(Counter(text).values())

    rewarded = spread(frequency_penalty=-2, presence_penalty=-2)
    assert spread(frequency_penalty=2, presence_penalty=2) < rewarded == 12
    # The prompt has most of the digits of the answer.
    assert said(either, chat=chat, stream=stream, extra_body={"repetition_penalty": 100})[0] != "-473"
    bias = {"logit_bias": {"7": 100}}
    assert said(either, chat=chat, stream=stream, max_tokens=4, extra_body=bias) == ("4444", "length", 4)


# --- How many, and how probable ---------------------------------------------------------------------------------------


@MOST_WAYS
def test_several_answers(either: Running, chat: bool, stream: bool) -> None:
    found = choices(either, chat=chat, stream=stream, n=3, stop="3")
    assert [(c["index"], c["text"], c["finish"]) for c in found] == [(i, "-47", "stop") for i in range(3)]
    drawn = [choices(either, chat=chat, stream=stream, n=3, seed=2, **HOT, extra_body=ON) for _ in range(2)]
    texts = [[choice["text"] for choice in each] for each in drawn]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts(either: Running, stream: bool) -> None:
    sums = {"1+2=": "3", "498-971=": "-473", "512+499=": "1011"}
    found = choices(either, chat=False, stream=stream, prompt=list(sums), n=2)
    assert [choice["text"] for choice in found] == [answer for answer in sums.values() for _ in range(2)]
    tokens = [either.tokenizer(prompt)["input_ids"] for prompt in sums]
    assert [c["text"] for c in choices(either, chat=False, stream=stream, prompt=tokens)] == list(sums.values())
    assert [c["text"] for c in choices(either, chat=False, stream=stream, prompt=tokens[1])] == ["-473"]
    body: dict[str, Any] = {"prompt": list(sums), "n": 2, "stream": stream}
    answer = either.post("/v1/completions", body).text
    last = json.loads(answer.removesuffix("data: [DONE]\n\n").split("data: ")[-1])
    prompt, new = sum(map(len, tokens)), 2 * sum(len(text) + 1 for text in sums.values())
    assert last["usage"] == {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


@MOST_WAYS
def test_logprobs(either: Running, chat: bool, stream: bool) -> None:
    asked = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    [found] = choices(either, chat=chat, stream=stream, stop="3", temperature=0, **asked)
    tokens = ["-", "4", "7", "3"]
    if chat:
        entries = [entry for part in found["logprobs"] for entry in part.content]
        assert [entry.token for entry in entries] == tokens
        assert [bytes(entry.bytes).decode() for entry in entries] == tokens
        assert [entry.top_logprobs[0].logprob for entry in entries] == [entry.logprob for entry in entries]
        assert {len(entry.top_logprobs) for entry in entries} == {2}
        values = [entry.logprob for entry in entries]
    else:
        assert [token for part in found["logprobs"] for token in part.tokens] == tokens
        assert [offset for part in found["logprobs"] for offset in part.text_offset] == [0, 1, 2, 3]
        top = [each for part in found["logprobs"] for each in part.top_logprobs]
        values = [value for part in found["logprobs"] for value in part.token_logprobs]
        assert [each[token] for each, token in zip(top, tokens, strict=True)] == values
    assert all(-1 < value <= 0 for value in values)
    assert choices(either, chat=chat, stream=stream)[0]["logprobs"] == []
    bare = {"logprobs": True} if chat else {"logprobs": 0}
    assert choices(either, chat=chat, stream=stream, **bare)[0]["logprobs"]
