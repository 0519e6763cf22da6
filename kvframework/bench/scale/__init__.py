"""`kvframework bench scale`: what one request costs with more clients, and with more objects.

`course` says what is measured; each client is a process of its own (`client_process`), driven over its standard input
and output by the bench's process (`client`), which is no client itself. Servers are real ones, objects are tiny.
"""
