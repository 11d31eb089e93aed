"""Real ranks on a real slow network: this project against what a user would pick instead.

Every rank is a process in a network namespace of its own with one rate-limited card; layers sleep for a published
model's times and carry its bytes, both scaled down. Needs root and iproute2. Usage:
python benchmarks/slow_network/run.py --ranks 4 --models uvit [--write]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed  # noqa: F401 - once, before ranks are forked
import readme
from namespaces import Namespace, bridged
from narrowing import require_known
from ranks import RanksFailed, launch
from slow_network import rank, report
from slow_network.cases import TIMED, Case, make_case
from slow_network.others import other_sides
from slow_network.plans import balanced, limited, once_each, our_sides
from slow_network.rank import Job
from sources import digest

from deepspeed_pulse.engine.plans.content import MEASURING_VERSION
from deepspeed_pulse.ir.cluster import Cluster
from deepspeed_pulse.ir.fields import write_whole
from deepspeed_pulse.ir.profile import Profile
from deepspeed_pulse.planner.cache import PLANNER_VERSION

HERE = Path(__file__).resolve().parent
RATIOS = {"unlimited": None, "ratio 1.5": 1.5, "ratio 2.5": 2.5}
"""By speed: how much longer relayed 1F1B with joined backward takes than on unlimited links, as a share."""
AGAIN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("1F1B, stock", "DualPipeV, stock"), ()),
    **dict.fromkeys(("1F1B", "DualPipeV", "interleaved", "ZB-V", "ZeRO-2", "DDP"), ("unlimited",)),
}
"""By side, speeds that later rounds run too: elsewhere these are far behind, and their steps are long."""
STEPS = 5
"""Of a side at a speed in a round, where they are short."""


class TimeIsOver(Exception):
    """What is left is for the next call."""


def main() -> int:
    arguments = parse()
    deadline = time.monotonic() + 60 * arguments.minutes
    cases, missed, states = [], [], []
    try:
        for name in arguments.models:
            case = make_case(name, arguments.ranks, arguments.stage_ms, arguments.work / "profiles")
            with bridged(case.ranks) as homes:
                bench = Bench(case=case, homes=homes, arguments=arguments, deadline=deadline)
                found = bench.run()
            print(report.table(found), flush=True)
            cases.append(found)
            states.append(bench.state_path)
            missed += [f"{name}, {case.ranks} ranks: {line}" for line in report.misses(found)]
            if arguments.write:
                report.keep(found, arguments.figures)
                report.write(arguments.figures)
    except TimeIsOver:
        print(f"{arguments.minutes:g} minutes are over: call again with the same options to go on", file=sys.stderr)
        return 3
    for state in states:  # not before all are done: the next call would begin those that are gone again
        state.unlink()
    if not arguments.sides:
        newest = {key: runs[0] for key, runs in report.load(arguments.figures).items()}
        newest |= {report.key(found): found for found in cases}
        missed += report.missed(report.of_all(newest.values()))
    for line in missed:
        print(f"MISSED {line}", file=sys.stderr)
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, choices=(2, 4, 8))
    parser.add_argument("--models", nargs="+", choices=TIMED, default=TIMED, metavar="MODEL", help=", ".join(TIMED))
    parser.add_argument("--sides", nargs="+", metavar="TEXT", help="only sides whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=2, help="how often all sides are run, in turn")
    parser.add_argument("--stage-ms", type=float, default=20.0, help="mean forward time of one of 2P stages")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds after which a side is ended and said so")
    parser.add_argument("--minutes", type=float, default=8.5, help="then stop; the next call goes on (status 3)")
    parser.add_argument("--quick", action="store_true", help="one round, nothing kept: does everything run?")
    parser.add_argument("--work", type=Path, default=Path("out/slow_network"), help="profiles and unfinished runs")
    parser.add_argument("--figures", type=Path, default=HERE / "figures.json", help="what --write merges runs into")
    arguments = readme.keep_option(parser, "quick", "sides", "rounds", "stage-ms", "timeout")
    require_known(parser, "--sides", arguments.sides or (), report.SIDES)
    return arguments


def made_by() -> list[Any]:
    """What figures of one run have in common."""
    shared = (HERE.with_name(f"{name}.py") for name in ("measured", "namespaces", "ranks", "resting"))
    return [PLANNER_VERSION, MEASURING_VERSION, digest(HERE, *shared)]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """All sides of one case. What is known is kept after every side, so that another call can go on."""

    case: Case
    homes: Sequence[Namespace]
    arguments: argparse.Namespace
    deadline: float

    def run(self) -> dict[str, Any]:
        try:
            state = self.begun() or self.begin()
        except RanksFailed as problem:
            raise SystemExit(f"{self.case.name}, {self.case.ranks} ranks: {problem}") from None
        profile = Profile.from_json(json.dumps(state["profile"]))
        jobs = self.jobs(state, profile)
        again = {name for name, result in state["results"].items() if result["failed"]}
        for tries in (1, 2):  # what failed in an earlier call comes last, so that every call gets on
            for number in range(self.rounds):
                for name, job in jobs:
                    if (name in again) == (tries == 2):
                        self.once(number, name, job, state, tries)
        found = {name: state["results"][name] for name, _ in jobs}
        return report.summary(self.case, profile, state, found, self.arguments.stage_ms)

    @property
    def rounds(self) -> int:
        return 1 if self.arguments.quick else int(self.arguments.rounds)

    @property
    def state_path(self) -> Path:
        kind = f"{self.arguments.stage_ms:g}ms-{self.rounds}" + ("-quick" if self.arguments.quick else "")
        kind += f"-{'+'.join(self.arguments.sides)}" if self.arguments.sides else ""
        return Path(self.arguments.work) / f"{self.case.name}-{self.case.ranks}-{kind}.json"

    def begun(self) -> dict[str, Any] | None:
        """What an earlier call left, if that is of this code."""
        if not self.state_path.exists():
            return None
        found: dict[str, Any] = json.loads(self.state_path.read_text())
        if found.get("made_by") != made_by():
            self.say("what an earlier call left was made by other code: begun anew")
            return None
        return found

    def begin(self) -> dict[str, Any]:
        """What all sides need: layer costs as they are here, link speeds, plans."""
        measured = self.launch(rank.profile, Job(side="pulse", case=self.case))
        profile = Profile.from_json(json.dumps(measured))
        options = {"boundaries": balanced(self.case, profile, "1f1b"), "dualpipev": False, "joined": True}
        job = Job(side="relayed", case=self.case, options=options, speeds=RATIOS)
        speeds = self.launch(rank.calibrate, job, patience=3)
        self.say("speeds: " + ", ".join(f"{name} {found}" for name, found in speeds.items()))
        measured_links = self.launch(rank.links, Job(side="pulse", case=self.case))
        unlimited = Cluster.from_json(json.dumps(measured_links))
        self.say(f"unlimited: {unlimited}")
        ours = {}
        for speed, found in speeds.items():
            sides = our_sides(self.case, profile, limited(unlimited, found.get("mbit")))
            ours[speed] = once_each({name: side for name, side in sides.items() if self.is_wanted(name)})
        state = {"made_by": made_by(), "profile": measured, "speeds": speeds, "ours": ours, "results": {}, "done": []}
        self.keep(state)
        return state

    def keep(self, state: dict[str, Any]) -> None:
        write_whole(self.state_path, json.dumps(state))

    def once(self, number: int, name: str, job: Job, state: dict[str, Any], tries: int) -> None:
        """Unless it is done, or the side has failed so often."""
        if number and name in AGAIN:
            job = replace(job, speeds={speed: job.speeds[speed] for speed in AGAIN[name]})
        key = f"{number} {name} {' '.join(job.speeds)}"
        result = state["results"].setdefault(name, {"speeds": {}, "failed": {}})
        failed: dict[str, list[str]] = result["failed"]
        if not job.speeds or key in state["done"] or max(map(len, failed.values()), default=0) >= tries:
            return
        if time.monotonic() > self.deadline:
            raise TimeIsOver
        try:
            self.take(name, job, result)
        except RanksFailed as problem:
            failed.setdefault(key, []).append(str(problem).splitlines()[0])
            self.say(f"{name}: {str(problem)[-3000:]}")
        else:
            failed.pop(key, None)
            state["done"].append(key)
        self.keep(state)

    def take(self, name: str, job: Job, result: dict[str, Any]) -> None:
        began = time.monotonic()
        found = self.launch(rank.measure, job)
        for speed, steps in found.items():
            result["speeds"].setdefault(speed, []).extend(steps)
        times = ", ".join(f"{speed} {steps[-1]['step_ms']:.0f} ms" for speed, steps in found.items())
        self.say(f"{name}: {times} ({time.monotonic() - began:.0f} s)")

    def launch(self, run: Any, job: Job, patience: int = 1) -> Any:
        timeout = patience * self.arguments.timeout
        return launch(run, self.case.ranks, job, namespaces=self.homes, timeout=timeout)

    def jobs(self, state: dict[str, Any], profile: Profile) -> list[tuple[str, Job]]:
        mbit = {name: found.get("mbit") for name, found in state["speeds"].items()}
        others = other_sides(self.case, profile, mbit, steps=STEPS)
        return [*((name, job) for name, job in others if self.is_wanted(name)), *self.our_jobs(state["ours"], mbit)]

    def our_jobs(self, ours: dict[str, Any], mbit: dict[str, float | None]) -> Iterator[tuple[str, Job]]:
        for speed, sides in ours.items():
            for name, side in sides.items():
                if "same_as" not in side:
                    options, speeds = side["options"], {speed: mbit[speed]}
                    yield name, Job(side="pulse", case=self.case, options=options, speeds=speeds, steps=STEPS)

    def is_wanted(self, name: str) -> bool:
        wanted = self.arguments.sides
        return not wanted or any(part in name for part in wanted)

    def say(self, text: str) -> None:
        print(f"[{self.case.name}, {self.case.ranks} ranks] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
