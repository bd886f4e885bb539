"""The arguments of a call of a layer and of its runner, and the checks of them that do not depend on the backend."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polymoe.errors import ArgumentError, UnsupportedProblem
from polymoe.problem.problem import Dtype, Problem
from polymoe.problem.routing import Routing

DTYPES: dict[torch.dtype, Dtype] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
"""Names in a Problem of the dtypes of x."""

TORCH_DTYPES: dict[Dtype, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}
"""The inverse of :data:`DTYPES`."""

_Dtypes = tuple[torch.dtype, ...]
_INPUTS: _Dtypes = tuple(DTYPES)
_QUANTIZED: _Dtypes = (torch.float8_e4m3fn,)
_INTEGERS: _Dtypes = (torch.int32, torch.int64)
_FLOAT32: _Dtypes = (torch.float32,)
_BYTES: _Dtypes = (torch.uint8,)


def dtype_name(dtype: torch.dtype) -> Dtype:
    """Return the name of a dtype of x in a Problem.

    Raises:
        ArgumentError: if x cannot have this dtype.
    """
    if dtype not in DTYPES:
        raise ArgumentError("dtype", expected="torch.bfloat16, torch.float16 or torch.float32", got=str(dtype))
    return DTYPES[dtype]


def device_name(device: torch.device | str | None) -> str | None:
    """Return the name of a device as :meth:`polymoe.machine.Machine.of` takes it; None for None.

    Raises:
        ArgumentError: for what is neither a CPU nor a CUDA device.
    """
    if device is None:
        return None
    expected = "cpu, cuda or cuda:1"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError("device", expected=expected, got=repr(device)) from None
    if found.type not in ("cpu", "cuda"):
        raise ArgumentError("device", expected=expected, got=repr(str(found)))
    return "cpu" if found.type == "cpu" else str(found)  # torch calls the one CPU cpu and cpu:0


class CallArguments(NamedTuple):
    """The arguments of one call of a layer, and of the backend that runs it.

    Attributes:
        x_TH: bfloat16, float16 or float32 of any strides; float8_e4m3fn if ``x_scales`` is given.
        topk_ids_TA: int32 or int64, the experts of each token; ids of no expert of this rank contribute exactly 0.
        topk_weights_TA: float32.
        out: contiguous [T, H], in x's dtype (in the planned one if x is quantized), where the result is written; None
            to allocate it. A runner always gets one.
        workspace: contiguous uint8, at least as many bytes as the runner needs, to use instead of allocating. What is
            in it does not matter, before or after.
        x_scales: float32 [T, groups], what multiplies x: see :class:`~polymoe.problem.activation_quantization`.
        expert_map: int32 or int64 [E], the place of each expert in the packed layer, or -1 for experts of other ranks;
            without it, experts are this rank's as ``problem.spec`` says.
    """

    x_TH: Tensor
    topk_ids_TA: Tensor
    topk_weights_TA: Tensor
    out: Tensor | None = None
    workspace: Tensor | None = None
    x_scales: Tensor | None = None
    expert_map: Tensor | None = None

    @property
    def routing(self) -> Routing:
        """The experts of each token and their weights."""
        return Routing(self.topk_ids_TA, self.topk_weights_TA)

    @property
    def out_TH(self) -> Tensor:
        """Where a runner writes the result."""
        assert self.out is not None
        return self.out

    def out_dtype(self, problem: Problem) -> torch.dtype:
        """Return the dtype of the result: that of x, or the planned one if x is quantized."""
        return self.x_TH.dtype if self.x_scales is None else TORCH_DTYPES[problem.dtype]

    @property
    def requires_grad(self) -> bool:
        """Whether gradients are recorded and any argument requires one."""
        if not torch.is_grad_enabled():
            return False
        x_TH, _, weights_TA, out, _, x_scales, _ = self
        return (
            x_TH.requires_grad
            or weights_TA.requires_grad
            or (out is not None and out.requires_grad)
            or (x_scales is not None and x_scales.requires_grad)
        )

    def requiring_gradients(self) -> list[str]:
        """Return the names of the arguments that require a gradient."""
        return [name for name, t in zip(self._fields, self, strict=True) if t is not None and t.requires_grad]

    def without_gradients(self) -> tuple[CallArguments, str]:
        """Return the call of a node without a backward, and the argument that it must refuse, "" for none."""
        if not self.requires_grad:
            return self, ""
        detached = CallArguments(*[None if part is None else part.detach() for part in self])  # type: ignore[arg-type]
        return detached, self.requiring_gradients()[0]

    def check(self, problem: Problem, device: torch.device) -> None:
        """Check shapes, dtypes and devices.

        Args:
            problem: what the layer computes.
            device: where the packed experts are.

        Raises:
            ArgumentError: if one is wrong; the error names the argument.
        """
        x_TH, ids_TA, weights_TA, out, workspace, x_scales, expert_map = self
        hidden, shape, ids_shape = problem.spec.hidden, x_TH.shape, ids_TA.shape
        if len(shape) != 2 or shape[1] != hidden:
            raise ArgumentError("x_TH", expected=f"[T, {hidden}]", got=str(list(shape)))
        if x_TH.dtype not in (_INPUTS if x_scales is None else _QUANTIZED):
            expected = "bfloat16, float16 or float32" if x_scales is None else "float8_e4m3fn, as x_scales is given"
            raise ArgumentError("x_TH", expected=expected, got=str(x_TH.dtype))
        tokens = shape[0]
        for name, tensor, dtypes in (
            ("topk_ids_TA", ids_TA, _INTEGERS),
            ("topk_weights_TA", weights_TA, _FLOAT32),
        ):
            if tensor.dtype not in dtypes:
                raise ArgumentError(name, expected=" or ".join(map(str, dtypes)), got=str(tensor.dtype))
            own = tensor.shape
            if len(own) != 2 or own[0] != tokens or own[1] < 1 or own != ids_shape:
                raise ArgumentError(name, expected=f"[{tokens}, A], the same for ids and weights", got=str(list(own)))
            if tensor.device != x_TH.device:
                raise ArgumentError(name, expected=f"on {x_TH.device}, like x", got=str(tensor.device))
        if x_TH.device != device:
            raise ArgumentError("x_TH", expected=f"on {device}, like the packed experts", got=str(x_TH.device))
        if out is not None:
            _require("out", out, device, (self.out_dtype(problem),), list(shape))
        if workspace is not None:
            _require("workspace", workspace, device, _BYTES, [workspace.numel()])
        if x_scales is not None:
            groups = problem.activations.scales_per_row(hidden)
            if groups is None:
                raise ArgumentError(
                    "x_scales",
                    expected="none: the experts do not quantize their inputs dynamically",
                    got=f"a tensor {list(x_scales.shape)}",
                    hint='load them with activations="fp8_token" or "fp8_group128"',
                )
            _require("x_scales", x_scales, device, _FLOAT32, [tokens, groups])
        if expert_map is not None:
            _require("expert_map", expert_map, device, _INTEGERS, [problem.spec.experts])

    def check_values(self, problem: Problem) -> None:
        """Check ids and places of experts. This reads the tensors, so it is for those on a CPU.

        Raises:
            ArgumentError: for an id or a place out of range.
        """
        spec, ids_TA, expert_map = problem.spec, self.topk_ids_TA, self.expert_map
        low, high = map(int, ids_TA.aminmax())
        if low < -1 or high > spec.experts:
            expected = f"0 to {spec.experts - 1}, or -1 or {spec.experts} for none"
            raise ArgumentError("topk_ids_TA", expected=expected, got=f"{low} to {high}")
        if expert_map is not None:
            low, high = map(int, expert_map.aminmax())
            if low < -1 or high >= spec.local_experts:
                expected = f"0 to {spec.local_experts - 1}, or -1 for experts of other ranks"
                raise ArgumentError("expert_map", expected=expected, got=f"{low} to {high}")


def no_gradient(argument: str, what: str, hint: str) -> UnsupportedProblem:
    """Return the error of a call whose result would not carry the gradient that an argument requires.

    Args:
        argument: its name.
        what: what computes the result.
        hint: what the user can do.
    """
    expected = f"no gradient: {what} has no backward for it"
    return UnsupportedProblem(argument, expected=expected, got="a tensor that requires a gradient", hint=hint)


def _require(name: str, tensor: Tensor, device: torch.device, dtypes: _Dtypes, shape: list[int]) -> None:
    """Raise ArgumentError unless the tensor is contiguous and has this shape, this device and one of these dtypes."""
    if tensor.dtype not in dtypes:
        raise ArgumentError(name, expected=" or ".join(map(str, dtypes)), got=str(tensor.dtype))
    if list(tensor.shape) != shape:
        raise ArgumentError(name, expected=str(shape), got=str(list(tensor.shape)))
    if tensor.device != device:
        raise ArgumentError(name, expected=f"on {device}, like the packed experts", got=str(tensor.device))
    if not tensor.is_contiguous():
        raise ArgumentError(name, expected="a contiguous tensor", got=f"strides {list(tensor.stride())}")
