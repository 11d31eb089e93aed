"""Moving averages of the weights, each rank those of its own layers.

    ema = EMA(engine, decay=0.9999)
    for _ in range(num_steps):
        engine.train_batch(data)
        ema.step()
    engine.save_checkpoint("out", ema=ema)  # and load_checkpoint("out", ema=ema)
    save_pretrained(engine, "out/unet", ema=ema)  # out/unet and out/unet_ema

Of several backbones each has its own, ``EMA(engine, backbone="base")``; a checkpoint takes a list of them.

The averaging is diffusers' ``EMAModel`` with its options and its schedule, so every rank does what one
process would do to the whole model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.training_utils import EMAModel
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from deepspeed_pulse.engine.specs import TiedCall
from deepspeed_pulse.errors import ConfigError, FileError
from deepspeed_pulse.models.weights.shards import apart

FORMAT = "pulse-ema/1"
SCHEDULE = "ema.json"
SHADOW = "shadow_params"
DIGESTS = "sha256"
"""Key of the digests of the layers' files, by name."""


class EMA:
    """Exponential moving average of an engine's trainable weights; frozen ones are their own average.

    One that trains later is averaged from the first :meth:`step` on that finds it so.

    Averages are kept in float32 for weights of 2 bytes and then follow the optimizer's fp32 master
    weights, else in the weights' dtype; on the weights' device, 4 bytes a trained parameter of the rank there. A step
    needs one weight more in full precision at a time; with ``foreach`` all of them.

    Args:
        engine: an engine of this package.
        decay, min_decay, update_after_step, use_ema_warmup, inv_gamma, power, foreach: as in
            ``diffusers.training_utils.EMAModel``.
        backbone: whose weights, where the engine trains several backbones.

    Raises:
        ConfigError: there are several backbones and none is named, or there is none of that name.
    """

    def __init__(
        self,
        engine: Any,
        *,
        decay: float = 0.9999,
        min_decay: float = 0.0,
        update_after_step: int = 0,
        use_ema_warmup: bool = False,
        inv_gamma: float = 1.0,
        power: float = 2 / 3,
        foreach: bool = False,
        backbone: str | None = None,
    ) -> None:
        self._engine, self.backbone = engine, backbone
        self._layers = engine.module.backbone_layers(backbone, "EMA()")
        self._names = _trainable(engine.module, self._layers)
        self._parameters = list(dict.fromkeys(self._names.values()))
        # torch's foreach functions take no empty lists.
        self._average = EMAModel([], foreach=foreach and bool(self._parameters))
        self._average.shadow_params = [self._weight(parameter).detach().clone() for parameter in self._parameters]
        options = {"decay": decay, "min_decay": float(min_decay), "update_after_step": update_after_step}
        self._set({**options, "use_ema_warmup": use_ema_warmup, "inv_gamma": inv_gamma, "power": power})

    def step(self) -> None:
        """Take the weights of now into the averages: on every rank, after each ``train_batch``."""
        if self._average.temp_stored_params is not None:
            raise ConfigError("EMA.step(): averages may be in the engine's weights; call restore() before training")
        self._engine.finish_backbones()
        self._begin_averages()
        averages, steps = self._average.shadow_params, self._average.optimization_step
        one_by_one = [slice(place, place + 1) for place in range(len(averages))] or [slice(0)]
        try:
            for part in [slice(None)] if self._average.foreach else one_by_one:
                self._average.shadow_params, self._average.optimization_step = averages[part], steps
                self._average.step([self._weight(parameter) for parameter in self._parameters[part]])
        finally:
            self._average.shadow_params = averages

    def _begin_averages(self) -> None:
        """Of weights that were frozen when the others' averages began."""
        trained = _trainable(self._engine.module, self._layers)
        if trained.keys() <= self._names.keys():
            return
        known = set(self._parameters)
        added = [parameter for parameter in dict.fromkeys(trained.values()) if parameter not in known]
        self._names |= trained
        self._parameters += added
        self._average.shadow_params += [self._weight(parameter).detach().clone() for parameter in added]

    def store(self) -> None:
        """Keep the weights of now on the host, for :meth:`restore`."""
        self._engine.finish_backbones()
        self._average.store(self._parameters)

    def copy_to(self) -> None:
        """Put the averages into the engine's weights, for validation; :meth:`store` before."""
        self._average.copy_to(self._parameters)

    def restore(self) -> None:
        """Put back what :meth:`store` kept."""
        if self._average.temp_stored_params is None:
            raise ConfigError("EMA.restore(): nothing is stored; call store() before copy_to()")
        self._average.restore(self._parameters)

    @property
    def cur_decay_value(self) -> float | None:
        """The decay of the last :meth:`step`, as ``EMAModel`` calls it; None before the first."""
        return self._average.cur_decay_value  # type: ignore[no-any-return]

    def schedule(self) -> dict[str, Any]:
        """The options and the number of steps taken, which diffusers adds to the config of averaged weights."""
        return {key: value for key, value in self._average.state_dict().items() if key != SHADOW}

    def averages(self) -> dict[str, Tensor]:
        """This rank's averages by layer index and name of the weight in its layer (``"3.conv1.weight"``); no copies.

        Of several backbones, layers are counted from the first of its own.
        """
        places = {parameter: place for place, parameter in enumerate(self._parameters)}
        return {name: self._average.shadow_params[places[parameter]] for name, parameter in self._names.items()}

    def averages_of(self, backbone: str | None) -> dict[str, Tensor]:
        """:meth:`averages`; a :class:`ConfigError` where they are those of another backbone."""
        if backbone != self.backbone:
            raise ConfigError(f"ema: expected averages of backbone {backbone}, found those of {self.backbone}")
        return self.averages()

    def state_dict(self) -> dict[str, Any]:
        """:meth:`schedule`, and :meth:`averages` under ``"shadow_params"``."""
        return {**self.schedule(), SHADOW: self.averages()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state. It may hold other layers too: the joined states of all ranks fit any plan.

        Raises :class:`ConfigError` when averages of this rank's layers lack or have another shape; nothing was changed.
        """
        self._check(state)
        found, mine = state[SHADOW], self.averages()
        first = {parameter: name for name, parameter in reversed(self._names.items())}
        self._set({**state, SHADOW: [found[first[p]].to(mine[first[p]]) for p in self._parameters]})

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write the state, one file a layer, for example into a checkpoint's folder; collective, every rank calls it.

        The schedule is written last and removed first, so a folder that loads is whole.
        Raises :class:`FileError` on every rank when some rank cannot write.
        """
        ranks, schedule, first = self._engine.module.ranks, Path(folder) / SCHEDULE, self._engine.global_rank == 0
        what = f"saving averages in {folder}"
        ranks.together(lambda: _put(schedule, None) if first else None, what)
        mine = ranks.together(lambda: self._write_layers(Path(folder)), what)
        digests = {name: digest for row in ranks.gather_to_first(mine) or () for name, digest in row.items()}
        state = {**self.schedule(), DIGESTS: {SCHEDULE: _digest(self.schedule()), **digests}}
        text = json.dumps({"format": FORMAT, **state}, indent=2) + "\n"
        ranks.together(lambda: _put(schedule, text.encode()) if first else None, what)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Go on from what :meth:`save` wrote, under this plan or another; collective, every rank calls it.

        Raises what :meth:`read` does, on every rank.
        """
        ranks = self._engine.module.ranks
        self.load_state_dict(ranks.together(lambda: self.read(folder), f"loading averages from {folder}"))

    def read(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """A state that :meth:`load_state_dict` takes, of what :meth:`save` wrote and this rank needs; local.

        Raises :class:`FileError` for a missing or damaged file, :class:`ConfigError` for files of another model.
        """
        folder = Path(folder)
        state, averages = _schedule_in(folder / SCHEDULE), dict[str, Tensor]()
        digests = state.pop(DIGESTS, None)
        for index in self._by_layer():
            path = folder / _file_of(index)
            try:
                content = path.read_bytes()
                if digests is not None and hashlib.sha256(content).hexdigest() != digests.get(path.name):
                    raise FileError(f"{path}: is damaged: not the averages of layer {index} that EMA.save() wrote")
                averages |= load(content)
            except (OSError, SafetensorError) as problem:
                reason = getattr(problem, "strerror", None) or problem
                raise FileError(f"{path}: expected the averages of layer {index}, found: {reason}") from None
            self._engine.module.ranks.got_on()
        state[SHADOW] = averages
        self._check(state)
        return state

    def _weight(self, parameter: nn.Parameter) -> Tensor:
        """What is averaged: the weight, or the fp32 master copy of a 2-byte one."""
        if parameter.element_size() > 2:
            return parameter
        full: Tensor = self._engine.module.full_precision(parameter)
        return full.requires_grad_(parameter.requires_grad)

    def _set(self, state: dict[str, Any], average: EMAModel | None = None) -> None:
        """diffusers' own loading takes fields one by one until one is wrong: tried on another ``average`` first."""
        try:
            (average or self._average).load_state_dict(state)
        except (TypeError, ValueError) as problem:
            raise ConfigError(f"EMA: {problem}") from None

    def _check(self, state: Mapping[str, Any]) -> None:
        found, mine = state.get(SHADOW, {}), self.averages()
        if missing := [name for name in mine if name not in found]:
            raise ConfigError(
                f"EMA: the state has no average of {len(missing)} of this rank's {len(mine)} trainable weights, the "
                f"first is {missing[0]}; join the states of all ranks, and train the same weights as before"
            )
        for name, average in mine.items():
            if found[name].shape != average.shape:
                raise ConfigError(
                    f"EMA: {name}: expected shape {list(average.shape)}, found {list(found[name].shape)}; the state "
                    "belongs to another model"
                )
        self._set({**state, SHADOW: []}, EMAModel([]))

    def _by_layer(self) -> dict[int, dict[str, Tensor]]:
        layers: dict[int, dict[str, Tensor]] = {}
        for name, average in self.averages().items():
            layers.setdefault(int(name.partition(".")[0]), {})[name] = average
        return layers

    def _write_layers(self, folder: Path) -> dict[str, str]:
        """Digests of the files by name."""
        digests: dict[str, str] = {}
        for index, averages in self._by_layer().items() if self._engine.grid.data_parallel_id == 0 else ():
            content = save(apart({name: average.cpu().contiguous() for name, average in averages.items()}))
            digests[_file_of(index)] = hashlib.sha256(content).hexdigest()
            _put(folder / _file_of(index), content)
            self._engine.module.ranks.got_on()
        return digests


def _trainable(module: Any, layers: range) -> dict[str, nn.Parameter]:
    """Trainable weights of these layers on this rank by index among them and name; a shared one has all its names."""
    mine = [(index - layers.start, layer) for index, layer in module.local_layers() if index in layers]
    # by class: a module of the user's may have a child called "module"
    owners = {index: layer.module if isinstance(layer, TiedCall) else layer for index, layer in mine}
    return {
        f"{index}.{name}": parameter
        for index, owner in owners.items()
        if isinstance(owner, nn.Module)
        for name, parameter in owner.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }


def _file_of(layer: int) -> str:
    return f"layer_{layer:02d}.safetensors"


def _schedule_in(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise FileError(f"{path}: expected what EMA.save() wrote, found: {problem}") from None
    if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
        raise FileError(f"{path}: expected the format {FORMAT}; it was not written by EMA.save()")
    digests = state.get(DIGESTS, {})
    plain = {key: value for key, value in state.items() if key != DIGESTS}
    if not isinstance(digests, dict) or digests.get(SCHEDULE, _digest(plain)) != _digest(plain):
        raise FileError(f"{path}: is damaged: not the schedule that EMA.save() wrote")
    return state


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _put(path: Path, content: bytes | None) -> None:
    """Write beside the final name, wait until it is on disk, then rename; without content remove the file."""
    beside = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink(missing_ok=True)
            return
        try:
            beside.write_bytes(content)
            with beside.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as problem:
        raise FileError(f"{path}: averages cannot be written: {problem}") from None
