"""On an asynchronous device, the stand-in of ``tests/standin``: losses, gradients and weights as on the CPU.

Under both kinds of wait, with kernels that are late and that are not; memory is protected and poisoned throughout.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from support.cases import launch_each
from support.damage_ranks import results
from support.device_ranks import WEIGHT_BYTES
from support.launch import launch
from support.precision_cases import pairwise
from support.standin import environment, needs_standin

pytestmark = needs_standin()

DEVICES = [*itertools.product(("hccl", "nccl"), (0, 200))]
"""Whose kind of wait, and microseconds by which every kernel is late."""

QUICK, LATE = ("hccl", 0), ("nccl", 200)


def named(kind: tuple[str, int]) -> str:
    waits, delay = kind
    return f"{waits}-{delay}us"


def device_of(kind: tuple[str, int]) -> dict[str, str]:
    waits, delay = kind
    return environment(waits=waits, kernel_delay_us=delay)


def case(model: str, ranks: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "P": ranks, "M": 3, "clip": 0.1, "enabled": True, **more}


def run_parity(
    subtests: pytest.Subtests, world: int, cases: list[dict[str, Any]], kind: tuple[str, int], seconds: float
) -> None:
    launch_each(subtests, "support.parity:run_cases", world, cases, timeout=seconds, environment=device_of(kind))


def run_precision(rows: list[dict[str, Any]], folder: Path, kind: tuple[str, int], seconds: float) -> None:
    """What DeepSpeed alone gives on the CPU, in one process, is given on the device by ranks under a plan."""
    argument = {"rows": rows, "folder": str(folder)}
    launch("support.precision_ranks:references", 1, argument, timeout=seconds)
    for world in sorted({row["P"] * row["dp"] for row in rows}):
        mine = [row for row in rows if row["P"] * row["dp"] == world]
        target, argument = "support.precision_ranks:compare", {"rows": mine, "folder": str(folder)}
        for _, output in launch(target, world, argument, timeout=seconds, environment=device_of(kind)):
            assert output.count("ERRORS") == len(mine)


SHORT = {
    QUICK: [
        case("toy", 2),
        case("toy", 2, W=2, clip=0.0),
        case("toy", 2, placement="linear"),
        case("toy", 1),
        case("noisy", 2, interval=2),
        case("tokens", 2, dynamic=True),
        case("assorted", 2, clip=0.0),
        case("ordered", 2, placement="linear", moved=True),
        case("tables apart", 2, placement="linear"),
    ],
    LATE: [case("toy", 2), case("unet", 2, M=2, W=2)],
}
"""A wave, two waves and a linear pipeline of two, two replicas, recomputation, dynamic shapes, any dtype; a model that
lies on the device before it is cut, its weights in other orders than row by row; and buffers that modules share."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [QUICK, pytest.param(LATE, marks=pytest.mark.soak)], ids=named)
def test_two_ranks_train_as_on_the_cpu(subtests: pytest.Subtests, kind: tuple[str, int]) -> None:
    run_parity(subtests, 2, SHORT[kind], kind, 300)


@pytest.mark.timeout(400)
def test_bf16_and_zero_train_as_on_the_cpu(tmp_path: Path) -> None:
    row = {"M": 3, "recompute": "off", "clip": 0.1, "P": 2, "dp": 1, "precision": "bf16", "zero": 1}
    run_precision([row], tmp_path, QUICK, 150)


WAITING = [
    case("waiting", 2, pulse={"receive_ahead": False}),
    case("waiting", 2, W=2, pulse={"receive_ahead": False}),
    case("waiting", 2, placement="linear", pulse={"receive_ahead": False}),
    case("loading", 2),
    case("loading", 2, W=2),
    case("loading", 2, placement="linear"),
]


@pytest.mark.timeout(400)
def test_layers_that_wait_for_the_whole_device_train(subtests: pytest.Subtests) -> None:
    run_parity(subtests, 2, WAITING, LATE, 300)


@pytest.mark.timeout(200)
def test_gloo_is_refused_on_every_rank_before_anything_is_sent() -> None:
    """With tied layers, replicas, and layers that are measured: one error, which says how to start the group."""
    jobs = itertools.product((2, 1), (True, False), (True, False))
    cases = [{"ranks": ranks, "tied": tied, "measured": measured} for ranks, tied, measured in jobs]
    for _, output in launch("support.device_ranks:refused", 2, cases, timeout=150, environment=device_of(QUICK)):
        found = [json.loads(line.removeprefix("REFUSED")) for line in output.splitlines() if "REFUSED" in line]
        assert len(found) == len(cases) and len({text for _, text in found}) == 1, found
        kind, text = found[0]
        assert kind == "ConfigError" and "start the process group with 'hccl' (deepspeed.init_distributed()" in text


@pytest.mark.timeout(200)
def test_a_device_with_one_queue_is_refused() -> None:
    device = {**device_of(QUICK), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    ends = launch("support.parity:run_cases", 2, [case("toy", 2)], timeout=150, check=False, environment=device)
    for status, output in ends:
        assert status != 0 and "ConfigError: CUDA_DEVICE_MAX_CONNECTIONS: found 1" in output, output


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_wait_for_receives_that_were_posted_ahead_ends_and_names_the_key() -> None:
    early = case("waiting", 2, placement="linear", pulse={"timeout_seconds": 10})
    ends = launch("support.parity:run_cases", 2, [early], timeout=300, check=False, environment=device_of(QUICK))
    assert all(status != 0 for status, _ in ends)
    assert any('set "receive_ahead": false' in output for _, output in ends)


COPIED = [
    {"bf16": {"enabled": True}},
    {"communication_data_type": "bf16", "gradient_clipping": 0.1},
    {"bf16": {"enabled": True}, "prescale_gradients": True},
]
"""Gradients are sent in copies: those of the bf16 optimizer, and of fp32 in another type."""

COUNTED = [
    case("toy", 2),
    case("toy", 2, placement="linear"),
    case("toy", 2, enabled=False),
]

LISTED = {("copy to device", "runtime/pipe/engine.py")}
"""The only waits of a steady step: what docs/decisions.md lists for every step."""


@pytest.mark.timeout(300)
def test_the_host_waits_in_a_steady_step_for_what_is_listed_only() -> None:
    """No message, no header, no number; and what goes to the device is pinned, but for upstream's own copies."""
    for _, output in launch("support.accelerator_ranks:counted", 2, COUNTED, timeout=250, environment=device_of(LATE)):
        found = [json.loads(line.removeprefix("COUNTED")) for line in output.splitlines() if line.startswith("COUNTED")]
        assert len(found) == len(COUNTED)
        for counted in found:
            waits = {(kind, place.split(":")[0]) for kind, place, _ in counted["waits"]}
            assert waits <= LISTED, (counted["case"], counted["rank"], counted["waits"])
            pageable = {place.split(":")[0] for kind, place, _ in counted["copies"] if "pageable" in kind}
            assert pageable <= {place for _, place in LISTED}, (counted["case"], counted["copies"])


@pytest.mark.timeout(300)
def test_an_entry_goes_to_the_device_once_a_microbatch(subtests: pytest.Subtests) -> None:
    """From pinned memory, on the ranks that read it, however many layers there do."""
    cases = [case("unet", 2, M=2), case("toy", 2, placement="linear"), case("toy", 2)]
    for _, output in launch("support.accelerator_ranks:counted", 2, cases, timeout=250, environment=device_of(QUICK)):
        found = [json.loads(line.removeprefix("COUNTED")) for line in output.splitlines() if line.startswith("COUNTED")]
        assert len(found) == len(cases)
        for counted in found:
            with subtests.test(case=counted["case"], rank=counted["rank"]):
                copied = sum(count for kind, _, count in counted["copies"] if kind == "pinned to device")
                assert copied == counted["entries_read"], counted["copies"]


@pytest.mark.timeout(200)
def test_the_host_hands_over_a_step_while_the_device_stands_still() -> None:
    launch("support.accelerator_ranks:runs_behind", 2, case("toy", 2), timeout=150, environment=device_of(QUICK))


@pytest.mark.timeout(200)
def test_messages_and_sums_are_timed_by_the_device() -> None:
    """Under NCCL's kind of wait too: of a size all are queued before the host waits once, for its times."""
    milliseconds = 5
    delayed = environment(waits="nccl", message_delay_us=1000 * milliseconds)
    sizes = 3
    for rank, (_, output) in enumerate(
        launch("support.device_ranks:measures", 2, None, timeout=150, environment=delayed)
    ):
        found = [json.loads(line.removeprefix("MEASURED")) for line in output.splitlines() if "MEASURED" in line]
        assert [one["kind"] for one in found] == ["links", "sums"]
        for one in found:
            waits = dict.fromkeys(("device", "stream", "event", "poll"), 0)
            for kind, place, count in one["waits"]:
                if kind in waits:
                    waits[kind] += count
                    assert place.startswith("deepspeed_pulse/engine/device.py"), one["waits"]
            assert sum(waits.values()) == waits["event"] == sizes, one["waits"]
        links, sums = (one["points"] for one in found)
        assert len(links) == (sizes if rank == 0 else 0) and len(sums) == sizes
        assert all(ms >= milliseconds for _, ms in links), links


@pytest.mark.timeout(300)
@pytest.mark.parametrize("config", COPIED, ids=str)
@pytest.mark.parametrize("kind", [pytest.param(QUICK, marks=pytest.mark.soak), LATE], ids=named)
def test_copies_of_gradients_are_put_back_as_they_are_summed(config: dict[str, Any], kind: tuple[str, int]) -> None:
    """Two at a time are there, of twelve, and none is left when the host has handed over the sums; it waits nowhere."""
    for _, output in launch("support.device_ranks:sums_copies", 2, config, timeout=250, environment=device_of(kind)):
        (found,) = (json.loads(line.removeprefix("COPIES")) for line in output.splitlines() if "COPIES" in line)
        assert found["allocated"] == pytest.approx(found["counted"], rel=WITHIN), found
        assert found["counted"] == 2 * WEIGHT_BYTES, found
        assert found["kept"] <= 0 and (found["left"], found["waits"]) == (0, []), found


@pytest.mark.timeout(200)
def test_building_and_tracing_leave_the_devices_random_numbers() -> None:
    ((_, output),) = launch("support.device_ranks:numbers_stay", 1, None, timeout=150, environment=device_of(QUICK))
    assert "STAYED" in output


@pytest.mark.timeout(200)
def test_a_model_that_asks_for_its_device_runs_where_it_was_not_listed() -> None:
    target = "support.device_ranks:runs_where_it_was_not_listed"
    ((_, output),) = launch(target, 1, None, timeout=150, environment=device_of(QUICK))
    assert "AGREES" in output


# -- communicators -------------------------------------------------------------------------

MADE = {
    2: [
        case("toy", 2),
        case("toy", 2, W=2),
        case("toy", 2, placement="linear"),
        case("toy", 1),
        case("uvit", 2, M=4),
        case("toy", 2, buffer_mb=16),
    ],
    4: [case("toy", 4), case("toy", 2), case("uvit", 2, M=3)],
}
"""By world size: waves, a line, replicas (tied layers in all of these), layers and links measured; HCCL's buffers."""


TOLD = {"P2P_HCCL_BUFFSIZE": "0", "HCCL_BUFFSIZE": "50"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("environment", [{}, pytest.param(TOLD, marks=pytest.mark.soak)], ids=["usual", "told"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_communicators_are_as_counted(subtests: pytest.Subtests, world: int, environment: dict[str, str]) -> None:
    """No rank makes another than its plan says, and they hold on the device what is counted for them."""
    device = {**device_of(QUICK), **environment}
    target, made = "support.accelerator_ranks:communicators", []
    for _, output in launch(target, world, MADE[world], timeout=350, environment=device):
        made += [json.loads(line.removeprefix("MADE")) for line in output.splitlines() if line.startswith("MADE")]
    assert len(made) == world * len(MADE[world])
    for one in made:
        with subtests.test(case=one["case"], rank=one["rank"]):
            assert one["bytes"] == one["told_bytes"], one
            assert one["counted"] >= one["whole"][1], one
            if environment:
                assert one["messages"] == 0, "messages run in their groups' communicators"
            else:
                assert (one["collectives"], one["messages"]) == (one["told_collectives"], one["told_messages"]), one


@pytest.mark.timeout(200)
def test_every_process_group_has_a_timeout() -> None:
    """The one over the hosts' memory too."""
    launch("support.group_ranks:have_timeouts", 2, case("toy", 2, M=2), timeout=150, environment=device_of(QUICK))


# -- faults that must be seen --------------------------------------------------------------


@pytest.mark.timeout(300)
def test_faults_of_sending_change_losses(subtests: pytest.Subtests) -> None:
    """What comparisons are worth; a receive that is posted late is seen by tests/runtime/test_transport.py."""
    cases = [case("toy", 2, M=6, fault=fault) for fault in ("wrong_order", "missing_wait", "freed_early")]
    late = environment(waits="hccl", kernel_delay_us=200, message_delay_us=20_000)
    launch_each(subtests, "support.spoilt_ranks:differ", 2, cases, timeout=250, environment=late)


# -- memory --------------------------------------------------------------------------------

HELD = {
    2: [
        case("uvit", 2, M=4),
        case("uvit", 2, M=6, placement="linear"),
        case("uvit", 2, M=4, W=2),
        case("uvit", 2, M=4, bf16=True, zero=1),
        case("uvit", 1, M=2),
        case("uvit", 2, M=4, interval=1),
        case("uvit", 2, M=4, interval=1, bf16=True),
        case("unet", 2, M=4),
        case("unet", 2, M=4, placement="linear"),
        case("uvit", 2, M=4, W=2, split=True),
        case("unet", 2, M=4, split=True),
        case("wide", 2, M=4),
        case("wide", 2, M=4, bf16=True),
        case("wide", 1, M=2, zero=1),
        case("wide", 1, M=2, bf16=True, zero=1),
        case("wide", 1, M=2, bf16=True),
    ],
    4: [
        case("uvit", 4, M=8),
        case("uvit", 2, M=3),
        case("uvit", 2, M=3, zero=1),
        case("unet", 4, M=6, clip=1.0),
        case("uvit", 2, M=3, zero=1, split=True),
        case("wide", 2, M=2, bf16=True),
    ],
}
"""By world size; replicas where there are fewer pipeline ranks. What a backward is, whole or in halves, is said: the
planner would choose by the times that it measures."""

WITHIN = 0.03
"""Counted and allocated, the difference's share."""


def memory_is_as_counted(subtests: pytest.Subtests, world: int, cases: list[dict[str, Any]], seconds: float) -> None:
    """Within 3 % of what the device's allocator says, and never more than was planned."""
    target, found = "support.memory_ranks:peaks", []
    for one in cases:  # each in processes of its own: what an engine leaves behind may go while the next one trains
        argument = {"split": False, **one}
        for _, output in launch(target, world, argument, timeout=seconds, environment=device_of(QUICK)):
            lines = [line for line in output.splitlines() if line.startswith("PEAKS")]
            found += [json.loads(line.removeprefix("PEAKS")) for line in lines]
    assert len(found) == world * len(cases)
    for peak in found:
        with subtests.test(case=peak["case"], rank=peak["rank"]):
            assert abs(peak["counted"] / peak["allocated"] - 1) <= WITHIN, json.dumps(peak)
            assert peak["counted"] <= peak["planned"], json.dumps(peak)
            one = peak["case"]
            # where replicas sum them early, what the last backward of a stage makes leaves in bf16 while it runs, and
            # is counted as if it did not
            leaves = f"B{one['M'] - 1}" if one.get("bf16") and not one.get("zero") else "none"
            for action, counted, allocated in peak["actions"]:  # in another order one of these may be at the peak
                if max(counted, allocated) > peak["allocated"] / 2:
                    assert counted / allocated - 1 >= -WITHIN, (action, counted, allocated, peak)
                    assert counted / allocated - 1 <= WITHIN or action.endswith(leaves), (
                        action,
                        counted,
                        allocated,
                        peak,
                    )


@pytest.mark.timeout(300)
def test_memory_is_what_the_allocator_says(subtests: pytest.Subtests) -> None:
    memory_is_as_counted(subtests, 2, HELD[2][:1], 250)


@pytest.mark.soak
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("world", HELD)
def test_memory_of_every_kind_is_what_the_allocator_says(subtests: pytest.Subtests, world: int) -> None:
    memory_is_as_counted(subtests, world, HELD[world], PRODUCT_SECONDS)


# -- the whole product ---------------------------------------------------------------------

PRODUCT_SECONDS = 1700

PLACEMENTS: list[dict[str, Any]] = [{}, {"W": 2}, {"placement": "linear"}, {"enabled": False}]
RANKS = {1: [1], 2: [1, 2], 3: [3], 4: [2, 4]}
"""World size to pipeline ranks: replicas where they are fewer."""


def product_of(world: int) -> list[dict[str, Any]]:
    cases = []
    for ranks in RANKS[world]:
        cases += [case("noisy", ranks, interval=2), case("noisy", ranks, interval=1, reentrant=True)]
        cases += [case("assorted", ranks, placement="linear"), *([case("assorted", ranks)] if ranks <= 3 else [])]
        cases += [case("tokens", ranks, dynamic=True), case("unet buckets", ranks, dynamic=True, M=2)]
    for ranks, clip, placement in itertools.product(RANKS[world], (0.0, 0.1), PLACEMENTS):
        if 2 * ranks * placement.get("W", 1) <= 10:
            cases.append(case("toy", ranks, clip=clip, **placement))
        cases.append(case("unet", ranks, M=2, clip=clip, **placement))
    return cases


@pytest.mark.soak
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("world", RANKS)
@pytest.mark.parametrize("kind", DEVICES, ids=named)
def test_the_whole_product_trains_as_on_the_cpu(subtests: pytest.Subtests, world: int, kind: tuple[str, int]) -> None:
    run_parity(subtests, world, product_of(world), kind, PRODUCT_SECONDS)


@pytest.mark.soak
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("kind", DEVICES, ids=named)
def test_every_precision_trains_as_on_the_cpu(kind: tuple[str, int], tmp_path: Path) -> None:
    rows = [row for row in pairwise() if row["P"] * row["dp"] <= 4]
    run_precision(rows, tmp_path, kind, PRODUCT_SECONDS)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", DEVICES, ids=named)
def test_frozen_parts_are_encoded_in_idle_time(
    subtests: pytest.Subtests, kind: tuple[str, int], tmp_path: Path
) -> None:
    cases = [{"P": 2, "M": 2}, {"P": 4, "M": 8}, {"P": 4, "M": 2, "placement": "linear"}]
    argument = {"folder": str(tmp_path), "cases": cases}
    target = "support.frozen_ranks:trains"
    launch_each(subtests, target, 4, cases, argument, timeout=800, environment=device_of(kind))


RESUMED: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({}, [{}, {"placement": "linear"}, {"off": True}, {"ranks": 1, "zero": 1}]),
    ({"ranks": 1, "zero": 1, "dtype": "bfloat16"}, [{"zero": 1, "dtype": "bfloat16"}]),
]
"""Three pipeline ranks as a wave, in a line, with pulse off; and three replicas."""


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", DEVICES, ids=named)
def test_a_job_that_stopped_goes_on(kind: tuple[str, int], tmp_path: Path) -> None:
    argument, target = {"folder": str(tmp_path), "cases": RESUMED}, "support.matrix_ranks:resumes"
    (_, output), *_ = launch(target, 3, argument, timeout=800, environment=device_of(kind))
    found = results(output)
    assert len(found) == sum(len(targets) for _, targets in RESUMED) and not any(found.values()), found
