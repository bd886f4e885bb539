"""The protocols of a backend and of its runner, and what backends share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from polymoe.backends.config import Config
from polymoe.backends.features import Handled, unhandled
from polymoe.common.plugins import PluginError, from_plugin, guarded
from polymoe.errors import ArgumentError, UnsupportedProblem
from polymoe.layouts import Packed
from polymoe.machine import Machine
from polymoe.problem import Problem
from polymoe.problem.activation_quantization import UNQUANTIZED, ActivationQuantization
from polymoe.problem.verdict import Accepted, Reason, Rejected, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from polymoe.problem.call import CallArguments


UNTIMED = "no record times it: runs only on request"
"""Why ``auto`` passes over a backend whose times are only predicted (:attr:`Accepted.opt_in_reason`)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expected time of one call in microseconds, and where the number comes from: "cost model", or "measured" and with
    what, where that differs from here."""

    time_us: float
    source: str = "cost model"


class Runner(Protocol):
    """One layer, ready to be called: arguments that do not change are prepared, weights are never copied.

    It stays valid while the packed tensors keep their addresses, also when they are refilled in place.
    """

    @property
    def options(self) -> frozenset[str]:
        """Which of ``workspace``, ``x_scales`` and ``expert_map`` :meth:`run` takes; the others are never given."""
        ...

    def run(self, call: CallArguments, config: Config) -> None:
        """Write this rank's weighted sum of the experts to ``call.out_TH`` [T, H].

        Ids that are not of this rank's experts contribute exactly 0. T is at least 1 and at most what the verdict
        allows. Where the verdict says capturable: no synchronization, no allocation outside the graph's pool, no branch
        on tensor values. The call's arguments are checked, and ``out`` is among them.
        """
        ...

    def workspace_bytes(self, tokens: int, top_k: int, config: Config) -> int:
        """Bytes of ``workspace`` that a call of ``tokens`` tokens needs; 0 where the runner takes none."""
        ...

    def add_rows(self, y_RH: Tensor, call: CallArguments, config: Config) -> None:
        """Write the weighted sum of rows that :meth:`run` computed, bitwise as it adds them.

        Args:
            y_RH: float32 [T * A, H], the result of each of a token's experts by itself, with a weight of 1 where
                weights are on the output.
            call: of which ids, weights and ``out`` are read.
            config: as for :meth:`run`.

        Raises:
            UnsupportedProblem: if the runner cannot.
        """
        ...


class RunnerBase:
    """Defaults of a :class:`Runner` that takes no options."""

    __slots__ = ()

    options: frozenset[str] = frozenset()

    def workspace_bytes(self, tokens: int, top_k: int, config: Config) -> int:
        return 0

    def add_rows(self, y_RH: Tensor, call: CallArguments, config: Config) -> None:
        raise UnsupportedProblem(
            "experts in host memory, in a CUDA graph",
            expected="at most as many expert ids in a call as slots, or backend cuda or triton",
            got=type(self).__name__,
        )


_ALIGNMENT = 16
"""Bytes that kernels load, copy or store at once."""


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is not contiguous or is a view at an address that kernels cannot load from."""
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def require_aligned(name: str, tensor: Tensor) -> None:
    """Require that a tensor to which kernels write begins at a multiple of 16 bytes.

    Raises:
        ArgumentError: if it does not; ``name`` is the argument's.
    """
    if tensor.data_ptr() % _ALIGNMENT:
        expected = f"an address that is a multiple of {_ALIGNMENT}"
        raise ArgumentError(name, expected=expected, got=hex(tensor.data_ptr()))


def mapped_ids(ids_TA: Tensor, expert_map: Tensor) -> Tensor:
    """Return each id's place in the packed layer by ``expert_map``, or -1 if it has none; contiguous, [T, A]."""
    experts = len(expert_map)
    found = expert_map[ids_TA.clamp(0, experts - 1).long()]
    return found.masked_fill_((ids_TA < 0) | (ids_TA >= experts), -1).contiguous()


class Backend(Protocol):
    """Runs experts packed in one of its ``layouts``.

    A check reads properties of the problem and the machine, never a model's or a format's name, and reports every
    reason. An exception inside a check is a bug and is not caught; one of another package's check is a rejection.
    """

    @property
    def name(self) -> str:
        """Name in ``BACKENDS``, in ``--backend`` and in records."""
        ...

    @property
    def layouts(self) -> tuple[str, ...]:
        """Layouts it reads."""
        ...

    @property
    def handles(self) -> Handled:
        """Features of a Problem that it handles, see :mod:`polymoe.backends.features`. All others are rejected."""
        ...

    def check(self, problem: Problem, machine: Machine) -> Verdict:
        """Whether it runs the problem on the machine."""
        ...

    def configure(self, problem: Problem, machine: Machine, tokens: int) -> Config:
        """Return its own choice for ``tokens`` tokens, without any table; only for problems it accepts."""
        ...

    def predict(self, problem: Problem, machine: Machine, tokens: int) -> Prediction:
        """Time of a call of ``tokens`` tokens by its cost model; only for problems it accepts."""
        ...

    def tuning_configs(
        self, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """Return the configurations to try for calls of ``tokens`` tokens, the most promising first.

        All of them fit the device. Tuning asks again with ``timed``, every configuration whose results were right and
        its time in microseconds, until it gets no configuration that it has not tried.
        """
        ...

    def compile(self, problem: Problem, packed: Packed, call: CallArguments, config: Config) -> None:
        """Compile what :meth:`Runner.run` would launch with these arguments, into a cache on disk if there is one. The
        tensors may be on the meta device; nothing is launched."""
        ...

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Return which of ``x_TH``, ``topk_weights_TA`` and ``out`` get gradients from a result. Calls in which another
        argument requires one are refused."""
        ...

    def bind(self, problem: Problem, packed: Packed) -> Runner:
        """Prepare the calls of one layer, once: views, constants and addresses that no call needs to make again.

        The runner refers to the packed tensors and copies none of them. Their GPU is torch's current one, here and in
        :meth:`Runner.run`.
        """
        ...


class BackendBase:
    """Defaults for methods that few backends need: one configuration for each token count, nothing to compile, and no
    backward pass.

    Attributes:
        compiler: "triton" if Triton compiles the kernels, so that measured times depend on its version; else None.
        package: the distribution whose kernels it runs, if they are not this library's; records have its version.
    """

    __slots__ = ()

    compiler: ClassVar[str | None] = None
    package: ClassVar[str | None] = None

    def tuning_configs(
        self: Backend, problem: Problem, machine: Machine, tokens: int, timed: Sequence[tuple[Config, float]] = ()
    ) -> Sequence[Config]:
        """The one that :meth:`Backend.configure` chooses."""
        return () if timed else (self.configure(problem, machine, tokens),)

    def token_bounds(self, problem: Problem, machine: Machine) -> Sequence[int]:
        """Return where ranges of token counts with one configuration end, besides powers of two: nowhere."""
        return ()

    def compile(self, problem: Problem, packed: Packed, call: CallArguments, config: Config) -> None:
        """Nothing to compile."""

    def gradients(self, problem: Problem) -> frozenset[str]:
        """None."""
        return frozenset()


def inputs_of(problem: Problem, config: Config | None) -> ActivationQuantization:
    """Return how a call with this configuration rounds x and h, which the reference has to emulate, and adds up."""
    if config is None:
        return problem.activations
    if config.keeps_16_bits:
        return UNQUANTIZED
    return problem.activations if config.fast_accumulation else problem.activations.promoted


def layouts_for(backend: Backend, verdict: Verdict) -> tuple[str, ...]:
    """Return the layouts that serve the problem: all of the backend's, unless the verdict names some."""
    return backend.layouts if verdict.layouts is None else verdict.layouts


def judge(backend: Backend, problem: Problem, machine: Machine) -> Verdict:
    """Return the backend's verdict, or a rejection if the problem has features that the backend does not declare.

    Backends that other packages register count as foreign; an exception of theirs is a rejection too.
    """
    try:
        with guarded(backend):
            verdict = backend.check(problem, machine)
            if not isinstance(verdict, (Accepted, Rejected)):
                raise TypeError(f"check returned {verdict!r}, not a verdict")
            undeclared = unhandled(backend.handles, problem)
    except PluginError as error:
        return Rejected((failed(error),))
    if isinstance(verdict, Accepted) and from_plugin(backend):
        verdict = replace(verdict, foreign=True)
    reasons = verdict.reasons if isinstance(verdict, Rejected) else ()
    said = {reason.what for reason in reasons}
    more = tuple(reason for reason in undeclared if reason.what not in said)
    return Rejected(more + reasons, verdict.layouts) if more else verdict


def failed(error: PluginError) -> Reason:
    """The reason against a backend or layout of another package that raised an exception."""
    return Reason("plug-in", "an answer", str(error))
