"""CUDA kernels in C++ for SM90, compiled ahead of time, and their launchers. Imports nothing of ours."""
