"""The hasher kit's tests of what a digest depends on: every bit of every token of the prefix, and their order."""

from __future__ import annotations

import itertools

import pytest

from kvf_dev.testing.hasher.kit import CHUNKS, HasherKit, mixed, must_change, must_differ, must_equal, packed
from kvframework.api.hasher import DIGEST_BYTES, KeyHasher

_CHANGED_BITS = 64  # of 256: half of them change on average, less than a quarter never of a cryptographic hash


class TokenTests(HasherKit):
    """Tokens, their order, and the prefix before them."""

    @pytest.mark.parametrize("chunk", CHUNKS)
    @pytest.mark.parametrize("ids", ["small", "large"])
    def test_a_changed_token_changes_its_chunk_and_all_behind_it(self, hasher: KeyHasher, chunk: int, ids: str) -> None:
        """Every token of three chunks is changed; every bit is, too: of all tokens of small chunks, and by turns of
        large ones."""
        tokens = mixed(3 * chunk) if ids == "large" else list(range(3 * chunk))
        before = hasher.chunk_digests(packed(tokens), chunk)
        for at in range(len(tokens)):
            for bit in range(32) if chunk < 16 else {at % 32, (at + 16) % 32}:
                changed = [*tokens]
                changed[at] ^= 1 << bit
                after = hasher.chunk_digests(packed(changed), chunk)
                must_change(before, after, at // chunk, f"bit {bit} of token {at} ({ids} ids, chunks of {chunk})")
                apart = int.from_bytes(before[-DIGEST_BYTES:], "big") ^ int.from_bytes(after[-DIGEST_BYTES:], "big")
                assert apart.bit_count() >= _CHANGED_BITS, (
                    f"bit {bit} of token {at} changes {apart.bit_count()} bits of a digest: no cryptographic hash"
                )

    @pytest.mark.parametrize("chunk", [1024, 4096])
    def test_every_token_of_a_long_chunk_counts(self, hasher: KeyHasher, chunk: int) -> None:
        """Chunks as long as some servers have them: each token of the first one, and the second one's ends."""
        step = chunk // 1024
        tokens = packed(mixed(2 * chunk))
        before = hasher.chunk_digests(tokens, chunk)
        for at in (*range(0, chunk, step), chunk - 2, chunk - 1, chunk, chunk + chunk // 2, 2 * chunk - 1):
            changed = bytearray(tokens)
            changed[4 * at + at % 4] ^= 1 << at % 8
            after = hasher.chunk_digests(bytes(changed), chunk)
            must_change(before, after, at // chunk, f"token {at} (chunks of {chunk})")

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_no_two_changes_of_tokens_cancel_each_other(self, hasher: KeyHasher, chunk: int) -> None:
        """Requests that differ in pairs of tokens, as sums, exclusive ors and products of tokens would hide it."""
        tokens = [1 << 20 | number for number in range(2 * chunk)]
        named = [("none", hasher.chunk_digests(packed(tokens), chunk))]
        for one, other in itertools.pairwise(range(len(tokens))):
            both = [*tokens]
            both[one], both[other] = both[one] ^ 1 << 31, both[other] ^ 1 << 31
            named.append((f"bit 31 of tokens {one} and {other}", hasher.chunk_digests(packed(both), chunk)))
            shifted = [*tokens]
            shifted[one], shifted[other] = shifted[one] + 5, shifted[other] - 5
            named.append((f"5 from token {other} to token {one}", hasher.chunk_digests(packed(shifted), chunk)))
        must_differ(named, "changes of two tokens")

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_the_order_of_tokens_and_chunks_counts(self, hasher: KeyHasher, chunk: int) -> None:
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
        unique = {tuple(order): name for name, order in orders.items()}
        must_differ(
            [(name, hasher.chunk_digests(packed(order), chunk)) for order, name in unique.items()], "the order counts"
        )

    @pytest.mark.parametrize("chunk", [4, 16, 256])
    def test_no_two_tokens_run_together(self, hasher: KeyHasher, chunk: int) -> None:
        """Requests whose ids read the same one after the other, in decimal or in hexadecimal."""
        pairs = ([1, 23], [12, 3], [123, 0], [1, 11], [11, 1], [0, 123], [1230, 0], [0x1, 0x1A], [0x11, 0xA])
        must_differ(
            [(pair, hasher.chunk_digests(packed(pair * (chunk // 2)), chunk)) for pair in pairs], "tokens run together"
        )

    def test_a_long_request_is_hashed_to_its_end(self, hasher: KeyHasher) -> None:
        """More chunks than a byte counts, and more than 64 KiB of them: the first and the last token count in all."""
        for chunk, chunks in ((1, 5000), (256, 300)):
            tokens = mixed(chunk * chunks)
            before = hasher.chunk_digests(packed(tokens), chunk)
            for at in (0, len(tokens) // 2, len(tokens) - 1):
                after = hasher.chunk_digests(packed([*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]), chunk)
                must_change(before, after, at // chunk, f"a request of {chunks} chunks of {chunk}: token {at}")

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
            must_differ(digests, f"the parent counts in chunk {index}")

    @pytest.mark.parametrize("chunk", CHUNKS)
    def test_what_is_behind_the_last_whole_chunk_does_not_count(self, hasher: KeyHasher, chunk: int) -> None:
        tokens = packed(mixed(2 * chunk))
        whole = hasher.chunk_digests(tokens, chunk)
        rests = [packed(range(chunk - 1)), packed([1] * (chunk - 1)), packed([2**32 - 1] * (chunk // 2)), b"x", b"xyz"]
        for rest in rests:
            for extras in (None, {2: b"later", 7: b"much later"}):
                if len(rest) < 4 * chunk:
                    found = hasher.chunk_digests(tokens + rest, chunk, extras=extras)
                    must_equal(found, whole, f"{len(rest)} bytes behind the last whole chunk of {chunk} tokens count")
