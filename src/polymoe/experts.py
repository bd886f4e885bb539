"""FusedExperts: a layer's experts, packed once, each call on the planned backend for its token count."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymoe.activations import Activation
from polymoe.backends import BACKENDS
from polymoe.backends.reference import run_experts
from polymoe.checkpoint import Checkpoint
from polymoe.errors import ArgumentError, CheckpointError, PlanError, ScaleError, VerificationError
from polymoe.layouts import LAYOUTS, Layout, Packed
from polymoe.machine import Machine
from polymoe.numerics import TOLERANCE, relative_error
from polymoe.planning.select import Selection
from polymoe.problem import ActivationMode, Dtype, Problem, WeightOn
from polymoe.routing import Routing
from polymoe.runtime import DTYPES, LayerRuntime, PlanRequest, on_device
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
        self._calls = LayerRuntime.of(problem, choice, packed.layout, tuple(packed.tensors))
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
        activations: ActivationMode = "16bit",
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
            activations: how inputs of the projections are quantized.
            backend: "auto", or the name of one, which is then used or refused.
            role: token counts to plan for: "decode", "prefill" or "mixed".
            batch_invariant: a token's result must not depend, to the bit, on the rest of the batch.
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
            activations=activations,
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
        if problem.activations == "fp8_static":
            self._require_input_scales(where)
        if check:
            self.check(weights, where=where)
        return self

    @property
    def problem(self) -> Problem:
        """What it runs: sizes, encodings, activation."""
        return self._calls.problem

    @property
    def packed(self) -> Packed:
        """The packed tensors, in their layout, wherever the module is now."""
        return self._calls.packed(self._tensors())

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
        return self._calls.selection(self.problem.dtype)

    def update(self, weights: ExpertWeights) -> None:
        """Refill the packed tensors in place, at the same addresses, from experts of the same spec.

        Raises:
            PlanError: if the spec differs, or scales now need the exact path, which graphs captured before lack; the
                experts are then not usable until they are updated again.
        """
        try:
            packed = self._layout.pack(weights, self.device, out=self.packed)
            wide = packed.wide_scales and not self.problem.wide_scales
        except ScaleError:
            wide = True
        if wide:
            raise PlanError(
                "update",
                expected="scales that its kernels decode, as those of the experts that were loaded",
                got="others",
                hint="load these experts anew: they take a slower, exact path",
            )

    def forward(self, x_TH: Tensor, topk_ids_TA: Tensor, topk_weights_TA: Tensor) -> Tensor:
        """Weighted sum over each token's experts: ``[T, H]`` in x's dtype.

        Args:
            x_TH: bfloat16, float16 or float32.
            topk_ids_TA: int32 or int64; -1, E and experts of other ranks contribute exactly 0.
            topk_weights_TA: float32, of the same shape; scaled by the router already. Any A of at least 1.

        Under tensor or expert parallelism the result is this rank's partial sum; the caller reduces.

        Raises:
            ArgumentError: for a wrong shape, dtype, device, or (on a CPU) an id outside -1 to E.
        """
        self._check_call(x_TH, topk_ids_TA, topk_weights_TA)
        if torch.compiler.is_compiling():
            return torch.ops.polymoe.fused_experts(x_TH, topk_ids_TA, topk_weights_TA, self._tensors(), self._calls.key)
        return self._calls.run(self._tensors(), x_TH, Routing(topk_ids_TA, topk_weights_TA))

    def check(self, weights: ExpertWeights | None = None, *, where: str = "experts") -> None:
        """Compare up to four experts with the float32 reference, on every backend of the plan.

        Args:
            weights: the experts to compare with: those that were packed, by default what is packed now.
            where: the layer's name for the message.

        Raises:
            VerificationError: naming backend, layer and error.
        """
        spec = self.problem.spec
        weights = weights or self.weights
        local = sorted({round(i * (spec.local_experts - 1) / 3) for i in range(4)})
        generator = torch.Generator().manual_seed(0)
        plan = self.explain().require()
        most = max(step.config.check_tokens for step in plan.steps)
        x_TH = torch.randn(most, spec.hidden, generator=generator).to(_TORCH[self.problem.dtype])
        ids_TA = torch.tensor(local)[torch.arange(most * 2).reshape(most, 2) % len(local)] + spec.first_expert
        weights_TA = torch.rand(most, 2, generator=generator) + 0.5
        expected = self._expected(weights, x_TH, Routing(ids_TA, weights_TA))
        if not bool(torch.isfinite(expected).all()):
            raise VerificationError(
                f"{where}, experts {', '.join(str(spec.first_expert + e) for e in local)}",
                expected="finite results in float32",
                got="NaN or infinity",
                hint="weights or scales are far too large: the files are damaged, or converted wrongly",
            )
        routing = Routing(ids_TA.to(self.device), weights_TA.to(self.device))
        for step in plan.steps:
            rows = min(step.config.check_tokens, step.max_tokens or most)
            x, some = x_TH[:rows].to(self.device), Routing(*(part[:rows] for part in routing))
            got = torch.empty_like(x)
            backend = self._calls.choice.backends[step.backend]
            with on_device(self.device):
                backend.run(self.problem, self.packed, x, some, step.config, got)
            error = relative_error(got.cpu(), expected[:rows])
            if not error <= TOLERANCE:  # NaN fails too
                raise VerificationError(
                    f"{where}, backend {step.backend!r} ({step.config}), layout {plan.layout!r}",
                    expected=f"a relative error of at most {TOLERANCE:g} against the reference",
                    got=f"{error:.3g}",
                    hint="this is a bug: report it with this message, and load with another backend meanwhile",
                )

    def _expected(self, weights: ExpertWeights, x_TH: Tensor, routing: Routing) -> Tensor:
        """What the reference computes, float32 on the CPU: in milliseconds on a GPU, if it has memory for a matrix.

        There in float64, since torch may have been told to compute float32 products in TF32.
        """

        def run(device: torch.device, dtype: torch.dtype) -> Tensor:
            here = ExpertWeights(weights.spec, lambda e: weights.expert(e).to(device))
            inputs = x_TH.to(device), Routing(*(part.to(device) for part in routing))
            return run_experts(self.problem, here, *inputs, dtype).float().cpu()

        if self.device.type != "cpu":
            try:
                return run(self.device, torch.float64)
            except torch.OutOfMemoryError:
                log.debug("no memory on %s for the reference: it runs on the CPU", self.device)
        return run(torch.device("cpu"), torch.float32)

    def _require_input_scales(self, where: str) -> None:
        """Refuse at load what would otherwise fail at the first token that meets an expert without its scales."""
        for e, expert in enumerate(self.weights):
            if expert.gate_up_input_scale is None or expert.down_input_scale is None:
                raise CheckpointError(
                    f"{where}, expert {self.problem.spec.first_expert + e}",
                    expected="static input scales, for activations='fp8_static'",
                    got="none, or not a number",
                    hint='the expert was never calibrated: load with activations="fp8_token" or "16bit"',
                )

    @property
    def _layout(self) -> Layout:
        return self._calls.choice.layouts[self._calls.layout]

    def _tensors(self) -> list[Tensor]:
        return [self.get_buffer(buffer) for buffer in self._names.values()]

    def _check_call(self, x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor) -> None:
        spec = self.problem.spec
        if x_TH.dim() != 2 or x_TH.shape[1] != spec.hidden:
            raise ArgumentError("x_TH", expected=f"[T, {spec.hidden}]", got=str(list(x_TH.shape)))
        if x_TH.dtype not in DTYPES:
            raise ArgumentError("x_TH", expected="bfloat16, float16 or float32", got=str(x_TH.dtype))
        tokens = x_TH.shape[0]
        for name, tensor, dtypes in (
            ("topk_ids_TA", ids_TA, (torch.int32, torch.int64)),
            ("topk_weights_TA", weights_TA, (torch.float32,)),
        ):
            if tensor.dtype not in dtypes:
                raise ArgumentError(name, expected=" or ".join(map(str, dtypes)), got=str(tensor.dtype))
            if tensor.dim() != 2 or tensor.shape[0] != tokens or tensor.shape[1] < 1 or tensor.shape != ids_TA.shape:
                raise ArgumentError(
                    name, expected=f"[{tokens}, A], the same for ids and weights", got=str(list(tensor.shape))
                )
            if tensor.device != x_TH.device:
                raise ArgumentError(name, expected=f"on {x_TH.device}, like x", got=str(tensor.device))
        if x_TH.device != self.device:
            raise ArgumentError("x_TH", expected=f"on {self.device}, like the packed experts", got=str(x_TH.device))

    def _apply(self, fn: Any, recurse: bool = True) -> FusedExperts:
        # Module.to(dtype), .half() and .float() cast what is floating point, and float8 codes and scales count as
        # that: only the device is taken from them.
        before = self.device
        device = fn(torch.empty(0, dtype=torch.int8, device=before)).device
        for buffer in self._names.values():
            setattr(self, buffer, self.get_buffer(buffer).to(device))
        if device.type != before.type:
            choice = replace(self._calls.choice, machine=Machine.of(str(device)))
            self._calls = LayerRuntime.of(self.problem, choice, self._calls.layout, self._calls.names)
        return self

    def extra_repr(self) -> str:
        """The problem, and the packed size."""
        return f"{self.problem}, {self._calls.layout}, {self.packed.nbytes / 2**20:.1f} MiB"


def load_experts(
    path: str | Path | Checkpoint,
    layer: int,
    *,
    device: torch.device | str | None = None,
    tp: int | tuple[int, int] = 1,
    ep: int | tuple[int, int] = 1,
    backend: str = "auto",
    activations: str = "auto",
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
        batch_invariant: a token's result must not depend, to the bit, on the rest of the batch. Such problems run on
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


def resolve_activations(checkpoint: Checkpoint, layer: int, machine: Machine, activations: str) -> ActivationMode:
    """``activations``, or for "auto" the checkpoint's own recipe on a GPU and "16bit" on a CPU."""
    if activations != "auto":
        return activations  # type: ignore[return-value]  # Problem checks the name
    return checkpoint.recipe(layer) if machine.device.kind == "cuda" else "16bit"


_TORCH = {name: dtype for dtype, name in DTYPES.items()}


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
