"""PackedLayer: a layer's packed experts as parameters of the engine's own module, and the calls that run them.

The engine then counts, offloads, frees and refills these parameters as it does its own. Their addresses stay, so graphs
that were captured stay valid.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polymoe.errors import PlanError
from polymoe.layer.load_check import check_layer, require_planned
from polymoe.layer.runtime import LayerRuntime, PlanCache, PlanRequest, compiled_call
from polymoe.layouts import Packed
from polymoe.layouts.pack_check import pack_checked
from polymoe.planning.selection import Selection
from polymoe.problem import Problem
from polymoe.problem.call import CallArguments
from polymoe.problem.tensors import ExpertWeights

__all__ = ["PackedLayer"]


class PackedLayer:
    """The experts of one layer, packed into parameters of a module that is passed to each method.

    The module is not kept: an engine may copy or free it.
    """

    def __init__(self, where: str, problem: Problem, request: PlanRequest) -> None:
        self.where, self._problem, self._request = where, problem, request
        self._plans: PlanCache | None = None
        self._dtypes: dict[str, torch.dtype] = {}
        self._bound: LayerRuntime | None = None

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

    def nbytes(self, module: nn.Module) -> int:
        """Bytes of the packed parameters of ``module``."""
        return sum(t.numel() * t.element_size() for t in self._tensors(module))

    def pack(
        self,
        module: nn.Module,
        weights: ExpertWeights,
        device: torch.device,
        *,
        check: bool = True,
        in_place: bool = False,
    ) -> None:
        """Pack ``weights`` into new parameters of ``module`` on ``device``.

        Called again, for weights that changed, it gives parameters of the same names, shapes and layout, which the
        engine copies over the first ones; or it overwrites these itself, once all experts are packed.

        Args:
            module: the engine's layer; parameters of these names are replaced.
            weights: the experts, read one at a time.
            device: where the parameters are.
            check: compare the results of a few experts with the reference, on every backend of the plan. The packed
                bytes of every expert are always compared with ``weights``.
            in_place: overwrite the parameters that a call before this one made, at their addresses. After an error
                they are as they were.

        Raises:
            UnsupportedProblem: if no backend runs these experts here.
            PlanError: if new weights have another spec, or scales that reach further than those for which the layer was
                planned.
            CheckpointError: if static input scales are missing.
            FormatError: for codes, scales or biases that are not finite, or a matrix whose scales are all zero.
            VerificationError: if the packed experts are not, or do not compute, what ``weights`` say.
        """
        again = self._plans is not None
        if again:
            require_planned(
                self.problem, weights, device, f"{self.where}: new weights", "start the engine again with them"
            )
            packed = pack_checked(self._request.layouts[self.plans.layout], weights, device, self.where)
        else:
            problem, packed = self._request.pack(self._problem, weights, device, self.where)
            self._plans = PlanCache.of(problem, self._request, packed.layout, tuple(packed.tensors))
        self._register(module, packed, in_place)
        if check:
            runtime = LayerRuntime(self.plans, self._tensors(module)) if again else self._runtime(module)
            check_layer(runtime, self.problem, weights, self.where)
        elif not again:
            self._runtime(module)

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
        call = CallArguments(x_TH, topk_ids_TA, topk_weights_TA)
        if torch.compiler.is_compiling():
            return compiled_call(self.plans, self._tensors(module), call)
        runtime = self._runtime(module)
        call.check(self.problem, runtime.device)
        return runtime.run(call)

    def _register(self, module: nn.Module, packed: Packed, in_place: bool) -> None:
        self._dtypes = {_parameter(name): tensor.dtype for name, tensor in packed.tensors.items()}
        for name, tensor in packed.tensors.items():
            # Bytes: not every collective and copy of an engine takes the 8-bit floats.
            plain = tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor
            if in_place:
                module.get_parameter(_parameter(name)).data.copy_(plain)
                continue
            if hasattr(module, _parameter(name)):
                delattr(module, _parameter(name))
            module.register_parameter(_parameter(name), nn.Parameter(plain, requires_grad=False))

    def _tensors(self, module: nn.Module) -> list[Tensor]:
        return [module.get_parameter(name).detach().view(dtype) for name, dtype in self._dtypes.items()]

    def _runtime(self, module: nn.Module) -> LayerRuntime:
        """Return the runtime of the parameters as they are now: an engine may have moved them."""
        parameters = module._parameters
        addresses = tuple(parameters[name].data_ptr() for name in self._dtypes)  # type: ignore[union-attr]
        if self._bound is None or addresses != self._bound.addresses:
            self._bound = LayerRuntime(self.plans, self._tensors(module))
            self.plans.add(self._bound)
        return self._bound


def _parameter(name: str) -> str:
    return f"packed_{name.replace('.', '_')}"
