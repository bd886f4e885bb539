"""Decoder: decode steps of a model over a static cache, compiled, and replayed from one CUDA graph on a GPU.

``model.generate(..., cache_implementation="static")`` compiles the same step, but between two steps its loop prepares
inputs, masks and stopping criteria on the host. Here a step is one replay, so only the model's own time remains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from polymoe.errors import ArgumentError, PlanError, UnsupportedProblem
from polymoe.layer.experts import FusedExperts
from polymoe.problem.verdict import Accepted

_RECOMPILES = 64  # of the step in one process: each Decoder compiles it for its own model and batch


class Decoder:
    """Decodes a batch of sequences of one length, step by step.

    Args:
        model: of Transformers, in evaluation mode; it must support a static cache.
        max_tokens: maximum number of tokens in a sequence, including its prompt.
        compile: backend of ``torch.compile`` for the step, "inductor" or "aot_eager"; None does not compile.
        capture: replay steps from a CUDA graph; requires ``compile``.
        whole: require that the step compiles as one graph; else parts of it may run as they are.

    Raises:
        ArgumentError: for ``capture`` without ``compile``.
        UnsupportedProblem: for ``capture`` with experts whose backend reads tensors on the host; from :meth:`prefill`
            for more prompts than experts in host memory have slots for.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_tokens: int,
        compile: str | None = "inductor",
        capture: bool = True,
        whole: bool = True,
    ) -> None:
        if capture:
            # Models copy constants from the host in each forward pass. A capture forbids that; compiling removes it.
            if compile is None:
                raise ArgumentError("Decoder(compile=None)", expected="capture=False with it", got="capture=True")
            require_capturable(model)
        self.model, self.device, self.max_tokens, self.capture = model, model.device, max_tokens, capture
        self.cache = StaticCache(config=model.config, max_cache_len=max_tokens)
        self.length = 0
        self._run: Callable[[Tensor, Tensor], Tensor] = self._forward
        if compile is not None:
            # A captured step has one shape. Otherwise lengths that the cache keeps on the host change at every step.
            dynamic = False if capture else None
            self._run = torch.compile(self._forward, fullgraph=whole, dynamic=dynamic, backend=compile)
        self._token_B1 = self._position_B1 = self._logits_BV = torch.empty(0)
        self._replay: Callable[[], None] | None = None
        self._captured: tuple[int, ...] = ()  # addresses of all parameters and buffers
        self._packed: list[tuple[dict[str, Any], str, int]] = []  # and those of packed experts, which steps compare too

    @torch.inference_mode()
    def prefill(self, ids_BT: Tensor) -> Tensor:
        """Start new sequences.

        The first call compiles and captures the step, which takes a minute or two for a large model. So does the first
        one after the model's tensors have moved: a graph reads the addresses at which it was captured.

        Args:
            ids_BT: prompts of one length; the number of prompts is that of the first call.

        Returns:
            Logits of the last positions, ``[B, V]``.

        Raises:
            ArgumentError: for prompts that leave no room for another token, a different number of prompts than before,
                or a model that is on another device than before; with ``capture``, for prompts shorter than a sliding
                window.
        """
        batch, length = ids_BT.shape
        if length >= self.max_tokens:
            raise ArgumentError("prompt", expected=f"fewer than {self.max_tokens} tokens", got=str(length))
        if not self._token_B1.numel():
            self._token_B1 = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
            self._position_B1 = torch.zeros_like(self._token_B1)
        if batch != len(self._token_B1):
            raise ArgumentError("prompts", expected=str(len(self._token_B1)), got=str(batch), hint="use a new Decoder")
        if self.model.device != self.device:
            got = f"{self.model.device}"
            raise ArgumentError("model", expected=f"on {self.device}", got=got, hint="use a new Decoder")
        if self.capture and (self._replay is None or self._captured != _addresses(self.model)):
            self._prepare_step(ids_BT)
        return self._start(ids_BT)

    @torch.inference_mode()
    def step(self, token_B1: Tensor) -> Tensor:
        """Append one token to each sequence.

        Args:
            token_B1: int64, ``[B, 1]``.

        Returns:
            Logits of the new positions, ``[B, V]``. With ``capture``, the next step overwrites them.

        Raises:
            ArgumentError: if the sequences have ``max_tokens`` tokens already.
            PlanError: with ``capture``, if packed experts have moved since :meth:`prefill`.
        """
        if self.length >= self.max_tokens:
            raise ArgumentError("step", expected=f"at most {self.max_tokens} tokens", got="one more")
        self.length += 1
        self._token_B1.copy_(token_B1)
        if self._replay is None:
            self._logits_BV = self._advance()
        else:
            if any(buffers[name].data_ptr() != address for buffers, name, address in self._packed):
                expected = "packed experts where they were when the step was captured"
                raise PlanError("step", expected=expected, got="moved ones", hint="call prefill again")
            self._replay()
        return self._logits_BV

    def _start(self, ids_BT: Tensor) -> Tensor:
        self.cache.reset()
        self.length = ids_BT.shape[1]
        self._position_B1.fill_(self.length)
        out = self.model(input_ids=ids_BT, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def _prepare_step(self, ids_BT: Tensor) -> None:
        """Compile the step, run it twice at the same length, and capture it."""
        layers: list[Any] = self.cache.layers
        windows = [layer.max_cache_len for layer in layers if getattr(layer, "is_sliding", False)]
        if windows and ids_BT.shape[1] < max(windows):
            # Until a window is full, its mask depends on lengths on the host, which a capture makes constants.
            raise ArgumentError(
                "prompt",
                expected=f"at least {max(windows)} tokens, the model's sliding window",
                got=str(ids_BT.shape[1]),
                hint="capture=False takes prompts of any length",
            )
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES):
            for _ in range(2):
                self._start(ids_BT)
                self._advance()
            self._start(ids_BT)
            self._replay = self._capture_step()
        self._captured = _addresses(self.model)
        experts = [m._buffers for m in self.model.modules() if isinstance(m, FusedExperts)]
        self._packed = [
            (held, name, tensor.data_ptr()) for held in experts for name, tensor in held.items() if tensor is not None
        ]

    def _capture_step(self) -> Callable[[], None]:
        """Capture one step; the function that replays it, writing the logits to the same place."""
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


def _addresses(module: nn.Module) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers()))


def require_capturable(model: nn.Module) -> None:
    """Raise UnsupportedProblem if a backend of a model's experts cannot be captured in a CUDA graph."""
    for name, module in model.named_modules():
        if not isinstance(module, FusedExperts):
            continue
        selection = module.explain()
        planned = {step.backend for step in selection.require(name).steps}
        for candidate in selection.candidates:
            verdict = candidate.verdict
            if candidate.backend in planned and not (isinstance(verdict, Accepted) and verdict.capturable):
                raise UnsupportedProblem(
                    name,
                    expected="a backend that CUDA graphs can capture",
                    got=f"backend {candidate.backend!r}",
                    hint="load with backend='auto', or do without graphs",
                )
