"""CudaRunner: the calls of one layer on the CUDA kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from polymoe.backends.base import RunnerBase, aligned, mapped_ids, require_aligned
from polymoe.backends.config import Config
from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.cuda.families import families_for, format_of
from polymoe.errors import PlanError
from polymoe.formats import Encoding
from polymoe.kernels.cuda import launch
from polymoe.kernels.cuda.launch.args import dtype_number
from polymoe.kernels.cuda.sizes import Budget
from polymoe.kernels.cuda.targets import Target, target_for
from polymoe.layouts import Packed
from polymoe.problem import Problem
from polymoe.problem.activations import Activation, GeGLU, SwiGLU

if TYPE_CHECKING:
    from torch import Tensor

    from polymoe.problem.call import CallArguments

__all__ = ["CudaRunner"]


class CudaRunner(RunnerBase):
    """Runs the calls of one layer with launches that are prepared once per configuration.

    Several threads may call it at once: each call uses prepared launches that no other call uses at the time.

    Args:
        problem: what runs.
        packed: the layer.
        target: the set of cubins; by default the one for the layer's GPU.
    """

    def __init__(self, problem: Problem, packed: Packed, target: Target | None = None) -> None:
        tensors = packed.tensors
        device = tensors["up.codes"].device
        self._tensors, self._device = tensors, device
        gpu: Any = torch.cuda.get_device_properties(device)
        target = target or target_for((gpu.major, gpu.minor))
        budget = target.budget_on(gpu.shared_memory_per_block_optin)
        readers = [f for f in families_for(problem) if f.name in target.families]
        expected = tuple(dict.fromkeys(f.layout_on(target, problem.spec) for f in readers))
        if packed.layout not in expected:
            raise PlanError(
                f"layout of a layer for {target.name}'s kernels",
                expected=" or ".join(expected),
                got=packed.layout,
                hint="pack the layer on the GPU that runs it",
            )
        self._layer = _layer(problem, packed, gpu.multi_processor_count, target, budget)
        self._bfloat16 = not problem.activations.quantized
        self._first_expert = problem.spec.first_expert
        self._free: dict[CudaConfig, list[launch.Call]] = {}
        index = device.index
        if device.type == "cuda" and index is None:
            index = torch.cuda.current_device()
        self._index = index
        # Kernels whose first GEMM reads rows of x by token support rows that are quantized already.
        rows = all(family.call.takes_quantized_x for family in readers) and not problem.activations.static
        self._options = frozenset(("workspace", "expert_map", "x_scales") if rows else ("workspace", "expert_map"))

    @property
    def options(self) -> frozenset[str]:
        """``workspace`` and ``expert_map``, and for E4M3 weights, unless scales of x are static, ``x_scales``."""
        return self._options

    def workspace_bytes(self, tokens: int, top_k: int, config: Config) -> int:
        """Return the bytes for the permutation, x, h and y."""
        assert isinstance(config, CudaConfig)
        return config.kernels.call.regions(self._layer, config.block_m, tokens, top_k).offsets()[1]

    def run(self, call: CallArguments, config: Config) -> None:
        """See :meth:`polymoe.backends.base.Runner.run`. The tensors' GPU must be torch's current one."""
        assert isinstance(config, CudaConfig)
        x_TH, ids_TA, weights_TA, _, workspace, x_scales, expert_map = call
        out_TH, shape = call.out_TH, ids_TA.shape
        if not shape[0]:
            return
        first_expert = self._first_expert
        if expert_map is not None:
            ids_TA, first_expert = mapped_ids(ids_TA, expert_map), 0
        elif not ids_TA.is_contiguous():
            ids_TA = ids_TA.contiguous()
        if not weights_TA.is_contiguous():
            weights_TA = weights_TA.contiguous()
        require_aligned("out", out_TH)
        x, dtype = self._input(x_TH, x_scales, config)
        free = self._free.get(config)
        if free is None:
            free = self._free.setdefault(config, [])
        try:
            launches = free.pop()
        except IndexError:  # the first call, or other threads use all prepared launches
            family = config.kernels
            sizes = (config.block_m, config.block_n, config.down_block_m, config.narrow_m)
            launches = family.call(self._layer, family.sizes, *sizes)
        if launches.shape != shape:
            launches.resize(*shape)
        if workspace is None:
            workspace = torch.empty(launches.bytes, dtype=torch.uint8, device=self._device)
        else:
            require_aligned("workspace", workspace)
        stream = 0 if self._index is None else torch._C._cuda_getCurrentRawStream(self._index)
        addresses = (x.data_ptr(), ids_TA.data_ptr(), weights_TA.data_ptr(), out_TH.data_ptr(), workspace.data_ptr())
        kinds = (dtype, dtype_number(out_TH.dtype), ids_TA.dtype is torch.int64, first_expert)
        launches.run(*addresses, stream, kinds, quantized_x=x_scales is not None)
        free.append(launches)

    def add_rows(self, y_RH: Tensor, call: CallArguments, config: Config) -> None:
        """See :meth:`polymoe.backends.base.Runner.add_rows`."""
        ids_TA, weights_TA = call.topk_ids_TA.contiguous(), call.topk_weights_TA.contiguous()
        weighted = not self._layer.router_weight_on_input
        stream = 0 if self._index is None else torch._C._cuda_getCurrentRawStream(self._index)
        launch.add_rows(self._layer, y_RH, ids_TA, weights_TA if weighted else None, call.out_TH, stream)

    def _input(self, x_TH: Tensor, scales: Tensor | None, config: CudaConfig) -> tuple[Tensor, int]:
        """Return x as the launches read it, and the number of its dtype."""
        if scales is not None:
            call = config.kernels.call
            assert issubclass(call, launch.E4M3RowsCall)
            return call.rows_of(x_TH, scales), -1
        if self._bfloat16 and x_TH.dtype is not torch.bfloat16:  # quantizing kernels read every dtype of x
            x_TH = x_TH.to(torch.bfloat16)
        return aligned(x_TH), dtype_number(x_TH.dtype)


def _layer(problem: Problem, packed: Packed, sms: int, target: Target, budget: Budget) -> launch.Layer:
    spec, t = problem.spec, packed.tensors
    first = "gate" if spec.gated else "up"
    static = problem.activations.static
    up = launch.Matrix(
        format=_format(spec.up),
        codes=t["up.codes"],
        scales=t.get("up.scales"),
        n=(2 if spec.gated else 1) * spec.intermediate,
        k=spec.hidden,
        bias=t.get(f"{first}_bias"),
        up_bias=t.get("up_bias"),
        expert_scale=t.get(f"{first}.global_scale"),
        up_expert_scale=t.get("up.global_scale"),
        input_scale=t["gate_up_input_scale"] if static else None,
    )
    down = launch.Matrix(
        format=_format(spec.down),
        codes=t["down.codes"],
        scales=t.get("down.scales"),
        n=spec.hidden,
        k=spec.intermediate,
        bias=t.get("down_bias"),
        expert_scale=t.get("down.global_scale"),
        input_scale=t["down_input_scale"] if static else None,
    )
    return launch.Layer(
        up=up,
        down=down,
        gated=spec.gated,
        activation=_activation(problem.activation),
        first_expert=spec.first_expert,
        experts=spec.local_experts,
        router_weight_on_input=problem.weight_on == "input",
        sms=sms,
        target=target,
        budget=budget,
    )


def _format(encoding: Encoding) -> str:
    found = format_of(encoding)
    assert found is not None
    return found


def _activation(activation: Activation) -> launch.Activation:
    if isinstance(activation, SwiGLU):
        return launch.Activation(0, activation.alpha, activation.beta, activation.limit or 0.0)
    if isinstance(activation, GeGLU):
        return launch.Activation(2 if activation.approximate == "tanh" else 1)
    return launch.Activation(0)
