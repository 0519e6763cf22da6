"""Bytes from strangers, against every decoder that sees them: a value or a typed error, bounded memory, no hang.

A look takes seconds. `KVF_FUZZ_EXAMPLES=20000 pytest tests/core/fuzz` looks longer.
`pytest -m slow tests/core/fuzz` floods a server for `KVF_FUZZ_SECONDS`.
"""
