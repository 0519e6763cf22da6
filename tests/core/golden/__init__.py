"""Golden messages: what each release wrote to the wire, into L2 and into names of content, byte by byte.

One folder a release, one readable file a request or format. Every later release has to read them; `record.py` writes
those of this one.
"""
