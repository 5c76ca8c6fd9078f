"""Scores: how well a query fits a key.

=====================  =================================  ==========================
``Dot``                ``s · h``                          Luong 2015
``ScaledDot``          ``s · h / √D``                     Vaswani 2017
``General``            ``s · W h``                        Luong 2015
``Additive``           ``v · tanh(W s + U h)``            Bahdanau 2014
``Concat``             ``v · tanh(W [s; h])``             Luong 2015
``LocationSensitive``  ``v · tanh(W s + U h + F f + b)``  Chorowski 2015, Tacotron 2
=====================  =================================  ==========================

``score(query, key)`` returns the scores ``(…, Q, K)`` of queries ``(…, Q, Dq)`` and keys ``(…, K, Dk)``.
``prepare(keys)`` computes the part that depends on the keys alone. Pass its result in place of the keys at
every later step. A score stores nothing between calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor, nn

from jumok.attention.additive import compute_additive_scores
from jumok.attention.caching import get_tensor_version
from jumok.attention.mask_types import broadcasts_from_left
from jumok.attention.prepared_keys import KeyLike, PreparedKeys
from jumok.errors import InputError

__all__ = ["Additive", "Concat", "Dot", "General", "LocationSensitive", "PreparedKeys", "ScaledDot", "Score"]


class Score(nn.Module):
    """How well each query fits each key: ``score(query, key)`` is ``(…, Q, K)``."""

    def prepare(self, keys: Tensor) -> PreparedKeys:
        """Project the keys once per source. The result can be passed in place of the keys.

        All keys are projected, including padding. NaN in the padding does not affect the output of attention,
        but it does affect the gradients of the score's parameters. Fill the padding with zeros first.
        """
        if isinstance(keys, PreparedKeys):
            raise InputError(f"{self.name}.prepare: these keys are already prepared; pass them as they are")
        return PreparedKeys(self.project_keys(keys), self.name, self.key_owner, self.key_version)

    def resolve_keys(self, key: KeyLike) -> Tensor:
        """Return the projected keys ``(…, K, width)``. Keys that are not prepared are projected now."""
        if isinstance(key, Tensor):
            return self.project_keys(key)
        self._check_prepared_keys(key)
        return key.keys

    def forward(self, query: Tensor, key: KeyLike) -> Tensor:
        raise NotImplementedError

    def project_keys(self, keys: Tensor) -> Tensor:
        """Compute the part of the score that depends on the keys alone."""
        return keys

    def check_inputs(self, query: Tensor, key: KeyLike) -> None:
        """Raise if queries and keys such as these do not fit the score."""
        is_prepared = isinstance(key, PreparedKeys)
        if isinstance(key, PreparedKeys):
            self._check_prepared_keys(key)
        keys = key.keys if isinstance(key, PreparedKeys) else key
        self.check_widths(query.shape[-1], keys.shape[-1], is_prepared)
        parameter = query if self.representative_parameter is None else self.representative_parameter
        if parameter.device != query.device:
            raise InputError(f"{self.name} is on {parameter.device}, the query on {query.device}; move one with .to()")
        if not are_dtypes_compatible(parameter, query):
            raise InputError(f"{self.name} is {parameter.dtype}, the query {query.dtype}; convert one with .to()")

    def check_widths(self, query_width: int, key_width: int, is_prepared: bool) -> None:
        """Raise unless the score supports queries and keys (prepared if ``is_prepared``) of these widths."""

    def _check_prepared_keys(self, key: PreparedKeys) -> None:
        if key.score_name != self.name:
            raise InputError(
                f"these keys were prepared by {key.score_name}, but the score is {self.name}; "
                "call this score's own prepare(keys)"
            )
        if key.owner is not None and key.owner is not self.key_owner:
            raise InputError(
                f"these keys were prepared by another {self.name}, with its own parameters; "
                "call this score's own prepare(keys)"
            )
        is_version_known = key.owner is not None and key.owner_version >= 0 and not torch.compiler.is_compiling()
        if is_version_known and key.owner_version != self.key_version:
            raise InputError(
                f"the parameters of {self.name} have changed since these keys were prepared (by an optimizer "
                "step?); call prepare(keys) again"
            )

    @property
    def name(self) -> str:
        """The name in error messages."""
        return type(self).__name__

    @property
    def key_version(self) -> int:
        """How often the parameters that ``prepare`` uses have been written to."""
        return 0

    @property
    def representative_parameter(self) -> Tensor | None:
        """A parameter whose device and dtype represent all parameters, or None if there are none."""
        return next(self.parameters(), None)

    @property
    def key_owner(self) -> Score | None:
        """The score itself if it has parameters. Only it can use the keys that it prepared."""
        return None if self.representative_parameter is None else self


class DotScore(Score):
    """A score that is a dot product with the prepared keys. SDPA and its kernels compute it."""

    @property
    def uses_standard_formula(self) -> bool:
        """Whether ``forward`` is the plain dot product. A subclass may override it."""
        return type(self).forward is DotScore.forward

    def default_scale(self, width: int) -> float:
        """Return the factor on the dot product of vectors of this width."""
        return 1.0

    def check_widths(self, query_width: int, key_width: int, is_prepared: bool) -> None:
        if query_width != key_width:
            raise InputError(
                f"the query has width {query_width}, the key {key_width}; a dot product needs equal widths: "
                "use score=jumok.scores.General(query_width, key_width) or Additive for unequal ones"
            )

    def forward(self, query: Tensor, key: KeyLike) -> Tensor:
        keys = self.resolve_keys(key)
        self.check_widths(query.shape[-1], keys.shape[-1], is_prepared=True)
        scale = self.default_scale(query.shape[-1])
        # Scaled before the product, which may overflow in float16.
        return (query if scale == 1.0 else query * scale) @ keys.transpose(-1, -2)


class Dot(DotScore):
    """``s · h``.

    >>> Dot()(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
    tensor([[11., 17.]])
    """


class ScaledDot(DotScore):
    """``s · h / √D``, the default score.

    >>> ScaledDot()(torch.tensor([[1.0, 2.0, 0.0, 0.0]]), torch.tensor([[3.0, 4.0, 9.0, 9.0]]))
    tensor([[5.5000]])
    """

    def default_scale(self, width: int) -> float:
        return width**-0.5 if width else 1.0


class General(DotScore):
    """Luong's ``s · W h``, for queries and keys of different width. ``prepare`` computes ``W h``.

    >>> General(query_width=3, key_width=5)(torch.ones(2, 3), torch.ones(4, 5)).shape
    torch.Size([2, 4])
    """

    def __init__(self, query_width: int, key_width: int) -> None:
        super().__init__()
        _check_sizes(self.name, {"query_width": query_width, "key_width": key_width})
        self.key = nn.Linear(key_width, query_width, bias=False)
        # If queries and keys have variance 1, the scores do too. Larger scores would start as a hard choice
        # of one key, and the model would hardly learn to attend to others.
        nn.init.normal_(self.key.weight, std=(query_width * key_width) ** -0.5)

    def check_widths(self, query_width: int, key_width: int, is_prepared: bool) -> None:
        _check_width(self.name, "query", query_width, self.key.out_features)
        _check_width(self.name, "key", key_width, self.key.out_features if is_prepared else self.key.in_features)

    @property
    def representative_parameter(self) -> Tensor | None:
        return self.key.weight

    @property
    def key_version(self) -> int:
        return get_tensor_version(self.key.weight)

    def project_keys(self, keys: Tensor) -> Tensor:
        _check_width(self.name, "key", keys.shape[-1], self.key.in_features)
        projected: Tensor = self.key(keys)
        return projected


class TanhScore(Score):
    """A score of the form ``v · tanh(query part + key part)``. Our own kernels compute it.

    The parts are those of the layers ``query`` and ``key``, unless a subclass has other weights.
    """

    query: nn.Linear
    key: nn.Linear
    v: nn.Parameter  # (hidden,)

    @property
    def representative_parameter(self) -> Tensor | None:
        return self.v

    @property
    def key_version(self) -> int:
        return get_tensor_version(self.key_weight)

    @property
    def query_weight(self) -> Tensor:
        """``(hidden, query_width)``."""
        return self.query.weight

    @property
    def key_weight(self) -> Tensor:
        """``(hidden, key_width)``."""
        return self.key.weight

    @property
    def key_bias(self) -> Tensor | None:
        """``(hidden,)``."""
        return self.key.bias

    def check_widths(self, query_width: int, key_width: int, is_prepared: bool) -> None:
        _check_width(self.name, "query", query_width, self.query_weight.shape[1])
        _check_width(self.name, "key", key_width, len(self.v) if is_prepared else self.key_weight.shape[1])

    @property
    def uses_standard_formula(self) -> bool:
        """Whether it is exactly that, with the query part ``query_weight · query`` (for the step kernel)."""
        return False

    def project_query(self, query: Tensor) -> Tensor:
        _check_width(self.name, "query", query.shape[-1], self.query_weight.shape[1])
        return nn.functional.linear(query, self.query_weight)

    def project_keys(self, keys: Tensor) -> Tensor:
        _check_width(self.name, "key", keys.shape[-1], self.key_weight.shape[1])
        return nn.functional.linear(keys, self.key_weight, self.key_bias)

    def forward(self, query: Tensor, key: KeyLike) -> Tensor:
        return compute_additive_scores(self.project_query(query), self.resolve_keys(key), self.v)


class Additive(TanhScore):
    """Bahdanau's ``v · tanh(W s + U h)``. ``prepare`` computes ``U h``.

    >>> score = Additive(query_width=3, key_width=5, hidden=7)
    >>> keys = score.prepare(torch.ones(2, 4, 5))
    >>> score(torch.ones(2, 1, 3), keys).shape
    torch.Size([2, 1, 4])
    """

    def __init__(self, query_width: int, key_width: int, hidden: int) -> None:
        super().__init__()
        _check_sizes(self.name, {"query_width": query_width, "key_width": key_width, "hidden": hidden})
        self.query = nn.Linear(query_width, hidden, bias=False)
        self.key = nn.Linear(key_width, hidden, bias=False)
        self.v = _init_score_vector(hidden)

    @property
    def uses_standard_formula(self) -> bool:
        return type(self) is Additive and type(self.query) is nn.Linear


class Concat(TanhScore):
    """Luong's ``v · tanh(W [s; h])``, with one matrix for both. ``prepare`` applies the part for the keys."""

    def __init__(self, query_width: int, key_width: int, hidden: int) -> None:
        super().__init__()
        _check_sizes(self.name, {"query_width": query_width, "key_width": key_width, "hidden": hidden})
        self.query_width = query_width
        self.both = nn.Linear(query_width + key_width, hidden, bias=False)
        self.v = _init_score_vector(hidden)

    @property
    def uses_standard_formula(self) -> bool:
        return type(self) is Concat and type(self.both) is nn.Linear

    @property
    def query_weight(self) -> Tensor:
        return self.both.weight[:, : self.query_width]

    @property
    def key_weight(self) -> Tensor:
        return self.both.weight[:, self.query_width :]

    @property
    def key_bias(self) -> None:
        return None


class LocationSensitive(TanhScore):
    """``v · tanh(W s + U h + F f + b)``, where ``f`` is a convolution over the weights of previous steps.

    ``with_previous(previous_weights)`` returns the score of the next step, for ``jumok.weights`` and
    ``jumok.attend``. ``previous_weights`` is ``(…, K)``, or ``(…, num_channels, K)`` for several kinds of
    weights (Tacotron 2: the weights of the last step and the sum of all weights).

    >>> score = LocationSensitive(query_width=3, key_width=5, hidden=7)
    >>> keys, query = score.prepare(torch.ones(2, 4, 5)), torch.ones(2, 1, 3)
    >>> previous = torch.zeros(2, 4)
    >>> score.with_previous(previous)(query, keys).shape
    torch.Size([2, 1, 4])
    """

    def __init__(
        self,
        query_width: int,
        key_width: int,
        hidden: int,
        *,
        num_filters: int = 32,
        kernel_size: int = 31,
        num_channels: int = 1,
    ) -> None:
        super().__init__()
        _check_sizes(self.name, {"query_width": query_width, "key_width": key_width, "hidden": hidden})
        _check_sizes(
            self.name,
            {"num_filters": num_filters, "kernel_size": kernel_size, "num_channels": num_channels},
        )
        if kernel_size % 2 == 0:
            raise InputError(f"LocationSensitive(kernel_size={kernel_size}): the kernel size must be odd")
        self.query = nn.Linear(query_width, hidden, bias=False)
        self.key = nn.Linear(key_width, hidden)
        self.convolution = nn.Conv1d(num_channels, num_filters, kernel_size, padding=kernel_size // 2, bias=False)
        self.location = nn.Linear(num_filters, hidden, bias=False)
        self.v = _init_score_vector(hidden)

    def with_previous(self, previous_weights: Tensor, *, location_term: Tensor | None = None) -> Score:
        """Return the score of the step that follows these weights.

        Args:
            previous_weights: ``(…, K)`` or ``(…, num_channels, K)``.
            location_term: the result of :meth:`compute_location_term`, if the caller has computed it.
        """
        return _LocationSensitiveStep(self, previous_weights, location_term)

    def forward(
        self,
        query: Tensor,
        key: KeyLike,
        previous_weights: Tensor | None = None,
        location_term: Tensor | None = None,
    ) -> Tensor:
        if previous_weights is None:
            raise InputError(
                "LocationSensitive needs the weights of previous steps: pass "
                "score=score.with_previous(weights), with zeros of shape (…, K) at the first step"
            )
        keys = self.resolve_keys(key)
        previous_weights = self._check_previous_weights(previous_weights, keys)
        keys = keys + (self.compute_location_term(previous_weights) if location_term is None else location_term)
        return compute_additive_scores(self.project_query(query), keys, self.v)

    def _check_previous_weights(self, previous_weights: object, keys: Tensor) -> Tensor:
        """Return the weights as ``(…, num_channels, K)``, for prepared keys ``(…, K, hidden)``."""
        num_channels, num_keys = self.convolution.in_channels, keys.shape[-2]
        if not isinstance(previous_weights, Tensor):
            raise InputError(
                f"LocationSensitive: the previous weights must be a tensor, not "
                f"{type(previous_weights).__name__}; pass several kinds of weights as "
                "torch.stack([last, total], dim=-2)"
            )
        channels = previous_weights
        if num_channels == 1 and previous_weights.dim() == keys.dim() - 1:
            channels = previous_weights[..., None, :]
        if (
            channels.dim() != keys.dim()
            or channels.shape[-2:] != (num_channels, num_keys)
            or not broadcasts_from_left(channels.shape[:-2], keys.shape[:-2])
        ):
            leading = "".join(f"{size}, " for size in keys.shape[:-2])
            expected = f"{leading}{num_keys}" if num_channels == 1 else f"{leading}{num_channels}, {num_keys}"
            raise InputError(
                f"LocationSensitive: the previous weights have shape {tuple(previous_weights.shape)}; "
                f"expected ({expected}) for {num_keys} keys and {num_channels} channel(s); pass zeros at the "
                "first step"
            )
        return channels

    @property
    def fused_location_weight(self) -> Tensor:
        """Convolution and projection as one matrix ``(hidden, num_channels · kernel_size)``."""
        return self.location.weight @ self.convolution.weight.flatten(1)

    def compute_location_term(self, previous_weights: Tensor) -> Tensor:
        """Return what previous weights ``(…, num_channels, K)`` add to each key, ``(…, K, hidden)``."""
        flat_weights = previous_weights.reshape(-1, *previous_weights.shape[-2:])  # (N, channels, K)
        features = self.convolution(flat_weights)  # (N, filters, K)
        location_term: Tensor = self.location(features.transpose(1, 2))  # (N, K, hidden)
        return location_term.reshape(*previous_weights.shape[:-2], *location_term.shape[1:])


class _LocationSensitiveStep(Score):
    """A location-sensitive score together with the previous weights, for one step."""

    score: LocationSensitive

    def __init__(self, score: LocationSensitive, previous_weights: Tensor, location_term: Tensor | None) -> None:
        super().__init__()
        # Not registered as a submodule: this object does not own the score.
        object.__setattr__(self, "score", score)
        self.previous_weights, self.location_term = previous_weights, location_term

    @property
    def name(self) -> str:
        return "LocationSensitive"

    @property
    def key_owner(self) -> Score | None:
        return self.score

    @property
    def key_version(self) -> int:
        return self.score.key_version

    def check_inputs(self, query: Tensor, key: KeyLike) -> None:
        self.score.check_inputs(query, key)

    def project_keys(self, keys: Tensor) -> Tensor:
        return self.score.project_keys(keys)

    def forward(self, query: Tensor, key: KeyLike) -> Tensor:
        scores: Tensor = self.score(query, key, self.previous_weights, self.location_term)
        return scores


def are_dtypes_compatible(x: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same dtype, or autocast will convert them."""
    return x.dtype == other.dtype or torch.is_autocast_enabled(other.device.type)


def _check_sizes(score_name: str, sizes: Mapping[str, object]) -> None:
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise InputError(f"{score_name}({name}={size!r}): expected an integer, 1 or more")


def _init_score_vector(hidden: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(hidden).uniform_(-(hidden**-0.5), hidden**-0.5))


def _check_width(score_name: str, name: str, width: int, expected_width: int) -> None:
    if width != expected_width:
        raise InputError(
            f"{score_name}: the {name} has width {width}, but the score expects {expected_width}; "
            f"pass such a {name}, or create the score with {name}_width={width}"
        )
