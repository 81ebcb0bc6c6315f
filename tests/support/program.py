"""A Python process that runs what a test sends it, one piece of code after the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

_LOOP = """
import json, sys
names = {}
for line in sys.stdin:
    answer = {}
    try:
        names["result"] = None
        exec(json.loads(line), names)
        answer["result"] = names["result"]
    except Exception as error:
        answer["error"] = type(error).__name__
        answer["message"] = str(error)
    print(json.dumps(answer), flush=True)
"""


def stop(process: subprocess.Popen[Any]) -> None:
    """Let a process stop, and wait until all its threads have."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


class ProgramError(Exception):
    """What the code has raised there; `name` is the type of the error."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name = name


class Program:
    """A Python process with flashwarp and numpy imported; ends with its `with` statement."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "FLASHWARP_RUNTIME_DIR": str(folder), **environment},
            text=True,
        )
        self.pid = self._process.pid
        self.run("import flashwarp as fw, numpy as np, os, time")

    def start(self, code: str) -> None:
        """Start a piece of code, whose `result` `finish` returns."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def finish(self) -> Any:
        """Return what the code has assigned to `result`; raises ProgramError."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the program has ended: {self._process.wait(10)}"
        answer = json.loads(line)
        if "error" in answer:
            raise ProgramError(answer["error"], answer["message"])
        return answer["result"]

    def run(self, code: str) -> Any:
        """Run a piece of code there, and return what it has assigned to `result`."""
        self.start(code)
        return self.finish()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Let it stop; its threads have when this returns."""
        stop(self._process)

    def kill(self) -> None:
        """End it at once, wherever it is."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def end(self) -> None:
        """Let it end as programs do; fails if it fails."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
