"""What is kept of images."""

from agentrl_core.engine_kit.media import MediaCache


def test_what_was_used_longest_ago_leaves_the_cache() -> None:
    cache = MediaCache(5, len)
    cache.put("a", b"11")
    cache.put("b", b"22")
    assert cache.get("a") == b"11"
    cache.put("c", b"33")
    assert [cache.get(name) for name in "abc"] == [b"11", None, b"33"]


def test_what_is_put_twice_counts_once() -> None:
    cache = MediaCache(4, len)
    for _ in range(3):
        assert cache.put("a", b"11") == b"11"
    cache.put("b", b"22")
    assert [cache.get(name) for name in "ab"] == [b"11", b"22"]


def test_one_too_large_for_the_cache_stays_until_the_next() -> None:
    cache = MediaCache(1, len)
    cache.put("a", b"111")
    assert cache.get("a") == b"111"
    cache.put("b", b"222")
    assert [cache.get(name) for name in "ab"] == [None, b"222"]
