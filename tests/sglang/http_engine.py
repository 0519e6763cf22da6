"""SGLang's HTTP server on the CPU: `python -m tests.sglang.http_engine SETTINGS`, with SGLang's server arguments as
JSON."""

from __future__ import annotations

import json
import sys
import types

from tests.sglang.standins import everything

# Also in the processes that SGLang starts: they import this module first.
everything.install()
# The server imports it for prompts that are sounds.
sys.modules["soundfile"] = types.ModuleType("soundfile")


def main() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs

    run_server(ServerArgs(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
