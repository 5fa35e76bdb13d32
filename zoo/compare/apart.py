"""Calls in processes of their own: what crashes, hangs or runs out of memory there is an error here."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context, parent_process, resource_tracker
from pathlib import Path
from typing import Any, Self

__all__ = ["Apart", "ApartError"]

_CONTEXT = get_context("forkserver")  # a fork of a process that has imported what it needs, and has done nothing else
sys.warnoptions.append("ignore:resource_tracker")  # it says what a process that is ended leaves, and removes it
_LONGEST_END = 30  # seconds that a process may take to end after it has answered


class ApartError(RuntimeError):
    """A call has failed in its process; the message is one line."""


class Apart:
    """A call that has begun in a process of its own; the process ends with the ``with`` block at the latest.

    Args:
        function: of a module that can be imported.
        arguments: of it, which are pickled, as is what it returns.
        log: the file that its output and tracebacks go to.
        environment: variables to set before.
    """

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, log: Path, environment: Mapping[str, str]
    ) -> None:
        _CONTEXT.set_forkserver_preload([function.__module__])
        self.log = log
        self.answer, sender = _CONTEXT.Pipe(duplex=False)
        self.process = _CONTEXT.Process(target=_call, args=(sender, log, dict(environment), function, arguments))
        with _interrupts_later():
            self.process.start()
        sender.close()

    def result(self, timeout: float) -> Any:
        """What the call returned.

        Args:
            timeout: seconds, after which the process is killed.

        Raises:
            ApartError: the call raised something, or its process ended or was killed.
        """
        if not connection.wait([self.answer, self.process.sentinel], timeout):
            raise ApartError(f"killed after {timeout:g} s without an end")
        try:
            failed, value = self.answer.recv()
        except EOFError:
            self.process.join()
            raise ApartError(self._end()) from None
        self.process.join(_LONGEST_END)
        if failed:
            raise ApartError(value)
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End the process now, and the compilers that it has started."""
        with suppress(ProcessLookupError):  # it has no group of its own yet, or nobody in it any more
            if self.process.pid:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()
        self.answer.close()

    def _end(self) -> str:
        code = self.process.exitcode or 0
        if code >= 0:
            return f"its process ended with status {code}"
        hint = ", as the system does to one when memory runs out" if -code == signal.SIGKILL else ""
        return f"its process was ended by signal {-code} ({signal.strsignal(-code)}){hint}"


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal: those that begin here never hear of it, this one afterwards."""
    resource_tracker.ensure_running()  # where it starts, it lets signals through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _call(
    sender: connection.Connection,
    log: Path,
    environment: dict[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """What the process does."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(environment)
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    try:
        answer = False, function(*arguments)
    except BaseException as error:
        traceback.print_exc()
        message = str(error).strip().partition("\n")[0]
        answer = True, f"{type(error).__name__}: {message}" if message else type(error).__name__
    sender.send(answer)
    os._exit(0)  # no teardown, which may fail or hang after an error of the device


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
