"""Hopper kernels in CUDA C++, compiled ahead of time: decode, prefill, and what moves rows. Imports nothing of ours."""
