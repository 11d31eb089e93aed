"""DeepSpeed's own tests, on the stand-in for an accelerator: with its ``PipelineModule``, and with ours in its place.

DEEPSPEED_TESTS=a/checkout/of/DeepSpeed make soak TESTS=tests/engine/test_upstreams_own.py
"""

from __future__ import annotations

import pytest
from support.standin import needs_standin
from support.upstream_tests import MODULES, PIPELINES, PLAIN, expected, lacking, run

pytestmark = [
    needs_standin(),
    pytest.mark.soak,
    pytest.mark.skipif(lacking() is not None, reason=lacking() or ""),
    pytest.mark.timeout(3000),
]

SECONDS = 2900


@pytest.mark.parametrize("file", PIPELINES)
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("waits", ["hccl", "nccl"])
def test_pipelines(subtests: pytest.Subtests, waits: str, module: str, file: str) -> None:
    give_what_is_expected(subtests, file, PIPELINES[file], waits, module)


@pytest.mark.parametrize("file", PLAIN)
@pytest.mark.parametrize("waits", ["hccl", "nccl"])
def test_without_pipelines(subtests: pytest.Subtests, waits: str, file: str) -> None:
    give_what_is_expected(subtests, file, PLAIN[file], waits, "theirs")


def give_what_is_expected(subtests: pytest.Subtests, file: str, selected: str, waits: str, module: str) -> None:
    """Every test of theirs passes, but for those that are known not to, which do what is known of them."""
    found = run(file, selected, module=module, waits=waits, timeout=SECONDS)
    assert found, f"{file}: no test"
    for test, (outcome, message) in found.items():
        otherwise = expected(test, module)
        with subtests.test(test):
            if otherwise is None:
                assert outcome == "passed", f"{outcome}: {message}"
            else:
                assert outcome == otherwise.outcome and otherwise.message in message, (
                    f"{otherwise}: {outcome}: {message}"
                )
