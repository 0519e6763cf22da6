"""A stand-in for vLLM's OpenAI server: `stand_in_engine.py PORT [FAULT]`. FAULT is dies, dies-when-asked, refuses,
other-tokens, never-loads or leaves-a-child.

Its answers follow from the prompt; it says of a prompt's first half that it was cached if it has answered it before.
Its metrics say that it has loaded what it has answered before, but for the last two of long prompts, which it holds,
and that each prompt had 100 tokens, of which it has computed 40.
Of long answers a token comes every two milliseconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, FAULT = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
LONG = 500
seen: set[str] = set()
held: list[str] = []
loaded = answered = 0


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        values = {
            "kvframework:loaded_tokens_total": loaded,
            "vllm:prompt_tokens_total": 100 * answered,
            "vllm:request_prefill_kv_computed_tokens_sum": 40 * answered,
        }
        text = "".join(f'{name}{{engine="0"}} {float(value)}\n' for name, value in values.items()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        global answered
        answered += 1
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if FAULT == "dies-when-asked" and len(asked["prompt"]) != 1024:  # not the first one, which warms up
            print("RuntimeError: no blocks are left", flush=True)
            os._exit(4)
        if FAULT == "refuses":
            text = b'{"error": {"message": "too long"}}'
            self.send_response(400)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        half = str(asked["prompt"][: len(asked["prompt"]) // 2])
        cached = len(asked["prompt"]) // 2 if half in seen else 0
        self._load(half, len(asked["prompt"]))
        seen.add(half)
        first = zlib.crc32(str(asked["prompt"]).encode()) + (FAULT == "other-tokens")
        for number in range(asked["max_tokens"]):
            if asked["max_tokens"] > 10:
                time.sleep(0.002)
            self._tell({"choices": [{"text": "", "token_ids": [first + number]}]})
        usage = {"prompt_tokens": len(asked["prompt"]), "prompt_tokens_details": {"cached_tokens": cached}}
        self._tell({"choices": [], "usage": usage})
        self._send(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _load(self, half: str, tokens: int) -> None:
        global held, loaded
        if tokens >= LONG:
            time.sleep(0.02)
            if half in seen and half not in held and FAULT != "never-loads":
                loaded += tokens - 1
                time.sleep(0.02)
            held = [*(each for each in held if each != half), half][-2:]

    def _tell(self, event: object) -> None:
        self._send(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _send(self, data: bytes) -> None:
        # In two pieces: an event need not come whole.
        for piece in (data[:9], data[9:]):
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()


if FAULT == "dies":
    print("WARNING [serve.py:9] this may cause `OSError: [Errno 24] Too many open files`. Consider more", flush=True)
    print("(Worker pid=7) ERROR [spec.py:1] Exception: only supported on GPUs", flush=True)
    print("RuntimeError: Engine core initialization failed.", flush=True)
    sys.exit(3)
if FAULT == "leaves-a-child" and os.fork() == 0:
    while time.process_time() < 0.5:
        pass
    signal.pause()
ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
