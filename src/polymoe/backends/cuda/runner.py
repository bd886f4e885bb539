"""CudaRunner: the calls of one layer on the CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from polymoe.backends.base import RunnerBase, aligned, mapped_ids, require_aligned
from polymoe.backends.config import Config
from polymoe.backends.cuda.config import CudaConfig
from polymoe.backends.cuda.families import families_for, layout_on, weight_format
from polymoe.errors import PlanError
from polymoe.formats import Encoding
from polymoe.kernels.cuda.launch.args import E4M3_ROWS, dtype_number
from polymoe.kernels.cuda.launch.call import PreparedCall, add_rows
from polymoe.kernels.cuda.launch.layer import ActivationArgs, Layer, Matrix
from polymoe.kernels.cuda.launch.shape import CallShape, Tiles
from polymoe.kernels.cuda.pipelines import Budget, e4m3_row_bytes
from polymoe.kernels.cuda.targets import Target, target_for
from polymoe.layouts import Packed
from polymoe.problem import Problem
from polymoe.problem.activations import Activation, GeGLU, ReLU2, SwiGLU

if TYPE_CHECKING:
    from torch import Tensor

    from polymoe.problem.call import CallArguments

ACTIVATION_ARGS: Mapping[type[Activation], Callable[[Any], ActivationArgs]] = {
    SwiGLU: lambda a: ActivationArgs(0, a.alpha, a.beta, a.limit or 0.0),
    GeGLU: lambda a: ActivationArgs(2 if a.approximate == "tanh" else 1),
    ReLU2: lambda a: ActivationArgs(0),
}
"""Activations that the kernels compute, and how their arguments say it."""


class CudaRunner(RunnerBase):
    """Runs the calls of one layer with launches that are prepared once per configuration.

    Several threads may call it at once: each call uses prepared launches that no other call uses at the time. The set
    of cubins, ``target``, is by default the one for the layer's GPU.
    """

    def __init__(self, problem: Problem, packed: Packed, target: Target | None = None) -> None:
        tensors = packed.tensors
        device = tensors["up.codes"].device
        self._tensors, self._device = tensors, device
        gpu: Any = torch.cuda.get_device_properties(device)
        target = target or target_for((gpu.major, gpu.minor))
        budget = target.budget_on(gpu.shared_memory_per_block_optin)
        readers = [f for f in families_for(problem) if f.name in target.families]
        expected = tuple(dict.fromkeys(layout_on(f, target, problem.spec) for f in readers))
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
        self._free: dict[CudaConfig, list[PreparedCall]] = {}
        index = device.index
        if device.type == "cuda" and index is None:
            index = torch.cuda.current_device()
        self._index = index
        # Kernels whose first GEMM reads rows of x by token support rows that are quantized already.
        rows = all(family.quantized_x for family in readers) and not problem.activations.static
        self.options = frozenset(("workspace", "expert_map", "x_scales") if rows else ("workspace", "expert_map"))

    def workspace_bytes(self, tokens: int, top_k: int, config: Config) -> int:
        """Return the bytes for the permutation, x, h and y."""
        assert isinstance(config, CudaConfig)
        return CallShape(self._layer, config.kernels, _tiles(config), tokens, top_k).workspace()[1]

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
            launches = PreparedCall(self._layer, config.kernels, _tiles(config))
        tokens, top_k = shape
        quantized = x_scales is not None
        if launches.shape != (tokens, top_k, quantized):
            launches.resize(tokens, top_k, quantized=quantized)
        if workspace is None:
            workspace = torch.empty(launches.bytes, dtype=torch.uint8, device=self._device)
        else:
            require_aligned("workspace", workspace)
        stream = 0 if self._index is None else torch._C._cuda_getCurrentRawStream(self._index)
        addresses = (x.data_ptr(), ids_TA.data_ptr(), weights_TA.data_ptr(), out_TH.data_ptr())
        kinds = (dtype, dtype_number(out_TH.dtype), ids_TA.dtype is torch.int64, first_expert)
        launches.run(stream, ((workspace.data_ptr(),), addresses, kinds))
        free.append(launches)

    def add_rows(self, y_RH: Tensor, call: CallArguments, config: Config) -> None:
        ids_TA, weights_TA = call.topk_ids_TA.contiguous(), call.topk_weights_TA.contiguous()
        weighted = not self._layer.router_weight_on_input
        stream = 0 if self._index is None else torch._C._cuda_getCurrentRawStream(self._index)
        weights = weights_TA if weighted else None
        add_rows(self._layer, self._first_expert, y_RH, ids_TA, weights, call.out_TH, stream)

    def _input(self, x_TH: Tensor, scales: Tensor | None, config: CudaConfig) -> tuple[Tensor, int]:
        """Return x as the launches read it, and the number of its dtype."""
        if scales is not None:
            return e4m3_rows(x_TH, scales), E4M3_ROWS
        if self._bfloat16 and x_TH.dtype is not torch.bfloat16:  # quantizing kernels read every dtype of x
            x_TH = x_TH.to(torch.bfloat16)
        return aligned(x_TH), dtype_number(x_TH.dtype)


def _layer(problem: Problem, packed: Packed, sms: int, target: Target, budget: Budget) -> Layer:
    spec, t = problem.spec, packed.tensors
    first = "gate" if spec.gated else "up"
    static = problem.activations.static
    up = Matrix(
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
    down = Matrix(
        format=_format(spec.down),
        codes=t["down.codes"],
        scales=t.get("down.scales"),
        n=spec.hidden,
        k=spec.intermediate,
        bias=t.get("down_bias"),
        expert_scale=t.get("down.global_scale"),
        input_scale=t["down_input_scale"] if static else None,
    )
    return Layer(
        up=up,
        down=down,
        gated=spec.gated,
        activation=ACTIVATION_ARGS[type(problem.activation)](problem.activation),
        experts=spec.local_experts,
        router_weight_on_input=problem.weight_on == "input",
        sms=sms,
        target=target,
        budget=budget,
    )


def _format(encoding: Encoding) -> str:
    found = weight_format(encoding)
    assert found is not None
    return found


def _tiles(config: CudaConfig) -> Tiles:
    return Tiles(config.block_m, config.down_block_m, config.narrow_m)


def e4m3_rows(codes_TH: Tensor, scales_TG: Tensor) -> Tensor:
    """Return quantized x as the first GEMM reads it: uint8 [T, row bytes].

    Args:
        codes_TH: float8_e4m3fn.
        scales_TG: float32, one for each 128 columns, or one.
    """
    tokens, columns = codes_TH.shape
    codes, scales = codes_TH.view(torch.uint8), scales_TG.contiguous().view(torch.uint8)
    rows = torch.empty(tokens, e4m3_row_bytes(columns), dtype=torch.uint8, device=codes.device)
    rows[:, :columns] = codes
    rows[:, columns : columns + scales.shape[1]] = scales
    return rows
