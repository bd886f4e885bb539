"""Triton kernels: dispatch, prepare, grouped GEMM, combine. Imports nothing of ours; torch and triton only."""
