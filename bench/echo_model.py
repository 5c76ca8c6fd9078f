"""A Transformer that repeats its source, with weights that are set directly.

The speed of a translator depends on its sizes and on the lengths of its translations, not on its training. A model
with random weights generates up to the length limit, and a model that was trained for a minute generates nothing. This
model generates as many words as its source has, and each step costs the same as in any model of its size::

    embedding             ±c, with equal numbers of both signs, but 0 in the dimensions of the fastest and slowest sines
    last cross attention  query and key: positions, so that word t attends to position t; value: the words
    everything else       initial weights, scaled down so that they hardly change the residual stream
"""

from __future__ import annotations

import torch

from jumok.models.transformer import Transformer

POSITION_SCALE = 12.0  # of queries and keys, so that almost all weight is at one position
CONTEXT_SCALE = 30.0  # of the attended word, relative to the previous word
LOGIT_MARGIN = 12.5  # of the correct word: all others together have about 2 % of the probability


@torch.no_grad()
def set_echo_weights(model: Transformer) -> Transformer:
    """Set the weights of a pre-norm model whose embeddings are all tied."""
    config = model.config
    if (config.norm, config.tie_embeddings) != ("pre", "all"):
        raise ValueError(f"expected norm=pre and tie_embeddings=all, got {config.norm} and {config.tie_embeddings}")
    width, num_positional = config.width, config.width // config.num_heads
    attentions = [layer.attention for layer in model.encoder]
    attentions += [layer.self_attention for layer in model.decoder]
    attentions += [layer.cross_attention for layer in model.decoder[:-1]]
    feed_forwards = [layer.feed_forward for layer in (*model.encoder, *model.decoder)]
    for linear in (*(x.merge for x in attentions), *(x.narrow for x in feed_forwards)):
        linear.weight.mul_(0.01)
        linear.bias.zero_()
    words, num_word = model.target_embedding.weight, width - num_positional - 2
    order = torch.rand(len(words), num_word, generator=torch.Generator().manual_seed(1)).argsort(1)
    words.zero_()
    words[:, num_positional:-2] = ((order < num_word // 2) * 2.0 - 1.0) * LOGIT_MARGIN / num_word  # mean 0
    last = model.decoder[-1].cross_attention
    position = torch.eye(num_positional, width).repeat(config.num_heads, 1) * POSITION_SCALE  # the same for every head
    position[:, -2] -= POSITION_SCALE  # the slowest sine is 0, so it shows the mean that the norm subtracted
    word_projection = torch.eye(width)
    word_projection[:num_positional] = word_projection[-2:] = 0.0
    last.project_query.weight.copy_(position)
    last.project_source.weight.copy_(torch.cat([position, word_projection]))
    last.merge.weight.copy_(word_projection * CONTEXT_SCALE)
    for linear in (last.project_query, last.project_source, last.merge):
        linear.bias.zero_()
    return model
