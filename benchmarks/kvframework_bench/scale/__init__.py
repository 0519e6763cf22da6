"""`kvframework bench scale`: the cost of one request with more clients, and with more objects.

Each client is a separate process (`client_process`), driven over its standard input and output by the benchmark's
process (`client`), which is no client itself. Servers are real ones, objects are tiny.
"""
