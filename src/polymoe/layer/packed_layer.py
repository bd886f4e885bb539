"""PackedLayer: the one owner of a packed layer's state.

Its tensors are buffers of a :class:`~polymoe.layer.experts.FusedExperts`, or parameters of an engine's own module,
which the engine then counts, offloads, frees and refills as it does its own. Their addresses stay, so graphs that were
captured stay valid.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_tracing  # pyright: ignore[reportPrivateImportUsage]

from polymoe.errors import PlanError, UnsupportedProblem
from polymoe.layer.load_check import check_layer, require_planned
from polymoe.layer.runtime import LayerRuntime, PlanCache, PlanRequest, compiled_call, incomplete_update
from polymoe.layouts import Layout, Packed
from polymoe.layouts.pack_check import pack_checked
from polymoe.layouts.staging import INPUT_SCALES, ordinary_tensors
from polymoe.planning.selection import Selection
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments
from polymoe.problem.tensors import ExpertWeights


class PackedLayer:
    """The state of one packed layer, whose tensors belong to a module that is passed to each method.

    The module is not kept: an engine may copy or free it. Shallow copies of a module share its tensors and this object.

    Attributes:
        where: the layer's name for messages.
    """

    def __init__(self, where: str, problem: Problem, request: PlanRequest, *, buffers: bool = False) -> None:
        self.where, self._problem, self._request, self._buffers = where, problem, request, buffers
        self._mixed = False  # an update has failed or has not ended, so that the tensors hold a mixture
        self._suspended = False  # so has one of the model that the layer is part of
        self._updating_model = False
        self._plans: PlanCache | None = None
        self._names: dict[str, torch.dtype] = {}
        self._bound: LayerRuntime | None = None
        self._updates = threading.Lock()  # one at a time: two would leave a mixture and say that it is whole

    @property
    def problem(self) -> Problem:
        """What it runs; after :meth:`pack` with the range of the scales."""
        return self._problem if self._plans is None else self._plans.problem

    @property
    def plans(self) -> PlanCache:
        """The plans of the packed layer.

        Raises:
            PlanError: before :meth:`pack`.
        """
        if self._plans is None:
            raise PlanError(
                self.where,
                expected="packed experts",
                got="none",
                hint="the engine called before it had loaded the layer",
            )
        return self._plans

    @property
    def selection(self) -> Selection:
        """Every backend with its verdict, and the plan by token count."""
        return self.plans.selection(self.problem.dtype)

    @property
    def layout(self) -> Layout:
        """How it is packed."""
        return self.plans.request.layouts[self.plans.layout]

    def nbytes(self, module: nn.Module) -> int:
        """Bytes of the packed tensors of ``module``."""
        return sum(t.nbytes for t in self.tensors(module))

    def packed(self, module: nn.Module) -> Packed:
        """The packed tensors of ``module``, in their layout."""
        return self.plans.packed(self.tensors(module))

    def weights(self, module: nn.Module) -> ExpertWeights:
        """The experts as they were stored, read from the packed tensors.

        Raises:
            PlanError: after an update that failed.
        """
        self.require_complete()
        runtime = self.runtime(module)
        weights = self.layout.unpack(self.plans.packed(runtime.tensors))

        def counted(read: Callable[..., Any] | None) -> Any:
            def count(*args: int) -> Any:
                runtime.reads += 1
                assert read is not None
                return read(*args)

            return read and count

        return replace(
            weights,
            read=counted(weights.read),
            read_unchecked=counted(weights.read_unchecked),
            read_stacked=counted(weights.read_stacked),
        )

    @property
    def incomplete(self) -> bool:
        """Whether an update, of the layer or of its model, has failed or has not ended: calls are refused."""
        return self._mixed or self._suspended

    def require_complete(self) -> None:
        """Raise PlanError if the layer is :attr:`incomplete`."""
        if self.incomplete:
            raise incomplete_update()

    def pack(
        self,
        module: nn.Module,
        weights: ExpertWeights,
        device: torch.device,
        *,
        check: bool = True,
        in_place: bool = False,
    ) -> None:
        """Pack ``weights`` into new tensors of ``module`` on ``device``.

        Called again, for weights that changed, it gives tensors of the same names, shapes and layout, which the engine
        copies over the first ones; or it overwrites these itself, once all experts are packed.

        Args:
            module: the engine's layer; parameters of these names are replaced.
            weights: the experts, read one at a time.
            device: where the tensors are.
            check: compare the results of a few experts with the reference, on every backend of the plan. The packed
                bytes of every expert are always compared with ``weights``.
            in_place: overwrite the tensors that a call before this one made, at their addresses. After an error they
                are as they were.

        Raises:
            UnsupportedProblem: if no backend runs these experts here.
            PlanError: if new weights have another spec, or scales that reach further than those for which the layer was
                planned.
            CheckpointError: if static input scales are missing.
            FormatError: for codes, scales or biases that are not finite, or a matrix whose scales are all zero.
            VerificationError: if the packed experts are not, or do not compute, what ``weights`` say.
        """
        if self._plans is None:
            problem, packed = self._request.pack(self._problem, weights, device, self.where)
            self.hold(module, problem, packed, self._request)
            if check:
                check_layer(self.runtime(module), problem, weights, self.where)
            return
        where, hint = f"{self.where}: new weights", "start the engine again with them"
        require_planned(self.problem, weights, device, where, hint)
        packed = pack_checked(self.layout, weights, device, self.where)
        self._require_same_tensors(packed)
        tensors = self._complete(packed)
        if check:
            check_layer(LayerRuntime(self.plans, tensors), self.problem, weights, self.where)
        if in_place:
            _overwrite(self.tensors(module), tensors)
        else:
            self._register(module, self.plans.packed(tensors))

    def update(
        self, module: nn.Module, weights: ExpertWeights, *, check: bool, wait: bool, of_model: bool = False
    ) -> None:
        """Refill the tensors in place; see :meth:`polymoe.layer.experts.FusedExperts.update`.

        Args:
            module, weights, check, wait: as there.
            of_model: whether the caller has suspended the layer, and will resume it.

        Raises:
            UnsupportedProblem: between :meth:`suspend` and :meth:`resume`, unless ``of_model``.
        """
        with self._updates:
            if not of_model:
                self._require_no_update_of_model()
            runtime = self.runtime(module)

            def begin() -> None:
                self._mixed = True
                self._refuse_calls(runtime, wait=wait)

            self.refill(runtime, weights, check=check, begin=begin)
            self._mixed = False
            runtime.incomplete = self._suspended

    def suspend(self, module: nn.Module, *, wait: bool) -> None:
        """Refuse calls, and updates of this layer alone, until :meth:`resume`: all layers of a model are updated.

        Raises:
            UnsupportedProblem: if another update of the model has not ended.
        """
        with self._updates:
            self._require_no_update_of_model()
            self._suspended = self._updating_model = True
            self._refuse_calls(self.runtime(module), wait=wait)

    def resume(self, module: nn.Module, *, whole: bool) -> None:
        """Take calls again if all layers are ``whole``; otherwise another update of all of them must do so."""
        with self._updates:
            self._updating_model, self._suspended = False, not whole
            self.runtime(module).incomplete = self.incomplete

    def _require_no_update_of_model(self) -> None:
        if self._updating_model:
            raise UnsupportedProblem(
                f"update of {self.where}",
                expected="one at a time",
                got="one of all layers of the model, which has not ended",
                hint="wait until polymoe.refit returns or raises",
            )

    def refill(
        self, runtime: LayerRuntime, weights: ExpertWeights, *, check: bool, begin: Callable[[], None] = lambda: None
    ) -> None:
        """Pack ``weights`` into the tensors of ``runtime``; aside and then there if they are read from these tensors.

        Args:
            runtime: of this layer's plans.
            weights: the experts, which are refused before ``begin`` if they cannot take the place of the present ones.
            check: compare bytes and results, as :meth:`update`.
            begin: called before the first tensor changes.
        """
        present, hint = self.plans.packed(runtime.tensors), "load these experts again"
        reads = runtime.reads
        touched = require_planned(self.problem, weights, runtime.device, "update", hint, (self.layout, present))
        if touched or runtime.reads > reads:  # an expert would be read after another had taken its place
            aside = pack_checked(self.layout, weights, runtime.device, "update", compare=check)
            tensors = self._complete(aside)
            if check:
                check_layer(LayerRuntime(self.plans, tensors), self.problem, weights, "update")
            begin()
            _overwrite(runtime.tensors, tensors)
        else:
            begin()
            pack_checked(self.layout, weights, runtime.device, "update", out=present, compare=check)
            if check:
                check_layer(runtime, self.problem, weights, "update")

    @ordinary_tensors()
    def _complete(self, packed: Packed) -> list[Tensor]:
        """The tensors of newly packed experts in the order of the layer's, with NaN for input scales that they lack."""
        found, count = packed.tensors, self.problem.spec.local_experts
        device = next(iter(found.values())).device
        return [
            torch.full((count,), float("nan"), dtype=dtype, device=device)
            if name in INPUT_SCALES and name not in found
            else found[name]
            for name, dtype in self.plans.parts
        ]

    def _refuse_calls(self, runtime: LayerRuntime, *, wait: bool) -> None:
        """Refuse calls from now on; with ``wait``, return when those that had begun have ended."""
        runtime.incomplete = True
        if wait:
            while runtime.in_flight - {threading.get_ident()}:
                time.sleep(1e-4)
            if runtime.device.type == "cuda":
                torch.cuda.synchronize(runtime.device)

    def _require_same_tensors(self, packed: Packed) -> None:
        known = dict(self.plans.parts)
        found = {name: tensor.dtype for name, tensor in packed.tensors.items()}
        other = sorted({name for name, _ in known.items() ^ found.items()} - (INPUT_SCALES - found.keys()))
        if other:
            raise PlanError(
                f"{self.where}: new weights",
                expected=", ".join(f"{name} {known.get(name, 'absent')}" for name in other),
                got=", ".join(f"{name} {found.get(name, 'absent')}" for name in other),
                hint="start the engine again with them",
            )

    def __call__(self, module: nn.Module, x_TH: Tensor, topk_ids_TA: Tensor, topk_weights_TA: Tensor) -> Tensor:
        """Return this rank's weighted sum over each token's experts, [T, H] in x's dtype.

        Args:
            module: the module that :meth:`pack` was given.
            x_TH: bfloat16, float16 or float32.
            topk_ids_TA: int32 or int64, ids in the whole layer; those of other ranks' experts contribute 0.
            topk_weights_TA: float32, scaled by the router already.

        Raises:
            ArgumentError: for a wrong shape, dtype or device.
        """
        return self.run(module, CallArguments(x_TH, topk_ids_TA, topk_weights_TA))

    def run(self, module: nn.Module, call: CallArguments) -> Tensor:
        """Return the result of a call: at once, or as a node of the graph that torch makes."""
        if torch.compiler.is_compiling() or is_tracing():
            return compiled_call(self.plans, [getattr(module, name) for name in self._names], call)
        runtime = self.runtime(module)
        call.check(self.plans.problem, runtime.device)
        return runtime.run(call)

    def hold(self, module: nn.Module, problem: Problem, packed: Packed, request: PlanRequest) -> None:
        """Make ``packed`` the tensors of ``module``, and bind the runners."""
        self._request = request
        dtypes = {name: tensor.dtype for name, tensor in packed.tensors.items()}
        self._plans = PlanCache.of(problem, request, packed.layout, tuple(dtypes.items()))
        for name in self._names:
            delattr(module, name)
        self._names = {_attribute(name): dtype for name, dtype in dtypes.items()}
        self._register(module, packed)
        self.bind(module)

    def release(self, module: nn.Module) -> None:
        """Remove the tensors from ``module``: other code has them now."""
        self._bound = None
        for name in self._names:
            delattr(module, name)

    def move(self, module: nn.Module, device: torch.device, request: PlanRequest | None = None) -> None:
        """Move the tensors to ``device``, all of them or none, and plan for the machine of ``request`` if given."""
        with ordinary_tensors():
            moved = [getattr(module, name).to(device) for name in self._names]
        for name, tensor in zip(self._names, moved, strict=True):
            setattr(module, name, tensor)
        if request is not None:
            self._request, self._plans = request, self.plans.on(request)
        self.bind(module)

    def _register(self, module: nn.Module, packed: Packed) -> None:
        for name, tensor in packed.tensors.items():
            name = _attribute(name)
            # Bytes: not every collective and copy of an engine takes the 8-bit floats, nor does a compiled graph that
            # writes to an argument. Module.to(dtype) would cast them.
            plain = tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor
            if hasattr(module, name):
                delattr(module, name)
            if self._buffers:
                module.register_buffer(name, plain, persistent=False)
            else:
                module.register_parameter(name, nn.Parameter(plain, requires_grad=False))

    @ordinary_tensors()
    def tensors(self, module: nn.Module) -> list[Tensor]:
        """The packed tensors of ``module``, in the order of ``plans.names``."""
        return [getattr(module, name).detach().view(dtype) for name, dtype in self._names.items()]

    def runtime(self, module: nn.Module) -> LayerRuntime:
        """Return the runners that are bound to the tensors as they are now: other code may have moved them."""
        bound = self._bound
        own: dict[str, Any] = module._buffers if self._buffers else module._parameters
        if bound is not None:
            for name, address in zip(self._names, bound.addresses, strict=True):
                if own[name].data_ptr() != address:
                    break
            else:
                return bound
        return self._bind(module)

    def bind(self, module: nn.Module) -> None:
        """Drop the runners and bind new ones to the present tensors, for compiled graphs too."""
        self._bound = None
        self._bind(module)

    def _bind(self, module: nn.Module) -> LayerRuntime:
        with ordinary_tensors():
            for name in self._names:  # a copy that was made under inference mode
                if getattr(module, name).is_inference():
                    tensor = getattr(module, name).clone()
                    setattr(module, name, tensor if self._buffers else nn.Parameter(tensor, requires_grad=False))
            self._bound = bound = self.plans.layer(self.tensors(module))
        bound.incomplete |= self.incomplete
        return bound

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_bound", "_updates")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy binds its own tensors, and is not part of the update that the original is in.
        self.__dict__.update(state, _bound=None, _updates=threading.Lock(), _updating_model=False)


@ordinary_tensors()
def _overwrite(tensors: list[Tensor], others: list[Tensor]) -> None:
    for tensor, other in zip(tensors, others, strict=True):
        tensor.copy_(other)


def _attribute(name: str) -> str:
    return f"packed_{name.replace('.', '_')}"
