"""An engine's OpenAI interface, as far as `kvframework try` needs it: models, a completion, the reset of its cache."""

from __future__ import annotations

import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kvframework.errors import EndpointError

_SLOW_S = 600.0
_MOST_LINE = 1 << 20
# Of vLLM and SGLang, in this order.
_RESETS = ("/reset_prefix_cache", "/flush_cache")


class Reply(NamedTuple):
    """A completion of one token. `ttft_s` lasts from the request to the first token; `cached_tokens` is None where the
    engine does not report them."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None
    text: str


class OpenAI:
    """The interface at `url`, with or without /v1 at its end. Each call blocks, and raises `EndpointError`."""

    def __init__(self, url: str, api_key: str = "", cafile: str | None = None, timeout_s: float = _SLOW_S) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise EndpointError(
                f"{url!r} is not the URL of an engine", where="--url", hint="write http://127.0.0.1:8000"
            )
        self.url = re.sub(r"(/v1)?/*$", "", url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context(cafile=cafile) if self.url.startswith("https") else None

    def model(self) -> str:
        document = self._json(self._open("/v1/models", None))
        try:
            return str(document["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise EndpointError(
                "the engine lists no model", where=f"{self.url}/v1/models", hint="give a model with --model"
            ) from None

    def complete(self, model: str, prompt: str) -> Reply:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        ttft_s, text = 0.0, ""
        usage: dict[str, Any] = {}
        with self._open("/v1/completions", body) as answer:
            for event in _events(answer):
                choices = event.get("choices") or []
                if choices and not ttft_s:
                    ttft_s = time.perf_counter() - began
                text += "".join(str(each.get("text") or "") for each in choices)
                usage = event.get("usage") or usage
        if not ttft_s:
            raise EndpointError("the engine's answer has no token", where=f"{self.url}/v1/completions")
        details = usage.get("prompt_tokens_details") or {}
        return Reply(ttft_s, int(usage.get("prompt_tokens") or 0), details.get("cached_tokens"), text)

    def reset(self) -> None:
        """Empty the engine's own cache, for everybody who uses it."""
        for path in _RESETS:
            try:
                self._open(path, {}).close()
            except _NotFoundError:
                continue
            return
        raise EndpointError(
            "the engine has no endpoint that resets its cache",
            where=self.url,
            hint="start vLLM with VLLM_SERVER_DEV_MODE=1, or leave out --reset: other prompts then displace the prompt",
        )

    def capacity_tokens(self) -> int | None:
        """Return the tokens that the engine's own cache holds, None where it does not say."""
        try:
            with self._open("/metrics", None) as answer:
                text = answer.read(_MOST_LINE * 8).decode(errors="replace")
        except EndpointError:
            return None
        info = re.search(r"vllm:cache_config_info\{([^}]*)\}", text)
        facts = dict(re.findall(r'(\w+)="([0-9]+)"', info[1])) if info else {}
        blocks, size = facts.get("num_gpu_blocks") or facts.get("num_cpu_blocks"), facts.get("block_size")
        if blocks and size:
            return int(blocks) * int(size)
        # SGLang also keeps a prompt in host memory, in front of its storage backend.
        sizes = re.findall(
            r"^sglang:(?:max_total_num_tokens|hicache_host_total_tokens)(?:\{[^}]*\})? ([0-9.e+]+)", text, re.MULTILINE
        )
        return int(sum(map(float, sizes))) or None

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)  # noqa: S310  http or https
        try:
            return urllib.request.urlopen(request, timeout=self._timeout_s, context=self._tls)  # noqa: S310
        except urllib.error.HTTPError as error:
            if error.code in (404, 405):
                raise _NotFoundError("the engine has no such path", where=request.full_url) from None
            said = error.read(2000).decode(errors="replace").strip()
            hints = dict.fromkeys((401, 403), "give the API key: --api-key-file or $OPENAI_API_KEY")
            hint = hints.get(error.code, "ask for a shorter prompt: --tokens" if error.code == 400 else "")
            raise EndpointError(
                f"the engine answered with status {error.code}: {said[:300]}", where=request.full_url, hint=hint
            ) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise EndpointError(
                f"the engine does not answer: {reason}", where=request.full_url, hint="check that the engine runs"
            ) from None

    def _json(self, answer: Any) -> Any:
        with answer:
            try:
                return json.loads(answer.read(_MOST_LINE))
            except ValueError:
                raise EndpointError(
                    "the engine's answer is not JSON",
                    where=self.url,
                    hint="check that the URL is an OpenAI-compatible API",
                ) from None


class _NotFoundError(EndpointError):
    """A path that the engine does not have."""


def _events(answer: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events. Raises `EndpointError` for one that holds an error."""
    while line := answer.readline(_MOST_LINE):
        word, _, data = line.decode(errors="replace").partition(":")
        if word != "data" or data.strip() in ("", "[DONE]"):
            continue
        try:
            event = json.loads(data)
        except ValueError:
            continue
        if isinstance(event, dict):
            if "error" in event:
                raise EndpointError(f"the engine answers with an error: {str(event['error'])[:300]}")
            yield event
