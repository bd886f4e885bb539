"""vLLM's kernels: Marlin for 4-bit weights, its Triton kernels for E4M3 and bfloat16, and what it ships: DeepGEMM and
OpenAI's ``triton_kernels``. Calls are those of vLLM 0.33."""

# None of these packages need be installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import os

import torch
from torch import Tensor

from polymoe.bench.peers.base import PeerCall, Stacks
from polymoe.formats import PerGroup
from polymoe.problem import Problem
from polymoe.problem.activations import Activation, SwiGLU


def import_vllm() -> None:
    """Register vLLM's operations with torch, and keep float32 scales of x, as the problem has them: vLLM rounds them to
    powers of two by default."""
    os.environ.setdefault("VLLM_USE_DEEP_GEMM_E8M0", "0")
    from vllm.platforms import current_platform

    current_platform.import_kernels()


def own_kernels(problem: Problem, stacks: Stacks) -> PeerCall:
    """The kernels that vLLM chooses on Hopper without other packages: Marlin for 4-bit weights, which are repacked;
    Triton reads the others as they are."""
    import_vllm()
    return _marlin(problem, stacks) if stacks.encoding.bits == 4 else _triton(stacks)


def _triton(stacks: Stacks) -> PeerCall:
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts_op

    up, down = stacks.gate_up, stacks.down
    options = {}
    if isinstance(stacks.encoding.granularity, PerGroup):
        options = {"use_fp8_w8a8": True, "w1_scale": up["scales"].float(), "w2_scale": down["scales"].float()}
        options["block_shape"] = [stacks.encoding.granularity.n, stacks.encoding.granularity.k]

    def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> Tensor:
        return fused_experts_op(x_TH, up["codes"], down["codes"], weights_TA, ids_TA, **options)

    return call


def _marlin(problem: Problem, stacks: Stacks) -> PeerCall:
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4 as fp4
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_moe_permute_scales
    from vllm.scalar_type import scalar_types

    spec, up, down = problem.spec, stacks.gate_up, stacks.down
    experts, options = spec.local_experts, {}
    if stacks.encoding.element == "int4":
        assert isinstance(stacks.encoding.granularity, PerGroup)
        group, kind = stacks.encoding.granularity.k, scalar_types.uint4b8

        def repacked(parts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            words_EKN = parts["codes"].view(torch.int32).transpose(1, 2).contiguous()
            k, n = 8 * words_EKN.shape[1], words_EKN.shape[2]
            scales_EGN = parts["scales"].bfloat16().transpose(1, 2).contiguous()
            return ops.gptq_marlin_moe_repack(words_EKN, k, n, 4), marlin_moe_permute_scales(scales_EGN, k, n, group)

        (w13, s13), (w2, s2) = repacked(up), repacked(down)
    else:
        layer = torch.nn.Module()
        layer.params_dtype, layer.num_experts, layer.hidden_size = torch.bfloat16, experts, spec.hidden  # type: ignore[assignment]
        layer.local_num_experts, layer.intermediate_size_per_partition = experts, spec.intermediate  # type: ignore[assignment]
        kind = scalar_types.float4_e2m1f
        # What repacks them writes into its arguments.
        codes = [parts["codes"].clone() for parts in (up, down)]
        scales = [parts["scales"].clone() for parts in (up, down)]
        if stacks.encoding.global_scale:
            w13, s13, global13, w2, s2, global2 = fp4.prepare_nvfp4_moe_layer_for_marlin(
                layer=layer, w13=codes[0], w13_scale=scales[0], w13_scale_2=up["global_scale"].clone(),
                w2=codes[1], w2_scale=scales[1], w2_scale_2=down["global_scale"].clone(), is_act_and_mul=True,
            )[:6]  # fmt: skip
            options = {"global_scale1": global13, "global_scale2": global2}
        else:
            s13, s2 = (part.view(torch.uint8) for part in scales)
            w13, w2, s13, s2 = fp4.prepare_moe_mxfp4_layer_for_marlin(layer, codes[0], codes[1], s13, s2, None, None)[
                :4
            ]
    limit = problem.activation.limit if isinstance(problem.activation, SwiGLU) else None
    limited = ApplyMoEActivationConfig(clamp_limit=limit)

    def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> Tensor:
        return fused_marlin_moe(
            x_TH, w13, w2, None, None, s13, s2, weights_TA, ids_TA, kind.id, global_num_experts=experts,
            output=out_TH, activation_config=limited, **options,
        )  # fmt: skip

    return call


def deepgemm(problem: Problem, stacks: Stacks) -> PeerCall:
    """DeepGEMM's grouped FP8 GEMMs (contiguous), as vLLM calls them and from the copy that it ships. Weights stay as
    they are."""
    import_vllm()
    from vllm.model_executor.layers.fused_moe import deep_gemm_utils as moe
    from vllm.model_executor.layers.quantization.utils import fp8_utils as fp8
    from vllm.utils import deep_gemm as gemm

    spec = problem.spec
    experts, hidden, width = spec.local_experts, spec.hidden, spec.intermediate
    up, down = ((p["codes"], p["scales"].float()) for p in (stacks.gate_up, stacks.down))
    device, e4m3 = up[0].device, torch.float8_e4m3fn

    def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> None:
        x, scales = fp8.per_token_group_quant_fp8(x_TH, 128)
        rows, alignment = moe.compute_aligned_M_and_alignment(
            M=len(ids_TA), num_topk=ids_TA.shape[1], local_num_experts=experts,
            alignment=gemm.get_mk_alignment_for_contiguous_layout()[0], expert_tokens_meta=None,
        )  # fmt: skip
        buffer = torch.empty(rows, hidden, device=device, dtype=e4m3)
        x, scales, ends, inverse, alignment = moe.deepgemm_moe_permute(
            aq=x, aq_scale=scales, topk_ids=ids_TA, local_num_experts=experts, expert_map=None,
            expert_tokens_meta=None, aq_out=buffer, use_psum_layout=True,
        )  # fmt: skip
        with gemm.mk_alignment_scope(alignment):
            gate_up = torch.empty(rows, 2 * width, device=device, dtype=torch.bfloat16)
            gemm.m_grouped_fp8_gemm_nt_contiguous((x, scales), up, gate_up, ends, use_psum_layout=True)
            h = torch.empty(rows, width, device=device, dtype=e4m3)
            quantize = fp8.silu_mul_per_token_group_quant_fp8_colmajor
            h, h_scales = quantize(
                input=gate_up, output=h, use_ue8m0=False, expert_ends=ends, expert_alignment=alignment
            )
            y = torch.empty(rows, hidden, device=device, dtype=torch.bfloat16)
            gemm.m_grouped_fp8_gemm_nt_contiguous((h, h_scales), down, y, ends, use_psum_layout=True)
        moe.deepgemm_unpermute_and_reduce(
            a=y, topk_ids=ids_TA, topk_weights=weights_TA, inv_perm=inverse, expert_map=None, output=out_TH
        )

    return call


def triton_kernels(problem: Problem, stacks: Stacks) -> PeerCall:
    """OpenAI's ``triton_kernels`` (``matmul_ogs``) in their own layout, as vLLM ships and calls them for GPT-OSS."""
    import_vllm()
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig
    from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
    from vllm.model_executor.layers.fused_moe.experts import gpt_oss_triton_kernels_moe as moe
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

    def interleaved(part: Tensor) -> Tensor:
        return part.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()

    up, down, experts = stacks.gate_up, stacks.down, problem.spec.local_experts
    w1, flex1, s1 = _swizzle_mxfp4(interleaved(up["codes"]), interleaved(up["scales"].view(torch.uint8)))
    w2, flex2, s2 = _swizzle_mxfp4(down["codes"], down["scales"].view(torch.uint8))
    bias1, bias2 = stacks.gate_up_bias_EF, stacks.down_bias_EH
    config = mxfp4_w4a16_moe_quant_config(
        w1_scale=PrecisionConfig(weight_scale=s1, flex_ctx=FlexCtx(rhs_data=flex1)),
        w2_scale=PrecisionConfig(weight_scale=s2, flex_ctx=FlexCtx(rhs_data=flex2)),
        w1_bias=None if bias1 is None else interleaved(bias1.float()),
        w2_bias=None if bias2 is None else bias2.float(),
    )
    activation = problem.activation
    assert isinstance(activation, SwiGLU)
    assert activation.limit is not None

    def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> Tensor:
        routing, gather, scatter = moe.make_routing_data(ids_TA, weights_TA, experts)
        return moe.triton_kernel_fused_experts(
            out_TH, x_TH, w1, w2, routing, gather, scatter, topk=ids_TA.shape[1], quant_config=config,
            swiglu_alpha=activation.alpha, swiglu_limit=activation.limit,
        )  # fmt: skip

    return call


def gpt_oss_only(activation: Activation) -> str:
    """It adds 1 to up and has a limit."""
    fits = isinstance(activation, SwiGLU) and activation.beta == 1.0 and activation.limit is not None
    return "" if fits else "SwiGLU with beta 1 and a limit"
