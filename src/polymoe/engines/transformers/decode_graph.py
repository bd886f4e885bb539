"""Decoder: a model's decode step over a static cache, compiled, and on a GPU one CUDA graph.

``model.generate(..., cache_implementation="static")`` compiles the same step, and its loop prepares inputs, masks and
stopping on the host between any two. Here a step is one replay: what remains is what the model itself takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from polymoe.errors import ArgumentError, UnsupportedProblem
from polymoe.experts import FusedExperts
from polymoe.verdict import Accepted

__all__ = ["Decoder", "require_capturable"]

_COMPILED = 64  # decoders in one process: each is compiled for its own model and batch


class Decoder:
    """Decodes a batch of sequences of one length, step by step.

    Args:
        model: of Transformers, in evaluation mode, with a static cache.
        max_tokens: most tokens of a sequence, the prompt's with them.
        compile: backend of ``torch.compile`` for the step as one graph, "inductor" or "aot_eager"; None leaves the
            model as it is.
        capture: whether steps are replays of a CUDA graph; they have to be compiled.

    Raises:
        ArgumentError: to capture without compiling.
        UnsupportedProblem: to capture experts whose backend looks at tensors on the host.
    """

    def __init__(self, model: Any, *, max_tokens: int, compile: str | None = "inductor", capture: bool = True) -> None:
        if capture:
            # Models copy constants from the host as they go, which a capture forbids and a compiler takes out.
            if compile is None:
                raise ArgumentError("Decoder(compile=None)", expected="capture=False with it", got="capture=True")
            require_capturable(model)
        self.model, self.device, self.max_tokens, self.capture = model, model.device, max_tokens, capture
        self.cache = StaticCache(config=model.config, max_cache_len=max_tokens)
        self.length = 0
        self._run: Callable[[Tensor, Tensor], Tensor] = self._forward
        if compile is not None:
            # A captured step has one shape. Else lengths that the cache keeps on the host change from step to step.
            dynamic = False if capture else None
            self._run = torch.compile(self._forward, fullgraph=True, dynamic=dynamic, backend=compile)
        self._token_B1 = self._position_B1 = self._logits_BV = torch.empty(0)
        self._replay: Callable[[], None] | None = None

    @torch.inference_mode()
    def prefill(self, ids_BT: Tensor) -> Tensor:
        """Begin anew with these prompts: logits of their last positions, ``[B, V]``.

        The first call makes the step ready, which takes a minute or two for a large model: a batch has one size.

        Raises:
            ArgumentError: for prompts that leave no room for a token, or another number of them than before; to
                capture, for prompts shorter than a sliding window.
        """
        batch, length = ids_BT.shape
        if length >= self.max_tokens:
            raise ArgumentError("prompt", expected=f"fewer than {self.max_tokens} tokens", got=str(length))
        if not self._token_B1.numel():
            self._token_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
            self._position_B1 = torch.zeros_like(self._token_B1)
        if batch != len(self._token_B1):
            raise ArgumentError("prompts", expected=str(len(self._token_B1)), got=str(batch), hint="use a new Decoder")
        if self.capture and self._replay is None:
            self._make_ready(ids_BT)
        return self._begin(ids_BT)

    @torch.inference_mode()
    def step(self, token_B1: Tensor) -> Tensor:
        """One more token for each sequence: logits ``[B, V]`` that follow it.

        The result of a captured step is overwritten by the next one.
        """
        if self.length >= self.max_tokens:
            raise ArgumentError("step", expected=f"at most {self.max_tokens} tokens", got="one more")
        self.length += 1
        self._token_B1.copy_(token_B1)
        if self._replay is None:
            self._logits_BV = self._advance()
        else:
            self._replay()
        return self._logits_BV

    def _begin(self, ids_BT: Tensor) -> Tensor:
        self.cache.reset()
        self.length = ids_BT.shape[1]
        self._position_B1.fill_(self.length)
        out = self.model(input_ids=ids_BT, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def _make_ready(self, ids_BT: Tensor) -> None:
        """Compile the step, run it twice at one length, which is all that it is made for, and capture it."""
        layers: list[Any] = self.cache.layers
        windows = [layer.max_cache_len for layer in layers if getattr(layer, "is_sliding", False)]
        if windows and ids_BT.shape[1] < max(windows):
            # While a window fills, its mask depends on lengths on the host; a captured step has them as constants.
            raise ArgumentError(
                "prompt", expected=f"at least {max(windows)} tokens, the model's sliding window",
                got=str(ids_BT.shape[1]), hint="capture=False takes any",
            )  # fmt: skip
        with torch._dynamo.config.patch(recompile_limit=_COMPILED):
            for _ in range(2):
                self._begin(ids_BT)
                self._advance()
            self._begin(ids_BT)
            self._replay = self._captured()

    def _captured(self) -> Callable[[], None]:
        """Capture one step; what repeats it and writes its logits where they were."""
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), torch.cuda.graph(graph):
            self._logits_BV = self._advance()
        return graph.replay

    def _advance(self) -> Tensor:
        logits_BV = self._run(self._token_B1, self._position_B1)
        self._position_B1 += 1
        return logits_BV

    def _forward(self, token_B1: Tensor, position_B1: Tensor) -> Tensor:
        out = self.model(input_ids=token_B1, position_ids=position_B1, past_key_values=self.cache, use_cache=True)
        return out.logits[:, -1]


def require_capturable(model: nn.Module) -> None:
    """Check that calls of a model's packed experts can be captured in a CUDA graph.

    Raises:
        UnsupportedProblem: naming the backend that cannot.
    """
    for name, module in model.named_modules():
        if not isinstance(module, FusedExperts):
            continue
        selection = module.explain()
        planned = {step.backend for step in selection.require(name).steps}
        for candidate in selection.candidates:
            verdict = candidate.verdict
            if candidate.backend in planned and not (isinstance(verdict, Accepted) and verdict.capturable):
                raise UnsupportedProblem(
                    name, expected="a backend that CUDA graphs can capture", got=f"backend {candidate.backend!r}",
                    hint="load with backend='auto', or go without graphs",
                )  # fmt: skip
