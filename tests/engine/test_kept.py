"""Profiles are kept by content, and compared with the model before they are used."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_pulse import LayerSpec
from deepspeed_pulse.config import PulseConfig
from deepspeed_pulse.engine.measure.layers import measure_layers
from deepspeed_pulse.engine.measure.probe import LayerInputs
from deepspeed_pulse.engine.plans import content, kept, machines
from deepspeed_pulse.engine.plans.content import frozen_content, job_content
from deepspeed_pulse.engine.plans.costs import PlanRequest, built, known_profile, skips_of
from deepspeed_pulse.engine.plans.kept import with_kept_times
from deepspeed_pulse.engine.specs import describe, spec
from deepspeed_pulse.errors import ConfigError, FileError
from deepspeed_pulse.ir.fill import FrozenLayer, FrozenPart
from deepspeed_pulse.ir.graph import Graph
from deepspeed_pulse.ir.profile import Profile

CPU = torch.device("cpu")


class Naps(nn.Module):
    def __init__(self, nap_ms: float = 1.0, width: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(width, width), nn.GroupNorm(groups, width)
        self._nap_ms = nap_ms

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.norm(self.inner(hidden))
        return hidden, hidden


def scaled(factor: float) -> Callable[..., Tensor]:
    def join(hidden: Tensor, skip: Tensor) -> Tensor:
        return hidden + factor * skip

    return join


def request(
    *, first: Any = None, factor: float = 2.0, rows: int = 2, dtype: torch.dtype = torch.float32, **pulse: Any
) -> PlanRequest:
    layers = [first or LayerSpec(Naps, stash="skip"), nn.Linear(4, 4), spec(scaled(factor), pop="skip")]
    return PlanRequest(
        graph=Graph(layers=tuple(describe(i, layer) for i, layer in enumerate(layers))),
        layers=layers,
        pulse=PulseConfig.model_validate(pulse),
        pipeline_ranks=1,
        data_parallel=1,
        microbatches=4,
        microbatch_size=2,
        partition_method="profile",
        example=(torch.zeros(rows, 4, dtype=dtype), {}),
        device=CPU,
    )


def profile_of(asked: PlanRequest) -> Profile:
    assert asked.example is not None
    inputs, entries = asked.example
    start = LayerInputs(hidden=inputs, values=entries)
    measured = measure_layers(asked.graph, [lambda x=x: built(x) for x in asked.layers], start, CPU)
    skips = skips_of(asked.graph, measured.value_bytes)
    return Profile(name="toy", device="cpu", dtype="float32", microbatch_size=2, layers=measured.layers, skips=skips)


def encoder(*ms: float) -> FrozenPart:
    layers = [FrozenLayer(name="e", forward_ms=x, param_bytes=1, output_bytes=1, activation_bytes=1) for x in ms]
    return FrozenPart(name="text", layers=tuple(layers), targets=(0,))


def test_times_of_encoders_are_those_of_the_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan is found by its costs: with times of its own no run would find that of another."""
    layers = [nn.Embedding(9, 4), nn.Linear(4, 4)]
    graph = Graph(layers=tuple(describe(i, layer) for i, layer in enumerate(layers)))

    def content_of(width: int = 4, rows: int = 2, dtype: torch.dtype | None = None) -> Any:
        found, entries = [layers[0], nn.Linear(4, width)], {"ids": torch.zeros(rows, dtype=torch.long)}
        return frozen_content({"text": (graph, found)}, {"text": ("ids", dtype)}, entries, CPU)

    folder = str(tmp_path)
    first, later = encoder(1.0, 2.0), encoder(1.5, 2.5)
    assert with_kept_times(folder, content_of(), [first]) == (first,)
    assert with_kept_times(folder, content_of(), [later]) == (first,)
    assert with_kept_times(folder, content_of(width=8), [later]) == (later,), "other layers"
    assert with_kept_times(folder, content_of(dtype=torch.bfloat16), [later]) == (later,), "in another dtype"
    assert with_kept_times(folder, content_of(rows=4), [later]) == (later,), "other batches"
    assert capsys.readouterr().out == ""
    for damage in ("{", "[]", '{"text": [1.0]}', '{"text": [1.0, null]}'):
        for path in tmp_path.glob("frozen-*.json"):
            path.write_text(damage)
        assert with_kept_times(folder, content_of(), [later]) == (later,)
        assert "are not this job's and are measured anew" in capsys.readouterr().out
        assert with_kept_times(folder, content_of(), [first]) == (later,)


@dataclass
class Settings:
    repeats: int


def with_settings(module: nn.Module, *, repeats: int) -> nn.Module:
    module.settings = Settings(repeats)
    return module


def test_a_base_class_whose_text_has_changed_is_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Derived(Naps):
        pass

    asked = request(first=spec(Derived(), stash="skip"))
    expected = name_of(asked)
    found = content._source
    monkeypatch.setattr(content, "_source", lambda kind: "edited" if kind is Naps else found(kind))
    assert name_of(asked) != expected


def name_of(asked: PlanRequest, size: int = 2) -> str:
    return kept.named_by([job_content(asked), size])


def test_a_name_says_all_that_costs_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = name_of(request())
    assert name_of(request()) == name_of(request(plan_cache="elsewhere")) == expected
    frozen = nn.Linear(4, 4).requires_grad_(False)
    others = {
        "an argument of a layer": request(first=LayerSpec(Naps, 2.0, stash="skip")),
        "a setting that no parameter shows": request(first=LayerSpec(Naps, groups=4, stash="skip")),
        "a wider layer": request(first=LayerSpec(Naps, width=8, stash="skip")),
        "a module of the same parameters": request(first=spec(Naps(3.0), stash="skip")),
        "a constant of a function": request(factor=3.0),
        "another batch": request(rows=3),
        "another dtype": request(dtype=torch.float64),
        "another example size": replace(request(), microbatch_size=4),
        "a settings object": request(first=spec(with_settings(Naps(), repeats=2), stash="skip")),
        "other settings": request(first=spec(with_settings(Naps(), repeats=3), stash="skip")),
        "a frozen layer": replace(request(), layers=[request().layers[0], frozen, request().layers[2]]),
    }
    names = {what: name_of(asked) for what, asked in others.items()}
    names["another size"] = name_of(request(), 4)
    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_pulse.engine.plans.content.device_name", lambda device: "another device")
        names["another device"] = name_of(request())
    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_pulse.engine.plans.content.library_versions", lambda: ["torch 9"])
        names["another library"] = name_of(request())
    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_pulse.engine.plans.content._world_size", lambda: 2)
        names["more ranks on the cores"] = name_of(request())
    with monkeypatch.context() as patch:
        patch.setattr("torch.get_num_threads", lambda: 77)
        names["more threads"] = name_of(request())
    with monkeypatch.context() as patch:
        patch.setattr("deepspeed_pulse.engine.plans.content._source", lambda kind: "another text")
        names["another source"] = name_of(request())
    torch.backends.cudnn.benchmark, before = True, torch.backends.cudnn.benchmark
    names["kernels that are looked for"] = name_of(request())
    torch.backends.cudnn.benchmark = before
    with torch.autocast("cpu", torch.bfloat16):
        names["autocast"] = name_of(request())
    names["the same"] = expected
    assert len(set(names.values())) == len(names), names


def test_what_is_kept_is_compared_with_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = request(plan_cache=str(tmp_path))
    profile = profile_of(here)
    assert kept.profiles(here, [2]) == {}
    kept.keep_profiles(here, [profile])
    (file,) = tmp_path.iterdir()
    assert kept.profiles(here, [2, 4]) == {2: profile}
    assert capsys.readouterr().out == ""
    names = [replace(profile.layers[0], name="another"), *profile.layers[1:]]
    sizes = [replace(profile.layers[0], param_bytes=3), *profile.layers[1:]]
    for stale, reason in (
        (profile.to_json()[:200], "not a JSON file"),
        (replace(profile, layers=tuple(names)).to_json(), "expected costs of layer 0 '0.Naps' as the model has"),
        (replace(profile, layers=tuple(sizes)).to_json(), "layer 0.Naps: expected 112 bytes of parameters"),
        (replace(profile, skips=()).to_json(), "only the model has 'skip' from layer 0 to layer 2"),
        (replace(profile, microbatch_size=4).to_json(), "expected microbatches of 2, found 4"),
    ):
        file.write_text(stale)
        assert kept.profiles(here, [2]) == {}
        said = capsys.readouterr().out
        assert said.count("\n") == 1 and f"the kept profile {file} is not this job's and is measured anew" in said
        assert reason in said
    shutil.rmtree(tmp_path)
    tmp_path.write_text("a file where the folder should be")
    with pytest.raises(FileError, match="plan_cache: cannot keep profile-"):
        kept.keep_profiles(here, [profile])


def test_a_profile_file_must_be_the_models(tmp_path: Path) -> None:
    asked = request(profile=str(tmp_path / "profile.json"))
    profile = profile_of(asked)
    half = [replace(layer, param_bytes=layer.param_bytes // 2) for layer in profile.layers]
    for fits in (profile, replace(profile, dtype="bfloat16", layers=tuple(half))):
        (tmp_path / "profile.json").write_text(fits.to_json())
        assert known_profile(asked)[0] == fits
    for layers, text in (
        (
            [replace(profile.layers[0], name="stem"), *profile.layers[1:]],
            "layer 0 '0.Naps' as the model has, found 'stem'",
        ),
        ([*profile.layers[:1], *half[1:]], "layer 1.Linear: expected 80 bytes of parameters .* found 40"),
    ):
        (tmp_path / "profile.json").write_text(replace(profile, layers=tuple(layers)).to_json())
        with pytest.raises(ConfigError, match=f"profile.json: .*{text}.*; profile this model, or set"):
            known_profile(asked)


def test_links_of_another_network_or_other_threads_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = machines._settings(CPU)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert machines._settings(CPU) == expected
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert machines._settings(CPU) != expected and "GLOO_SOCKET_IFNAME=eth7" in machines._settings(torch.device("meta"))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    assert machines._settings(CPU) != expected
