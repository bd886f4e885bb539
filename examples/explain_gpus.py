"""Which GPUs hold a model, and how fast a token can be there: without weights, without a GPU and without a network."""

import polymoe

MODEL = "openai/gpt-oss-120b"
DEVICES = ("rtx4090", "RTX PRO 6000", "NVIDIA H200", "b200")

for device in DEVICES:
    explanation = polymoe.explain(MODEL, device=device)
    fits, backend, *_ = explanation.conclusion()
    print(f"{fits}\n  {backend}")

# The tables behind it, as text or as values for a program.
row = polymoe.explain(MODEL, device="h200").rows[0]
print(f"\n{len(row.layers)} layers: {row.problem}")
print(row.selection)
