"""One layer's experts in PyTorch: load them packed, call them, read why they run as they do, and dequantize them."""

import torch

import polymoe
from polymoe.problem.routing import TopKSoftmax

experts = polymoe.load_experts("models/sums-gpt-oss-mxfp4", layer=1, device="cpu")  # or a Hub id and "cuda"
problem = experts.problem

# A router chooses two of eight experts for each of four tokens, and weighs them.
generator = torch.Generator().manual_seed(0)
x_TH = torch.randn(4, problem.spec.hidden, generator=generator).bfloat16()
router = TopKSoftmax(problem.top_k)
topk_ids_TA, topk_weights_TA = router(torch.randn(4, problem.spec.experts, generator=generator))

y_TH = experts(x_TH, topk_ids_TA, topk_weights_TA)
print(f"{tuple(x_TH.shape)} -> {tuple(y_TH.shape)}, {y_TH.dtype}")

gate_up_EFH, down_EHF = experts.weights.dequantize()  # float32, from the packed bytes
unpacked = 2 * (gate_up_EFH.numel() + down_EHF.numel())
print(f"{problem.spec.local_bytes / 2**20:.2f} MiB packed, {unpacked / 2**20:.2f} MiB in 16 bit")
print(f"{experts.packed.nbytes / 2**20:.2f} MiB in memory, in layout {experts.packed.layout}")

print(experts.explain())
