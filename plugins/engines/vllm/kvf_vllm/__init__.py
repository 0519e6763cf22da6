"""vLLM as an engine, through its own KV connector interface. vLLM selects `kvf_vllm.connector`; only it and `metrics`
import vLLM, so that everything else here is tested without it."""
