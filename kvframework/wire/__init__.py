"""The wire protocol: frames, the payload structs, the request table, version negotiation. Pure, no sockets."""

from kvframework.wire.protocol import non_gpu_desc, non_gpu_layout, non_gpu_namespace

__all__ = ["non_gpu_desc", "non_gpu_layout", "non_gpu_namespace"]
