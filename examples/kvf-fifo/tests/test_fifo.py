from kvf_fifo import Fifo


def test_the_first_goes_first_however_often_it_is_used() -> None:
    policy = Fifo()
    for key in (b"a", b"b", b"c"):
        policy.on_insert(key, 1)
    policy.on_access(b"a")
    policy.on_remove(b"b")
    assert list(policy.victims()) == [b"a", b"c"]
