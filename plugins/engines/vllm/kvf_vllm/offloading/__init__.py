"""vLLM's own offloading, with the server's arena as its host memory: vLLM moves the bytes, kvframework keeps them."""
