"""Hugging Face's ``finegrained-fp8``, a kernel of its Hub that Transformers can use for experts. Calls are those of its
version 4: both products, the activation, and the weighted sum in one function.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from polymoe.bench.peers.base import PeerCall, Stacks
from polymoe.problem import Problem


def prepare(problem: Problem, stacks: Stacks) -> PeerCall:
    """The faster one of its two functions for each number of tokens: experts as batches of rows, or one row at a time.
    Weights stay as they are.

    Transformers leaves that choice to its user (``experts_implementation``). Each measures dozens of configurations for
    each number of tokens. So batches are tried from half a row an expert on, and single rows, each of which reads
    its expert's weights, up to four rows an expert. Its kernels are compiled and tuned at the first call.
    """
    from triton.testing import do_bench

    from kernels import get_kernel

    library = get_kernel("kernels-community/finegrained-fp8", version=4)
    up, down = stacks.gate_up, stacks.down
    blocks = [128, 128] if problem.spec.format == "fp8_block128" else None
    scales = [p["scales"].float() if blocks else p["scales"] for p in (up, down)]
    experts = problem.spec.local_experts
    fastest: dict[int, Callable[..., Tensor]] = {}

    def call(x_TH: Tensor, ids_TA: Tensor, weights_TA: Tensor, out_TH: Tensor) -> Tensor:
        given = (x_TH, ids_TA, weights_TA, up["codes"], down["codes"], *scales, blocks)
        tokens = len(x_TH)
        if tokens not in fastest:  # before graphs are captured: every size is called once
            single, batches = ids_TA.numel() <= 4 * experts, 2 * ids_TA.numel() >= experts
            functions = [library.moe_fused_batched] * single + [library.moe_fused_grouped] * batches
            fastest[tokens] = min(functions, key=lambda f: do_bench(lambda: f(*given)))  # type: ignore
        return fastest[tokens](*given)

    return call
