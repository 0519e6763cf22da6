"""The policy fulfils the contract that the server relies on."""

from kvf_dev.testing import EvictionConformance


class TestS3Fifo(EvictionConformance):
    use = "s3fifo"


class TestS3FifoOfOtherShares(EvictionConformance):
    use = "s3fifo"
    options = {"small": 0.5, "ghost": 3.0}  # noqa: RUF012
