"""The wire protocol: frames, the payload structs, the request table, version negotiation. Pure, no sockets."""
