"""`kvframework bench outside`: benchmarks that others wrote and publish, run unchanged against vLLM's server.

`tools` names the tools and their workloads; `aiperf`, `vllm_bench` and `lmcache_bench` have the command and the result
of one tool each; `load` has the sizes and the trace; `cells` keeps what is finished; `figures` has what is shown.
"""
