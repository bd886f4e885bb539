"""FusedExperts: a layer's experts, packed once, each call on the planned backend for its token count."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymoe.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.activations import Activation
from polymoe.backends import BACKENDS
from polymoe.checkpoint import Checkpoint
from polymoe.errors import ArgumentError, PlanError
from polymoe.layouts import LAYOUTS, Layout, Packed
from polymoe.load_check import check_layer, require_input_scales
from polymoe.machine import Machine
from polymoe.planning.selection import Selection
from polymoe.problem import Dtype, Problem, WeightOn
from polymoe.runtime import DTYPES, TORCH_DTYPES, LayerRuntime, PlanCache, PlanRequest, check_call
from polymoe.scale_range import ScaleRange, measure_scales
from polymoe.tensors import ExpertWeights

__all__ = ["FusedExperts", "load_experts", "resolve_activations"]

log = logging.getLogger("polymoe")


class FusedExperts(nn.Module):
    """The experts of one layer; ``experts(x_TH, topk_ids_TA, topk_weights_TA)`` is their weighted sum.

    Make one with :func:`load_experts` from a checkpoint, or :meth:`from_weights`. The packed tensors are non-persistent
    buffers: they move with ``.to(device)``, and are not in ``state_dict()``.
    """

    def __init__(self, problem: Problem, packed: Packed, choice: PlanRequest) -> None:
        super().__init__()
        self._plans = PlanCache.of(problem, choice, packed.layout, tuple(packed.tensors))
        self._bound: LayerRuntime | None = None
        self._names = {name: f"packed_{name.replace('.', '_')}" for name in packed.tensors}
        for name, tensor in packed.tensors.items():
            self.register_buffer(self._names[name], tensor, persistent=False)

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
            check: compare a few experts with the reference before returning.

        Raises:
            UnsupportedProblem: if no backend, or not the named one, runs it here.
            VerificationError: if the packed experts do not compute what ``weights`` say.
        """
        problem = Problem(
            spec=weights.spec,
            activation=activation,
            top_k=top_k,
            weight_on=weight_on,
            dtype=_dtype(dtype),
            activations=ActivationQuantization.of(activations),
            batch_invariant=batch_invariant,
        )
        choice = PlanRequest(Machine.of(_device_name(device)), role, backend, BACKENDS, LAYOUTS)
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
        target = torch.device(device or choice.machine.device.kind)
        self = cls(*choice.pack(problem, weights, target, where), choice)
        if problem.activations.static:
            require_input_scales(self.weights, where)
        if check:
            self.check(weights, where=where)
        return self

    @property
    def problem(self) -> Problem:
        """What it runs: sizes, encodings, activation."""
        return self._plans.problem

    @property
    def packed(self) -> Packed:
        """The packed tensors, in their layout, wherever the module is now."""
        return self._plans.packed(self._tensors())

    @property
    def weights(self) -> ExpertWeights:
        """The experts as the checkpoint has them, read through the layout's inverse: nothing is kept twice."""
        return self._layout.unpack(self.packed)

    @property
    def device(self) -> torch.device:
        """Where the packed tensors are."""
        return self.get_buffer(next(iter(self._names.values()))).device

    def explain(self) -> Selection:
        """Every backend with its verdict and the plan by token count; ``print()`` it, or ``.to_dict()``."""
        return self._plans.selection(self.problem.dtype)

    def update(self, weights: ExpertWeights) -> None:
        """Refill the packed tensors in place, at the same addresses, from experts of the same spec.

        Raises:
            PlanError: if the spec differs, or scales reach further than those that the plan was made for; nothing is
                changed then.
        """
        found, planned = measure_scales(weights, self.device), self.problem.scales
        if found is not None and not (planned or ScaleRange()).covers(found):
            raise PlanError(
                "update",
                expected=str(planned or ScaleRange()),
                got=str(found),
                hint="load these experts again: they are planned by the range of their scales",
            )
        self._layout.pack(weights, self.device, out=self.packed)

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
            expert_map: int32 or int64 [E]: the place in the packed layer of each expert that an id may name, or -1 for
                those of other ranks. It replaces the range of experts that the layer was loaded for.

        The last three are for backends that take them. Under tensor or expert parallelism the result is this rank's
        partial sum; the caller reduces.

        Raises:
            ArgumentError: for a wrong shape, dtype, device, or (on a CPU) an id outside -1 to E; for an argument that
                the planned backend does not take.
        """
        if torch.compiler.is_compiling():
            tensors, key = self._tensors(), self._plans.key
            check_call(
                self.problem, self.device, x_TH, topk_ids_TA, topk_weights_TA, out, workspace, x_scales, expert_map
            )
            given = (x_TH, topk_ids_TA, topk_weights_TA, tensors, key)
            if out is None:  # its memory, and the workspace's, is the graph's
                return torch.ops.polymoe.fused_experts(*given, x_scales, expert_map)
            torch.ops.polymoe.fused_experts_out(out, *given, workspace, x_scales, expert_map)
            return out
        layer = self._runtime
        check_call(self.problem, layer.device, x_TH, topk_ids_TA, topk_weights_TA, out, workspace, x_scales, expert_map)
        return layer.run(x_TH, topk_ids_TA, topk_weights_TA, out, workspace, x_scales, expert_map)

    def check(self, weights: ExpertWeights | None = None, *, where: str = "experts") -> None:
        """Compare up to four experts with the float32 reference, on every backend of the plan.

        Args:
            weights: the experts to compare with: those that were packed, by default what is packed now.
            where: the layer's name for the message.

        Raises:
            VerificationError: naming backend, layer and error.
        """
        check_layer(self._runtime, self.problem, weights or self.weights, where)

    @property
    def _layout(self) -> Layout:
        return self._plans.request.layouts[self._plans.layout]

    def _tensors(self) -> list[Tensor]:
        return [self.get_buffer(buffer) for buffer in self._names.values()]

    @property
    def _runtime(self) -> LayerRuntime:
        """Bind the runner to the present tensors of the buffers, since moving a module may replace them."""
        buffers, bound = self._buffers, self._bound
        tensors = [buffers[name] for name in self._names.values()]
        if bound is None or bound.plans is not self._plans or not bound.holds(tensors):
            bound = self._bound = LayerRuntime(self._plans, self._tensors())
            self._plans.add(bound)
        return bound

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bound": None}  # a copy is bound to its own tensors

    def _apply(self, fn: Any, recurse: bool = True) -> FusedExperts:
        # Module.to(dtype), .half() and .float() cast what is floating point, and float8 codes and scales count as
        # that: only the device is taken from them.
        before = self.device
        device = fn(torch.empty(0, dtype=torch.int8, device=before)).device
        for buffer in self._names.values():
            setattr(self, buffer, self.get_buffer(buffer).to(device))
        if device.type != before.type:
            request = replace(self._plans.request, machine=Machine.of(str(device)))
            self._plans = PlanCache.of(self.problem, request, self._plans.layout, self._plans.names)
        return self

    def extra_repr(self) -> str:
        """The problem, and the packed size."""
        return f"{self.problem}, {self._plans.layout}, {self.packed.nbytes / 2**20:.1f} MiB"


def load_experts(
    path: str | Path | Checkpoint,
    layer: int,
    *,
    device: torch.device | str | None = None,
    tp: int | tuple[int, int] = 1,
    ep: int | tuple[int, int] = 1,
    backend: str = "auto",
    activations: ActivationQuantization | str = "auto",
    role: str = "mixed",
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    check: bool = True,
) -> FusedExperts:
    """One layer's experts from a checkpoint, streamed expert by expert and packed for ``device``.

    Args:
        path: a checkpoint's directory, a Hub id, or an open :class:`~polymoe.checkpoint.Checkpoint`.
        layer: its index in the model.
        device: "cuda", "cuda:1", "cpu", or None for the GPU if there is one.
        tp, ep: ``(rank, size)`` of the tensor and expert parallel group; a size alone means rank 0.
        backend: "auto", or the name of one, which is then used or refused.
        activations: "16bit", "fp8_token", "fp8_group128", "fp8_static", or "auto": on a GPU the checkpoint's own
            recipe, on a CPU "16bit".
        role: token counts to plan for: "decode", "prefill" or "mixed".
        dtype: of x, for planning; calls may use another.
        batch_invariant: a token's result must be bitwise independent of the rest of the batch. Such problems run on
            fewer backends, and slower.
        check: compare a few experts with the reference before returning (milliseconds).

    Raises:
        CheckpointError: for a checkpoint that cannot be read, or a layer without routed experts.
        UnsupportedProblem: if no backend, or not the named one, runs it here.
        VerificationError: if the packed experts do not compute what the checkpoint says.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    machine = Machine.of(_device_name(device))
    problem = checkpoint.problem(
        layer,
        tp=tp,
        ep=ep,
        dtype=_dtype(dtype),
        activations=resolve_activations(checkpoint, layer, machine, activations),
        batch_invariant=batch_invariant,
    )
    experts = FusedExperts.pack(
        problem,
        checkpoint.weights(layer, tp=tp, ep=ep),
        PlanRequest(machine, role, backend, BACKENDS, LAYOUTS),
        device=device,
        check=check,
        where=f"layer {layer}",
    )
    selection = experts.explain()
    if checkpoint.first_time(selection.summary()):
        size = "".join(f" --{n} {getattr(problem, n)}" for n in ("tp", "ep") if getattr(problem, n) > 1)
        tune = f"polymoe tune --checkpoint {checkpoint.name} --layer {layer}{size} --activations {problem.activations}"
        tune += " --batch-invariant" * batch_invariant
        log.info("layer %d, and all layers like it: %s", layer, selection.summary(tune))
    return experts


def resolve_activations(
    checkpoint: Checkpoint, layer: int, machine: Machine, activations: ActivationQuantization | str
) -> ActivationQuantization:
    """``activations``, or for "auto" the checkpoint's own recipe on a GPU and "16bit" on a CPU.

    Raises:
        ArgumentError: for an unknown name.
    """
    if activations != "auto":
        return ActivationQuantization.of(activations)
    return checkpoint.recipe(layer) if machine.device.kind == "cuda" else UNQUANTIZED


def _dtype(dtype: torch.dtype) -> Dtype:
    if dtype not in DTYPES:
        raise ArgumentError("dtype", expected="torch.bfloat16, torch.float16 or torch.float32", got=str(dtype))
    return DTYPES[dtype]


def _device_name(device: torch.device | str | None) -> str | None:
    if device is None:
        return None
    expected = "cpu, cuda or cuda:1"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError("device", expected=expected, got=repr(device)) from None
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError("device", expected=expected, got=repr(str(found)))
    return str(found)
