"""A Transformer that says its source again, by weights that are set by hand.

How fast a model translates depends on its sizes and on how long its translations are, not on what it
learned. A model with random weights goes on to the length limit, and one that was trained for a minute says
nothing at all; this one says as many words as its source has, and costs at every step what any model of its
size does::

    embedding             ±c, as often + as −, but 0 where positions turn fastest, and slowest
    last cross attention  query and key: positions, so that word t looks at place t; value: the words
    all the rest          as it was begun, and next to nothing of it goes into the stream of residuals
"""

from __future__ import annotations

import torch

from jumok.models.transformer import Transformer

SHARP = 12.0  # of queries and keys: so that next to all weight is at one place
LOUD = 30.0  # of what was found, beside the word before
SURE = 12.5  # how far the logit of the right word is ahead: the others share about 2 % of the probability


@torch.no_grad()
def set_echo_weights(model: Transformer) -> Transformer:
    """Set the weights of a model with norms before its sublayers and one embedding for all."""
    config = model.config
    if (config.norm, config.tie_embeddings) != ("pre", "all"):
        raise ValueError(f"norm={config.norm}, tie_embeddings={config.tie_embeddings} came; expected pre and all")
    width, turning = config.width, config.width // config.num_heads
    attentions = [layer.attention for layer in model.encoder]
    attentions += [layer.self_attention for layer in model.decoder]
    attentions += [layer.cross_attention for layer in model.decoder[:-1]]
    feed_forwards = [layer.feed_forward for layer in (*model.encoder, *model.decoder)]
    for linear in (*(x.merge for x in attentions), *(x.narrow for x in feed_forwards)):
        linear.weight.mul_(0.01)
        linear.bias.zero_()
    words, free = model.target_embedding.weight, width - turning - 2
    order = torch.rand(len(words), free, generator=torch.Generator().manual_seed(1)).argsort(1)
    words.zero_()
    words[:, turning:-2] = ((order < free // 2) * 2.0 - 1.0) * SURE / free  # as often + as −: no mean
    last = model.decoder[-1].cross_attention
    position = torch.eye(turning, width).repeat(config.num_heads, 1) * SHARP  # the same for every head
    position[:, -2] -= SHARP  # the slowest sine is 0: what a norm took away from it, it took from all
    kept = torch.eye(width)
    kept[:turning] = kept[-2:] = 0.0
    last.project_query.weight.copy_(position)
    last.project_source.weight.copy_(torch.cat([position, kept]))
    last.merge.weight.copy_(kept * LOUD)
    for linear in (last.project_query, last.project_source, last.merge):
        linear.bias.zero_()
    return model
