"""`kvframework bench disaggregated`: the first token of prompts that another engine of vLLM computes, whose KV comes by
NIXL or through the cache, beside the same engine that computes them itself."""
