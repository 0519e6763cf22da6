"""kvframework and LMCache's multi-process server side by side: store, retrieve and LOOKUP, on one machine, in one run.

    benchmarks/kvframework_bench/lmcache/install.sh ENV
    ENV/bin/python -m kvframework_bench.lmcache --json FILE.json --plot FILE.png

One process plays the engine for both; each server is a separate process. `peer` drives LMCache through its own client
classes and is the only module that imports it; `run` has the order of the cases.
"""
