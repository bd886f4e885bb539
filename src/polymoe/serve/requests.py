"""The fields of requests: every one of OpenAI's is supported, without effect, or refused by name.

A new field is an attribute of :class:`ChatRequest`, :class:`CompletionRequest` or both, an attribute of
:class:`~polymoe.serve.settings.GenerationSettings`, and its use in :mod:`polymoe.serve.sampling`. The description of a
field says which values are right: in the error for another one, and at ``/docs``.

API: https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from polymoe.serve.errors import refusal
from polymoe.serve.limits import MAX_ANSWERS, Limits
from polymoe.serve.settings import GenerationSettings

_TOP_LOGPROBS = 20


def _where(accepts: Callable[[Any], bool]) -> AfterValidator:
    """A check of what a type does not say."""

    def check(value: Any) -> Any:
        if value is not None and not accepts(value):
            raise ValueError
        return value

    return AfterValidator(check)


def _is_bias(value: dict[str, float]) -> bool:
    # An object's names are unique, and so must be the tokens: no leading zeros, no digits of other scripts.
    return (
        len(value) <= 1024
        and all(token.isascii() and token.isdecimal() and str(int(token[:20])) == token for token in value)
        and all(-100 <= bias <= 100 for bias in value.values())
    )


def _is_stop(value: str | list[str]) -> bool:
    texts = [value] if isinstance(value, str) else value
    return 1 <= len(texts) <= 16 and all(1 <= len(text) <= 256 for text in texts)


def _is_prompt(value: Any) -> bool:
    """One text or one list of token ids, or a list of either."""
    if isinstance(value, str):
        return True
    several = isinstance(value, list) and value and not _is_token(value[0])
    prompts = value if several else [value]
    return (
        len(prompts) <= MAX_ANSWERS
        and len({type(prompt) for prompt in prompts}) == 1
        and all(isinstance(p, str) or (isinstance(p, list) and bool(p) and all(map(_is_token, p))) for p in prompts)
    )


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_stream_options(value: dict[str, Any]) -> bool:
    return (
        value.keys() <= {"include_usage", "continuous_usage_stats", "include_obfuscation"}
        and all(isinstance(value.get(name) or False, bool) for name in ("include_usage", "continuous_usage_stats"))
        and not value.get("include_obfuscation")
    )


def _is_function(tool: Any) -> bool:
    if not isinstance(tool, dict) or tool.keys() != {"type", "function"} or tool["type"] != "function":
        return False
    function = tool["function"]
    return (
        isinstance(function, dict)
        and function.keys() <= {"name", "description", "parameters", "strict"}
        and isinstance(function.get("name"), str)
        and bool(function["name"])
        and isinstance(function.get("description") or "", str)
        and isinstance(function.get("parameters") or {}, dict)
        and not function.get("strict")
    )


_Omitted = Annotated[None, Field(description="omitted: this server does not support it")]
_Text = Annotated[str | None, Field(description="a string")]
_Object = Annotated[dict[str, Any] | None, Field(description="an object")]
_Tokens = Annotated[int | None, Field(ge=1, le=2**31 - 1, description="an integer from 1 to 2147483647")]
_Penalty = Annotated[float | None, Field(ge=-2, le=2, description="a number from -2 to 2")]
_Bool = Annotated[bool | None, Field(description="true or false")]
_NotTrue = Annotated[Literal[False] | None, Field(description="false or omitted: this server does not support it")]
_NumberOfTop = Annotated[int | None, Field(ge=0, le=_TOP_LOGPROBS, description=f"an integer from 0 to {_TOP_LOGPROBS}")]


class _Request(BaseModel):
    """The fields of both endpoints. Null means that a field is omitted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    frequency_penalty: _Penalty = None
    ignore_eos: _Bool = None  # not OpenAI's, but of vLLM and SGLang
    logit_bias: Annotated[dict[str, float] | None, _where(_is_bias)] = Field(
        None, description="an object of at most 1024 numbers from -100 to 100, named by token ids"
    )
    max_tokens: _Tokens = None
    min_p: float | None = Field(
        None, ge=0, le=1, description="a number from 0 to 1"
    )  # of vLLM and SGLang; the next too
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1, description="an integer from 0 to 2147483647")
    model: _Text = None
    n: int | None = Field(None, ge=1, le=MAX_ANSWERS, description=f"an integer from 1 to {MAX_ANSWERS}")
    presence_penalty: _Penalty = None
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="a number from 0.01 to 100")  # of vLLM
    seed: int | None = Field(None, ge=0, le=2**63 - 1, description="an integer of at least 0")
    stop: Annotated[str | list[str] | None, _where(_is_stop)] = Field(
        None, description="a string or a list of at most 16 strings, each of 1 to 256 characters"
    )
    stop_token_ids: Annotated[list[int] | None, _where(lambda v: len(v) <= 128 and all(map(_is_token, v)))] = Field(
        None, description="a list of at most 128 token ids"
    )  # of vLLM and SGLang
    stream: _Bool = None
    stream_options: Annotated[dict[str, Any] | None, _where(_is_stream_options)] = Field(
        None, description='an object in which "include_usage" and "continuous_usage_stats" may be true'
    )
    # Logits over less than 1e-5 may be more than a float32 can have.
    temperature: Annotated[float | None, _where(lambda v: v == 0 or v >= 1e-5)] = Field(
        None, ge=0, le=100, description="0, or a number from 0.00001 to 100"
    )
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="an integer of at least 1; 0 or -1 for all tokens")
    top_p: float | None = Field(None, gt=0, le=1, description="a number above 0, at most 1")
    user: _Text = None  # without effect


class ChatRequest(_Request):
    """The fields of ``/v1/chat/completions``."""

    audio: _Omitted = None
    chat_template_kwargs: _Object = None  # of vLLM and SGLang
    function_call: _Omitted = None
    functions: _Omitted = None
    logprobs: _Bool = None
    max_completion_tokens: _Tokens = None
    messages: list[Any] | None = Field(None, min_length=1, description="a list with at least one message")
    metadata: _Object = None  # without effect
    modalities: Annotated[list[str] | None, _where(lambda v: v == ["text"])] = Field(None, description='["text"]')
    moderation: _Omitted = None
    parallel_tool_calls: Literal[True] | None = Field(
        None, description="true or omitted: the model decides how many tools it calls"
    )
    prediction: _Object = None  # without effect on the answer; the next three neither
    prompt_cache_key: _Text = None
    prompt_cache_options: _Object = None
    prompt_cache_retention: _Text = None
    reasoning_effort: _Text = None
    response_format: Annotated[dict[str, Any] | None, _where(lambda v: v == {"type": "text"})] = Field(
        None,
        description='{"type": "text"}: this server does not constrain answers to JSON; "vllm serve" with polymoe\'s '
        "plug-in does",
    )
    safety_identifier: _Text = None  # without effect
    service_tier: Literal["auto", "default"] | None = Field(None, description='"auto" or "default"')
    store: _NotTrue = None
    tool_choice: Literal["auto", "none"] | None = Field(None, description='"auto" or "none"')
    tools: Annotated[list[Any] | None, _where(lambda v: bool(v) and all(map(_is_function, v)))] = Field(
        None,
        description='a list of {"type": "function", "function": {"name", "description", "parameters"}}, '
        "where strict is not true",
    )
    top_logprobs: _NumberOfTop = None
    verbosity: Literal["medium"] | None = Field(
        None, description='"medium" or omitted: this server does not support it'
    )
    web_search_options: _Omitted = None


class CompletionRequest(_Request):
    """The fields of ``/v1/completions``."""

    best_of: Annotated[int | None, _where(lambda v: v == 1)] = Field(
        None, description="1 or omitted: this server does not choose among answers"
    )
    echo: _NotTrue = None
    logprobs: _NumberOfTop = None
    prompt: Annotated[str | list[Any] | None, _where(_is_prompt)] = Field(
        None, description=f"a string, a list of token ids, or a list of at most {MAX_ANSWERS} of either"
    )
    suffix: _Omitted = None


Request = TypeVar("Request", ChatRequest, CompletionRequest)


def read_request(body: dict[str, Any], kind: type[Request]) -> Request:
    """A request whose fields are known and right.

    Raises:
        HTTPException: 400, naming a field that is wrong or unknown: it could change the answer.
    """
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(first["loc"][0])
    if name not in kind.model_fields:
        raise refusal(f"unknown parameter: {name[:80]!r}", param=name[:80], code="unknown_parameter")
    raise refusal(f"{name} must be {kind.model_fields[name].description}", param=name)


def settings_of(request: ChatRequest | CompletionRequest, limits: Limits) -> GenerationSettings:
    """The settings of a request, as :func:`read_request` returns it.

    Raises:
        HTTPException: 400 for fields that contradict each other or the limits.
    """
    lengths = {
        name: value
        for name in ("max_tokens", "max_completion_tokens")
        if (value := getattr(request, name, None)) is not None
    }
    for name, value in lengths.items():
        limits.check(name, value)
    if len(set(lengths.values())) > 1:
        raise refusal("max_tokens and max_completion_tokens must be the same, or one omitted", param="max_tokens")
    longest = next(iter(lengths.values()), None)
    if request.min_tokens is not None:
        limits.check("min_tokens", request.min_tokens)
        if longest is not None and request.min_tokens > longest:
            raise refusal(f"min_tokens must be at most {next(iter(lengths))}, which is {longest}", param="min_tokens")
    if request.stream_options is not None and not request.stream:
        raise refusal("stream_options must be omitted unless stream is true", param="stream_options")
    bias = {int(token): float(value) for token, value in (request.logit_bias or {}).items()}
    limits.check_tokens("logit_bias", bias)
    limits.check_tokens("stop_token_ids", request.stop_token_ids or ())
    stop, options = request.stop or (), request.stream_options or {}
    plain = (
        "min_tokens", "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
        "seed", "ignore_eos", "n", "stream",
    )  # fmt: skip
    return GenerationSettings(
        max_tokens=longest,
        logit_bias=bias,
        top_k=None if request.top_k is None else max(request.top_k, 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=_logprobs(request),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        **{name: value for name in plain if (value := getattr(request, name)) is not None},
    )


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise refusal("top_logprobs must be omitted unless logprobs is true", param="top_logprobs")
    return None
