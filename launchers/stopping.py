"""SIGTERM: the run saves a checkpoint at the next step that all processes agree on, and ends within its grace period.

Signals arrive at different steps in different processes, and a checkpoint is written by all together. So the first to
be told tells the others through JAX's key-value store; each says how far it is, and all stop one step after the
farthest. Tunix's trainer, which both engines share, saves what is unsaved when its data ends: so that is made to end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Any

STOPPED = 128 + signal.SIGTERM
KEY = "bridge/stop"
AGREE_MS = 20_000
FOREVER_MS = 7 * 24 * 3600 * 1000


class Stopping:
    """One for each process; `install` in the main thread, before the engine runs."""

    def __init__(self, process: int, count: int, grace: float) -> None:
        """`grace`: seconds from the signal to the end, checkpoint or not."""
        self._process, self._count, self._grace = process, count, grace
        self._lock = threading.Lock()
        self._step = -1
        self._last: int | None = None
        self._client: Any = None
        self._asked = threading.Event()
        self.reached: int | None = None
        """The optimizer steps done when the run was stopped."""

    def install(self) -> None:
        """Take SIGTERM. A thread answers it: the main one may be waiting inside XLA, where Python runs no handler."""
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _awake)
        threading.Thread(target=self._listen, args=(read,), daemon=True, name="sigterm").start()

    def agree_through(self, client: Any) -> None:
        """Use JAX's key-value store (`jax._src.distributed.global_state.client`) to agree with the others."""
        self._client = client
        threading.Thread(target=self._follow, daemon=True, name="stop").start()

    def due(self, step: int) -> bool:
        """Whether to stop before optimizer step `step + 1`; the main thread asks at each."""
        with self._lock:
            self._step = step
            if self._last is None or step < self._last:
                return False
            self.reached = step
            return True

    def _listen(self, read: int) -> None:
        while True:
            if signal.SIGTERM in os.read(read, 64) and not self._asked.is_set():
                self._asked.set()
                self._ask()

    def _ask(self) -> None:
        if self._step < 0:
            print("stopped by SIGTERM before the first step", file=sys.stderr, flush=True)
            os._exit(STOPPED)
        timer = threading.Timer(self._grace, self._give_up)
        timer.daemon = True
        timer.start()
        if self._client is None:
            with self._lock:
                self._last = self._step + 1
            return
        self._client.key_value_set(KEY, "1", allow_overwrite=True)

    def _follow(self) -> None:
        from jax.errors import JaxRuntimeError

        try:
            self._client.blocking_key_value_get(KEY, FOREVER_MS)
        except JaxRuntimeError:  # the run is over, or its coordinator has gone, which the training itself reports
            return
        with self._lock:  # nobody goes on until all have said how far they are
            self._client.key_value_set(f"{KEY}/{self._process}", str(self._step))
            steps = [
                int(self._client.blocking_key_value_get(f"{KEY}/{other}", AGREE_MS)) for other in range(self._count)
            ]
            self._last = max(steps) + 1

    def _give_up(self) -> None:
        print(f"no step ended within the grace period of {self._grace:g} s", file=sys.stderr, flush=True)
        os._exit(STOPPED)


def _awake(number: int, frame: Any) -> None:
    """A handler in Python, so that the signal neither ends the process nor is ignored: the pipe wakes the thread."""
    del number, frame


def hook_trainer(stopping: Stopping) -> None:
    """Put `stopping` before the data hooks of Tunix's trainer, which MaxText's post-training uses as well.

    Source: tunix/sft/peft_trainer.py 0.1.7: `train` ends when `load_next_train_batch` gives None, and `close` saves.
    """
    from tunix.sft import peft_trainer

    plain = peft_trainer.PeftTrainer.with_data_hooks

    def with_data_hooks(self: Any, hooks: Any) -> Any:
        return plain(self, _StoppingHooks(hooks, stopping))

    peft_trainer.PeftTrainer.with_data_hooks = with_data_hooks


class _StoppingHooks:
    """Data hooks that end when the run is to stop; all else is the wrapped hooks'."""

    def __init__(self, hooks: Any, stopping: Stopping) -> None:
        self._hooks, self._stopping = hooks, stopping

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hooks, name)

    def load_next_train_batch(self, trainer: Any) -> Any:
        """None at the step to stop at; micro steps of one optimizer step belong together."""
        accumulation = trainer.config.get_with_default("gradient_accumulation_steps", 1)
        if trainer.iter_steps % accumulation == 0 and self._stopping.due(trainer.train_steps):
            return None
        return self._hooks.load_next_train_batch(trainer)

    def load_next_eval_batch(self, trainer: Any) -> Any:
        """As the wrapped hooks."""
        return self._hooks.load_next_eval_batch(trainer)


def end_with_launcher() -> None:
    """End this process and its children when the launcher has gone: standard input, which it holds, ends then."""

    def wait() -> None:
        while os.read(0, 4096):
            pass
        time.sleep(0.1)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(STOPPED)

    threading.Thread(target=wait, daemon=True, name="lifeline").start()
