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

from jumok.attention.capability import compiles
from jumok.training import graphs, weights
from jumok.training.distributed import Ranks, gathered, spread, syncing
from jumok.training.optimizer import clipped_norm, make_optimizer, moments, restore_moments, set_rate
from jumok.training.precision import LossScale, autocast_dtype
from jumok.training.prefetch import Batch, Work
from jumok.training.schedule import share
from jumok.training.settings import Settings

__all__ = ["COLUMNS", "Learner", "reseed"]

COLUMNS = ("total", "count", "norm")  # of a row; the model's further sums follow


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
    """``last`` is the number of the last step, for the schedules that end there."""

    def __init__(self, model: nn.Module, settings: Settings, ranks: Ranks, last: int | None) -> None:
        self.settings, self.ranks, self.last = settings, ranks, last
        self.model = model.to(ranks.device).train()
        # What is in shards cannot be validated by one process alone: the first keeps a whole model for it.
        sharded = settings.parallel == "fsdp" and ranks.world > 1
        self._copy = copy.deepcopy(model).cpu() if sharded and ranks.main else None
        self.objective = spread(model, ranks, settings.parallel)
        recorded = graphs.wanted(settings, ranks.device, ranks.world)
        self.optimizer = make_optimizer(model, settings, ranks.device if recorded else None)
        self._gradients = graphs.Gradients(self._run, model.parameters(), ranks.device) if recorded else None
        self._change = graphs.Repeated(self._update, ranks.device) if recorded else None
        self.parts: list[str] = []  # the names of the model's further sums, from the first step on
        self.compiled = settings.compile is True or (
            settings.compile == "auto" and compiles(ranks.device) and getattr(model, "compiles", True)
        )
        if self.compiled:  # a model with a way of its own to compile itself knows best
            (self.objective if type(model).compile is nn.Module.compile else model).compile()
        low = autocast_dtype(settings, ranks.device)
        self._autocast = torch.autocast(ranks.device.type, low, enabled=low is not None)
        self._loss_scale = LossScale(ranks.device) if low == torch.float16 else None
        # From the first step on that is not finite this is 1, and the optimiser changes nothing any more.
        self._bad = torch.zeros((), device=ranks.device)
        self._skipped = torch.zeros((), device=ranks.device)  # 1: the optimiser skips this step
        self._loss = torch.zeros((), dtype=torch.float64, device=ranks.device)  # of the batch at hand
        self.optimizer.found_inf = self._skipped  # type: ignore[attr-defined]

    def rate(self, number: int, spent: float = 0.0) -> float:
        """The learning rate of step ``number``, the first of which is 1, with such a share of time spent."""
        return self.settings.learning_rate * share(self.settings, number, self.last, spent)

    def step(self, work: Work, number: int, spent: float = 0.0) -> Tensor:
        """Learn from one batch. A row of the sums over all processes, as ``COLUMNS`` and ``parts`` say."""
        ranks = self.ranks
        reseed(ranks.device, self.settings.seed, number, ranks.rank)
        own = sum(batch.count * weight for batch, weight in work.parts)
        count = torch.full((), own, dtype=torch.float64, device=ranks.device)
        count = ranks.sum(count).clamp(min=1)
        set_rate(self.optimizer, self.rate(number, spent))
        if self._gradients is not None and self._change is not None:
            ((batch, weight),) = work.parts
            whole = self._gradients(batch, weight / max(1, own))
            self._loss.copy_(whole[0])
            norm = self._change()
        else:
            whole = self._turns(work, count)
            self._loss.copy_(whole[0])
            norm = self._update()
            self.optimizer.zero_grad()
        return torch.cat([whole[:1], count[None], norm[None], whole[1:]])

    def _update(self) -> Tensor:
        """Change the weights by their gradients, if those are finite; the length of the gradient.

        With loss scaling, a gradient that is not finite is an overflow, and has length 0: the step is
        skipped. But if even an unscaled gradient is not finite, training has diverged.
        """
        scale = self._loss_scale
        factor = None if scale is None else scale.factor
        norm = clipped_norm(self.model.parameters(), self.settings.clip, factor).double()
        finite = torch.isfinite(norm)
        fault = ~finite if factor is None else ~finite & (factor <= 1)
        self._bad += (~torch.isfinite(self._loss) | fault) & (self._bad == 0)
        self._skipped.copy_((self._bad > 0) | ~finite)
        self.optimizer.step()
        if scale is None:
            return norm
        scale.update(overflow=~finite)
        return norm.masked_fill(~(finite | fault), 0.0)

    def _turns(self, work: Work, count: Tensor) -> Tensor:
        """The gradients of one part after the other, over all processes; the sums of their losses."""
        ranks, turns = self.ranks, len(work.parts)
        sums = []
        for turn, (batch, weight) in enumerate(work.parts, 1):
            with syncing(self.objective, now=turn == turns):
                # DDP and FSDP take the mean over the processes, where the sum is meant.
                row = self._run(batch.to(ranks.device), weight * ranks.world / count)
            sums.append(row * weight)
        return ranks.sum(torch.stack(sums).sum(0))

    def _run(self, batch: Batch, scale: Tensor) -> Tensor:
        """The gradients of a batch's loss, times ``scale``; a row of the loss and its parts."""
        with self._autocast:
            total, parts = self.objective(batch)
        if self._loss_scale is not None:
            scale = scale * self._loss_scale.factor
        (total * scale.to(total.dtype)).backward()
        self.parts = self.parts or sorted(parts)
        return torch.stack([x.double() for x in (total.detach(), *(parts[name] for name in self.parts))])

    @property
    def trouble(self) -> str | None:
        """Why steps are no longer recorded, though they were to be."""
        if self._gradients is None or self._change is None:
            return None
        return self._gradients.trouble or self._change.trouble

    def weights(self) -> dict[str, Tensor]:
        """The weights, whole, in the first process; nothing in the others, which must call this too."""
        return gathered(weights.weights(self.model), self.ranks)

    def moments(self) -> dict[str, Tensor]:
        """What the optimiser remembers; as :meth:`weights`."""
        scale = {} if self._loss_scale is None else self._loss_scale.state()
        return gathered(moments(self.optimizer, self.model) | scale, self.ranks)

    def restore(self, saved: Mapping[str, Tensor], remembered: Mapping[str, Tensor], source: str) -> None:
        """Go on from what :meth:`weights` and :meth:`moments` gave, in every process."""
        weights.set_weights(self.model, saved, source)
        named = {name: tensor for name, tensor in remembered.items() if "/" in name}
        restore_moments(self.optimizer, self.model, named)
        if self._loss_scale is not None:
            self._loss_scale.restore(remembered)

    @contextlib.contextmanager
    def judged(self, saved: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """A whole model with these weights, in eval mode; for the first process only."""
        model = self.model if self._copy is None else self._copy.to(self.ranks.device)
        weights.set_weights(model, saved)
        model.eval()
        try:
            with torch.no_grad():
                yield model
        finally:
            model.train()
            if self._copy is not None:
                self._copy.cpu()
