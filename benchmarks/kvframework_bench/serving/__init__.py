"""`kvframework bench serving`: vLLM's OpenAI server under a trace's load, with what keeps its KV cache beside it.

`load` makes the requests of a trace, `engines` starts vLLM's servers, `contenders` has what they offload to, `asking`
sends the requests when they are due, `figures` has what is shown.
"""
