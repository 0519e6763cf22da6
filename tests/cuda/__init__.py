"""The transport `cuda_ipc`: by itself, on a simulated CUDA driver, and, marked `gpu`, on a real one."""
