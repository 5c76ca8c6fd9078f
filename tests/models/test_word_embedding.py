"""Vectors of pairs of words: which pairs there are, where they stand, and what models make of them."""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jumok.batches.text import ClassificationBatch, DocumentBatch
from jumok.batches.tokens import Tokens
from jumok.models.hierarchical import HierarchicalAttentionNetwork, HierarchicalConfig
from jumok.models.layers.word_embedding import (
    FIRST_BIGRAM,
    MIN_COUNT,
    NO_BIGRAM,
    RARE_BIGRAM,
    BigramEmbedding,
)
from jumok.models.self_attentive import SelfAttentiveClassifier, SelfAttentiveConfig

VOCABULARY = 7
TEXTS = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=9), min_size=1, max_size=12)


@given(TEXTS, st.integers(1, 20))
def test_most_frequent_pairs(texts: list[list[int]], most: int) -> None:
    bigrams = BigramEmbedding(most, VOCABULARY, 3)
    counts = Counter(pair for text in texts for pair in pairwise(text))
    frequent = [count for count in counts.values() if count >= MIN_COUNT]
    assert bigrams.fit(texts) == min(most, len(frequent))
    kept = [divmod(int(pair), VOCABULARY) for pair in bigrams.bigram_codes if pair < VOCABULARY**2]
    assert sorted(counts[pair] for pair in kept) == sorted(frequent)[-most:]


@given(TEXTS)
def test_pairs_do_not_depend_on_the_layout(texts: list[list[int]]) -> None:
    bigrams = BigramEmbedding(5, VOCABULARY, 3)
    bigrams.fit(texts)
    known = {divmod(int(pair), VOCABULARY): number for number, pair in enumerate(bigrams.bigram_codes, FIRST_BIGRAM)}
    wanted = [[NO_BIGRAM, *(known.get(pair, RARE_BIGRAM) for pair in pairwise(text))][: len(text)] for text in texts]
    ids, pairs = bigrams.split_ids(bigrams.combine_ids(Tokens.pad(texts)).ids)
    assert torch.equal(ids, Tokens.pad(texts).ids)
    assert torch.equal(pairs, Tokens.pad(wanted, fill=NO_BIGRAM).ids)
    if any(texts):
        ids, pairs = bigrams.split_ids(bigrams.combine_ids(Tokens.pack(texts)).ids)
        assert ids[0].tolist() == [one for text in texts for one in text]
        assert pairs[0].tolist() == [one for text in wanted for one in text]


def test_missing_pairs_and_pair_dropout() -> None:
    torch.manual_seed(1)
    bigrams = BigramEmbedding(40, VOCABULARY, 3)
    numbers = torch.tensor([NO_BIGRAM] * 500 + [FIRST_BIGRAM + 1] * 500)
    found = bigrams(numbers, 0.4)
    assert found[:500].eq(0).all()
    rare = (found[500:] == bigrams.embedding.weight[RARE_BIGRAM]).all(1).sum().item()
    assert 150 < rare < 250
    assert (found[500:] == bigrams.embedding.weight[FIRST_BIGRAM + 1]).all(1).sum().item() == 500 - rare
    found.sum().backward()
    assert bigrams.embedding.weight.grad is not None
    assert bigrams.embedding.weight.grad[NO_BIGRAM].eq(0).all()


@pytest.mark.parametrize("kind", ["self_attentive", "hierarchical"])
def test_models_add_the_vector_of_the_pair(kind: str) -> None:
    sizes = {"embedding_width": 5, "attention_width": 7, "width": 3, "dropout": 0.0, "num_bigrams": 11}
    torch.manual_seed(3)
    model: HierarchicalAttentionNetwork | SelfAttentiveClassifier
    if kind == "hierarchical":
        model = HierarchicalAttentionNetwork(HierarchicalConfig(**sizes), 11, 2).eval()
        batch = DocumentBatch.from_sequences([[4, 5, 6], [7], [4, 5]], sentence_indices=[[0, 1], [2]], labels=[1, 0])
    else:
        model = SelfAttentiveClassifier(SelfAttentiveConfig(**sizes, num_hops=2, mlp_width=5), 11, 2).eval()
        batch = ClassificationBatch.from_sequences([[4, 5, 6], [7, 4, 5]], labels=[1, 0])
    assert model.bigrams is not None
    model.bigrams.fit([[4, 5]] * MIN_COUNT)
    read: list[torch.Tensor] = []
    rnn = model.word_level.rnn if isinstance(model, HierarchicalAttentionNetwork) else model.encoder
    rnn.register_forward_pre_hook(lambda _, given: read.append(getattr(given[0], "data", given[0])))
    with torch.no_grad():
        before = model.logits(batch)
    pair = model.bigrams.embedding.weight[FIRST_BIGRAM] + model.embedding.weight[5]
    for words in (4, 7):  # which begin
        assert (read[0] - model.embedding.weight[words]).abs().amax(-1).min() < 1e-6
    assert (read[0] - pair).abs().amax(-1).eq(0).sum() == 2
    with torch.no_grad():
        model.bigrams.embedding.weight[FIRST_BIGRAM] += 1
    assert (model.logits(batch) - before).abs().min() > 1e-5
    model.train()
    model.loss(batch).total.backward()
    weights = [name for name, weight in model.named_parameters() if weight.grad is None]
    assert not weights
    with pytest.raises(ValueError, match="num_bigrams=-1"):
        type(model.config)(num_bigrams=-1)
