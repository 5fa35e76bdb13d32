"""Small models to compare, some with faults, and the command as a terminal runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from zoo.compare.plan import Plan
from zoo.compare.run import run_plan

__all__ = ["FAULTS", "Command", "key", "measured", "small", "write_faults"]

_SMALL = """
name: {name}
vocab_size: 256
dim: 32
num_layers: 1
layers: {{pattern: [{{mixer: {mixer}}}]}}
block: {{mlp: {{name: swiglu, hidden_dim: 64}}}}
"""
FAULTS = ("Raising", "Hungry", "Greedy", "Killed", "Ending", "Hanging", "Breaking", "Fading", "Limited")
_FAULTS = '''
import os, signal, subprocess
from pathlib import Path
import torch
from zoo.mixers.full_attention import FullAttention

class Faulty(FullAttention):
    def forward(self, x, context, state=None):
        self.fail(x)
        return super().forward(x, context, state)

    @torch._dynamo.disable
    def fail(self, x):
        raise NotImplementedError

class Raising(Faulty):
    def fail(self, x):
        raise RuntimeError("it broke\\nand there is more to say")

class Hungry(Faulty):
    def fail(self, x):
        raise MemoryError

class Greedy(Faulty):
    def fail(self, x):
        torch.empty(1 << 60)

class Killed(Faulty):
    def fail(self, x):
        os.kill(os.getpid(), signal.SIGKILL)

class Ending(Faulty):
    def fail(self, x):
        os._exit(7)

class Breaking(Faulty):
    @torch._dynamo.disable
    def fail(self, x):
        pass

class Hanging(FullAttention):
    """For as long as there is a file called hang, in a process that it has started."""
    def __init__(self, options, dim):
        super().__init__(options, dim)
        if Path(__file__).with_name("hang").exists():
            subprocess.run(["sleep", "1000"])

class Fading(FullAttention):
    """A loss that is no number."""
    def forward(self, x, context, state=None):
        y, state = super().forward(x, context, state)
        return y * float("nan"), state

@torch.library.custom_op("faults::limited", mutates_args=())
def limited(x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] >= 64:
        raise MemoryError("too long")
    return x.clone()

@limited.register_fake
def _(x):
    return torch.empty_like(x)

class Limited(FullAttention):
    """Too much for sequences of 64 and more, which no compiler sees."""
    def forward(self, x, context, state=None):
        return super().forward(limited(x), context, state)
'''


def small(folder: Path, name: str, mixer: str = "full_attention") -> str:
    """The path of a model's YAML file."""
    path = folder / f"{name.replace('/', ' ')}.yaml"
    path.write_text(_SMALL.format(name=json.dumps(name), mixer=mixer))
    return str(path)


def write_faults(folder: Path) -> dict[str, str]:
    """A module of mixers, whose folder must be on the path, and for each name of `FAULTS` a model's YAML file."""
    (folder / "faults.py").write_text(_FAULTS)
    return {name: small(folder, name, f"faults.{name}") for name in FAULTS}


def measured(plan: Plan, folder: Path, **options: Any) -> dict[str, Any]:
    """The results of a plan."""
    return run_plan(plan, folder, lambda line: None, lambda results: None, **options)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells the rows of one dtype apart."""
    return row["recipe"], row["mode"], row["compile"], row["length"], row["batch_size"]


class Command:
    """`zoo compare` in a session of its own, as in a terminal; it and all that it started can be found again.

    Args:
        arguments: of the command.
        folder: where it runs, and where its output goes.
        environment: variables that it has beside others.
    """

    def __init__(self, *arguments: str, folder: Path, **environment: str) -> None:
        self.mark = f"ZOO_TEST={time.monotonic_ns()}"
        name, _, value = self.mark.partition("=")
        self.folder = folder
        with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "zoo.cli", "compare", *arguments],
                cwd=folder,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, **environment, name: value},
            )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_: object) -> None:
        for number in self.processes():
            os.kill(number, signal.SIGKILL)
        self.process.wait()

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Until it has said so."""
        end = time.monotonic() + seconds
        while text not in self.stderr:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < end, self.stderr
            time.sleep(0.05)

    def wait_for_program(self, name: str, seconds: float = 60) -> None:
        """Until some process of it runs this."""
        end = time.monotonic() + seconds
        while not any(_program(number) == name for number in self.processes()):
            assert time.monotonic() < end, self.stderr
            time.sleep(0.05)

    def wait(self, seconds: float = 200) -> int:
        """Its exit status."""
        return self.process.wait(seconds)

    def interrupt(self) -> None:
        """Ctrl-C: to every process of the terminal's foreground."""
        os.killpg(self.process.pid, signal.SIGINT)

    def processes(self) -> list[int]:
        """Those that it has started, it among them, that still run."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:  # it has ended, or is another user's
                continue
        return found

    def none_left(self, seconds: float) -> bool:
        """Whether all of them end in so much time."""
        end = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True


def _program(number: int) -> str:
    try:
        return Path(f"/proc/{number}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""
