"""A stand-in for a tool: `stand_in_tool.py URL FOLDER [FAULT]` asks the engine once and writes what it found."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

url, folder, fault = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
request = urllib.request.Request(f"{url}/v1/completions", json.dumps({"prompt": [1, 2], "max_tokens": 1}).encode())
with urllib.request.urlopen(request) as answer:
    answer.read()
if fault == "dies":
    sys.exit("ValueError: no such dataset")
(folder / "result.json").write_text(json.dumps({"completed": 0 if fault == "fails" else 1}))
