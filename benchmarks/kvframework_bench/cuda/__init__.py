"""`kvframework bench cuda`: the speed of a server that copies between a GPU's memory and the arena by itself.

Parts, each with separate servers: `transfers` (store and retrieve next to one plain pinned copy of as many bytes),
`submits` (the engine's time for a submit), `matmul` and `decode` (the cost of transfers for the GPU's other work), and
`sweep` (fragment sizes: where copy engines begin to beat the kernel). The benchmark's process is the engine; it uses
the GPU by the driver API alone, and torch for the loops of `matmul` and `decode` only.
"""
