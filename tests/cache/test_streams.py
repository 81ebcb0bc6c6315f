"""Streams that are noted: who asks about one keeps it, and nobody else waits for that."""

from __future__ import annotations

import threading

import pytest

from flashwarp.cache.streams import NotedStreams


class Stream:
    def __init__(self, handle: int) -> None:
        self.handle, self.closed = handle, threading.Event()

    def close(self) -> None:
        self.closed.set()


def test_a_stream_ends_once_nobody_asks_about_it() -> None:
    streams, asked, other = NotedStreams(), Stream(5), Stream(6)
    streams |= {5, 6}

    with streams.asking(5) as noted:
        assert noted
        ender = threading.Thread(target=streams.end, args=(asked,))
        ender.start()
        streams.end(other)  # at once
        assert other.closed.is_set()
        assert not asked.closed.wait(0.05)
        with streams.asking(5) as noted:
            assert not noted, "who comes now does not ask"
    ender.join(20)

    assert asked.closed.is_set()
    assert not streams


def test_it_is_taken_out_of_every_set_and_its_handle_may_come_again() -> None:
    streams, of_an_array = NotedStreams(), {5, 7}
    streams.add(5)

    streams.end(Stream(5), of_an_array)

    assert (set(streams), of_an_array) == (set(), {7})
    with streams.asking(7, of_an_array) as noted:
        assert noted
    streams.add(5)
    with streams.asking(5) as noted:
        assert noted


def test_who_was_interrupted_asks_no_more() -> None:
    streams, stream = NotedStreams(), Stream(5)
    streams.add(5)
    interrupted = streams.asking(5)
    interrupted.__enter__()

    del interrupted
    streams.end(stream)

    assert stream.closed.is_set()


def test_one_that_is_asked_about_for_too_long_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FLASHWARP_TIMEOUT_S", "0.05")
    streams, stream = NotedStreams(), Stream(5)
    streams.add(5)

    with streams.asking(5):
        streams.end(stream)

    assert not stream.closed.is_set()
    assert "stream 0x5 is kept" in caplog.text
