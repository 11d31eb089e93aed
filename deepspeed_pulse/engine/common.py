"""What both engines, with a plan and without one, do otherwise than upstream's."""

from __future__ import annotations

import glob
import os
from typing import Any, NoReturn

import torch
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_pulse.engine.checkpoints.files import SafeCheckpointEngine
from deepspeed_pulse.engine.checkpoints.loading import Loading, Wanted
from deepspeed_pulse.engine.checkpoints.optimizer_state import address_in_turn, full_precision_copies
from deepspeed_pulse.engine.checkpoints.saving import Saving
from deepspeed_pulse.engine.checkpoints.universal import name_once
from deepspeed_pulse.engine.data.evaluation import Evaluation
from deepspeed_pulse.engine.gradients.completion import clip_over_pipeline
from deepspeed_pulse.engine.gradients.placeholders import is_placeholder
from deepspeed_pulse.engine.memory_order import flattened, lay_in_rows
from deepspeed_pulse.engine.replaced import clipping_is_replaced
from deepspeed_pulse.engine.starting.kernels import TORCH_ADAM
from deepspeed_pulse.engine.starting.supported import check_kept
from deepspeed_pulse.errors import ConfigError


class CommonEngine(PipelineEngine):
    """``PipelineEngine`` with checkpoints that are whole or absent, and that resume under another plan.

    Layer files and optimizer files are upstream's. Beside them lies ``pulse_checkpoint.json``, which
    says what each rank held; when another layout resumes, optimizer state is found by parameter name.
    ``SHA256SUMS`` holds the digest of every file. Evaluation refuses options that would hang, and with a ``"pulse"``
    block gradients are clipped by the norm over all ranks.
    """

    _destroyed = False
    _global_grad_norm: torch.Tensor | None

    def destroy(self) -> None:
        """As upstream, once.

        Upstream's ``__del__`` does it again, and ZeRO's optimizer then waits for the whole device. The garbage
        collector comes in the midst of another engine's step, when the device has receives before it for which other
        ranks need what this one has not begun.
        """
        if not self._destroyed:
            self._destroyed = True
            super().destroy()

    def _broadcast_model(self) -> None:
        """As upstream, which views weights as bytes: rows only can be viewed so."""
        with flattened(self.module.parameters()):
            super()._broadcast_model()

    def _check_for_duplicates(self, optimizer: Any) -> None:
        """As upstream, whose last look it is at an optimizer before that gets state."""
        super()._check_for_duplicates(optimizer)
        count = lay_in_rows(optimizer)
        if count and self.global_rank == 0:
            print(
                f"pulse: DeepSpeed's {type(optimizer).__name__} steps weights row by row only: {count} weights of rank "
                "0 that lay otherwise (channels_last, transposed) lie so now; to keep their order take an optimizer "
                f'of torch, "{TORCH_ADAM}": true for example, without ZeRO, bf16 and fp16',
                flush=True,
            )

    def _configure_lr_scheduler(self, *args: Any) -> None:
        super()._configure_lr_scheduler(*args)
        if isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "lr_scheduler: expected one that steps without a loss, found "
                f"{type(self.lr_scheduler).__name__}: DeepSpeed's pipelines step it with the batch size in place of a "
                "loss, so the learning rate would fall for ever; leave it out, and call its step(loss) after each "
                "train_batch, on every rank"
            )

    def _configure_checkpointing(self) -> None:
        super()._configure_checkpointing()
        check_kept(self)
        if type(self.checkpoint_engine) is not TorchCheckpointEngine:
            raise ConfigError(
                f"checkpoint: expected upstream's default writer, found {type(self.checkpoint_engine).__name__}: other "
                "writers finish after save_checkpoint() returns, so a save could not be complete or absent; remove "
                '"checkpoint.writer" (and "nebula"/"datastates") from the config'
            )
        address_in_turn(self.optimizer)
        name_once(self.optimizer, self.param_names)
        self.checkpoint_engine: Any = SafeCheckpointEngine(self._config, self.module.ranks.got_on)
        self.module.full_precision_copies = full_precision_copies(self.optimizer)
        self._saving = Saving(self, super().save_checkpoint)
        self._loading = Loading(self, super().load_checkpoint)
        self._evaluation = Evaluation(self)

    def module_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As upstream, inside ``save_checkpoint`` only."""
        if getattr(self, "_curr_ckpt_path", None) is None:
            raise _of_a_part("module_state_dict")
        return super().module_state_dict(*args, **kwargs)

    def save_16bit_model(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: upstream's writes a file without weights, and over those of the checkpoint that was loaded."""
        raise _of_a_part("save_16bit_model")

    def finish_backbones(self) -> None:
        """End the steps that backbones are in the midst of: none, unless they make their own."""

    def train_batch(self, data_iter: Any = None) -> Any:
        """As upstream: one step over the global batch; returns the mean loss."""
        self.module.check_usable("train_batch")
        return super().train_batch(data_iter)

    def eval_batch(
        self,
        data_iter: Any,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """As upstream, forward only.

        Args:
            data_iter: batches ``(inputs, labels)``; training goes on with its own afterwards.
            return_logits: also return the last layer's output of the last microbatch, on the last stage's rank.
            compute_loss: False returns outputs instead of losses, and reads no labels.
            reduce_output: ``"avg"`` over microbatches and replicas, or None: the last stage's rank gets the list of
                all microbatches, the others None.
            bcast_loss: every rank gets the loss.
            num_micro_batches: any number; as in training when left out.

        Raises:
            ConfigError: an option is unknown, or what would be broadcast is no scalar.
        """
        self.module.check_usable("eval_batch")
        with self._evaluation.under_way(compute_loss, reduce_output, bcast_loss, num_micro_batches, return_logits):
            return super().eval_batch(
                data_iter, return_logits, compute_loss, reduce_output, bcast_loss, num_micro_batches
            )

    def _reduce_outputs(self, outputs: Any, reduce: str | None = "avg", **options: Any) -> Any:
        """As upstream, on the last stage's rank; several losses are averaged each."""
        mean = super()._reduce_outputs
        return self._evaluation.reduced(outputs, reduce, lambda found: mean(found, reduce, **options))

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm over all pipeline ranks, tied weights once; a program's own clipping goes first."""
        if self.module.pulse is None or clipping_is_replaced():
            super().clip_fp32_gradients()
            return
        self._global_grad_norm = clip_over_pipeline(
            self.module.parameters(), self.gradient_clipping(), self.grid.get_pipe_parallel_group()
        )

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        ema: Any = None,
        checkpoints_total_limit: int | None = None,
    ) -> bool:
        """As upstream; the checkpoint appears under its name when all of it is on disk.

        Data-parallel replicas share the writing of layers. When any rank fails, all raise, and the folder
        is as it was.

        Args:
            ema: a ``deepspeed_pulse.models.EMA``, saved in the checkpoint: both are there, or neither is. With several
                backbones a list, one of each; more of one are saved beside it, with ``EMA.save(folder)``.
            checkpoints_total_limit: when this checkpoint is there, so many of its series stay, the last written:
                those whose tags differ from this one in the number at their end. Never removed: this one, the one
                that ``latest`` names, and tags of another kind. Files are deleted while training goes on.

        Raises:
            ConfigError: the tag is no name, ranks gave different ones, or client state could not be loaded again.
            FileError: a rank cannot write, or another job saves into the folder.
        """
        self._saving.save(
            save_dir, tag, client_state, save_latest, exclude_frozen_parameters, ema, checkpoints_total_limit
        )
        return True

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        write = super()._save_checkpoint
        self._saving.keep_problem(lambda: write(*args, **kwargs))

    def _save_zero_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        write = super()._save_zero_checkpoint
        self._saving.keep_problem(lambda: write(*args, **kwargs))

    def _copy_recovery_script(self, save_path: str) -> None:
        """Later: nothing but the checkpoint's own folder is touched before that is whole."""

    def write_recovery_script(self, save_dir: str | os.PathLike[str]) -> None:
        """Upstream's ``zero_to_fp32.py``, beside a checkpoint that is whole."""
        try:
            super()._copy_recovery_script(os.fspath(save_dir))
        except OSError as problem:
            print(f"pulse: warning: {save_dir}: zero_to_fp32.py is not written: {problem}", flush=True)

    def load_universal_checkpoint(self) -> bool:
        """False for upstream, which would unpickle: such a checkpoint is read here, when the config asks for it."""
        return False

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        *,
        ema: Any = None,
        backbone: str | None = None,
    ) -> tuple[Any, Any]:
        """As upstream, from a checkpoint of any plan, number of ranks or placement; of stock 1F1B the weights.

        Every rank reads and verifies its files before any of them changes a weight. The client state is
        what was given to :meth:`save_checkpoint`.

        Args:
            ema: goes on from the averages that were saved with the checkpoint; of several backbones a list.
            backbone: load the weights and the optimizer state of one backbone only, into a run that trains it alone
                or beside others, from a checkpoint of either kind; a checkpoint of one backbone needs no name for it.
                Everything else (other backbones, steps counted, learning rate schedule) stays as it is.

        Raises:
            PlanError: optimizer state cannot be carried over; says why and the way round.
            FileError: a file is missing, damaged, or holds objects that are not read.
            ConfigError: the tag is no name, or ranks gave different ones.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint: custom_load_fn: expected None: a pipeline's layers load their own files"
            )
        wanted = Wanted(
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            backbone=backbone,
        )
        try:
            return self._loading.load(load_dir, tag, wanted, ema)
        finally:
            self._curr_ckpt_path = None  # upstream would write there next

    def load_module_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As upstream; ranks meet for tied weights after all of them have loaded their layers."""
        load = super().load_module_state_dict
        self._loading.load_layers(lambda: load(*args, **kwargs))

    def _get_zero_param_shapes(self) -> list[dict[str, Any]]:
        """As upstream; the converter to universal checkpoints looks for the state of each, so no placeholders."""
        groups = super()._get_zero_param_shapes()
        return [{name: shape for name, shape in group.items() if not is_placeholder(name)} for group in groups]

    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]:
        """As upstream, for folders with ``[``, ``*`` or ``?`` in their path too."""
        return list(super()._get_all_ckpt_names(glob.escape(checkpoints_path), glob.escape(tag)))


def _of_a_part(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: a rank of a pipeline holds some of the layers only; deepspeed_pulse.models.save_pretrained(engine, "
        "folder) writes the whole model, with dtype=torch.bfloat16 in 16 bit, and save_checkpoint what a run resumes "
        "from"
    )
