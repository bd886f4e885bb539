"""load_experts: one layer's experts from a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from polymoe.backends import BACKENDS
from polymoe.checkpoint import Checkpoint
from polymoe.layer.experts import FusedExperts
from polymoe.layer.offload import OffloadedExperts, require_slots
from polymoe.layer.runtime import PlanRequest
from polymoe.layouts import LAYOUTS
from polymoe.machine import Machine
from polymoe.planning.select import resolve_activations
from polymoe.problem.activation_quantization import ActivationQuantization
from polymoe.problem.call import device_name, dtype_name

log = logging.getLogger("polymoe")


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
    machine: Machine | None = None,
    slots: int | None = None,
) -> FusedExperts:
    """One layer's experts from a checkpoint, streamed expert by expert and packed for ``device``.

    Args:
        path: a checkpoint's directory, a Hub id, or an open :class:`~polymoe.checkpoint.Checkpoint`.
        layer: its index in the model.
        device: "cuda", "cuda:1", "cpu", or None for the GPU if there is one.
        tp, ep: ``(rank, size)`` of the tensor and expert parallel group; a size alone means rank 0.
        backend: "auto", or the name of one, which is then used or refused.
        activations: "16bit", "fp8_token", "fp8_group128", "fp8_group128_ue8m0", "fp8_static", "mxfp8", "nvfp4", or
            "auto": on a GPU the checkpoint's own recipe, on a CPU "16bit"; never "fp8_group128_ue8m0" or "nvfp4", which
            have to be named. So have "fp8_token_fast_accumulation" and "fp8_static_fast_accumulation": faster for many
            tokens, with errors of up to 1.3e-2 instead of 6e-3.
        role: token counts to plan for: "decode", "prefill" or "mixed".
        dtype: of x, for planning; calls may use another.
        batch_invariant: a token's result must be bitwise independent of the rest of the batch. Such problems run on
            fewer backends, and slower.
        check: compare the packed bytes of every expert with the files, and the results of a few with the reference,
            before returning.
        machine: what to plan for, where layers share its memory (:meth:`polymoe.machine.Machine.shared_by`).
        slots: experts that lie on the GPU; all of them lie in host memory then, and a call copies those that it needs
            (:class:`~polymoe.layer.offload.OffloadedExperts`). None: all experts lie on the GPU.

    Raises:
        ArgumentError: for fewer slots than experts active per token, or as many as the layer has.
        CheckpointError: for a checkpoint that cannot be read, or a layer without routed experts.
        FormatError: for codes, scales or biases that are not finite, or a matrix whose scales are all zero.
        UnsupportedProblem: if no backend, or not the named one, runs it here, or not with ``slots``.
        PlanError: with ``slots``, if the host has not enough memory.
        VerificationError: if the packed experts are not, or do not compute, what the checkpoint says.
    """
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint.open(path)
    machine = machine or Machine.of(device_name(device))
    problem = checkpoint.problem(
        layer,
        tp=tp,
        ep=ep,
        dtype=dtype_name(dtype),
        activations=resolve_activations(checkpoint, layer, machine, activations),
        batch_invariant=batch_invariant,
    )
    if slots is not None:
        require_slots(problem, slots)
    experts = FusedExperts.pack(
        problem,
        checkpoint.weights(layer, tp=tp, ep=ep, device=device_name(device)),
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
    if slots is None:
        return experts
    offloaded = OffloadedExperts(experts, slots)
    if checkpoint.first_time(offloaded.summary()):
        log.info("layer %d, and all layers like it: %s", layer, offloaded.summary())
    return offloaded
