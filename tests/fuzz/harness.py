"""Runs drawn cases in forked children with limits of memory and time, and counts how they end.

A case is a kind of input and a spec: plain JSON values that say what is wrong with it. `draw` makes a spec from a random number
generator, `run` does with it what a user would do, and raises InputError with a message, returns where the input is accepted, or
raises AcceptedWrongly where data came back that is not what was written. Everything else is wrong: any other exception, a message
that is none, a hang, memory beyond the limit, a crash.

Specs, not seeds, go into the corpus: they mean the same when the generators change.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from foundation.errors import InputError

Spec = dict[str, Any]
HANG_SECONDS = 60.0  # no input here takes a second; a machine that is this slow is not
MEMORY_BYTES = 2**30  # over what the process has mapped at its start; no input here is larger than a MiB
CASES_A_CHILD = 100
LONGEST_MESSAGE = 6000  # an unknown key may come with a line for every member of a union


class AcceptedWrongly(Exception):
    """The input was taken, and what was read from it is not what was written."""


@dataclass(frozen=True)
class Kind:
    """A class of inputs. `run` gets the spec and an empty folder of its own."""

    name: str
    share: int  # of 1,000 cases
    draw: Callable[[random.Random], Spec]
    run: Callable[[Spec, Path], object]


@dataclass(frozen=True)
class Outcome:
    kind: str
    spec: Spec
    ending: str  # "message", "accepted", or what is wrong: "traceback", "hang", "memory", "died", "accepted wrongly"
    detail: str

    @property
    def wrong(self) -> bool:
        return self.ending not in ("message", "accepted")


def drawn(kinds: Sequence[Kind], cases: int, seed: int) -> Iterator[tuple[Kind, Spec]]:
    """`cases` specs, each kind's share of them; the same for the same seed."""
    whole = sum(kind.share for kind in kinds)
    for kind in kinds:
        rng = random.Random(f"{seed} {kind.name}")
        for _ in range(round(cases * kind.share / whole)):
            yield kind, kind.draw(rng)


def corpus(path: Path, kinds: Sequence[Kind]) -> Iterator[tuple[Kind, Spec]]:
    """What once failed."""
    by_name = {kind.name: kind for kind in kinds}
    for name, specs in json.loads(path.read_text()).items():
        for spec in specs:
            yield by_name[name], spec


def run_all(cases: Iterable[tuple[Kind, Spec]], hang_seconds: float = HANG_SECONDS) -> Iterator[Outcome]:
    """The outcome of every case, in order. A child takes many; one that hangs or dies is replaced, and the next case goes on."""
    waiting = list(cases)
    while waiting:
        batch = waiting[:CASES_A_CHILD]
        ours, theirs = multiprocessing.Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _serve(theirs, batch)
        theirs.close()
        done = 0
        try:
            while done < len(batch):
                kind, spec = batch[done]
                if not ours.poll(hang_seconds):
                    yield Outcome(kind.name, spec, "hang", f"more than {hang_seconds:.0f} s")
                    done += 1
                    break
                try:
                    ending, detail = ours.recv()
                except EOFError:
                    yield Outcome(kind.name, spec, "died", "the process ended")
                    done += 1
                    break
                yield Outcome(kind.name, spec, ending, detail)
                done += 1
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
            ours.close()
        waiting = waiting[done:]


def _serve(pipe: Connection, batch: Sequence[tuple[Kind, Spec]]) -> None:
    """What a child does; it never returns."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    try:
        for kind, spec in batch:
            pipe.send(_end_of(kind, spec))
    finally:
        os._exit(0)


def _end_of(kind: Kind, spec: Spec) -> tuple[str, str]:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        kind.run(spec, folder)
    except InputError as error:
        message = str(error)
        clear = message.strip() and len(message) < LONGEST_MESSAGE and "Traceback" not in message
        return ("message", message[:300]) if clear else ("traceback", f"a message that is none: {message[:1000]}")
    except AcceptedWrongly as error:
        return "accepted wrongly", str(error)
    except MemoryError:
        return "memory", traceback.format_exc()[-2000:]
    except BaseException:
        return "traceback", traceback.format_exc()[-2000:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return "accepted", ""


def table(outcomes: Sequence[Outcome]) -> str:
    """In the form of a review's: a line a kind, and one for all."""
    lines = ["| inputs | tried | clear message | accepted | wrong |", "| --- | --- | --- | --- | --- |"]
    names = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    for name in [*names, "all"]:
        of_kind = [outcome for outcome in outcomes if name in (outcome.kind, "all")]
        ended = Counter(outcome.ending for outcome in of_kind)
        wrong = ", ".join(f"{n} {what}" for what, n in ended.items() if what not in ("message", "accepted"))
        lines.append(f"| {name} | {len(of_kind):,} | {ended['message']:,} | {ended['accepted']:,} | {wrong or 'none'} |")
    return "\n".join(lines)
