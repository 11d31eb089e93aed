"""Two hosts by DeepSpeed's launcher over ssh: they train as one, a host that is lost ends the job, which goes on."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.hosts import ROOT, Hosts, hosts, lacking

SCRIPT = ROOT / "examples" / "unet" / "train.py"

STEPS, SAVE_EVERY = 16, 2

TIMEOUT = 30.0
"""``timeout_seconds``: what a pulled cable takes to be noticed in a step."""

END_SECONDS = 500.0
"""A run that is not over by then, or a rank that is not, hangs."""

HOSTS = {"first": 2, "second": 2}

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = lacking()
    if reason:
        pytest.skip(reason)
    try:
        with hosts(tmp_path_factory.mktemp("hosts")) as found:
            yield found
    except SystemExit as problem:
        pytest.skip(f"no network namespaces: {problem}")


class Job:
    """The example's script in a folder; started again, it goes on."""

    def __init__(self, two: Hosts, folder: Path, **pulse: Any) -> None:
        self._two, self.out, self._log = two, folder, folder / "log"
        folder.mkdir(exist_ok=True)
        config = json.loads((SCRIPT.parent / "ds_config.json").read_text())
        config |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
        config["pulse"] = {"placement": "wave", "solver_seconds": 2, "timeout_seconds": TIMEOUT, **pulse}
        (folder / "ds_config.json").write_text(json.dumps(config))

    def start(self, slots: Mapping[str, int] = HOSTS) -> subprocess.Popen[bytes]:
        self._log.unlink(missing_ok=True)
        flags = {"--steps": STEPS, "--size": 16, "--checkpoint-every": SAVE_EVERY, "--out": self.out}
        words = [str(word) for flag in flags.items() for word in flag]
        config = ["--deepspeed_config", str(self.out / "ds_config.json")]
        return self._two.deepspeed(str(SCRIPT), *config, *words, slots=slots, log=self._log)

    def run(self, slots: Mapping[str, int] = HOSTS) -> str:
        """To its end; what it said."""
        status = self.wait(self.start(slots))
        assert status == 0, self.log
        return self.log

    def wait(self, launcher: subprocess.Popen[bytes]) -> int:
        try:
            return launcher.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {END_SECONDS:g} s:\n{self.log[-6000:]}")

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def saved(self) -> str:
        latest = self.out / "checkpoints" / "latest"
        return latest.read_text() if latest.is_file() else ""

    def losses(self) -> list[list[str]]:
        with (self.out / "loss.csv").open(newline="") as file:
            return list(csv.reader(file))

    def steps(self) -> int:
        """Done so far, those of earlier runs too."""
        return len((self.out / "loss.csv").read_text().splitlines()) - 1


@pytest.fixture(scope="module")
def undisturbed(two: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job whose costs, links and plan are made on both hosts."""
    job = Job(two, tmp_path_factory.mktemp("undisturbed"))
    start = time.monotonic()
    log = job.run()
    print(f"\nundisturbed: {time.monotonic() - start:.1f} s in all\n{_plan_told(log)}\n{_last(job)}")
    return job


@pytest.fixture(scope="module")
def plan(undisturbed: Job) -> str:
    """The plan of that job, for others to run: what is measured differs from run to run."""
    found = json.loads((undisturbed.out / "checkpoints" / "pulse_run.json").read_text())
    path = undisturbed.out / "plan.json"
    path.write_text(json.dumps(found["plan"]))
    return str(path)


def _plan_told(log: str) -> str:
    lines = [
        line
        for line in log.splitlines()
        if re.search(r"pulse: 4 ranks|predicted: |links measured|between +nodes", line)
    ]
    return "\n".join(lines)


def _last(job: Job) -> str:
    return f"losses of steps 1 and {STEPS}: {job.losses()[1][1]}, {job.losses()[-1][1]}"


def test_the_job_is_planned_for_two_hosts_of_two(undisturbed: Job) -> None:
    log = undisturbed.log
    assert "{'first': [0, 1], 'second': [2, 3]}" in log
    assert re.search(r"links measured: [^\n]+ inside a node, ", log) and re.search(r"between\W+(\w+: *)?nodes", log)
    assert (undisturbed.out / "model" / "unet" / "config.json").is_file()
    assert len(undisturbed.losses()) == STEPS + 1


def test_losses_are_those_of_one_host(two: Hosts, undisturbed: Job, plan: str, tmp_path: Path) -> None:
    job = Job(two, tmp_path / "one", plan=plan)
    job.run({"first": 4})
    assert job.losses() == undisturbed.losses()


def test_lost_hosts_are_named_and_the_job_goes_on(two: Hosts, undisturbed: Job, plan: str, tmp_path: Path) -> None:
    """One after the other, after a save or in a step, each in the run that goes on from the one before."""
    job = Job(two, tmp_path / "struck", plan=plan)
    for lost, how, steps in (("second", DIES, 0), ("first", CABLE, 0), ("first", DIES, 1), ("second", CABLE, 1)):
        before = job.saved
        launcher = job.start()
        start = time.monotonic()
        while job.saved == before or job.steps() < steps + int(job.saved.removeprefix("step")):
            assert launcher.poll() is None and time.monotonic() < start + END_SECONDS, job.log[-8000:]
            time.sleep(0.02)
        print(f"\n{job.saved} is saved after {time.monotonic() - start:.1f} s, {lost} {how}")
        struck = time.monotonic()
        try:
            two.hosts[lost].switch_off() if how == DIES else two.set_link(lost, "down")
            status = job.wait(launcher)
            print(f"the launcher ended with {status} after {time.monotonic() - struck:.1f} s")
            while any(host.ranks() for host in two.hosts.values()):
                assert time.monotonic() < struck + END_SECONDS, [host.ranks() for host in two.hosts.values()]
                time.sleep(0.2)
            print(f"no process of the job is left after {time.monotonic() - struck:.1f} s")
        finally:
            two.hosts[lost].switch_off()
            two.set_link(lost, "up")
            two.hosts[lost].switch_on()
        print("\n".join(line[:300] for line in job.log.splitlines() if "Error: " in line or " host " in line))
        assert status != 0
        assert re.search(NAMED[lost], job.log), job.log[-8000:]
        assert job.saved != f"step{STEPS}"
    saved = job.saved
    job.run()
    print(f"went on from {saved}; {_last(job)}")
    assert job.losses() == undisturbed.losses()


def test_a_name_that_stands_for_loopback_is_told(two: Hosts, tmp_path: Path) -> None:
    """Without ``GLOO_SOCKET_IFNAME`` hosts with Debian's /etc/hosts cannot meet."""
    log = tmp_path / "log"
    with two.without("GLOO_SOCKET_IFNAME"):
        launcher = two.deepspeed(str(ROOT / "examples" / "skips" / "train.py"), slots=HOSTS, log=log)
        assert launcher.wait(END_SECONDS) != 0
    told = r"joining the process group: the name of this host, (first|second), stands for 127\.0\.1\.1 here"
    assert re.search(rf"ConfigError: {told}.* set GLOO_SOCKET_IFNAME", log.read_text()), log.read_text()[-8000:]


DIES, CABLE = "dies", "loses its cable"

NAMED = {
    "first": r"second: .*the store of the process group does not answer: [^\n]* \(global rank 0 on host first",
    "second": r"first: .*host second gives no sign of life \(ranks 2, 3\): it is down, or its network is",
}
"""What a rank of the other host says."""
