"""`kvframework try`: proves a deployment from outside. A new prompt is computed, pushed out of the engine's own cache,
and asked for again: a hit then comes from kvframework."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvf_run.openai import OpenAI, Reply
from kvframework.api.command import EXIT_FOUND, AsJson, EndpointConfig, examples
from kvframework.api.console import print_document, print_text
from kvframework.client import StatusSource, quiet_connection, server_endpoint
from kvframework.errors import ConfigFieldError, KVFrameworkError
from kvframework.status import Status

app = typer.Typer()
# How far the fillers go beyond what the engine's own cache holds, and how many tokens are sent where it does not say.
_BEYOND, _UNKNOWN_TOKENS = 1.2, 200_000
_SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


class Verdict(msgspec.Struct, frozen=True):
    """What was seen. Times are in seconds. `server` is what the server says of the second request, "" if not asked;
    `estimated_saved_s` is the prefill that it counts as saved by that, None without a hit there."""

    hit: bool
    reason: str
    prompt_tokens: int
    cold_ttft_s: float
    ttft_s: float
    cached_tokens: int | None
    fillers: int
    server: str
    estimated_saved_s: float | None = None


@app.command(
    "try",
    epilog=examples(
        "kvframework try --url http://127.0.0.1:8000",
        "kvframework try --url http://127.0.0.1:8000 --second-url http://127.0.0.1:8001",
        "kvframework try --url https://gateway/v1 --api-key-file key --tokens 8000",
    ),
)
def try_out(
    url: Annotated[str, typer.Option(help="URL of the engine's OpenAI-compatible API.")],
    second_url: Annotated[
        str, typer.Option(help="URL of another engine for the second request; no other prompts are sent then.")
    ] = "",
    tokens: Annotated[
        int, typer.Option(min=64, max=1_000_000, help="Approximate length of the prompt, in tokens.")
    ] = 2000,
    model: Annotated[str, typer.Option(help="The model's name; default: the first model that the engine lists.")] = "",
    reset: Annotated[
        bool,
        typer.Option(
            "--reset", help="Reset the engine's own cache; default: send other prompts to displace the prompt."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation before a reset.")] = False,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the API key. Default: $OPENAI_API_KEY.")] = None,
    cafile: Annotated[Path | None, typer.Option(help="PEM file of trusted certificates.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Endpoint of the kvframework server, to ask about the request.")
    ] = None,
    config: EndpointConfig = None,
    as_json: AsJson = False,
) -> None:
    """Test a deployment through its OpenAI API: a prompt that left the engine's own cache must be a hit.

    A new prompt is sent twice. In between it leaves the engine's own cache: a second engine never had it, fillers push
    it out, or --reset drops everybody's. Exit status 1: nothing was found the second time, and the reason is printed.
    """
    key = _key(api_key_file)
    first = OpenAI(url, key, str(cafile) if cafile else None)
    second = OpenAI(second_url, key, str(cafile) if cafile else None) if second_url else first
    if reset and not yes:
        _confirm(second.url)
    name = model or first.model()
    chance = random.Random()  # noqa: S311  a prompt that nobody has sent, no secret
    prompt = text_of(tokens, chance)
    cold = first.complete(name, prompt)
    fillers = 0
    if reset:
        second.reset()
    elif second is first:
        fillers = sum(1 for _ in _filled(first, name, cold.prompt_tokens or tokens, tokens, chance))
    source = _source(endpoint, config)
    before, saved_s = (source.finished().last, _saved_s(source)) if source else (0, 0.0)
    again = second.complete(name, prompt)
    verdict = judged(cold, again, fillers, "")
    if source:
        with closing(source):
            said = _said(source, before)
            estimated = _saved_s(source) - saved_s
        verdict = msgspec.structs.replace(verdict, server=said, estimated_saved_s=estimated or None)
    if as_json:
        print_document(msgspec.structs.asdict(verdict))
    else:
        for line in _lines(verdict):
            print_text(line)
    if not verdict.hit:
        raise typer.Exit(EXIT_FOUND)


def text_of(tokens: int, chance: random.Random) -> str:
    """Return words that nobody has sent before, of about as many tokens as asked for. Pure but for `chance`."""
    words = ("".join(chance.choice(_SYLLABLES) for _ in range(2)) for _ in range(max(tokens // 2, 1)))
    return " ".join(words)


def judged(cold: Reply, again: Reply, fillers: int, server: str) -> Verdict:
    """Return the verdict on both answers. Pure."""
    cached, reason = again.cached_tokens, ""
    if cached is None:
        reason = "the engine does not report cached tokens: start vLLM with --enable-prompt-tokens-details, "
        reason += "SGLang with --enable-cache-report"
    elif cached == 0:
        reason = "no token of the prompt was found: check that `kvframework status` lists the engine's instances, "
        reason += "and that the prompt is longer than a chunk"
    elif again.text != cold.text:
        reason = "the answers differ, but greedy answers of one model in fp32 must be equal"
    hit = bool(cached) and again.text == cold.text
    return Verdict(hit, reason, again.prompt_tokens, cold.ttft_s, again.ttft_s, cached, fillers, server)


def _filled(engine: OpenAI, model: str, prompt_tokens: int, words: int, chance: random.Random) -> Iterator[Reply]:
    """Send other prompts of the same length until the engine's own cache has no room for the first one."""
    left = _BEYOND * (engine.capacity_tokens() or _UNKNOWN_TOKENS)
    while left > 0:
        yield (reply := engine.complete(model, text_of(words, chance)))
        left -= reply.prompt_tokens or prompt_tokens


def _source(endpoint: str | None, config: Path | None) -> StatusSource | None:
    if endpoint is None and config is None:
        return None
    quiet_connection()
    return StatusSource(server_endpoint(endpoint, config), 5.0, name="try")


def _said(source: StatusSource, before: int) -> str:
    try:
        records = [each for each in source.finished(before).records if each.request in ("LOOKUP", "LOOKUP_KEYS")]
    except KVFrameworkError as error:
        return f"the server does not answer: {error}"
    if not records:
        return "the server got no lookup: the engine is connected to another server, or to none"
    last = records[-1]
    found = f"{last.l1_tokens} tokens in L1 and {last.l2_tokens} in tiers of {last.asked_tokens} tokens asked for"
    return f"{found}{f'; missing: {last.reason}' if last.reason else ''}"


def _saved_s(source: StatusSource) -> float:
    try:
        return msgspec.json.decode(source.ask(), type=Status).lookups.prefill_saved_s
    except KVFrameworkError:
        return 0.0


def _lines(verdict: Verdict) -> list[str]:
    cached = "unknown" if verdict.cached_tokens is None else verdict.cached_tokens
    lines = [
        f"prompt: {verdict.prompt_tokens} tokens, {verdict.fillers} other prompts in between",
        f"first token, cold: {verdict.cold_ttft_s * 1e3:.0f} ms",
        f"first token, again: {verdict.ttft_s * 1e3:.0f} ms, {cached} tokens cached",
    ]
    if verdict.server:
        lines.append(f"server: {verdict.server}")
    if verdict.estimated_saved_s is not None:
        measured = verdict.cold_ttft_s - verdict.ttft_s
        lines.append(
            f"prefill saved: {verdict.estimated_saved_s:.2f} s estimated by the server, {measured:.2f} s measured here"
        )
    times = verdict.cold_ttft_s / verdict.ttft_s if verdict.ttft_s else 0.0
    lines.append(f"hit: the first token came {times:.1f} x as fast" if verdict.hit else f"no hit: {verdict.reason}")
    return lines


def _key(file: Path | None) -> str:
    if file is None:
        return os.environ.get("OPENAI_API_KEY", "")
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigFieldError(f"the API key file cannot be read: {error}", where="--api-key-file") from None


def _confirm(url: str) -> None:
    question = f"Delete the engine's cache at {url}, for all its users?"
    if not sys.stdin.isatty():
        raise ConfigFieldError(
            "--reset deletes the cache of all users, and no terminal can confirm it", where="--reset", hint="add --yes"
        )
    typer.confirm(question, abort=True)
