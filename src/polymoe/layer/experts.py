"""FusedExperts: a layer's experts, packed once, each call on the planned backend for its token count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polymoe.backends import BACKENDS
from polymoe.layer.load_check import check_layer
from polymoe.layer.packed_layer import PackedLayer
from polymoe.layer.runtime import LayerRuntime, PlanCache, PlanRequest
from polymoe.layouts import LAYOUTS, Packed
from polymoe.machine import Machine
from polymoe.planning.selection import Selection
from polymoe.problem import Problem, WeightOn
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.activations import Activation
from polymoe.problem.call import TORCH_DTYPES, CallArguments, device_name, dtype_name
from polymoe.problem.tensors import ExpertWeights


class FusedExperts(nn.Module):
    """The experts of one layer; ``experts(x_TH, topk_ids_TA, topk_weights_TA)`` is their weighted sum.

    Make one with :func:`polymoe.load_experts` from a checkpoint, or :meth:`from_weights`. The packed tensors are
    non-persistent buffers: they move with ``.to(device)``, and are not in ``state_dict()``. Where no backend of the new
    device reads their layout, they are packed again for it.
    """

    def __init__(self, problem: Problem, packed: Packed, choice: PlanRequest) -> None:
        super().__init__()
        self._layer = PackedLayer("experts", problem, choice, buffers=True)
        self._layer.hold(self, problem, packed, choice)

    @classmethod
    def from_weights(
        cls,
        weights: ExpertWeights,
        activation: Activation,
        *,
        top_k: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
        weight_on: WeightOn = "output",
        activations: ActivationQuantization | str = UNQUANTIZED,
        backend: str = "auto",
        role: str = "mixed",
        batch_invariant: bool = False,
        check: bool = True,
    ) -> FusedExperts:
        """Pack ``weights`` for ``device`` (None: the GPU if there is one).

        Args:
            weights: the experts, read one at a time.
            activation: the function between the projections.
            top_k: experts active per token, for planning; calls may use another.
            device: "cuda", "cuda:1", "cpu" or None.
            dtype: of x, for planning; calls may use another.
            weight_on: what the routing weight multiplies.
            activations: how inputs of the projections are quantized: a value, or a name in ``ACTIVATIONS``.
            backend: "auto", or the name of one, which is then used or refused.
            role: token counts to plan for: "decode", "prefill" or "mixed".
            batch_invariant: a token's result must be bitwise independent of the rest of the batch.
            check: compare the packed bytes of every expert with ``weights``, and the results of a few with the
                reference, before returning.

        Raises:
            UnsupportedProblem: if no backend, or not the named one, runs it here.
            FormatError: for codes, scales or biases that are not finite, or a matrix whose scales are all zero.
            VerificationError: if the packed experts are not, or do not compute, what ``weights`` say.
        """
        problem = Problem(
            spec=weights.spec,
            activation=activation,
            top_k=top_k,
            weight_on=weight_on,
            dtype=dtype_name(dtype),
            activations=ActivationQuantization.of(activations),
            batch_invariant=batch_invariant,
        )
        choice = PlanRequest(Machine.of(device_name(device)), role, backend, BACKENDS, LAYOUTS)
        return cls.pack(problem, weights, choice, device=device, check=check)

    @classmethod
    def pack(
        cls,
        problem: Problem,
        weights: ExpertWeights,
        choice: PlanRequest,
        *,
        device: torch.device | str | None = None,
        check: bool = True,
        where: str = "experts",
    ) -> FusedExperts:
        """As :meth:`from_weights`, with the problem and the tables to choose from given."""
        target = torch.device(device_name(device) or choice.machine.device.kind)
        self = cls(*choice.pack(problem, weights, target, where, check=check), choice)
        if check:
            self.check(weights, where=where)
        return self

    @property
    def problem(self) -> Problem:
        """What it runs: sizes, encodings, activation."""
        return self._layer.problem

    @property
    def packed(self) -> Packed:
        """The packed tensors, in their layout, wherever the module is now."""
        return self._layer.packed(self)

    @property
    def weights(self) -> ExpertWeights:
        """The experts as the checkpoint has them, read through the layout's inverse: nothing is kept twice.

        Raises:
            PlanError: after an :meth:`update` that failed.
        """
        return self._layer.weights(self)

    @property
    def device(self) -> torch.device:
        """Where the packed tensors are."""
        return next(self.buffers()).device

    def explain(self) -> Selection:
        """Every backend with its verdict and the plan by token count; ``print()`` it, or ``.to_dict()``."""
        return self._layer.selection

    def update(self, weights: ExpertWeights, *, check: bool = False, wait: bool = False) -> None:
        """Refill the packed tensors in place, at the same addresses, from experts of the same spec.

        Weights that cannot take the place of the present ones are refused before anything is changed. If something else
        fails, such as reading an expert or the check, the tensors hold a mixture. Every later call of this layer
        raises then, of its copies and of compiled graphs too and also after ``.to()``, until an update succeeds.
        Loading a state dict does not end that: packed tensors are not in it.

        ``weights`` may be read from this layer itself, such as its own experts in another order. They are packed into
        new tensors first, so that this takes the memory of another layer.

        A captured CUDA graph follows without another capture. It replays on whatever the tensors hold and cannot raise:
        do not replay it between an update that failed and one that succeeded.

        Args:
            weights: the new experts, read one at a time; of a checkpoint, the scales of 4-bit weights are read once
                before, of others everything.
            check: compare the packed bytes of every expert with ``weights``, and the results of a few with the
                reference, as when a layer is loaded.
            wait: change nothing before calls that other threads have begun have ended, on the GPU too. Without it,
                the result of such a call may mix old and new experts. Calls that begin later are refused either way.

        Raises:
            PlanError: if the spec differs, scales reach further than those that the plan was made for, or biases have
                another dtype or experts input scales that the present ones lack. Nothing is changed then.
            CheckpointError: if an expert has no input scales and ``problem.activations`` are static; nothing is changed
                then. Also if an expert cannot be read.
            FormatError: for codes, scales or biases that are not finite, or a matrix whose scales are all zero.
            VerificationError: if the check fails.
            UnsupportedProblem: while :func:`polymoe.refit` updates the model that the layer is part of; nothing is
                changed then. If it failed, only another one lets the layer run again.
        """
        self._layer.update(self, weights, check=check, wait=wait)

    def workspace_bytes(self, tokens: int, top_k: int | None = None) -> int:
        """Bytes of ``workspace`` that a call of ``tokens`` tokens needs; 0 where the planned backend takes none.

        Args:
            tokens: T.
            top_k: A, by default the model's.
        """
        step = self._runtime.step(TORCH_DTYPES[self.problem.dtype], tokens)
        return step.runner.workspace_bytes(tokens, top_k or self.problem.top_k, step.config)

    def forward(
        self,
        x_TH: Tensor,
        topk_ids_TA: Tensor,
        topk_weights_TA: Tensor,
        *,
        out: Tensor | None = None,
        workspace: Tensor | None = None,
        x_scales: Tensor | None = None,
        expert_map: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum over each token's experts: ``[T, H]`` in x's dtype.

        Args:
            x_TH: bfloat16, float16 or float32; float8_e4m3fn with ``x_scales``.
            topk_ids_TA: int32 or int64; -1, E and experts of other ranks contribute exactly 0.
            topk_weights_TA: float32, of the same shape; scaled by the router already. Any A of at least 1.
            out: where the result is written, and what is returned; contiguous, in x's dtype (in the planned dtype if x
                is quantized). By default it is allocated.
            workspace: uint8 [:meth:`workspace_bytes`] to use instead of allocating. Calls that share one must not run
                at the same time.
            x_scales: float32 [T, groups] that multiply x: x comes quantized, as ``problem.activations`` says.
            expert_map: int32 or int64 [E], E being ``problem.spec.experts``: the place in the packed layer of each
                expert, or -1 for those of other ranks. It replaces the range of experts that the layer was loaded for.

        The last three are for backends that take them. Under tensor or expert parallelism the result is this rank's
        partial sum; the caller reduces.

        Raises:
            ArgumentError: for a wrong shape, dtype, device, or (on a CPU) an id outside -1 to E or a place outside the
                packed layer; for an argument that the planned backend does not take.
            PlanError: after an :meth:`update` that failed; for more tokens than the plan of a named backend serves.
            UnsupportedProblem: where gradients are recorded, for an argument that requires one for which the planned
                backend, or a compiled graph, has no backward. ``reference`` has one for x and the routing weights;
                where inputs are quantized, at most for the routing weights.
        """
        call = CallArguments(x_TH, topk_ids_TA, topk_weights_TA, out, workspace, x_scales, expert_map)
        return self._layer.run(self, call)

    def check(self, weights: ExpertWeights | None = None, *, where: str = "experts") -> None:
        """Compare up to four experts with the float32 reference, on every backend of the plan.

        Args:
            weights: the experts to compare with: those that were packed, by default what is packed now.
            where: the layer's name for the message.

        Raises:
            VerificationError: naming backend, layer and error.
            PlanError: after an :meth:`update` that failed.
        """
        self._layer.require_complete()
        check_layer(self._runtime, self.problem, weights or self.weights, where)

    @property
    def _plans(self) -> PlanCache:
        return self._layer.plans

    @property
    def _runtime(self) -> LayerRuntime:
        return self._layer.runtime(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layer.runtime(self)  # of the copy's own tensors, for compiled graphs too

    def _apply(self, fn: Any, recurse: bool = True) -> FusedExperts:
        # Module.to(dtype), .half() and .float() cast what is floating point: only the device is taken from them.
        before, layer = self.device, self._layer
        probe = fn(torch.empty(1, dtype=torch.int8, device=before))
        device, request = probe.device, None
        if device != before:
            request = replace(self._plans.request, machine=Machine.of(device_name(device)))
            if self._plans.on(request).selection(self.problem.dtype).plan is None and not layer.incomplete:
                layer.hold(self, *request.pack(self.problem, self.weights, device, "experts", check=False), request)
                return self
        elif device.type == "cpu" and probe.is_shared():  # Module.share_memory
            for tensor in self.buffers():
                tensor.share_memory_()
        layer.move(self, device, request)
        return self

    def extra_repr(self) -> str:
        """The problem, and the packed size."""
        return f"{self.problem}, {self.packed.layout}, {self.packed.nbytes / 2**20:.1f} MiB"
