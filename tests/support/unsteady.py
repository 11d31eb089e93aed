"""A pytest plugin: what failed runs once more, alone and one at a time; what passes then is unsteady.

Unsteady tests count as passed and are shown with their first failure, so that its cause can be mended. What fails again
fails the run, and so does all that is no failing test: an error while collecting, tests that never ran.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

BAD = ("failed", "error")
Stats = dict[str, list[Any]]
"""The terminal reporter's: reports by outcome."""


@pytest.hookimpl(trylast=True)  # xdist's workers have ended, and the reporter sums up after this
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if session.exitstatus != pytest.ExitCode.TESTS_FAILED or hasattr(config, "workerinput"):
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    names = names_of(reporter.stats, *BAD)
    reporter.section("what failed, once more, alone")
    count_again(reporter.stats, names - failed_again(names, config))
    if any(reporter.stats.get(kind) for kind in BAD):
        return
    if len(names_of(reporter.stats, *reporter.stats)) == session.testscollected:
        session.exitstatus = pytest.ExitCode.OK
    else:
        reporter.write_line("some tests never ran: the run fails", red=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found = terminalreporter.stats.get("unsteady", ())
    if found:
        terminalreporter.section("unsteady: failed, and passed alone")
    for report in found:
        terminalreporter.write_line(f"UNSTEADY {report.nodeid}\n{report.longreprtext}")


def names_of(stats: Stats, *kinds: str) -> set[str]:
    """The tests with a report of such an outcome."""
    reports = (report for kind in kinds for report in stats.get(kind, ()))
    return {report.nodeid for report in reports if isinstance(report, pytest.TestReport)}


def failed_again(names: set[str], config: pytest.Config) -> set[str]:
    """Those of the tests that fail; a process for each file, so that one that crashes takes no other file with it."""
    failed = set[str]()
    for _, group in groupby(sorted(names), lambda name: name.split("::")[0]):
        failed |= _failed_in_one_process(list(group), config)
    return failed


def _failed_in_one_process(names: list[str], config: pytest.Config) -> set[str]:
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "pytest", "-m", config.option.markexpr, "-o", f"cache_dir={cache}", *names]
        status = subprocess.run(command, cwd=config.rootpath).returncode
        if status == pytest.ExitCode.OK:
            return set()
        if status != pytest.ExitCode.TESTS_FAILED:
            return set(names)
        return set(json.loads((Path(cache) / "v/cache/lastfailed").read_text()))


def count_again(stats: Stats, unsteady: set[str]) -> None:
    """Move what passed alone from the bad to the passed, and the first report of each to the unsteady."""
    firsts: dict[str, Any] = {}
    for kind in BAD:
        for report in stats.get(kind, ()):
            if report.nodeid in unsteady:
                firsts.setdefault(report.nodeid, report)
        left = [report for report in stats.pop(kind, ()) if report.nodeid not in unsteady]
        stats.update({kind: left} if left else {})
    passed = names_of(stats, "passed")
    stats.setdefault("passed", []).extend(firsts[name] for name in firsts if name not in passed)
    stats.update({"unsteady": list(firsts.values())} if firsts else {})
