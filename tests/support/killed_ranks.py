"""Runs that are killed at seeded moments, and go on until they are done; four ranks, forked or by the real launcher.

A run trains the toy network, saves after every second step and goes on from the last checkpoint it finds. Each rank
writes what its watchdog is told into a file; the killer waits there for a phase, and strikes at a random moment of it.
Then nobody may be left after ``timeout_seconds`` + 15 s, and the ranks that were left must have said which one is gone
and what they did.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from support.children import forked
from support.launch import TESTS, free_port

RANKS, STEPS, SAVE_EVERY, MICROBATCHES = 4, 8, 2, 3
TIMEOUT = 20.0
LEFT_SECONDS = TIMEOUT + 15.0
LONGEST_WAIT = 0.3
"""Seconds between a victim's coming into a phase and the strike, at most."""

RUN_SECONDS = 240.0
"""A run that is not over by then, on whatever busy machine, hangs."""

PHASES = {
    "start-up": r"PipelineModule\(\): (waiting|comparing|settling|making|building|tying)|deepspeed\.initialize",
    "planning": r"PipelineModule\(\): planning",
    "measuring": r"PipelineModule\(\): measuring",
    "steps": r"train_batch|action|end of the step|figures",
    "saving": r"save_checkpoint",
    "loading": r"load_checkpoint",
}
NAPS = {"planning": 0.5, "write": 0.1, "load": 0.2, "forward": 0.01, "build": 0.05}
"""Seconds that make phases of the toy long enough to be struck in."""


@dataclass(frozen=True)
class Strike:
    """Whom to hit, when and how: ``victim`` is a rank, "runner" or "launch" (the launcher's two processes)."""

    phase: str
    victim: int | str
    moment: float
    number: int = signal.SIGKILL

    @property
    def launched(self) -> bool:
        return isinstance(self.victim, str) or self.moment > 1.0


# -- a rank ----------------------------------------------------------------------------------


def tell_places(folder: Path, rank: int) -> None:
    """Every place that the watchdog is told goes to the events."""
    from deepspeed_pulse.engine.observation.watchdog import Watchdog

    events = os.open(folder / "events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def told(self: Any, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "_place":
            os.write(events, f"{rank} {os.getpid()} {value.doing if value.inside else '-'}\n".encode())

    Watchdog.__setattr__ = told  # type: ignore[assignment]


def be_slow() -> None:
    from deepspeed_pulse.engine.checkpoints import files
    from deepspeed_pulse.engine.module import PipelineModule
    from deepspeed_pulse.engine.plans import planning
    from deepspeed_pulse.runtime.rank import RankRuntime

    def slowed(owner: Any, name: str, nap: str) -> None:
        genuine = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(NAPS[nap])
            return genuine(*args, **kwargs)

        setattr(owner, name, slow)

    slowed(planning, "make_planned", "planning")
    slowed(files.SafeCheckpointEngine, "save", "write")
    slowed(files.SafeCheckpointEngine, "load", "load")
    slowed(RankRuntime, "_forward", "forward")
    slowed(PipelineModule, "_build", "build")


def train(folder: Path) -> None:
    """One rank of a run; rank 0 writes the loss of every step."""
    import deepspeed
    from support.toy import loss_fn, toy_batch, toy_layers

    from deepspeed_pulse import PipelineModule

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    tell_places(folder, rank)
    be_slow()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        # one order whatever is measured, so that runs can be compared bit for bit
        "pulse": {"solver_seconds": 0, "placement": "linear", "schedule": "1f1b", "timeout_seconds": TIMEOUT},
    }
    module = PipelineModule(
        layers=toy_layers(),
        num_stages=RANKS,
        loss_fn=loss_fn,
        seed_layers=True,
        config=config,
        partition_method=[2, 4, 7],
        example_batch=toy_batch(0, 0, 0),
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    if (folder / "latest").is_file():
        engine.load_checkpoint(folder)
    while engine.global_steps < STEPS:
        step = engine.global_steps
        loss = float(engine.train_batch(toy_batch(step, m, 0) for m in range(MICROBATCHES)).detach())
        if rank == 0:
            with (folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps([engine.global_steps, loss]) + "\n")
        if engine.global_steps % SAVE_EVERY == 0:
            # the tightest limit: whenever a rank dies, the last checkpoint must be there
            engine.save_checkpoint(folder, checkpoints_total_limit=None if folder.name == "undisturbed" else 1)


# -- a run -----------------------------------------------------------------------------------


def be_a_rank(folder: Path, here: dict[str, str]) -> None:
    world = str(RANKS)
    os.environ.update(here, WORLD_SIZE=world, LOCAL_SIZE=world, MASTER_ADDR="127.0.0.1")
    train(folder)


def start_forked(folder: Path) -> list[int]:
    """The ranks' processes, forked from this one, which has imported everything."""
    port, children = str(free_port()), []
    for rank in range(RANKS):
        here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
        children.append(forked(partial(be_a_rank, folder, here), log=folder / "log"))
    return children


def start_launched(folder: Path) -> subprocess.Popen[bytes]:
    """DeepSpeed's own launcher: a runner, which starts ``launch.py``, which starts the ranks."""
    command = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", str(RANKS)]
    command += ["--master_port", str(free_port()), __file__, str(folder)]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, env=environment, cwd=TESTS.parent, stdout=log, stderr=log)


def places_in(folder: Path) -> Iterator[tuple[int, int, str]]:
    """(rank, process, what it does) as they come; ends when the run does not go on for too long."""
    end = time.monotonic() + RUN_SECONDS
    position = 0
    while time.monotonic() < end:
        whole = (folder / "events").read_bytes() if (folder / "events").is_file() else b""
        lines = whole[position : whole.rfind(b"\n") + 1]
        position += len(lines)
        for line in lines.decode().splitlines():
            rank, process, doing = line.split(" ", 2)
            yield int(rank), int(process), doing
        if not lines:
            yield -1, -1, ""
            time.sleep(0.005)


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def reap() -> None:
    """Take note of children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


class Run:
    """One run in a folder, from its start to its end or to a strike."""

    def __init__(self, folder: Path, *, launched: bool = False) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("events", "log"):
            (folder / name).unlink(missing_ok=True)
        self._launcher = start_launched(folder) if launched else None
        self._processes = [] if launched else start_forked(folder)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace") if (self.folder / "log").is_file() else ""

    def finish(self) -> None:
        """Wait for the end; every rank must have ended well."""
        end = time.monotonic() + RUN_SECONDS
        statuses = {}
        while len(statuses) < len(self._processes):
            for process in self._processes:
                if process not in statuses:
                    done, status = os.waitpid(process, os.WNOHANG)
                    if done:
                        statuses[process] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                self.end()
                raise AssertionError(f"a run does not end:\n{self.log[-6000:]}")
            time.sleep(0.02)
        assert not any(statuses.values()), f"{statuses}\n{self.log[-6000:]}"

    def strike(self, strike: Strike) -> tuple[str, dict[int, int], float] | None:
        """Hit; what the victim did, the ranks' processes, and when. None where the run ended before the phase came."""
        processes: dict[int, int] = {}
        doing: dict[int, str] = {}
        due = float("inf")
        for rank, process, place in places_in(self.folder):
            if rank >= 0:
                processes[rank], doing[rank] = process, place
                if rank == (0 if isinstance(strike.victim, str) else strike.victim):
                    inside = re.search(PHASES[strike.phase], place) is not None and len(processes) == RANKS
                    if inside and due == float("inf"):
                        due = time.monotonic() + strike.moment % 1.0 * LONGEST_WAIT
            elif time.monotonic() >= due:
                break
            elif len(processes) == RANKS and not any(map(alive, processes.values())):
                reap()
                return None
        else:
            self.end()
            raise AssertionError(f"the phase {strike.phase} never came:\n{self.log[-6000:]}")
        launcher = parent_of(processes[0])
        victim = {"launch": launcher, "runner": parent_of(launcher)}.get(strike.victim) or processes[strike.victim]  # type: ignore[call-overload,index]
        what = doing.get(strike.victim, doing[0]) if isinstance(strike.victim, int) else doing[0]
        os.kill(victim, strike.number)
        self._processes = list({*self._processes, *processes.values(), launcher} - {os.getpid()})
        return what, processes, time.monotonic()

    def left_after(self, struck: float, but: tuple[int, ...] = ()) -> list[int]:
        """Processes that are still there when the time is up."""
        while time.monotonic() < struck + LEFT_SECONDS:
            reap()
            if not [p for p in self._processes if p not in but and alive(p)]:
                break
            time.sleep(0.05)
        return [p for p in self._processes if p not in but and alive(p)]

    def end(self) -> None:
        """End whatever is left of it."""
        for process in self._processes:
            if alive(process):
                os.kill(process, signal.SIGKILL)
        if self._launcher is not None:
            self._launcher.kill()
        time.sleep(0.1)
        reap()


def is_named(strike: Strike, log: str) -> bool:
    """The ranks that were left have said who is gone, and what they did."""
    if isinstance(strike.victim, str):
        return re.search(r"rank \d is in [^\n]+, and the launcher \(process \d+\) is gone", log) is not None
    victim = strike.victim
    killed = "is gone, its process"
    fates: dict[int, str] = {signal.SIGSTOP: "no sign of life", signal.SIGTERM: f"(has ended in|{killed})"}
    fate = fates.get(strike.number, killed)
    who = rf"rank {victim}: {fate}|ranks? [\d, ]*\b{victim}\b[\d, ]* of this machine is gone"
    if victim == 0:
        who += "|the store of the process group does not answer: the process that holds it"
    doing = r"rank \d, in [^\n]+:|pipeline rank \d, stage|rank \d has been in|SIGTERM in|rank \d: in "
    return re.search(who, log) is not None and re.search(doing, log) is not None


# -- chains of strikes -----------------------------------------------------------------------


def load_everything() -> None:
    """Imports before the forks; no thread and no process group may exist then."""
    import deepspeed
    import support.engine_ranks  # noqa: F401

    import deepspeed_pulse.engine.engine  # noqa: F401

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def losses(folder: Path) -> dict[int, float]:
    """The last loss of every step."""
    return dict(map(json.loads, (folder / "losses.jsonl").read_text().splitlines()))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    found = {}
    for path in sorted((folder / f"global_step{STEPS}").glob("layer_*")):
        state = torch.load(path, weights_only=True)
        found.update({f"{path.name} {name}": tensor for name, tensor in state.items()})
    return found


def assert_as_undisturbed(folder: Path, undisturbed: Path) -> None:
    assert losses(folder) == losses(undisturbed)
    mine, expected = weights(folder), weights(undisturbed)
    assert mine.keys() == expected.keys() and expected
    assert all(torch.equal(mine[name], tensor) for name, tensor in expected.items())


def chain(folder: Path, strikes: list[Strike], undisturbed: Path) -> list[dict[str, Any]]:
    """Strike after strike, each at the run that goes on from the one before; then a run that is left alone."""
    found = []
    for strike in strikes:
        if strike.phase == "loading" and not (folder / "latest").is_file():
            copy_checkpoint(undisturbed, folder)
        run = Run(folder, launched=strike.launched)
        try:
            hit = run.strike(strike)
            if hit is None:
                found.append({**vars(strike), "missed": True})
                continue
            what, processes, at = hit
            but = (processes[strike.victim],) if strike.number == signal.SIGSTOP else ()  # type: ignore[index]
            left = run.left_after(at, but)
            row = {**vars(strike), "doing": what, "seconds": round(time.monotonic() - at, 1), "left": len(left)}
            row["named"] = is_named(strike, run.log)
            found.append(row)
            print("STRIKE", json.dumps(row), flush=True)
            if left or not row["named"]:
                print(run.log[-8000:], flush=True)
        finally:
            run.end()
    Run(folder).finish()
    assert_as_undisturbed(folder, undisturbed)
    return found


def copy_checkpoint(source: Path, folder: Path) -> None:
    """As if the run had been killed after its first save."""
    import shutil

    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source / f"global_step{SAVE_EVERY}", folder / f"global_step{SAVE_EVERY}")
    (folder / "latest").write_text(f"global_step{SAVE_EVERY}")
    first = (source / "losses.jsonl").read_text().splitlines()[:SAVE_EVERY]
    (folder / "losses.jsonl").write_text("\n".join(first) + "\n")


def drawn(seed: int, count: int) -> list[Strike]:
    """So many strikes: phases in turn, victims and moments by chance; some by the launcher, some at it."""
    source = random.Random(seed)
    phases = [phase for phase in PHASES for _ in range(-(-count // len(PHASES)))][:count]
    source.shuffle(phases)
    found = []
    for number, phase in enumerate(phases):
        victim: int | str = source.randrange(RANKS)
        moment = source.random()
        if number % 5 == 1:  # by the launcher
            moment += 1.0
            victim = source.choice(["launch", "runner", victim, victim])
        found.append(Strike(phase, victim, moment))
    return found


def kills(case: dict[str, Any]) -> None:
    """``count`` strikes in chains of at most ``length``, from a seed."""
    load_everything()
    base = Path(case["folder"])
    Run(base / "undisturbed").finish()
    strikes, rows = drawn(case["seed"], case["count"]), []
    for number in range(0, len(strikes), case["length"]):
        rows += chain(base / str(number), strikes[number : number + case["length"]], base / "undisturbed")
        print("CHAIN", number, "as undisturbed", flush=True)
    report(rows)


def given(case: dict[str, Any]) -> None:
    """The strikes of a case, one chain."""
    load_everything()
    base = Path(case["folder"])
    Run(base / "undisturbed").finish()
    report(chain(base / "struck", [Strike(*row) for row in case["strikes"]], base / "undisturbed"))


def report(rows: list[dict[str, Any]]) -> None:
    struck = [row for row in rows if "missed" not in row]
    by_phase: dict[str, Counter[str]] = {}
    for row in struck:
        kind = row["phase"] if isinstance(row["victim"], int) else f"{row['victim']} of the launcher"
        counts = by_phase.setdefault(kind, Counter())
        counts.update(struck=1, named=row["named"], left=row["left"])
    print("RESULT", json.dumps({"struck": len(struck), "by_phase": by_phase, "rows": struck}), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    train(Path(sys.argv[-1]))
