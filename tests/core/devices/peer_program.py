"""Another process on a simulated node, for tests: PATH. One JSON list a line: a method and its arguments.

Bytes travel as hex. Handles are kept by name: a first word `name=` stores what a call returns.
"""

from __future__ import annotations

import json
import sys

from kvf_dev.testing.accelerator import Accelerator, AcceleratorError


def main() -> None:
    runtime = Accelerator(sys.argv[1])
    host = memoryview(bytearray(1 << 16))
    kept: dict[str, object] = {"runtime": runtime}
    for line in sys.stdin:
        name, method, *arguments = json.loads(line)
        plain = [
            kept[each[1:]] if isinstance(each, str) and each.startswith("$") else _plain(each) for each in arguments
        ]
        try:
            if method == "copy":
                stream, addresses, offsets, length, to_host = plain
                runtime.copy(stream, host, addresses, offsets, length, to_host=to_host)
                result: object = None
            elif method == "host":
                result = bytes(host[plain[0] : plain[0] + plain[1]]).hex()
            elif method == "synchronize":
                result = plain[0].synchronize()
            else:
                result = getattr(runtime, method)(*plain)
        except AcceleratorError as error:
            print(json.dumps(["error", str(error)]), flush=True)
            continue
        kept[name] = result
        shown = result if isinstance(result, int | str | bool | type(None)) else repr(result)
        print(json.dumps(["ok", shown]), flush=True)


def _plain(value):
    return bytes.fromhex(value[4:]) if isinstance(value, str) and value.startswith("hex:") else value


if __name__ == "__main__":
    main()
