"""Several processes that look after each other: one that dies, hangs or lags is named, and the others end with one message.

A thread on every rank writes down, every two seconds, that it lives and where its main thread is. It writes into the store that
the process group was joined through, over a connection of its own, so that nothing waits for a collective. Rank 0 reads what all
have written; the others watch rank 0 and read what it has found.

    rank 1 is gone      its process is not there any more, which rank 0 sees on its own machine
    rank 1 is silent    it has written nothing for `train.rank_timeout` seconds
    rank 1 hangs        it has written, but its main thread has not moved, and all others wait further on in the step

Who is ahead is what tells: no time by itself ends a run. A main thread that compiles, saves, evaluates or begins is not compared,
and a step that usually takes long has longer (SLOWER). A thread that waits in a collective cannot be interrupted: the
process ends around it (`os._exit`), with status LOST.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from foundation.errors import InputError
from foundation.reading import one_line
from foundation.units import duration
from pretrain.checkpoint.folders import step_folders
from pretrain.metrics.health import TrainingHalted
from pretrain.run.command_line import tell_torchrun

LOST = 75  # the exit status of ranks that lost another: EX_TEMPFAIL of sysexits.h, "try again later"
BEAT = 2.0  # seconds between two signs of life, or a fifth of the limit
LOOK = 0.2  # seconds between two looks at what the main thread wants
BEGINNING = 3  # steps of a process in which it compiles and tunes: their times say nothing
PATIENCE = 2  # times the limit, for the silence of what may take its time: compilers, for one, keep the interpreter to themselves
GRACE = 10.0  # seconds for a main thread that waits in a collective while another rank has failed, and told why
SLOWER = 3  # times the longest of the usual steps, where that is more than the limit
USUAL_STEPS = 20
AFTER = 10**9  # the place of what comes after a step's forward and backward passes

LAGS = 1.3  # times the median rank's own time
LAG_STEPS = 50  # steps of which the median is a rank's own time
LAG_EVERY, LAG_AGAIN = 100, 1000  # steps between two looks for one that lags, and until it is named again
LAG_SHARE = 0.05  # of a step: what lags by less delays nobody

_ROOT = Path(__file__).resolve().parents[2]
# Where a main thread waits for the other ranks: the innermost frame's file, or function.
_WAITS_IN = (f"{os.sep}torch{os.sep}distributed{os.sep}",)
_WAITS_AS = {"_engine_run_backward", "same_on_all_ranks", "largest_over_ranks", "_ask"}
# Files that are on the stack only while something is compiled or tuned.
_COMPILES_IN = {"convert_frame.py", "compile_fx.py", "autotuner.py", "async_compile.py"}
_OF_A_COLLECTIVE = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "c10d")


@dataclass(frozen=True)
class Place:
    """Where a rank's main thread is. Of two ranks, the one of the smaller (step, order) is behind."""

    step: int
    order: int  # within the step
    doing: str
    patient: bool  # what it does may take any time
    since: float  # this process's clock


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life."""

    number: int
    step: int
    order: int
    doing: str
    patient: bool
    seconds: float  # for which it has been there
    usual: float = 0.0  # seconds of the longest of its recent steps
    own_ms: float | None = None  # a step's time in which it waits for no other rank, median
    data_ms: float = 0.0  # the part of these in which it waits for data
    frame: str = ""  # where in this project its main thread is, once that has not moved for long
    waits: bool = False  # in a collective, as far as the frame tells
    compiles: bool = False
    left: bool = False  # it has come to its end

    @property
    def position(self) -> tuple[int, int]:
        return self.step, self.order

    @classmethod
    def read(cls, text: bytes) -> Beat:
        return cls(**json.loads(text))


def hanging(beats: Mapping[int, Beat], limit: float) -> list[int]:
    """The ranks that all others wait for, none where that cannot be told: someone has moved in the last `limit` seconds (or in
    SLOWER usual steps), what is behind may take its time, or all are at one place and wait there alike."""
    there = {rank: beat for rank, beat in beats.items() if not beat.left}
    limit = max([limit, *(SLOWER * beat.usual for beat in there.values())])
    if not there or any(beat.seconds <= limit for beat in there.values()):
        return []
    front = max(beat.position for beat in there.values())
    behind = {rank: beat for rank, beat in there.items() if beat.position < front}
    if behind:
        if any(beat.patient and not beat.waits for rank, beat in there.items() if rank not in behind):
            return []
        behind = {rank: beat for rank, beat in behind.items() if not beat.waits} or behind
        last = min(beat.position for beat in behind.values())
        suspects = {rank: beat for rank, beat in behind.items() if beat.position == last}
    else:
        suspects = {rank: beat for rank, beat in there.items() if not beat.waits}
        if len(suspects) == len(there):
            return []
    if any(beat.patient or beat.compiles for beat in suspects.values()):
        return []
    return sorted(suspects)


def lagging(beats: Mapping[int, Beat]) -> dict[int, float]:
    """Ranks whose own time a step is more than LAGS times the median rank's, with that median in ms."""
    own = {rank: beat.own_ms for rank, beat in beats.items() if beat.own_ms is not None and not beat.left}
    if len(own) < len(beats) or not own:
        return {}
    median = statistics.median_low(own.values())
    least = LAG_SHARE * 1e3 * max(beat.usual for beat in beats.values())
    return {rank: median for rank, ms in own.items() if ms > LAGS * median and ms - median > least}


class RankWatch:
    """Watches over the ranks while its `with` block lasts; with one process, or without a limit, it does nothing.

    All ranks enter it at once, in their main threads. `limit`: `train.rank_timeout`, in seconds. `checkpoints`: the folder that a
    message names the last one of.
    """

    def __init__(self, accelerator: Accelerator, limit: float | None, checkpoints: Path) -> None:
        self.rank, self.world_size = accelerator.process_index, accelerator.num_processes
        self.limit, self.checkpoints = limit, checkpoints
        self.note: Callable[[Mapping[str, Any]], None] | None = None  # into metrics.jsonl; set on the main process
        self._accelerator = accelerator
        self._on = self.world_size > 1 and limit is not None
        self._place = Place(0, 0, "starting", True, time.monotonic())
        self._in_step = False
        self._steps = 0  # of this process
        self._took: deque[float] = deque(maxlen=USUAL_STEPS)  # seconds of its recent steps
        self._own: deque[tuple[float, float]] = deque(maxlen=LAG_STEPS)  # a step's own ms; how many it waits for data
        self._own_time = OwnTime(accelerator.device)
        self._lags: list[dict[str, Any]] = []  # found, and not said yet
        self._asked = False  # the main thread wants to know soon why its collective has failed
        self._failure: dict[str, Any] | None = None  # what this rank leaves with
        self._ends = False

    # ── The main thread ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> RankWatch:
        if self._on:
            self._main = threading.get_ident()
            self._store = distributed_c10d._get_default_store().clone()  # waits of others do not hold up this connection
            self._store = dist.PrefixStore("ranks", self._store)
            self._number = 0
            self._post()
            self._store.set(f"who/{self.rank}", json.dumps(_who()))
            self._accelerator.wait_for_everyone()  # from here on no key is waited for
            self._who = [json.loads(text) for text in self._store.multi_get([f"who/{rank}" for rank in range(self.world_size)])]
            self._processes = {rank: _process(who) for rank, who in enumerate(self._who) if who["machine"] == _machine()}
            self._previous = signal.signal(signal.SIGTERM, self._terminated)
            self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._on:
            return
        if error is None:
            self._place = replace(self._place, doing="ending", patient=True, since=time.monotonic())
            try:
                self._accelerator.wait_for_everyone()  # a rank may need long to end, and is watched until then
            except RuntimeError as broken:
                self._leave(broken)
                raise
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """End the watch, by itself or with `error`; where that comes of a lost rank, the process ends here."""
        if error is not None:
            if isinstance(error, RuntimeError) and of_a_collective(error):
                self._ask(self._silence() + 3 * self._interval)
            said = one_line(error, named=True)
            self._failure = {"kind": "failed", "ranks": [self.rank], "status": _status_of(error), "text": said}
        self._ends = True
        self._thread.join(2 * self._interval)
        if error is not None and self.rank == 0 and not _launcher_has_store():
            time.sleep(self._interval + LOOK)  # the store goes with this process, and the others have yet to read why
        signal.signal(signal.SIGTERM, self._previous)

    def attach(self, model: nn.Module, loss: nn.Module) -> None:
        """Follow the forward and backward passes of `model` within steps; its forward ends with that of `loss`."""
        if self._on:
            model.register_forward_pre_hook(lambda *_: self._pass("forward pass", begins=True))
            loss.register_forward_hook(lambda *_: self._pass("backward pass", begins=False))

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Put this around step `number`, from asking for its data on."""
        if not self._on:
            yield
            return
        began = time.monotonic()
        self._move(number, 0, "waiting for its data")
        self._in_step = True
        self._own_time.clear()
        yield
        self._in_step = False
        self._steps += 1
        self._move(number, AFTER, "between two steps")
        if self._steps > BEGINNING:
            self._took.append(time.monotonic() - began)

    def stepped(self, data_wait_ms: float) -> list[dict[str, Any]]:
        """Takes note of a step that has waited so long for its data. Returns, on rank 0, the lines of metrics that name lagging
        ranks."""
        if not self._on:
            return []
        if self._steps > BEGINNING and (own := self._own_time.milliseconds()) is not None:
            self._own.append((own + data_wait_ms, data_wait_ms))
        found, self._lags = self._lags, []
        return found

    @contextmanager
    def busy(self, doing: str) -> Iterator[None]:
        """Put this around what may take one rank any time while the others wait for it."""
        before = self._place
        self._place = replace(before, doing=doing, patient=True, since=time.monotonic())
        try:
            yield
        finally:
            self._place = replace(before, since=time.monotonic())

    def _pass(self, doing: str, *, begins: bool) -> None:
        if self._in_step:
            self._move(self._place.step, self._place.order + 1, f"in the {doing} of microbatch {(self._place.order + 2) // 2}")
            self._own_time.mark(begins=begins)

    def _move(self, step: int, order: int, doing: str) -> None:
        self._place = Place(step, order, doing, self._steps < BEGINNING, time.monotonic())

    def _ask(self, seconds: float) -> None:
        """Wait so long for the other thread to find out that a rank is lost, with which it ends this process."""
        self._asked, until = True, time.monotonic() + seconds
        while time.monotonic() < until and self._thread.is_alive():
            time.sleep(LOOK / 2)
        self._asked = False

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """Handles SIGTERM where the training loop does not take it: torchrun sends it to all others when one rank has died."""
        if self._asked:
            return
        self._ask(self._interval + 4 * LOOK)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    # ── The thread that watches ───────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _interval(self) -> float:
        return min(BEAT, self.limit / 5)

    def _silence(self) -> float:
        """Seconds for which a rank may write nothing now: what takes its time, all ranks do at once."""
        return self.limit * (PATIENCE if self._place.patient else 1)

    def _watch(self) -> None:
        self._heard: dict[int, tuple[Beat, float]] = {}  # the last sign of life of each rank, and when it came
        self._looked_at = 0  # the last step at which ranks were compared
        self._named: dict[int, int] = {}  # at which step a rank was said to lag
        self._without_store: float | None = None
        turn = 0.0
        while not self._ends:
            time.sleep(LOOK)
            now = time.monotonic()
            if now - turn < self._interval and not self._asked:
                continue
            if turn and now - turn > self._interval + self.limit / 2:  # this process itself was stopped, and cannot judge
                self._heard = {rank: (beat, now) for rank, (beat, _) in self._heard.items()}
            turn = now
            try:
                self._look()
            except RuntimeError:  # DistError is one
                if not self._ends:
                    self._lost_store()
        if self._without_store is not None:
            return
        with suppress(RuntimeError):  # the rank that has the store may have ended first
            if self._failure:
                self._store.compare_set("verdict", "", json.dumps(self._failure))
            else:
                self._post(left=True)

    def _look(self) -> None:
        if self._without_store is not None:
            return self._lost_store()
        self._post()
        if self._store.check(["verdict"]):
            return self._follow(json.loads(self._store.get("verdict")))
        others = range(self.world_size) if self.rank == 0 else (0,)
        now = time.monotonic()
        for rank, text in zip(others, self._store.multi_get([f"beat/{rank}" for rank in others]), strict=True):
            beat = Beat.read(text)
            if rank not in self._heard or self._heard[rank][0].number != beat.number:
                self._heard[rank] = (beat, now)
        if verdict := self._judge(now):
            decided = self._store.compare_set("verdict", "", json.dumps(verdict))
            self._follow(json.loads(decided))
        elif self.rank == 0:
            self._compare()

    def _post(self, *, left: bool = False) -> None:
        """Write down where the main thread is."""
        place, self._number = self._place, self._number + 1
        seconds = time.monotonic() - place.since
        own = [list(each) for each in zip(*self._own, strict=True)] if len(self._own) >= LAG_STEPS // 2 else None
        frame = _frame_of(self._main) if seconds > self.limit / 2 else {}
        beat = Beat(
            self._number,
            place.step,
            place.order,
            place.doing,
            place.patient,
            seconds,
            usual=max(self._took, default=0.0),
            own_ms=statistics.median(own[0]) if own else None,
            data_ms=statistics.median(own[1]) if own else 0.0,
            left=left,
            **frame,
        )
        self._store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def _judge(self, now: float) -> dict[str, Any] | None:
        """Returns the verdict that ends the run; None where nothing does."""
        gone = [rank for rank, (beat, _) in self._heard.items() if not beat.left and rank != self.rank and self._is_gone(rank)]
        if gone:
            return self._verdict("gone", gone, self._heard, 0.0)
        silent = {
            rank: now - when
            for rank, (beat, when) in self._heard.items()
            if not beat.left and rank != self.rank and now - when > self._silence()
        }
        if silent:
            return self._verdict("silent", sorted(silent), self._heard, max(silent.values()))
        if self.rank == 0 and (hung := hanging({rank: beat for rank, (beat, _) in self._heard.items()}, self.limit)):
            return self._verdict("hangs", hung, self._heard, max(self._heard[rank][0].seconds for rank in hung))
        return None

    def _is_gone(self, rank: int) -> bool:
        """Whether the rank was a process of this machine and is none any more."""
        process = self._processes.get(rank, False)
        if process is False:  # it runs on another machine
            return False
        try:
            return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _verdict(
        self, kind: str, ranks: Sequence[int], heard: Mapping[int, tuple[Beat, float]], seconds: float
    ) -> dict[str, Any]:
        """Returns a verdict. `kind`: gone, silent or hangs."""
        beat = heard[ranks[0]][0]
        hosts = list(dict.fromkeys(self._who[rank]["host"] for rank in ranks))
        named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
        who = f"rank{'s' if len(ranks) > 1 else ''} {named} on {', '.join(hosts[:8])}"
        is_, has, hangs = ("is", "has", "hangs") if len(ranks) == 1 else ("are", "have", "hang")
        # What is gone or silent has come as far as this rank, which exchanges something with it in every step.
        at = beat.step if kind == "hangs" else max(beat.step, self._place.step)
        step = f"step {at}" if at else "the start"
        if kind == "gone":
            what = f"{is_} gone since {step}, without a word: killed, most often for memory (see `dmesg`)"
        elif kind == "silent":
            what = f"{has} not been heard of since {step}, {duration(seconds)} ago: stopped, or out of reach"
        else:
            frame = f" ({beat.frame})" if beat.frame else ""
            what = f"{hangs} in {step}, {beat.doing}{frame}, for {duration(seconds)} now, and the others wait"
        return {"kind": kind, "ranks": list(ranks), "hosts": hosts, "step": at, "status": LOST, "text": f"{who} {what}"}

    def _follow(self, verdict: dict[str, Any]) -> None:
        """End this process as `verdict` says. Where a rank has failed with words of its own, it needs none of ours."""
        if verdict["kind"] == "failed":
            began = time.monotonic()  # all ranks may end by that failure, each by itself, and when its work is done
            while not self._ends and not self._asked and (passed := time.monotonic() - began) < PATIENCE * self.limit:
                if passed > GRACE and _frame_of(self._main).get("waits"):
                    break
                time.sleep(LOOK)
            if self._ends:
                return
            tell_torchrun(f"rank {verdict['ranks'][0]} has failed: {verdict['text']}")
            os._exit(verdict["status"])
        guard = threading.Timer(5.0, os._exit, [LOST])  # should a disk hang too
        guard.daemon = True
        guard.start()
        text = f"{verdict['text']}; {self._last_checkpoint()}: start the same command again to go on from there"
        tell_torchrun(f"lost: {text}")
        if self.rank not in verdict["ranks"] and self._tells(verdict):
            with suppress(OSError):
                os.write(2, f"\nlost: {text}\n".encode())
        if self.note is not None:
            event = {key: verdict[key] for key in ("kind", "ranks", "hosts")}
            with suppress(InputError, ValueError):  # the file may be closed, or its disk full
                self.note({"step": self._place.step, "event": "lost_rank", **event, "reason": text})
        self._kill_stopped(verdict)
        os._exit(LOST)

    def _tells(self, verdict: dict[str, Any]) -> bool:
        """Whether this rank is the one that prints."""
        if self._without_store is None:
            with suppress(RuntimeError):
                return self._store.add("told", 1) == 1
        return self.rank == min(set(range(self.world_size)) - set(verdict["ranks"]))

    def _last_checkpoint(self) -> str:
        """Says which checkpoint the disk has now, where it answers within two seconds."""
        found: list[str] = []
        look = threading.Thread(target=lambda: found.extend(_newest(self.checkpoints)), daemon=True)
        look.start()
        look.join(2.0)
        return found[0] if found else f"{self.checkpoints} does not answer"

    def _kill_stopped(self, verdict: dict[str, Any]) -> None:
        """Kills stopped processes of this machine: each would hold its GPU until its launcher gives up on it half a minute
        later."""
        for rank in verdict["ranks"]:
            if rank != self.rank and (process := self._processes.get(rank)):
                with suppress(psutil.Error):
                    if process.status() == psutil.STATUS_STOPPED:
                        process.kill()

    def _lost_store(self) -> None:
        """The store is gone: with rank 0, which has it where no launcher does, or with the launcher.

        Without a launcher nobody restarts, requeues or ends the ranks: they save and end, as by SIGTERM. Where this one stands
        still in a step, the first machine is gone as a whole.
        """
        now, heard = time.monotonic(), self._heard.get(0)
        if self._without_store is None:
            self._without_store = now
            if _launcher_has_store() and not self._is_gone(0):
                if self.rank == 0:
                    with suppress(OSError):
                        os.write(2, f"\nthe launcher on {self._who[0]['host']} is gone: saving, and ending\n".encode())
                os.kill(os.getpid(), signal.SIGTERM)
                return
        gone, place = self.rank != 0 and self._is_gone(0), self._place
        still = not place.patient and now - max(place.since, self._without_store) > self.limit
        if gone or still or not _launcher_has_store():
            heard = heard or (Beat(0, 0, 0, "starting", True, 0.0), now)
            self._follow(self._verdict("gone" if gone else "silent", [0], {0: heard}, now - heard[1]))

    def _compare(self) -> None:
        """Find ranks that lag, once in a while; the main thread says so after its step."""
        beats = {rank: beat for rank, (beat, _) in self._heard.items()}
        step = self._place.step
        if step - self._looked_at < LAG_EVERY or len(beats) < self.world_size:
            return
        self._looked_at = step
        for rank, median in lagging(beats).items():
            if rank not in self._named or step - self._named[rank] >= LAG_AGAIN:
                self._named[rank] = step
                figures = {"own_ms": beats[rank].own_ms, "data_ms": beats[rank].data_ms, "median_ms": median}
                self._lags.append({"event": "straggler", "rank": rank, "host": self._who[rank]["host"], **figures})


class OwnTime:
    """The time of a step's forward passes on the device, each from its beginning to its loss. Nothing is exchanged within one:
    delayed scaling compares its largest values after it, gradients are added up later still. Under FSDP2 the ranks wait for each
    other inside, and what one lags by is in the time of all."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._passes: list[list[Any]] = []  # moments: of the beginning, and of the end where it was reached

    def clear(self) -> None:
        self._passes = []

    def mark(self, *, begins: bool) -> None:
        if self._on_gpu:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        else:
            moment = time.perf_counter()
        if begins:
            self._passes.append([moment])
        elif self._passes:
            self._passes[-1].append(moment)

    def milliseconds(self) -> float | None:
        """Returns the sum of the passes; None where none was seen. Call it when the step's figures have come from the device."""
        whole = [each for each in self._passes if len(each) == 2]
        if not whole:
            return None
        return sum(first.elapsed_time(last) if self._on_gpu else (last - first) * 1e3 for first, last in whole)


def describe_lag(found: Mapping[str, Any]) -> str:
    """What the user is told of a rank that lags."""
    data = f", {found['data_ms']:.3g} ms of it waiting for data" if found["data_ms"] > 0.1 * found["own_ms"] else ""
    return (
        f"rank {found['rank']} on {found['host']} lags: its forward passes of a step take {found['own_ms']:.3g} ms{data}, the "
        f"median rank's {found['median_ms']:.3g} ms, and all wait for it. Look for another program, heat or a slow disk there"
    )


def of_a_collective(error: BaseException) -> bool:
    """Whether it comes from exchanging something with other ranks, one of which may be lost."""
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _OF_A_COLLECTIVE)


def _status_of(error: BaseException) -> int:
    return 2 if isinstance(error, InputError) else 3 if isinstance(error, TrainingHalted) else 1


def _newest(checkpoints: Path) -> list[str]:
    folders = step_folders(checkpoints)
    return [f"the last checkpoint is {folders[0]}" if folders else f"{checkpoints} holds no checkpoint yet"]


def _launcher_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _who() -> dict[str, Any]:
    return {"host": platform.node(), "machine": _machine(), "pid": os.getpid()}


def _machine() -> str:
    """Returns a name for this machine: the same in two processes that can see each other by their numbers."""
    parts = [platform.node()]
    with suppress(OSError):  # not on Linux
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _process(who: Mapping[str, Any]) -> psutil.Process | None:
    """Returns the process; None where it has died in the meantime."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(who["pid"])
    return None


def _frame_of(thread: int) -> dict[str, Any]:
    """Returns what a thread's stack tells: the innermost place in this project; whether it waits for other ranks, or compiles."""
    frame = innermost = sys._current_frames().get(thread)
    if innermost is None:
        return {}
    waits = innermost.f_code.co_name in _WAITS_AS or any(part in innermost.f_code.co_filename for part in _WAITS_IN)
    place, compiles = "", False
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        compiles = compiles or path.name in _COMPILES_IN
        if not place and path.is_relative_to(_ROOT) and "site-packages" not in path.parts:
            place = f"{path.relative_to(_ROOT)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return {"frame": place, "waits": waits, "compiles": compiles}
