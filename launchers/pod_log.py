"""The log of one pod, line by line as it is written: `kubectl logs --follow`, begun again where it breaks off."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from bridge.launchers.pods import CONTAINER

STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(?:Z|[+-]\d\d:\d\d) ?")


class PodLog:
    """Reads in a thread of its own; each line goes to a file and to `take`, without its time."""

    def __init__(self, argv: Sequence[str], file: Path, take: Callable[[str], None]) -> None:
        """`argv` is `kubectl logs POD`; the file is appended to."""
        self._argv, self._file, self._take = (*argv, "--container", CONTAINER, "--follow", "--timestamps"), file, take
        self._popen: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._stamp, self._time, self._same = "", "", 0
        self._last_one = False
        self.complete = False
        """Whether the pod had finished when what has been read to its end was asked for."""

    def tend(self, finished: bool) -> None:
        """Begin to read, or begin again where it broke off; called now and then. `finished`: the pod has.

        The end of `kubectl logs` does not tell whether the log ended or the connection, so once the pod has finished
        what is left is asked for again.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        if self._last_one:
            self.complete = True
            return
        self._last_one = finished
        since = [f"--since-time={self._stamp}"] if self._stamp else []
        self._popen = subprocess.Popen(
            [*self._argv, *since],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._read, args=(self._popen,), daemon=True, name="pod-log")
        self._thread.start()

    def close(self) -> None:
        """Stop reading."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _read(self, popen: subprocess.Popen[str]) -> None:
        # Asked for by the second, lines come again that were seen before: all until those with the last time.
        known, again = self._time, self._same
        with self._file.open("a", encoding="utf-8", errors="replace") as file:
            for line in popen.stdout or ():
                found = STAMP.match(line)
                time = f"{found[1]}.{(found[2] or '').ljust(9, '0')}" if found else self._time
                if found and time < known:
                    continue
                if found and time == known and again:
                    again -= 1
                    continue
                if found:
                    self._same = self._same + 1 if time == self._time else 1
                    self._time, self._stamp = time, found[0].rstrip()
                text = line[found.end() :] if found else line
                file.write(text)
                file.flush()
                self._take(text.rstrip("\n"))
        popen.wait()
