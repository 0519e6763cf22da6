"""The transport moves the right bytes, in order, and leaves nothing behind after the death of any process."""

from kvf_dev.testing import TransportConformance


class TestOpencl(TransportConformance):
    use = "opencl"
    make_rig = "opencl_rig:OpenclRig"
