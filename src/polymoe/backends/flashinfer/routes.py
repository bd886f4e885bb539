"""Route: one family of FlashInfer's kernels, with what it requires, its layouts and its calls."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from polymoe.backends.base import Prediction, Runner, mapped_ids
from polymoe.backends.config import Config
from polymoe.backends.cost import Cost, cost
from polymoe.backends.flashinfer.config import FlashInferConfig
from polymoe.backends.packages import need_package
from polymoe.errors import PlanError
from polymoe.formats import FORMATS
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.activations import Activation, SwiGLU
from polymoe.problem.verdict import Reasons

if TYPE_CHECKING:
    from torch import Tensor

PACKAGE = "flashinfer-python"
"""The distribution."""

_WRITTEN_FOR = "polymoe was written for the arguments of flashinfer-python 0.7.2"


@dataclass(frozen=True, slots=True)
class RouteRates:
    """Shares of the device's memory bandwidth and MMA rate that the kernels reach, and the time of their launches."""

    bandwidth: float
    math: float
    fixed_us: float

    def predict(self, c: Cost) -> Prediction:
        """Return the time of one call: the longer of memory and math, and the launches."""
        return Prediction(max(c.memory_us / self.bandwidth, c.compute_us / self.math) + self.fixed_us)


class Route(ABC):
    """A family of kernels for weights of one format on GPUs of some architectures.

    Attributes:
        name: the kernel family, in configurations and proofs.
        architectures: compute capabilities.
        format: of all projections, as in ``FORMATS``.
        layouts: that it reads, each with some versions of the package.
        activations: supported quantizations of x and h.
        functions: activation functions between the projections, classes.
        least: oldest version of FlashInfer.
        wrong: what known-bad versions do.
        most_tokens: of one call, or None for any number.
        repeatable: whether repeated calls are bitwise identical.
        token_bounds: token counts at which the kernels change.
        rates: for the cost model.
        notes: what ``explain`` says of it.
    """

    name: ClassVar[str]
    architectures: ClassVar[tuple[tuple[int, int], ...]]
    format: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]]
    activations: ClassVar[tuple[ActivationQuantization, ...]] = (UNQUANTIZED,)
    functions: ClassVar[tuple[type, ...]]
    least: ClassVar[str]
    wrong: ClassVar[Mapping[str, str]] = {}
    most_tokens: ClassVar[int | None] = None
    repeatable: ClassVar[bool] = True
    token_bounds: ClassVar[tuple[int, ...]] = ()
    rates: ClassVar[RouteRates]
    notes: ClassVar[tuple[str, ...]] = ()

    def reads(self, problem: Problem) -> bool:
        """Whether all projections have the route's format."""
        return all(encoding == FORMATS[self.format].encoding for encoding in problem.spec.encodings.values())

    def check(self, problem: Problem, machine: Machine, reasons: Reasons) -> Sequence[str]:
        """Add every reason against the problem, other than those of the layout; return notes."""
        functions = " or ".join(function.__name__ for function in self.functions)
        reasons.need(isinstance(problem.activation, self.functions), "activation", functions, problem.activation.name)
        modes = " or ".join(map(str, self.activations))
        reasons.need(problem.activations in self.activations, "activations", modes, problem.activations)
        return (*self.notes, *need_package(reasons, machine, PACKAGE, self.least, wrong=self.wrong))

    def layout(self, machine: Machine) -> str:
        """The layout that the installed version reads; that of the newest where none is installed."""
        return self.layouts[0]

    @abstractmethod
    def configure(self, problem: Problem, machine: Machine, tokens: int) -> FlashInferConfig:
        """The choice for a token count."""

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]]
    ) -> Sequence[Config]:
        """What tuning tries: see :meth:`polymoe.backends.base.Backend.tuning_configs`."""
        return () if timed else (self.configure(problem, machine, tokens),)

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Time of a call by the route's rates."""
        return self.rates.predict(cost(problem, machine.device, tokens))

    @abstractmethod
    def bind(self, problem: Problem, packed: Packed) -> Runner:
        """Prepare the calls of one layer. The package is imported here."""


def need_shared_memory(reasons: Reasons, machine: Machine, kib: int) -> None:
    """Add a reason unless a CTA has the shared memory that all GPUs of the kernels' architectures have.

    Compiled kernels rely on it, so that a device that reports less is not what its compute capability says.
    """
    found = machine.device.shared_memory_bytes // 1024
    reasons.need(found >= kib, f"shared memory of {machine.device.arch}", f"{kib} KiB a CTA", f"{found} KiB")


def local_ids(ids_TA: Tensor, first_expert: int, experts: int, expert_map: Tensor | None) -> Tensor:
    """Return places of experts in the packed layer, int32 [T, A]; ``experts``, their number, for those elsewhere."""
    ids_TA = ids_TA - first_expert if expert_map is None else mapped_ids(ids_TA, expert_map)
    return torch.where((ids_TA >= 0) & (ids_TA < experts), ids_TA, experts).int()


def swiglu_constants(
    activation: Activation, experts: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return alpha, beta and limit for each expert, float32 [E]; None for those that change nothing, and for an
    activation that has none."""
    if not isinstance(activation, SwiGLU):
        return None, None, None
    plain = SwiGLU()
    alpha, beta, limit = (
        None if value is None or value == usual else torch.full((experts,), value, dtype=torch.float32, device=device)
        for value, usual in (
            (activation.alpha, plain.alpha), (activation.beta, plain.beta), (activation.limit, plain.limit)
        )
    )  # fmt: skip
    return alpha, beta, limit


def function_of(module: str, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Import a function of FlashInfer that takes these parameters.

    Raises:
        PlanError: if the installed version has none that does.
    """
    expected = f"{name}({', '.join(parameters)})"
    hint = f"{_WRITTEN_FOR}: install that version, or load with another backend"
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PlanError(module, expected=expected, got=f"{type(error).__name__}: {error}", hint=hint) from error
    missing = [p for p in parameters if p not in inspect.signature(function).parameters]
    if missing:
        raise PlanError(module, expected=expected, got=f"no {', '.join(missing)}", hint=hint)
    return function
