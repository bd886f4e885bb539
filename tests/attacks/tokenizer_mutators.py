"""Mutators of the tokenizer's files, the generation config and the chat template."""

from __future__ import annotations

import random
from typing import Any

from attacks.json_mutators import HOSTILE, Raw, dumps
from attacks.source import Edit, Mutation, Source

__all__ = ["TOKENIZER_MUTATORS"]

GENERATION = "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"

OF_GENERATION: tuple[tuple[str, str], ...] = tuple(
    (key, value)
    for key, values in {
        "eos_token_id": ("-1", "16", "1e30", "[]", '"x"', "[[1]]", "[-5]", "9223372036854775808", "null"),
        "pad_token_id": ("-1", "9223372036854775808", '"x"', "[0]", "1.5"),
        "bos_token_id": ("-7", '"x"'),
        "max_new_tokens": ("-1", "0", "1000000000", '"x"'),
        "max_length": ("1000000000", "-1"),
        "min_new_tokens": ("1000000", "-1"),
        "temperature": ("0", "-1", "NaN", "1e-45", '"x"', "1e400"),
        "top_k": ("-1", "1e30", '"x"'),
        "top_p": ("-1", "2", '"x"'),
        "num_beams": ("1000000", "0", "-1", "4"),
        "num_return_sequences": ("1000000", "3", "0"),
        "do_sample": ("true", '"x"'),
        "repetition_penalty": ("0", "-1", "NaN", '"x"'),
        "bad_words_ids": ("[[]]", "[[99999]]", '"x"'),
        "forced_eos_token_id": ("99999", "-1"),
        "suppress_tokens": ("[99999999]", "[-1]", '"x"'),
        "sequence_bias": ('{"a": 1}', "[[[1], 1e400]]"),
        "cache_implementation": ('"static"', '"quantized"', '"offloaded"', '"x"'),
        "use_cache": ("false",),
        "assistant_model": ('"x"',),
        "prompt_lookup_num_tokens": ("3", "-1"),
        "custom_generate": ('"."', '"org/repo"'),
        "watermarking_config": ("{}", '{"a": 1}'),
        "compile_config": ("{}", '{"backend": "x"}'),
        "stop_strings": ('["x"]', "1", '[""]', '"' + "a" * 5000 + '"'),
        "max_time": ("0", "-1", '"x"'),
        "guidance_scale": ("2", "0", '"x"'),
        "dola_layers": ('"high"',),
        "penalty_alpha": ("0.5",),
        "length_penalty": ('"x"',),
        "return_dict_in_generate": ("true",),
        "output_scores": ("true",),
        "transformers_version": ("1", "null", '"x"'),
        "token_healing": ("true",),
    }.items()
    for value in values
)
TEMPLATES: tuple[tuple[str, str], ...] = (
    ("endless loops", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
    ("a huge range", "{% for i in range(10 ** 12) %}x{% endfor %}"),
    ("a huge string", "{{ 'a' * (10 ** 11) }}"),
    ("a huge padding", "{{ 'a' | center(10 ** 11) }}"),
    (
        "a doubling string",
        "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    ),
    ("a huge power", "{{ 9 ** 9 ** 9 ** 9 }}"),
    ("recursion", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    ("a long answer", "{% for i in range(90000) %}1+1={% endfor %}"),
    ("a file included", "{% include '/etc/passwd' %}"),
    ("an attribute of a class", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    ("code", "{{ cycler.__init__.__globals__.os.system('touch canary') }}"),
    ("code by joiner", "{{ lipsum.__globals__['os'].popen('touch canary').read() }}"),
    ("a format string", "{{ '%999999999d' | format(1) }}"),
    ("a format method", "{{ '{:>9999999999}'.format(1) }}"),
    ("an exception", "{{ raise_exception('no') }}"),
    ("a division by zero", "{{ 1 / 0 }}"),
    ("an unknown name", "{{ nothing.at.all }}"),
    ("an unknown filter", "{{ 'x' | nothing }}"),
    ("a syntax error", "{% if %}"),
    ("nested parentheses", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"),
    ("many blocks", "{% if true %}" * 3000 + "{% endif %}" * 3000),
    ("nothing", ""),
    ("only white space", "   \n"),
    ("a number", "{{ 3 }}"),
    ("a surrogate", "{{ '\\ud800' }}"),
    ("invalid bytes", "\udcff\udcfe"),
    ("special tokens", "<|return|><|endoftext|>"),
    ("a character outside the vocabulary", "\U0001f600 hello"),
)  # fmt: skip


def generation_key(source: Source, rng: random.Random) -> Mutation:
    """generation_config.json gets a key."""
    tree = source.json(GENERATION)
    key, value = (
        rng.choice(OF_GENERATION) if rng.random() < 0.8 else (rng.choice(OF_GENERATION)[0], rng.choice(HOSTILE))
    )
    tree[key] = Raw(value)
    return Mutation("generation_key", f"{GENERATION}: {key} = {value[:40]}", (Edit(GENERATION, dumps(tree)),))


def vocabulary(source: Source, rng: random.Random) -> Mutation:
    """Tokens and model disagree about the vocabulary."""
    tree = source.json(TOKENIZER)
    vocabulary = tree["model"]["vocab"]
    kind = rng.choice(("ids + 1000", "an id of 2**31", "negative ids", "empty", "all the same", "added tokens", "unk"))
    if kind == "ids + 1000":
        tree["model"]["vocab"] = {token: i + 1000 for token, i in vocabulary.items()}
    elif kind == "an id of 2**31":
        vocabulary[rng.choice(sorted(vocabulary))] = 2**31
    elif kind == "negative ids":
        tree["model"]["vocab"] = {token: -i - 1 for token, i in vocabulary.items()}
    elif kind == "empty":
        tree["model"]["vocab"] = {}
    elif kind == "all the same":
        tree["model"]["vocab"] = dict.fromkeys(vocabulary, 3)
    elif kind == "added tokens":
        tree["added_tokens"] = [
            {**tree["added_tokens"][0], "id": 1000 + i, "content": d} for i, d in enumerate("0123+=")
        ]
    else:
        tree["model"]["unk_token"] = "nothing"
    return Mutation("vocabulary", f"{TOKENIZER}: {kind}", (Edit(TOKENIZER, dumps(tree)),))


def regular_expression(source: Source, rng: random.Random) -> Mutation:
    """The tokenizer normalizes or splits by an expression that is hard to match."""
    tree = source.json(TOKENIZER)
    expression = rng.choice(
        ("(\\d+)+$", "(\\d|\\d\\d)+$", "(\\d+)+$|.", "((\\d*)*)*x", "(", "", "(?<=(", "\\p{", "(.|.)*x", "(?:" * 500)
    )
    step = {"type": "Replace", "pattern": {"Regex": expression}, "content": rng.choice(("", "x" * 10_000))}
    if rng.random() < 0.5:
        tree["normalizer"] = step
    else:
        tree["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": expression},
            "behavior": "Isolated",
            "invert": False,
        }
    return Mutation("regular_expression", f"{TOKENIZER}: {expression[:40]!r}", (Edit(TOKENIZER, dumps(tree)),))


def tokenizer_key(source: Source, rng: random.Random) -> Mutation:
    """tokenizer_config.json gets a key."""
    tree: dict[str, Any] = source.json(TOKENIZER_CONFIG)
    key, value = rng.choice((
        ("tokenizer_class", '"LlamaTokenizer"'), ("tokenizer_class", '"BertTokenizer"'), ("tokenizer_class", "3"),
        ("tokenizer_class", '"../x"'), ("tokenizer_class", '"os"'), ("model_max_length", "-1"),
        ("model_max_length", '"x"'), ("model_max_length", "1e400"), ("chat_template", "3"), ("chat_template", "{}"),
        ("chat_template", '[{"name": "default", "template": 3}]'),
        ("chat_template", '[{"name": "x", "template": "y"}]'),
        ("eos_token", "3"), ("eos_token", "[]"), ("eos_token", '{"content": 3}'), ("pad_token", "null"),
        ("eos_token", '{"__type": "AddedToken", "content": "<|return|>", "lstrip": "x"}'), ("pad_token", '"new"'),
        ("added_tokens_decoder", '{"x": {}}'), ("added_tokens_decoder", '{"0": 3}'),
        ("added_tokens_decoder", '{"99999999999": {"content": "1", "special": false}}'),
        ("additional_special_tokens", "3"), ("additional_special_tokens", '["1", "2"]'), ("extra_special_tokens", "3"),
        ("tokenizer_file", '"/etc/passwd"'), ("vocab_file", '"/etc/passwd"'), ("vocab_file", '"/dev/zero"'),
        ("tokenizer_object", "3"), ("gguf_file", '"x"'), ("name_or_path", '"/etc"'), ("from_slow", "true"),
        ("use_fast", "false"), ("backend", '"x"'), ("backend", '"mistral"'), ("padding_side", '"x"'),
        ("truncation_side", "3"), ("model_input_names", "3"), ("model_input_names", '["x"]'),
        ("split_special_tokens", "3"),
        ("response_template", '{"fields": {"content": {"open_pattern": "(\\\\d+)+$"}}}'), ("response_template", "3"),
        ("processor_class", '"x"'), ("is_local", "3"), ("_from_auto", "3"), ("trust_remote_code", "true"),
    ))  # fmt: skip
    tree[key] = Raw(value)
    return Mutation("tokenizer_key", f"{TOKENIZER_CONFIG}: {key} = {value}", (Edit(TOKENIZER_CONFIG, dumps(tree)),))


def chat_template(source: Source, rng: random.Random) -> Mutation:
    """A chat template that works against the one who renders it."""
    name, text = rng.choice(TEMPLATES)
    content = text.encode("utf-8", "surrogateescape")
    return Mutation("chat_template", f"{TEMPLATE}: {name}", (Edit(TEMPLATE, content),))


TOKENIZER_MUTATORS = (
    (4, generation_key),
    (2, vocabulary),
    (1, regular_expression),
    (3, tokenizer_key),
    (3, chat_template),
)
"""Each with its weight."""
