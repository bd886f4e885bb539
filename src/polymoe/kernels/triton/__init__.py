"""Triton kernels: permute, grouped GEMMs, quantize, finalize. Imports nothing of ours; torch and triton only."""
