"""Training steps of a model: its loss over all processes, its gradients and its optimizer.

Nothing here waits for the GPU: the metrics of a step stay on the device, as a row of numbers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from jumok.attention.gpu_support import supports_compile
from jumok.training import cuda_graphs, weights
from jumok.training.config import TrainConfig
from jumok.training.distributed import DistributedRanks, gather_to_main, parallelize, set_gradient_sync
from jumok.training.optimizer import (
    build_optimizer,
    clip_gradients,
    get_optimizer_state,
    load_optimizer_state,
    set_learning_rate,
)
from jumok.training.precision import LossScaler, select_autocast_dtype
from jumok.training.prefetch import StepBatches, TrainingBatch
from jumok.training.schedule import compute_lr_factor

ROW_COLUMNS = ("total", "count", "norm")  # columns of a row; the components of the loss follow


def reseed(device: torch.device, seed: int, step: int, rank: int) -> None:
    """Seed the random numbers (dropout) of one step in one process, as a function of these numbers only.

    So a step does not depend on what was drawn before it, for example by a validation. It is reproducible
    without saving the state of a generator.
    """
    step_seed = int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
    # Not torch.manual_seed: without a GPU it stores a traceback at each call, and never frees them.
    torch.default_generator.manual_seed(step_seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(step_seed)


def should_compile(config: TrainConfig, model: nn.Module, device: torch.device, *, use_graphs: bool) -> bool:
    """Whether ``torch.compile`` is applied to the model.

    By default only if its steps are CUDA graphs: launching the blocks of a model from Python takes longer if
    they are compiled, because of the guards of each (bench/training.py).
    """
    if config.compile == "auto":
        return use_graphs and supports_compile(device) and getattr(model, "supports_compile", True)
    return config.compile


class Learner:
    """A model with its optimizer.

    ``last_step`` is the number of the last step, for the schedules that end there.
    """

    def __init__(self, model: nn.Module, config: TrainConfig, ranks: DistributedRanks, last_step: int | None) -> None:
        self.config, self.ranks, self.last_step = config, ranks, last_step
        self.model = model.to(ranks.device).train()
        # One process cannot validate a sharded model, so the first one keeps a complete copy.
        is_sharded = config.parallel == "fsdp" and ranks.world_size > 1
        self._eval_copy = copy.deepcopy(model).cpu() if is_sharded and ranks.is_main else None
        self.loss_module = parallelize(model, ranks, config.parallel)
        use_graphs = cuda_graphs.should_use_cuda_graphs(config, ranks.device, ranks.world_size)
        self.optimizer = build_optimizer(model, config, ranks.device if use_graphs else None)
        self._gradients = (
            cuda_graphs.CudaGraphGradients(self._forward_backward, model.parameters(), ranks.device)
            if use_graphs
            else None
        )
        self._graphed_update = cuda_graphs.CudaGraphCallable(self._update_weights, ranks.device) if use_graphs else None
        self.loss_part_names: list[str] = []  # components of the loss, known after the first step
        self.is_compiled = should_compile(config, model, ranks.device, use_graphs=use_graphs)
        if self.is_compiled:  # a model may override ``compile``
            (self.loss_module if type(model).compile is nn.Module.compile else model).compile()
        dtype = select_autocast_dtype(config, ranks.device)
        self._autocast = torch.autocast(ranks.device.type, dtype, enabled=dtype is not None)
        self._loss_scaler = LossScaler(ranks.device) if dtype == torch.float16 else None
        # 1 from the first step that is not finite; then the optimizer changes nothing any more.
        self._has_diverged = torch.zeros((), device=ranks.device)
        self._skip_update = torch.zeros((), device=ranks.device)  # 1: the optimizer skips this step
        self._loss = torch.zeros((), dtype=torch.float64, device=ranks.device)  # loss of the current batch
        self.optimizer.found_inf = self._skip_update  # type: ignore[attr-defined]

    def compute_learning_rate(self, step: int, time_fraction: float = 0.0) -> float:
        """Return the learning rate of a step (counted from 1). See :func:`.schedule.compute_lr_factor`."""
        return self.config.learning_rate * compute_lr_factor(self.config, step, self.last_step, time_fraction)

    def step(self, step_batches: StepBatches, step: int, time_fraction: float = 0.0) -> Tensor:
        """Train on one batch.

        Returns a row of sums over all processes, with the columns ``ROW_COLUMNS`` and ``loss_part_names``.
        """
        ranks = self.ranks
        reseed(ranks.device, self.config.seed, step, ranks.rank)
        local_labels = sum(batch.count * weight for batch, weight in step_batches.micro_batches)
        num_labels = torch.full((), local_labels, dtype=torch.float64, device=ranks.device)
        num_labels = ranks.all_reduce_sum(num_labels).clamp(min=1)
        set_learning_rate(self.optimizer, self.compute_learning_rate(step, time_fraction))
        if self._gradients is not None and self._graphed_update is not None:
            ((batch, weight),) = step_batches.micro_batches
            losses = self._gradients(batch, weight / max(1, local_labels))
            self._loss.copy_(losses[0])
            norm = self._graphed_update()
        else:
            losses = self._accumulate_gradients(step_batches, num_labels)
            self._loss.copy_(losses[0])
            norm = self._update_weights()
            self.optimizer.zero_grad()
        return torch.cat([losses[:1], num_labels[None], norm[None], losses[1:]])

    def _update_weights(self) -> Tensor:
        """Update the weights if the gradient is finite. Returns the norm of the gradient.

        With loss scaling, a gradient that is not finite is an overflow: the step is skipped, and the norm is
        0. If even an unscaled gradient is not finite, training has diverged.
        """
        scaler = self._loss_scaler
        scale = None if scaler is None else scaler.scale
        norm = clip_gradients(self.model.parameters(), self.config.max_grad_norm, scale).double()
        is_finite = torch.isfinite(norm)
        diverges = ~is_finite if scale is None else ~is_finite & (scale <= 1)
        self._has_diverged += (~torch.isfinite(self._loss) | diverges) & (self._has_diverged == 0)
        self._skip_update.copy_((self._has_diverged > 0) | ~is_finite)
        self.optimizer.step()
        if scaler is None:
            return norm
        scaler.update(overflow=~is_finite)
        return norm.masked_fill(~(is_finite | diverges), 0.0)

    def _accumulate_gradients(self, step_batches: StepBatches, num_labels: Tensor) -> Tensor:
        """Accumulate the gradients of all micro-batches and processes. Returns the sums of the losses."""
        ranks, num_micro_batches = self.ranks, len(step_batches.micro_batches)
        losses = []
        for number, (batch, weight) in enumerate(step_batches.micro_batches, 1):
            with set_gradient_sync(self.loss_module, enabled=number == num_micro_batches):
                # DDP and FSDP average over the processes; here the sum is needed.
                scale = weight * ranks.world_size / num_labels
                losses.append(self._forward_backward(batch.to(ranks.device), scale) * weight)
        return ranks.all_reduce_sum(torch.stack(losses).sum(0))

    def _forward_backward(self, batch: TrainingBatch, scale: Tensor) -> Tensor:
        """Compute the gradients of ``scale * loss``. Returns the loss and its components, unscaled."""
        with self._autocast:
            total, parts = self.loss_module(batch)
        if self._loss_scaler is not None:
            scale = scale * self._loss_scaler.scale
        # In this thread: waking autograd's own thread for a GPU, and waiting for it, takes longer than many kernels.
        with torch.autograd.set_multithreading_enabled(False):
            (total * scale.to(total.dtype)).backward()
        self.loss_part_names = self.loss_part_names or sorted(parts)
        return torch.stack([x.double() for x in (total.detach(), *(parts[name] for name in self.loss_part_names))])

    @property
    def capture_error(self) -> str | None:
        """Why CUDA graphs are not used, although they were requested."""
        if self._gradients is None or self._graphed_update is None:
            return None
        return self._gradients.capture_error or self._graphed_update.capture_error

    def gather_weights(self) -> dict[str, Tensor]:
        """Return all weights in the first process, and nothing in the others, which must call this too."""
        return gather_to_main(weights.get_weights(self.model), self.ranks)

    def gather_optimizer_state(self) -> dict[str, Tensor]:
        """Return the state of the optimizer, as :meth:`gather_weights` does."""
        scaler_state = {} if self._loss_scaler is None else self._loss_scaler.state_dict()
        return gather_to_main(get_optimizer_state(self.optimizer, self.model) | scaler_state, self.ranks)

    def restore(self, model_weights: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor], source: str) -> None:
        """Restore the results of :meth:`gather_weights` and :meth:`gather_optimizer_state`."""
        weights.set_weights(self.model, model_weights, source)
        parameter_state = {name: tensor for name, tensor in optimizer_state.items() if "/" in name}
        load_optimizer_state(self.optimizer, self.model, parameter_state)
        if self._loss_scaler is not None:
            self._loss_scaler.load_state_dict(optimizer_state)

    @contextlib.contextmanager
    def use_eval_model(self, model_weights: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """Yield a complete model with these weights in eval mode. Use it in the first process only."""
        model = self.model if self._eval_copy is None else self._eval_copy.to(self.ranks.device)
        weights.set_weights(model, model_weights)
        model.eval()
        try:
            with torch.no_grad():
                yield model
        finally:
            model.train()
            if self._eval_copy is not None:
                self._eval_copy.cpu()
