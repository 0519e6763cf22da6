"""A KV cache connector of TensorRT-LLM for kvframework. Written by the interface, not run."""
