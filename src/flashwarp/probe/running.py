"""The processes of this user that have arrays open: what they count, and how fast.

Each answers by a thread of its own; see `observing.endpoint`. One that has died is forgotten, and
one that is stopped is said not to answer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flashwarp.array.stats import Stats
from flashwarp.config import SIZE_MAX
from flashwarp.errors import FlashwarpError, SharedCacheError
from flashwarp.probe import ceilings
from flashwarp.probe.text import aligned, binary, thousands
from flashwarp.sharing import messages, names

_ANSWER_S = 1.0
_COUNTS = tuple(Stats.__dataclass_fields__)
_KEY = ("kind", "route", "device", "disks")
HEADINGS = (
    *("pid", "program", "kind", "route", "open", "hits", "read", "written", "ceiling"),
    *("waits/s", "errors", "memory", "mapped files", "pinned", "threads"),
)


@dataclass
class Process:
    """One process that can be asked, and what it has said."""

    name: str
    asked: socket.socket | None = None
    said: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """Between these two answers."""
    failed: str = ""
    _when: float = 0.0

    @classmethod
    def own(cls) -> Process:
        """Return this process, which `take` gives its counters."""
        return cls(names.of_process(os.getpid()))

    @classmethod
    def reach(cls, name: str) -> Process | None:
        """Connect to a process; None if it has died, which leaves nothing behind."""
        try:
            client = names.reach(name)
        except BlockingIOError:
            return cls(name, failed="does not answer, and many wait for it: it is stopped")
        except OSError as error:
            return cls(name, failed=f"cannot be asked: {error.strerror}")
        if client is None:
            names.remove(name)
            return None
        made = cls(name, client)
        if messages.peer(client)[1] != os.geteuid():
            client.close()
            return None
        made._say(messages.hello())
        answer = made._hear()
        if answer is not None and not made.failed:
            try:
                messages.check_hello(answer, "it")
            except SharedCacheError as error:
                made.failed = str(error)
        return made

    @property
    def pid(self) -> int:
        """Its number."""
        return int(self.name.rpartition("-")[2])

    def ask(self) -> None:
        """Ask for its counters; `hear` takes the answer, so that all processes answer at once."""
        self._say({"ask": "counters"})

    def hear(self) -> bool:
        """Take the answer; returns False if the process has gone."""
        answer = self._hear()
        if answer is not None:
            try:
                _check_counters(answer.body)
            except SharedCacheError as error:
                self.failed = f"answers with what are no counters: {error}"
            else:
                self.take(answer.body)
        return answer is not None or bool(self.failed)

    def take(self, said: dict[str, Any]) -> None:
        """Take what the process has said now."""
        now = time.monotonic()
        self.before, self.said = self.said or said, said
        self.seconds, self._when = (now - self._when if self._when else 0.0), now

    def close(self) -> None:
        """Leave it."""
        if self.asked is not None:
            self.asked.close()

    def _say(self, body: dict[str, Any]) -> None:
        if self.asked is None:
            return
        self.asked.settimeout(_ANSWER_S)
        with contextlib.suppress(OSError):  # it has died: `_hear` notices
            messages.send(self.asked, body)

    def _hear(self) -> messages.Message | None:
        if self.failed:
            return None
        assert self.asked is not None
        try:
            answer = messages.receive(self.asked)
            if answer is not None:
                answer.close()  # nothing comes by descriptor
                if "error" in answer.body:
                    raise messages.error_of(answer)
        except TimeoutError:
            self.failed = "does not answer: it is stopped, or holds the interpreter's lock"
        except FlashwarpError as error:
            self.failed = str(error)
        except OSError:
            return None
        else:
            return answer
        return None

    def rows(self, rates: dict[str, float]) -> list[dict[str, Any]]:
        """Return a dictionary for each kind and route, for JSON; `rates` are ceilings."""
        before = {_key(each): each for each in self.before.get("sums", ())}
        found = []
        for each in self.said.get("sums", ()):
            now = {name: each.get(name, 0) for name in _COUNTS}
            then = before.get(_key(each), {})
            recent = Stats(**{name: now[name] - then.get(name, 0) for name in _COUNTS})
            per_s = 1 / self.seconds if self.seconds else 0.0
            # Of a process that was idle since the last look, the rate since its start says more.
            counted = recent if recent.hits + recent.misses else Stats(**now)
            found.append(
                {
                    **{name: each.get(name, "") for name in _KEY},
                    "open": each.get("open", 0),
                    "hit_rate": counted.hit_rate,
                    "read_bytes_per_s": recent.bytes_read * per_s,
                    "written_bytes_per_s": recent.bytes_written * per_s,
                    "ceiling_bytes_per_s": ceilings.of_route(
                        rates, each.get("disks", ""), each.get("device", "")
                    ),
                    "waits_per_s": recent.helps * per_s,
                    "counts": now,
                }
            )
        return found

    def as_dict(self, rates: dict[str, float]) -> dict[str, Any]:
        """Return everything, for JSON."""
        names = ("command", "uptime_s", "threads", "pinned", "memory")
        said = {each: self.said.get(each) for each in names}
        return {"pid": self.pid, **said, "failed": self.failed, "routes": self.rows(rates)}


def _check_counters(said: dict[str, Any]) -> None:
    """Raise SharedCacheError unless a process has said what `observing.counters` returns."""

    def check(
        body: object, texts: Iterable[str], integers: Iterable[str], counts: Iterable[str]
    ) -> None:
        if not isinstance(body, dict):
            raise SharedCacheError(f"a message has {body!r:.99}, no object")
        message = messages.Message(body)
        for name in texts:
            # What cannot be printed could take hold of the terminal.
            if not message.text(name).isprintable():
                raise SharedCacheError(f"a message has {name}={body[name]!r:.99}, no plain text")
        for name in (*integers, *(each for each in counts if each in body)):
            message.integer(name, 0, SIZE_MAX)

    check(said, ["command"], ["threads"], ())
    for name in ("pinned", "memory"):
        held = said.get(name)
        check(held, (), (), held if isinstance(held, dict) else ())
    sums, uptime_s = said.get("sums"), said.get("uptime_s")
    if not isinstance(sums, list) or type(uptime_s) not in (int, float):
        raise SharedCacheError(f"a message has sums={sums!r:.99}, uptime_s={uptime_s!r:.99}")
    for each in sums:
        check(each, _KEY, ["open"], _COUNTS)


def _key(sums: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(sums.get(name) for name in _KEY)


class Processes:
    """Those that run, with the connections to them."""

    def __init__(self) -> None:
        self._known: dict[str, Process] = {}

    def look(self) -> list[Process]:
        """Ask all processes. Blocks until each has answered, or for a second."""
        for name in names.processes():
            if name not in self._known:
                made = Process.reach(name)
                if made is not None:
                    self._known[name] = made
        for each in self._known.values():
            each.ask()
        here = [each for each in self._known.values() if each.hear()]
        # One that does not answer is reached anew: a late answer would pass for the next one's.
        heard = {each.name: each for each in here if not each.failed}
        for each in self._known.values():
            if each.name not in heard:
                each.close()
        self._known = heard
        return sorted(here, key=lambda each: each.pid)

    def told(self) -> list[dict[str, Any]]:
        """Look, and return what `Process.as_dict` says of each."""
        rates = ceilings.kept()
        return [each.as_dict(rates) for each in self.look()]

    def close(self) -> None:
        """Leave them."""
        for each in self._known.values():
            each.close()


def lines(process: dict[str, Any], program_max: int = 24) -> list[tuple[str, ...]]:
    """Return the cells of a process, a line for each route, under `HEADINGS`."""
    program, _, rest = (process["command"] or "").partition(" ")
    if os.path.basename(program).startswith("python") and rest:
        program, _, rest = rest.partition(" ")
    first = (str(process["pid"]), f"{os.path.basename(program)} {rest}"[:program_max].strip())
    if process["failed"]:
        return [(*first, *[""] * (len(HEADINGS) - 2))]
    memory = dict(process["memory"] or {})
    files = memory.pop("mapped files", 0)
    sizes = sum(memory.values()), files, sum((process["pinned"] or {}).values())
    last = *map(binary, sizes), str(process["threads"])
    blank = ("",) * len(last)
    moved = [_moved(row) for row in process["routes"]]
    moved = moved or [("",) * (len(HEADINGS) - len(first) - len(last))]
    # What is of the process stands in its first line.
    return [(*first, *moved[0], *last), *(("", "", *each, *blank) for each in moved[1:])]


def rate(bytes_per_s: float) -> str:
    """Return a rate as people read it: in GB/s from 1 MB/s on, below in kB/s."""
    if not bytes_per_s:
        return "0"
    gigabytes = bytes_per_s >= 1e6
    return f"{bytes_per_s / (1e9 if gigabytes else 1e3):.3g} {'GB/s' if gigabytes else 'kB/s'}"


def _moved(row: dict[str, Any]) -> tuple[str, ...]:
    rates = row["read_bytes_per_s"], row["written_bytes_per_s"]
    ceiling = row["ceiling_bytes_per_s"]
    accesses = row["counts"]["hits"] + row["counts"]["misses"]
    disks = f", disk {row['disks']}" if row["disks"] else ""
    return (
        *(row["kind"], f"{row['route']}, {row['device']}{disks}", str(row["open"])),
        f"{row['hit_rate']:.1%}" if accesses else "",
        *map(rate, rates),
        f"{max(rates) / ceiling:.0%} of {ceiling / 1e9:.3g}" if ceiling else "",
        *(thousands(row["waits_per_s"]), thousands(row["counts"]["errors"])),
    )


def table(processes: list[dict[str, Any]]) -> str:
    """Return what `top` prints."""
    if not processes:
        return f"no process of yours has arrays open ({names.folder_path()})"
    cells = [HEADINGS, *(line for each in processes for line in lines(each))]
    return "\n".join([aligned(cells, left=4), *failures(processes)])


def failures(processes: list[dict[str, Any]]) -> list[str]:
    """Return a line for each process that has not told its counters."""
    return [f"process {each['pid']}: {each['failed']}" for each in processes if each["failed"]]
