"""What verify reports: a row for each layer, and one for each backend, layer and token count."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from polymoe.problem.numerics import TOLERANCE


@dataclass(frozen=True, slots=True)
class LayerRow:
    """The result for the bytes of one layer.

    Attributes:
        layer, format, experts: what was examined.
        repacked: number of experts whose stored bytes are the same after reading and writing.
        second_reading: number of experts with the same weights, biases and input scales in an independent reading.
        oracle_error: relative error of the float64 reference against numpy on that reading.
        tolerance: largest such error of a correct reading.
    """

    layer: int
    format: str
    experts: int
    repacked: int
    second_reading: int
    oracle_error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether everything agreed."""
        return self.repacked == self.second_reading == self.experts and self.oracle_error <= self.tolerance


@dataclass(frozen=True, slots=True)
class BackendRow:
    """One backend on one layer: its error and its time, or why it was rejected.

    Attributes:
        layer, backend, tokens: what ran.
        against: what the result was compared with: "oracle", the float64 sum in numpy of the independent reading, or
            "reference", which rounds the inputs of the experts as the backend does.
        error, tolerance: the relative error, and the largest one of a correct backend.
        differing: number of experts that the packed layer does not hold as they were read.
        time_us: median time of a call.
        rejected: why the backend does not run the layer here.
        family: the kernels that ran, as ``Config.kernel_family``.
        format, activations: of the weights and of the experts' inputs.
    """

    layer: int
    backend: str
    tokens: int = 0
    against: str = ""
    error: float = 0.0
    tolerance: float = TOLERANCE
    differing: int = 0
    time_us: float = 0.0
    rejected: str = ""
    family: str = ""
    format: str = ""
    activations: str = ""

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance and every expert is packed right; True if rejected."""
        return bool(self.rejected) or (self.error <= self.tolerance and not self.differing)


@dataclass(frozen=True, slots=True)
class Report:
    """All rows, and the device they were measured on.

    Attributes:
        checkpoint, device: the checkpoint and the device.
        layers, backends: one row for each layer, and one for each layer, backend and token count.
        absent: layers of the config whose experts are not in the files, if all layers were requested.
    """

    checkpoint: str
    device: str
    layers: tuple[LayerRow, ...]
    backends: tuple[BackendRow, ...]
    absent: tuple[int, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every row is correct."""
        return all(row.ok for row in (*self.layers, *self.backends))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "checkpoint": self.checkpoint,
            "device": self.device,
            "ok": self.ok,
            "absent": list(self.absent),
            "layers": [{**asdict(row), "ok": row.ok} for row in self.layers],
            "backends": [{**asdict(row), "ok": row.ok} for row in self.backends],
        }
