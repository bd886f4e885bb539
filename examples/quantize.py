"""A matrix in every format: bits per weight and relative error."""

import torch

from polymoe.formats import FORMATS

w_NK = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))

print(f"{'format':<14} {'bits':>6} {'error':>8}")
for name, form in FORMATS.items():
    q = form.quantize(w_NK)  # codes and scales, as checkpoints store them
    error = (q.dequantize() - w_NK).norm() / w_NK.norm()
    bits = 8 * sum(part.numel() * part.element_size() for part in q.parts().values()) / w_NK.numel()
    print(f"{name:<14} {bits:6.2f} {error:8.1e}")
