"""vLLM's own offloading, with the server's arena as its host memory: vLLM moves the bytes, kvframework keeps them."""

import vllm
from kvf_vllm.options import check_version

# Here, since the modules import what another vLLM may lack: it is refused by its number, not by a missing name.
check_version(vllm.__version__)
