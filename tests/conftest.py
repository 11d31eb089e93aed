"""What all tests have in common."""

import math
from collections.abc import Iterator

import pytest

from deepspeed_pulse.report import progress


@pytest.fixture(autouse=True, scope="session")
def nothing_said_for_being_slow() -> Iterator[None]:
    """A busy machine does not add lines of progress to what a command writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "EVERY_SECONDS", math.inf)
        yield
