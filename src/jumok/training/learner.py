"""A model with all that makes it learn: its loss over all processes, its optimiser, one step at a time.

Nothing here waits for the GPU: what a step came to stays on the device, as a row of numbers.
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

__all__ = ["ROW_COLUMNS", "Learner", "reseed"]

ROW_COLUMNS = ("total", "count", "norm")  # of a row; the model's further sums follow


def reseed(device: torch.device, seed: int, step: int, rank: int) -> None:
    """Begin the random numbers (dropout) of one step in one process: a function of these numbers only.

    Seeded anew, a step does not depend on what was drawn before it, by a validation, say. It comes out the
    same again, and no state of a generator needs to be saved for that.
    """
    mixed = int(np.random.SeedSequence((seed, step, rank)).generate_state(1, np.uint64)[0])
    # Not torch.manual_seed: where there is no GPU, it puts down a traceback at each call, and keeps them all.
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(mixed)


class Learner:
    """``last_step`` is the number of the last step, for the schedules that end there."""

    def __init__(
        self, model: nn.Module, config: TrainConfig, ranks: DistributedRanks, last_step: int | None
    ) -> None:
        self.config, self.ranks, self.last_step = config, ranks, last_step
        self.model = model.to(ranks.device).train()
        # What is in shards cannot be validated by one process alone: the first keeps a whole model for it.
        sharded = config.parallel == "fsdp" and ranks.world_size > 1
        self._eval_copy = copy.deepcopy(model).cpu() if sharded and ranks.is_main else None
        self.loss_module = parallelize(model, ranks, config.parallel)
        recorded = cuda_graphs.should_use_cuda_graphs(config, ranks.device, ranks.world_size)
        self.optimizer = build_optimizer(model, config, ranks.device if recorded else None)
        self._gradients = (
            cuda_graphs.CudaGraphGradients(self._forward_backward, model.parameters(), ranks.device)
            if recorded
            else None
        )
        self._graphed_update = (
            cuda_graphs.CudaGraphCallable(self._update_weights, ranks.device) if recorded else None
        )
        self.loss_part_names: list[str] = []  # the names of the model's further sums, from the first step on
        self.is_compiled = config.compile is True or (
            config.compile == "auto" and supports_compile(ranks.device) and getattr(model, "compiles", True)
        )
        if self.is_compiled:  # a model with a way of its own to compile itself knows best
            (self.loss_module if type(model).compile is nn.Module.compile else model).compile()
        low = select_autocast_dtype(config, ranks.device)
        self._autocast = torch.autocast(ranks.device.type, low, enabled=low is not None)
        self._loss_scaler = LossScaler(ranks.device) if low == torch.float16 else None
        # From the first step on that is not finite this is 1, and the optimiser changes nothing any more.
        self._has_diverged = torch.zeros((), device=ranks.device)
        self._skip_update = torch.zeros((), device=ranks.device)  # 1: the optimiser skips this step
        self._loss = torch.zeros((), dtype=torch.float64, device=ranks.device)  # of the batch at hand
        self.optimizer.found_inf = self._skip_update  # type: ignore[attr-defined]

    def compute_learning_rate(self, step: int, time_fraction: float = 0.0) -> float:
        """The learning rate of step ``step``, the first of which is 1, with such a share of time spent."""
        return self.config.learning_rate * compute_lr_factor(self.config, step, self.last_step, time_fraction)

    def step(self, step_batches: StepBatches, step: int, time_fraction: float = 0.0) -> Tensor:
        """Learn from one batch. A row of the sums over all processes, as ``ROW_COLUMNS`` and ``loss_part_names`` say."""
        ranks = self.ranks
        reseed(ranks.device, self.config.seed, step, ranks.rank)
        own = sum(batch.count * weight for batch, weight in step_batches.micro_batches)
        count = torch.full((), own, dtype=torch.float64, device=ranks.device)
        count = ranks.all_reduce_sum(count).clamp(min=1)
        set_learning_rate(self.optimizer, self.compute_learning_rate(step, time_fraction))
        if self._gradients is not None and self._graphed_update is not None:
            ((batch, weight),) = step_batches.micro_batches
            whole = self._gradients(batch, weight / max(1, own))
            self._loss.copy_(whole[0])
            norm = self._graphed_update()
        else:
            whole = self._accumulate_gradients(step_batches, count)
            self._loss.copy_(whole[0])
            norm = self._update_weights()
            self.optimizer.zero_grad()
        return torch.cat([whole[:1], count[None], norm[None], whole[1:]])

    def _update_weights(self) -> Tensor:
        """Change the weights by their gradients, if those are finite; the length of the gradient.

        With loss scaling, a gradient that is not finite is an overflow, and has length 0: the step is
        skipped. But if even an unscaled gradient is not finite, training has diverged.
        """
        scale = self._loss_scaler
        factor = None if scale is None else scale.scale
        norm = clip_gradients(self.model.parameters(), self.config.max_grad_norm, factor).double()
        finite = torch.isfinite(norm)
        fault = ~finite if factor is None else ~finite & (factor <= 1)
        self._has_diverged += (~torch.isfinite(self._loss) | fault) & (self._has_diverged == 0)
        self._skip_update.copy_((self._has_diverged > 0) | ~finite)
        self.optimizer.step()
        if scale is None:
            return norm
        scale.update(overflow=~finite)
        return norm.masked_fill(~(finite | fault), 0.0)

    def _accumulate_gradients(self, step_batches: StepBatches, num_labels: Tensor) -> Tensor:
        """The gradients of one part after the other, over all processes; the sums of their losses."""
        ranks, turns = self.ranks, len(step_batches.micro_batches)
        sums = []
        for turn, (batch, weight) in enumerate(step_batches.micro_batches, 1):
            with set_gradient_sync(self.loss_module, enabled=turn == turns):
                # DDP and FSDP take the mean over the processes, where the sum is meant.
                row = self._forward_backward(batch.to(ranks.device), weight * ranks.world_size / num_labels)
            sums.append(row * weight)
        return ranks.all_reduce_sum(torch.stack(sums).sum(0))

    def _forward_backward(self, batch: TrainingBatch, scale: Tensor) -> Tensor:
        """The gradients of a batch's loss, times ``scale``; a row of the loss and its parts."""
        with self._autocast:
            total, parts = self.loss_module(batch)
        if self._loss_scaler is not None:
            scale = scale * self._loss_scaler.scale
        (total * scale.to(total.dtype)).backward()
        self.loss_part_names = self.loss_part_names or sorted(parts)
        return torch.stack(
            [x.double() for x in (total.detach(), *(parts[name] for name in self.loss_part_names))]
        )

    @property
    def capture_error(self) -> str | None:
        """Why steps are no longer recorded, though they were to be."""
        if self._gradients is None or self._graphed_update is None:
            return None
        return self._gradients.capture_error or self._graphed_update.capture_error

    def gather_weights(self) -> dict[str, Tensor]:
        """The weights, whole, in the first process; nothing in the others, which must call this too."""
        return gather_to_main(weights.get_weights(self.model), self.ranks)

    def gather_optimizer_state(self) -> dict[str, Tensor]:
        """What the optimiser remembers; as :meth:`gather_weights`."""
        scale = {} if self._loss_scaler is None else self._loss_scaler.state_dict()
        return gather_to_main(get_optimizer_state(self.optimizer, self.model) | scale, self.ranks)

    def restore(
        self, model_weights: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor], source: str
    ) -> None:
        """Go on from what :meth:`gather_weights` and :meth:`get_optimizer_state` gave, in every process."""
        weights.set_weights(self.model, model_weights, source)
        named = {name: tensor for name, tensor in optimizer_state.items() if "/" in name}
        load_optimizer_state(self.optimizer, self.model, named)
        if self._loss_scaler is not None:
            self._loss_scaler.load_state_dict(optimizer_state)

    @contextlib.contextmanager
    def use_eval_model(self, model_weights: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """A whole model with these weights, in eval mode; for the first process only."""
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
