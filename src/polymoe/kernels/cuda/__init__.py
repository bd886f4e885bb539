"""CUDA kernels in C++, compiled ahead of time for several GPUs, and their launchers. Imports nothing of ours."""
