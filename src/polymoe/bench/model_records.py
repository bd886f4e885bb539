"""What ``polymoe bench decode`` finds: a measurement of a whole model, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecord:
    """One measurement of a whole model.

    Attributes:
        checkpoint, experts, implementation: what ran; "packed" on the named polymoe backends, "dequantized" by
            Transformers with the named experts implementation, or "transformers-packed" with the named implementation
            or kernels.
        phase, batch, tokens, attention: "decode" of a batch after that many tokens, or "prefill" of that many.
        graphs: whether steps were compiled and replayed from a CUDA graph.
        median_us, p25_us, p75_us: time of a step, or of a prefill.
        tokens_per_second: of the whole batch.
        floor_us, share: time to read everything that a step needs once, and ``floor_us / median_us``; None for prefill.
        experts_read: mean number of experts that a step reads in one layer; None for prefill. Of experts that
            Transformers calls in its own way, floor and count are those of the packed model, or None without it.
        weight_bytes: memory of the loaded model.
        difference: of logits, relative to those of the packed model; None for the packed model.
        expert_memory: as the user gave it; None with all experts on the GPU.
        hits, misses, copied_bytes: of experts in host memory, for a step and a layer; else None.
        device, torch, transformers, triton, commit, date, command, bandwidth_tb_s: as in a bench record.
    """

    checkpoint: str
    experts: str
    implementation: str
    phase: str
    batch: int
    tokens: int
    attention: str
    graphs: bool
    median_us: float
    p25_us: float
    p75_us: float
    tokens_per_second: float
    floor_us: float | None
    share: float | None
    experts_read: float | None
    weight_bytes: int
    difference: float | None
    device: str
    torch: str
    transformers: str
    triton: str | None
    commit: str
    date: str
    command: str
    bandwidth_tb_s: float | None = None
    expert_memory: str | None = None
    hits: float | None = None
    misses: float | None = None
    copied_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """What could not be measured, and why. Without an implementation the model could not be loaded."""

    experts: str
    reason: str
    implementation: str = ""
    phase: str = ""
    batch: int | None = None

    def __str__(self) -> str:
        named = [self.experts, self.implementation, self.phase, "" if self.batch is None else f"batch {self.batch}"]
        return f"not measured: {', '.join(filter(None, named))}: {self.reason}"
