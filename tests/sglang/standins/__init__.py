"""What SGLang lacks on a CPU without its compiled kernels, which are on no package index: in plain torch, for tests."""
