"""The conformance kit for key hashers: tests that every `KeyHasher` must pass, see docs/plugins/hashers.md.

Digests are names: two prefixes that differ must not share a digest. A test of fixed digests, beside the kit,
shows that they stay as they are from release to release. Needs pytest alone.
"""

from __future__ import annotations

import array
import gc
import itertools
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest

from kvf_dev.testing.kit import NamedKit, interleaved, must_be_equal, must_refuse
from kvframework.api.hasher import DIGEST_BYTES, TOKEN_BYTES, Buffer, HasherProvider, KeyHasher
from kvframework.errors import RequestError

MakeHasher = Callable[[], KeyHasher]

# Tokens of a chunk: the smallest, an odd number, and those that servers use.
CHUNKS = (1, 3, 16, 256)
_BITS = 8 * DIGEST_BYTES
_MANY = 2 * _BITS
# Digests of adapters and images, alone and several of one chunk, and long ones that differ at one place.
_LONG = bytes(range(256)) * 20
_EXTRAS = [b"\0", b"\1", b"\0\0", b"a", b"ab", b"b", bytes(31), bytes(32), bytes(33), bytes(64), bytes(65), _LONG]
_EXTRAS += [_LONG[:-1] + b"?", b"?" + _LONG[1:], _LONG[:2560] + b"?" + _LONG[2561:], _LONG + b"\0", b"\t\0\0\0"]
_CHANGED_BITS = 64  # of 256: half of them change on average, less than a quarter never of a cryptographic hash
_CHUNK = 16
_ELSEWHERE = """
import sys
tokens = b"".join((number * 2654435761 % 2**32).to_bytes(4, "little") for number in range(64))
for parent in (b"", bytes(range(32))):
    sys.stdout.buffer.write(made.chunk_digests(tokens, 4, parent=parent))
    sys.stdout.buffer.write(made.chunk_digests(tokens, 4, parent=parent, extras={1: b"image", 5: b"adapter"}))
sys.stdout.buffer.write(made.fingerprint.encode())
"""


def packed(tokens: Iterable[int]) -> bytes:
    words = array.array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    assert words.itemsize == TOKEN_BYTES
    return words.tobytes()


def mixed(count: int) -> list[int]:
    return [(number * 2654435761 + (number << 3)) % 2**32 for number in range(1, count + 1)]


def split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def must_change(before: bytes, after: bytes, chunk: int, what: str) -> None:
    __tracebackhide__ = True
    one, other = split(before), split(after)
    if len(one) != len(other):
        pytest.fail(f"{what}: the hasher returned {len(other)} digests, expected {len(one)}")
    for index, (was, became) in enumerate(zip(one, other, strict=True)):
        if index < chunk and was != became:
            pytest.fail(f"{what}, in chunk {chunk}, must not change the digest of the earlier chunk {index}")
        if index >= chunk and was == became:
            pytest.fail(f"{what}, in chunk {chunk}, must change the digest of chunk {index}")


def must_differ(named: Sequence[tuple[object, bytes]], what: str) -> None:
    __tracebackhide__ = True
    seen: dict[bytes, object] = {}
    for name, digests in named:
        if (last := digests[-DIGEST_BYTES:]) in seen:
            pytest.fail(f"{what}, but requests {seen[last]} and {name} share a digest")
        seen[last] = name


def _rank(rows: list[int]) -> int:
    by_top: dict[int, int] = {}
    for row in rows:
        while row:
            top = row.bit_length()
            if top not in by_top:
                by_top[top] = row
                break
            row ^= by_top[top]
    return len(by_top)


class _Tokens(bytearray):
    """Memory that a weak reference can point to."""


class HasherConformance(NamedKit):
    """Base class of an author's test class, which gives `use`, or a fixture `make_hasher`: a factory of new hashers."""

    _descriptor = HasherProvider
    usual_s = 30.0

    @pytest.fixture
    def make_hasher(self) -> MakeHasher:
        return self.by_name()

    @pytest.fixture
    def hasher(self, make_hasher: MakeHasher) -> KeyHasher:
        return make_hasher()

    def test_it_has_the_plugins_name_and_a_fingerprint(self, make_hasher: MakeHasher) -> None:
        one, other = make_hasher(), make_hasher()
        self.must_be_named(one.name)
        assert isinstance(one.fingerprint, str), f"The hasher's `fingerprint` must be a str, but is {one.fingerprint!r}"
        assert one.fingerprint, "The hasher's `fingerprint` is empty: derive it from the options"
        one.chunk_digests(packed(range(64)), 16)
        assert one.fingerprint == other.fingerprint, "Two hashers with the same options must have the same fingerprint"

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_there_is_one_digest_for_each_whole_chunk(self, hasher: KeyHasher, chunk: int) -> None:
        for count in (0, 1, chunk - 1, chunk, chunk + 1, 3 * chunk - 1, 3 * chunk, 40 * chunk + chunk // 2):
            for parent in (b"", bytes(range(DIGEST_BYTES))):
                digests = hasher.chunk_digests(packed(range(count)), chunk, parent=parent)
                assert type(digests) is bytes, f"`chunk_digests` returned {type(digests).__name__}, not bytes"
                assert len(digests) == count // chunk * DIGEST_BYTES, (
                    f"{count} tokens in chunks of {chunk} gave {len(digests)} bytes, not 32 for each whole chunk"
                )

    @pytest.mark.parametrize("chunk", [1, 256])
    def test_every_bit_of_a_digest_counts(self, hasher: KeyHasher, chunk: int) -> None:
        """No bit of a digest is constant or follows from other bits: fewer effective bits would mean collisions."""
        chunks = [packed([*mixed(chunk - 1), number]) for number in range(_MANY)]
        for how, digests in (
            ("first chunks", [hasher.chunk_digests(each, chunk) for each in chunks]),
            ("chunks of a request", split(hasher.chunk_digests(b"".join(chunks), chunk))),
        ):
            first, *others = (int.from_bytes(digest, "big") for digest in digests)
            found = _rank([number ^ first for number in others])
            assert found == _BITS, f"{how}: only {found} of the {_BITS} bits of a digest are independent"

    @pytest.mark.parametrize("chunk", [*CHUNKS, 1024, 4096])
    @pytest.mark.parametrize("ids", ["small", "large"])
    def test_a_changed_token_changes_its_chunk_and_all_behind_it(self, hasher: KeyHasher, chunk: int, ids: str) -> None:
        """Tokens of three chunks are changed, of large ones some; of small chunks every bit of each."""
        tokens = mixed(3 * chunk) if ids == "large" else list(range(3 * chunk))
        before = hasher.chunk_digests(packed(tokens), chunk)
        step = max(chunk // 1024, 1)
        large = (*range(0, chunk, step), chunk - 2, chunk - 1, chunk, chunk + chunk // 2, 2 * chunk - 1)
        for at in large if chunk >= 1024 else range(len(tokens)):
            for bit in range(32) if chunk < 16 else {at % 32, (at + 16) % 32}:
                changed = [*tokens]
                changed[at] ^= 1 << bit
                after = hasher.chunk_digests(packed(changed), chunk)
                must_change(before, after, at // chunk, f"Bit {bit} of token {at} ({ids} ids, chunks of {chunk})")
                apart = int.from_bytes(before[-DIGEST_BYTES:], "big") ^ int.from_bytes(after[-DIGEST_BYTES:], "big")
                assert apart.bit_count() >= _CHANGED_BITS, (
                    f"Bit {bit} of token {at} changes {apart.bit_count()} digest bits: use a cryptographic hash"
                )

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_the_order_of_tokens_and_chunks_counts(self, hasher: KeyHasher, chunk: int) -> None:
        """Also of tokens whose ids read the same one after the other, in decimal or in hexadecimal."""
        count = 4 * chunk
        tokens = mixed(count)
        orders = {"as they are": tokens, "backwards": tokens[::-1], "turned by one": [*tokens[1:], tokens[0]]}
        for one, other in [*itertools.pairwise(range(count)), (0, count - 1), (0, chunk // 2), (0, count // 2)]:
            swapped = [*tokens]
            swapped[one], swapped[other] = swapped[other], swapped[one]
            orders.setdefault(f"tokens {one} and {other} swapped", swapped)
        chunks = [tokens[at : at + chunk] for at in range(0, count, chunk)]
        for order in itertools.permutations(range(4)):
            orders[f"chunks in the order {order}"] = [token for index in order for token in chunks[index]]
        for pair in ([1, 23], [12, 3], [123, 0], [1, 11], [11, 1], [0, 123], [1230, 0], [0x1, 0x1A], [0x11, 0xA]):
            orders[f"{pair} repeated"] = pair * (count // 2)
        unique = {tuple(order): name for name, order in orders.items()}
        digests = [(name, hasher.chunk_digests(packed(order), chunk)) for order, name in unique.items()]
        must_differ(digests, "The order of tokens and chunks must change the digest")

    @pytest.mark.parametrize("chunk", [4, 256])
    def test_the_parent_counts(self, hasher: KeyHasher, chunk: int) -> None:
        """Every bit of a parent digest is flipped; all chunks of the call depend on it."""
        tokens = packed(mixed(3 * chunk))
        parent = b"\0" + hasher.chunk_digests(packed(range(chunk)), chunk)[1:]
        number = int.from_bytes(parent, "big")
        found = [
            ("no parent", hasher.chunk_digests(tokens, chunk)),
            ("the parent", hasher.chunk_digests(tokens, chunk, parent=parent)),
        ]
        for bit in range(8 * DIGEST_BYTES):
            other = (number ^ 1 << bit).to_bytes(DIGEST_BYTES, "big")
            found.append((f"the parent without bit {bit}", hasher.chunk_digests(tokens, chunk, parent=other)))
        for index in range(3):
            digests = [(name, each[: (index + 1) * DIGEST_BYTES]) for name, each in found]
            must_differ(digests, f"The parent must change the digest of chunk {index}")

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_what_is_behind_the_last_whole_chunk_does_not_count(self, hasher: KeyHasher, chunk: int) -> None:
        tokens = packed(mixed(2 * chunk))
        whole = hasher.chunk_digests(tokens, chunk)
        rests = [packed(range(chunk - 1)), packed([1] * (chunk - 1)), packed([2**32 - 1] * (chunk // 2)), b"x", b"xyz"]
        for rest in rests:
            for extras in (None, {2: b"later", 7: b"much later"}):
                if len(rest) < 4 * chunk:
                    found = hasher.chunk_digests(tokens + rest, chunk, extras=extras)
                    must_be_equal(found, whole, f"{len(rest)} bytes after the last whole chunk must not count")

    @pytest.mark.parametrize("chunk", [4, 256])
    def test_an_extra_changes_its_chunk_and_all_behind_it(self, hasher: KeyHasher, chunk: int) -> None:
        tokens = packed([9] * (3 * chunk))
        plain = hasher.chunk_digests(tokens, chunk)
        named = [("no extra", plain)]
        for at in range(3):
            for number, extra in enumerate(_EXTRAS):
                found = hasher.chunk_digests(tokens, chunk, extras={at: extra})
                must_change(plain, found, at, f"An extra of {len(extra)} bytes")
                named.append((f"extra {number} ({len(extra)} bytes) at chunk {at}", found))
        must_differ(named, "Extras of other content, length or chunk must change the digest")

    def test_an_extra_is_not_taken_for_a_parent(self, hasher: KeyHasher) -> None:
        """The digest of an image is as long as a parent digest."""
        tokens, digest = packed(range(4)), bytes(range(DIGEST_BYTES))
        for rest in (b"", b"adapter"):
            with_parent = hasher.chunk_digests(tokens, 4, parent=digest, extras={0: rest} if rest else None)
            for extra in (digest + rest, rest + digest):
                assert with_parent != hasher.chunk_digests(tokens, 4, extras={0: extra}), (
                    "The hasher treats an extra of 32 bytes as a parent: hash them differently"
                )

    def test_the_order_and_the_type_of_the_mapping_do_not_count(self, hasher: KeyHasher) -> None:
        tokens = packed(mixed(16))
        extras = {3: b"c", 0: b"a", 2: b"b", 9: b"behind"}
        expected = hasher.chunk_digests(tokens, 4, extras={0: b"a", 2: b"b", 3: b"c"})
        found = hasher.chunk_digests(tokens, 4, extras=extras)
        assert extras == {3: b"c", 0: b"a", 2: b"b", 9: b"behind"}, "`chunk_digests` changed the caller's extras"
        must_be_equal(found, expected, "The order of the extras in the mapping must not change the digests")
        read_only = hasher.chunk_digests(tokens, 4, extras=MappingProxyType(extras))
        must_be_equal(read_only, expected, "Extras in a read-only mapping and in a dict must give the same digests")
        plain = hasher.chunk_digests(tokens, 4)
        must_be_equal(hasher.chunk_digests(tokens, 4, parent=b"", extras=None), plain, "`extras=None` changes digests")
        must_be_equal(hasher.chunk_digests(tokens, 4, extras={}), plain, "`extras={}` changes digests")

    @pytest.mark.parametrize("chunk", [1, 16, 256])
    def test_a_request_of_many_chunks_goes_on_anywhere(self, hasher: KeyHasher, chunk: int) -> None:
        """Piece by piece, as an engine does: the parent may be the digest of the hundredth chunk."""
        tokens, extras = mixed(300 * chunk + chunk // 2), {0: b"adapter", 99: b"image", 256: b"another"}
        whole = hasher.chunk_digests(packed(tokens), chunk, extras=extras)
        for splits in ([1], [99], [100], [255], [256], [299], [300], [100, 200, 257], [*range(1, 40)]):
            found = b""
            for start, end in zip([0, *splits], [*splits, None], strict=True):
                piece = packed(tokens[start * chunk : None if end is None else end * chunk])
                here = {index - start: extra for index, extra in extras.items() if index >= start}
                found += hasher.chunk_digests(piece, chunk, parent=found[-DIGEST_BYTES:], extras=here)
            must_be_equal(found, whole, f"Split at chunks {splits} of {chunk} tokens, calls must equal one call")

    @pytest.mark.parametrize(
        "form", ["bytes", "bytearray", "memoryview", "read-only", "words", "signed", "bytes of 'c'", "odd place"]
    )
    def test_any_memory_of_the_tokens_gives_the_same(self, hasher: KeyHasher, form: str) -> None:
        tokens = packed(mixed(5 * _CHUNK + 2))
        odd = memoryview(bytearray(b"\xff" + tokens + b"\xff"))[1:-1]
        forms: dict[str, Buffer] = {
            "bytes": tokens,
            "bytearray": bytearray(tokens),
            "memoryview": memoryview(bytearray(tokens)),
            "read-only": memoryview(tokens),
            "words": memoryview(tokens).cast("I"),
            "signed": memoryview(tokens).cast("h"),
            "bytes of 'c'": memoryview(tokens).cast("c"),  # type: ignore[dict-item]
            "odd place": odd,
        }
        found = hasher.chunk_digests(forms[form], _CHUNK)
        must_be_equal(found, hasher.chunk_digests(tokens, _CHUNK), f"Tokens as {form} must hash as bytes")
        assert bytes(forms[form]) == tokens, "`chunk_digests` changed the caller's tokens, which it may only read"

    def test_memory_is_not_kept(self, hasher: KeyHasher) -> None:
        for count in (_CHUNK - 1, 10 * _CHUNK, 1000 * _CHUNK):
            for more in ({}, {"parent": bytes(range(DIGEST_BYTES))}, {"extras": {0: b"a"}}):
                tokens = _Tokens(packed(range(count)))
                hasher.chunk_digests(tokens, _CHUNK, **more)
                gc.collect()
                try:
                    tokens.append(0)
                except BufferError:
                    pytest.fail("The hasher keeps a view of the tokens after the call: release it")
                left = weakref.ref(tokens)
                del tokens
                gc.collect()
                assert left() is None, "The hasher keeps a reference to the tokens after the call: copy or drop it"

    @pytest.mark.parametrize(
        ("nbytes", "chunk"), [*((nbytes, _CHUNK) for nbytes in (1, 5, 31, 33, 40, 64)), (32, 0), (0, -1)]
    )
    def test_no_digest_as_a_parent_and_no_tokens_in_a_chunk_are_refused(
        self, hasher: KeyHasher, nbytes: int, chunk: int
    ) -> None:
        for tokens in (packed(range(2 * _CHUNK)), b""):
            call = partial(hasher.chunk_digests, tokens, chunk, parent=bytes(range(nbytes)))
            must_refuse(f"A parent of {nbytes} bytes with chunks of {chunk} tokens", call, RequestError)

    def test_a_call_knows_nothing_of_others(self, make_hasher: MakeHasher) -> None:
        """Calls that differ in one argument each, in any order and the same memory, give what a new hasher gives."""
        tokens, last = mixed(5 * _CHUNK), mixed(5 * _CHUNK)
        last[-1] ^= 1
        calls: list[tuple[bytes, int, dict[str, Any]]] = [
            (packed(ids), chunk, {"parent": parent, "extras": extras})
            for ids in (tokens, last, tokens[::-1], tokens[:_CHUNK], mixed(6 * _CHUNK)[_CHUNK:])
            for chunk in (_CHUNK, _CHUNK - 1)
            for parent in (b"", bytes(range(DIGEST_BYTES)))
            for extras in (None, {0: b"a"}, {0: b"b"}, {4: b"a"})
        ]
        alone = [make_hasher().chunk_digests(ids, chunk, **more) for ids, chunk, more in calls]
        hasher, memory = make_hasher(), bytearray(5 * _CHUNK * 4)
        order = [*range(len(calls))] * 2
        random.Random(1).shuffle(order)  # noqa: S311  fixed order
        for index in order:
            ids, chunk, more = calls[index]
            memory[: len(ids)] = ids
            with memoryview(memory) as view, view[: len(ids)] as place:
                found = hasher.chunk_digests(place, chunk, **more)
            must_be_equal(found, alone[index], "A used hasher must equal a new one: keep no state")

    def test_an_engine_without_the_options_finds_the_same_or_is_refused(self, make_hasher: MakeHasher) -> None:
        """Engines make the hasher by its name alone. What depends on options belongs into the fingerprint."""
        if not (self.use and self.options):
            pytest.skip("The test class sets no `options`")
        server, engine = make_hasher(), self.by_name({})()
        tokens = packed(mixed(64))
        if server.chunk_digests(tokens, _CHUNK) != engine.chunk_digests(tokens, _CHUNK):
            assert server.fingerprint != engine.fingerprint, "The options must change the fingerprint"

    @pytest.mark.parametrize("seed", [1, 2])
    def test_another_process_finds_the_same(self, hasher: KeyHasher, seed: int) -> None:
        tokens = packed(number * 2654435761 % 2**32 for number in range(64))
        here = b"".join(
            hasher.chunk_digests(tokens, 4, parent=parent, extras=extras)
            for parent in (b"", bytes(range(32)))
            for extras in (None, {5: b"adapter", 1: b"image"})
        )
        there = self.elsewhere(hasher, _ELSEWHERE, seed=seed)
        must_be_equal(there[: len(here)], here, "A second process computes other digests: use no random seed")
        assert there[len(here) :].decode() == hasher.fingerprint, "Another process has another fingerprint"

    def test_a_call_is_not_disturbed_at_any_step(self, hasher: KeyHasher) -> None:
        """Before each instruction of a call another thread makes another: no time is too short to be in the way."""
        tokens, others = (packed(mixed((2 + seed) * _CHUNK)[seed:]) for seed in range(2))
        alone = hasher.chunk_digests(tokens, _CHUNK)
        found = interleaved(lambda: hasher.chunk_digests(tokens, _CHUNK), lambda: hasher.chunk_digests(others, _CHUNK))
        must_be_equal(found, alone, "Threads changed each other's digests: keep no state in the hasher")
