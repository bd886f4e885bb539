"""Generator: answers to batches of prompts from a model in this process, for ``polymoe run``, ``chat`` and
measurements."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from polymoe.common.untrusted import reading
from polymoe.engines.transformers.chat_template import ChatTemplateError
from polymoe.engines.transformers.decode_graph import require_capturable
from polymoe.engines.transformers.loading import load, require_gpu
from polymoe.engines.transformers.model_config import context_length
from polymoe.engines.transformers.replies import read_reply
from polymoe.errors import ArgumentError
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts

_CACHE_STEP = 1024  # tokens


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt.

    Attributes:
        prompt: what was asked.
        text: the answer, without reasoning and tool calls where the model's chat format marks them.
        tokens: how many were generated.
        reasoning: what the model thought before it answered.
        tool_calls: each as ``name(arguments)``.
    """

    prompt: str
    text: str
    tokens: int
    reasoning: str = ""
    tool_calls: tuple[str, ...] = ()


@dataclass(slots=True)
class Generator:
    """A Transformers model and tokenizer that answer batches of prompts and count time and tokens.

    Attributes:
        model, tokenizer: as :func:`polymoe.engines.transformers.load` returns them.
        graphs: decode over a static cache, which Transformers compiles and captures in CUDA graphs on a GPU. The first
            batch of each size then takes a minute or more, and later tokens a fraction of their time.
        seconds, new_tokens: of all answers so far.
    """

    model: Any
    tokenizer: Any
    graphs: bool = False
    seconds: float = field(default=0.0, init=False)
    new_tokens: int = field(default=0, init=False)

    @classmethod
    def load(cls, path: str, *, graphs: bool = False, device: str = "auto", **options: Any) -> Generator:
        """Load a checkpoint with packed experts; ``options`` are others of :func:`polymoe.engines.transformers.load`.

        Raises:
            ArgumentError: for graphs without a GPU.
            UnsupportedProblem: for graphs with a backend that cannot be captured.
            PolymoeError: as :func:`polymoe.engines.transformers.load`.
        """
        if graphs:
            require_gpu("graphs", device, hint="do without graphs")
        model, tokenizer = load(path, device=device, **options)
        if graphs:
            require_capturable(model)
        return cls(model, tokenizer, graphs)

    def answer(self, prompts: Sequence[str], *, max_tokens: int, raw: bool = False) -> list[Answer]:
        """Answers to all ``prompts`` in one batch, in order.

        Args:
            prompts: texts; the tokenizer's chat template, if it has one, makes a conversation of each.
            max_tokens: maximum number of tokens in an answer.
            raw: do not apply the chat template.

        The checkpoint's generation config decides how tokens are chosen; by default the most probable one.

        Raises:
            ArgumentError: for a prompt that leaves no room for an answer in the model's context.
            CheckpointError: if the chat template fails.
        """
        chat = not raw and getattr(self.tokenizer, "chat_template", None) is not None
        texts = [self._chat(p) for p in prompts] if chat else list(prompts)
        inputs = self.encode(texts, chat=chat)
        new = self.generate(inputs, max_tokens=max_tokens)
        answers = []
        for prompt, prompt_ids, ids in zip(prompts, inputs["input_ids"].tolist(), new, strict=True):
            reply = read_reply(self.model, self.tokenizer, prompt_ids, ids, raw=not chat)
            answers.append(Answer(prompt, reply.content, len(ids), reply.reasoning, reply.tool_calls))
        return answers

    def encode(self, texts: Sequence[str], *, chat: bool) -> Any:
        """Token ids and attention mask of a batch, [B, T] on the model's device, padded on the left.

        Args:
            texts: prompts; a chat template writes special tokens itself.
            chat: whether a chat template has written them.

        Raises:
            ArgumentError: for a prompt that leaves no room for an answer in the model's context.
        """
        # Decoder-only models continue at the right end, so padding goes to the left. verbose=False suppresses the
        # warning for prompts that are too long, which raise an error below.
        if len(texts) > 1 and self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token  # any token: the attention mask hides it
        with reading(f"{self.model.name_or_path}: tokenizer", "one that encodes the prompts"):
            inputs = self.tokenizer(
                list(texts),
                return_tensors="pt",
                padding=len(texts) > 1,
                padding_side="left",
                add_special_tokens=not chat,
                verbose=False,
            ).to(self.model.device)
        length = inputs["input_ids"].shape[1]
        if length < 1:
            raise ArgumentError("prompt", expected="at least one token", got="none")
        if self.context is not None and length >= self.context:
            raise ArgumentError("prompt", expected=f"fewer tokens than the context's {self.context}", got=f"{length}")
        return inputs

    @property
    def context(self) -> int | None:
        """Most tokens of a prompt and its answer; None if the config does not say."""
        return context_length(self.model)

    def generate(self, inputs: Mapping[str, Any], *, max_tokens: int, **options: Any) -> list[list[int]]:
        """Tokens of each answer, without padding; time and tokens are counted.

        Args:
            inputs: of :meth:`encode`.
            max_tokens: maximum number of tokens in an answer.
            options: for Transformers' ``generate``.
        """
        length = inputs["input_ids"].shape[1]
        # Rounded up, since every cache size is compiled separately.
        longest = -(-(length + max_tokens) // _CACHE_STEP) * _CACHE_STEP
        static = {"cache_implementation": "static", "max_cache_len": longest} if self.graphs else {}
        start = time.perf_counter()
        with reading(self.model.name_or_path, "a model that generates"), torch.inference_mode():
            out = self.model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max_tokens,
                **static,
                **options,
            )
        self.seconds += time.perf_counter() - start
        pad = self.model.generation_config.pad_token_id
        new = [[id for id in row if id != pad] for row in out[:, length:].tolist()]
        self.new_tokens += sum(map(len, new))
        return new

    def _chat(self, prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        try:
            return self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        except ChatTemplateError as error:
            error.hint = "--raw does not apply it"
            raise

    def experts(self) -> list[FusedExperts]:
        """The packed experts of every layer."""
        return [m for m in self.model.modules() if isinstance(m, FusedExperts)]

    def speed(self) -> dict[str, Any]:
        """Time and tokens of all answers so far, size and layouts of the experts, backends, device: values for JSON. Of
        experts in host memory also slots and counts of all calls, summed over the layers."""
        layers = self.experts()
        offloaded = [layer for layer in layers if isinstance(layer, OffloadedExperts)]
        counts = [layer.cache_stats() for layer in offloaded]
        names = ("hits", "misses", "copied_bytes") if counts else ()
        return {
            "seconds": self.seconds,
            "new_tokens": self.new_tokens,
            "tokens_per_second": self.new_tokens / self.seconds if self.seconds else 0.0,
            "layouts": sorted({x.packed.layout for x in layers}),
            "stored_bytes": sum(x.problem.spec.local_bytes for x in layers),
            "packed_bytes": sum(x.packed.nbytes for x in layers),
            "dequantized_bytes": sum(x.problem.spec.dequantized_bytes for x in layers),
            "backends": sorted({step.backend for x in layers for step in x.explain().require().steps}),
            "device": str(self.model.device),
            **({"slots": max(layer.slots for layer in offloaded)} if offloaded else {}),
            **{name: sum(count[name] for count in counts) for name in names},
        }
