# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="en"
# # Sentences and documents
#
# So far a word looked at words, to become another word. Here a whole text is looked at, to become one vector, and the vector decides
# what class the text belongs to. Two classic models do that, and both are loved because their weights seem to *explain* what they decide.
# This lesson trains both on documents in which we know the words that decide, so that for once the explanation can be checked.
#
# Five small models are trained: about a minute on two cores the first time; they are kept in `runs/lessons`.

# %% [markdown] lang="ko"
# # 문장과 문서
#
# 지금까지는 단어가 다른 단어를 보고 새로운 단어가 되었습니다. 이번에는 글 전체를 보고 벡터 하나를 만들고, 그 벡터로 글이 어느 분류에 속하는지 정합니다.
# 이 일을 하는 고전적인 모델이 둘 있는데, 둘 다 가중치가 판단의 이유를 *설명해 주는* 것처럼 보여서 사랑받았습니다.
# 이번 강의에서는 판단을 결정하는 단어를 우리가 이미 알고 있는 문서로 두 모델을 학습합니다. 그래서 그 설명이 맞는지 직접 확인할 수 있습니다.
#
# 작은 모델 다섯 개를 학습합니다. 처음에는 코어 두 개로 1분쯤 걸리고, 그다음부터는 `runs/lessons`에 보관된 것을 씁니다.

# %%
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from textwrap import wrap

import numpy as np
import torch
from _shown import COLOURS, GREY, INK, at, figure, heat, marked, show, table, trained, viewer

import jumok
from jumok.batches.tokens import UNK, Tokens
from jumok.data.builtin.decisive_words import ENGLISH, find_decisive_words
from jumok.data.tokenizers.word_tokenizer import segment_text
from jumok.look.figures.document_figure import draw_document
from jumok.metrics.faithfulness import measure_faithfulness

torch.manual_seed(0)
same, apart, far_apart, han, early = trained(
    documents_same=["self_attentive", "model.redundancy_penalty=0"],
    documents_apart=["self_attentive", "model.redundancy_penalty=0.03"],
    documents_far_apart=["self_attentive", "model.redundancy_penalty=0.3"],
    documents_levels=["hierarchical"],
    documents_early=["hierarchical", "train.max_epochs=1"],
)
readers = {
    "4 hops, penalty 0": same,
    "4 hops, penalty 0.03": apart,
    "4 hops, penalty 0.3": far_apart,
    "two levels": han,
}  # fmt: skip

# %% [markdown] lang="en"
# ## The documents
#
# They are made on the spot. Each judges several things, in words that praise, blame, or do neither; only the judgement in the sentence
# with a *marker* (overall, altogether, finally, ultimately) counts. Where that sentence stands, and how many kind words there are elsewhere, is chance. So
# whoever knows the class has found the marker *and* read the judgement beside it. These two words, shaded here, decide:

# %% [markdown] lang="ko"
# ## 문서
#
# 문서는 그 자리에서 만들어 냅니다. 문서마다 여러 대상을 칭찬하거나(praise) 비난하거나(blame) 둘 다 아닌(neither) 말로 평가하는데,
# *표지*(overall, altogether, finally, ultimately)가 있는 문장의 평가만 유효합니다. 그 문장이 어디에 있는지, 다른 문장에 좋은 말이 몇 개나 있는지는 우연으로 정해집니다.
# 그러니 분류를 맞혔다면 표지를 찾고, *또* 그 옆의 평가까지 읽은 것입니다. 여기에서 칠해 둔 두 단어가 분류를 결정합니다.

# %%
test = han.load_split("test").examples
chosen = [one for one in test if len(one.text.split()) in (21, 22) and one.text.count(".") == 4][:3]
fig, panels = figure(7, 2.2, 3, 1)
for axes, one in zip(panels, chosen, strict=True):
    words = segment_text(one.text).words  # full stops are words of their own here
    weights = [float(n in find_decisive_words(words)) for n, word in enumerate(words) if word != "."]
    marked(axes, [*one.text.split(), "→", one.label], [*weights, 0, 0], 9.5)
show(fig, "documents")
print(f"{len(test)} documents to test on")

# %% [markdown] lang="en"
# ## Several hops: a text as a matrix
#
# The self-attentive embedding (Lin et al. 2017). A recurrent network reads the text in both directions: a state for each word, H. Then R queries,
# the *hops*, look at it. Nobody asks these queries; they are learned, and the same for all texts. One matrix A says where all hops
# look, and M is what they see. Every step by hand, for a short text and a long one:

# %% [markdown] lang="ko"
# ## 여러 홉: 글을 행렬로
#
# 셀프 어텐티브 임베딩(self-attentive embedding, Lin 외 2017)입니다. 순환 신경망이 글을 양방향으로 읽어 단어마다 상태를 하나씩 만듭니다. 이것이 H입니다.
# 그다음 R개의 쿼리, 곧 *홉*(hop)이 그것을 봅니다. 이 쿼리는 누가 묻는 것이 아니라 학습된 것이고, 모든 글에 똑같이 쓰입니다. 홉들이 어디를 보는지는 행렬 A 하나에 담기고,
# 본 것은 M이 됩니다. 짧은 글과 긴 글을 놓고 모든 단계를 손으로 계산해 봅시다.


# %%
def tokens_of(reader, text: str) -> Tokens:
    """A text as a self-attentive model reads it: one row of words."""
    (sentences,) = reader.tokenizer.encode([segment_text(text).sentences])
    return Tokens.pad([[word for sentence in sentences for word in sentence]])


# %%
model, shapes = apart.model, []
for text in (min((one.text for one in test), key=len), max((one.text for one in test), key=len)):
    tokens = tokens_of(apart, text)
    with torch.no_grad():
        words = model.embedding(tokens.ids)  # w_1 … w_L
        H, _ = model.encoder(words)  # a state for each word, from the left and from the right
        keys = torch.tanh(model.attention.key(H))  # tanh(W_1 H + b)
        scores = keys @ model.attention.queries.T  # W_2 …: one score for each word and hop
        A = scores.softmax(1).transpose(1, 2)  # over the words of the text
        M = A @ H
        torch.testing.assert_close(M, model.embed(tokens)[0])  # the model itself gives the same
    shapes.append([str(tuple(x.shape[1:])) for x in (words, H, keys, A, M)])
names = ["words", "H: states", "tanh(W₁ H)", "A: where hops look", "M = A H: the text"]
table(["", "a short text", "a long one"], [[name, *pair] for name, *pair in zip(names, *shapes, strict=True)])
assert shapes[0][-1] == shapes[1][-1]
assert shapes[0][1] != shapes[1][1]

# %% [markdown] lang="en"
# A has a row for each hop and a column for each word, and each of its rows adds up to 1. M has the same shape for both texts: however long a text
# is, the classifier behind it gets R vectors. (With R = 1 this is attention as in [lesson 2](02_mechanism.py), with one fixed query.)
#
# ## The penalty, and what hops do without it
#
# Why should four hops look at four different things? Nothing in the loss asks for it. The paper adds a term that does, `P = ‖A Aᵀ − I‖²`, the squared
# Frobenius norm. A Aᵀ is a small matrix, hops by hops. Off its diagonal stands how much two hops look at the same words; on it, how much a hop looks
# at few. Three extremes show what P likes:

# %% [markdown] lang="ko"
# A에는 홉마다 행이 하나, 단어마다 열이 하나 있고, 각 행의 합은 1입니다. M의 모양은 두 글에서 같습니다. 글이 아무리 길어도 뒤의 분류기가 받는 것은 벡터 R개입니다.
# (R = 1이면 쿼리 하나가 고정된, [2강](02_mechanism.py)의 어텐션 그대로입니다.)
#
# ## 벌점, 그리고 벌점이 없을 때 홉이 하는 일
#
# 홉 네 개가 왜 서로 다른 것을 보아야 할까요? 손실 함수 어디에도 그런 요구는 없습니다. 그래서 논문은 벌점(penalty)을 더합니다. `P = ‖A Aᵀ − I‖²`, 곧 프로베니우스 노름(Frobenius norm)의 제곱입니다.
# A Aᵀ는 홉 × 홉 크기의 작은 행렬입니다. 대각선 밖의 값은 두 홉이 같은 단어를 얼마나 함께 보는지, 대각선의 값은 한 홉이 얼마나 적은 단어에 집중하는지를 말합니다.
# 극단적인 세 경우를 보면 P가 무엇을 좋아하는지 알 수 있습니다.


# %%
def penalty(A: torch.Tensor) -> float:
    return (A @ A.T - torch.eye(len(A))).square().sum().item()


R, L = 4, 20
extremes = {
    "each hop at a word of its own": torch.eye(R, L),
    "all hops at the same word": torch.eye(1, L).expand(R, L),
    "all hops at all words": torch.full((R, L), 1 / L),
}
table(["", "P"], [[name, f"{penalty(A):.2f}"] for name, A in extremes.items()])

# %% [markdown] lang="en"
# So P does not only push hops apart. It also wants each of them *sharp*, on one single word. Now three models that were trained alike but for the factor
# of P in their loss. Where do their hops look in one and the same document, and what does A Aᵀ look like over all test documents?

# %% [markdown] lang="ko"
# 그러니 P는 홉을 서로 떼어 놓기만 하는 것이 아닙니다. 홉 하나하나가 단어 하나에 *날카롭게* 집중하기도 바랍니다. 이제 손실에 더하는 P의 계수만 다르고 나머지는 똑같이 학습한
# 세 모델을 봅시다. 같은 문서에서 홉들은 어디를 볼까요? 그리고 시험 문서 전체에서 A Aᵀ는 어떤 모습일까요?

# %%
texts = [one.text for one in test]
looked = {name: reader.highlight_texts(texts) for name, reader in readers.items()}
hopping = [name for name in readers if "hops" in name]
number = test.index(chosen[0])
fig, panels = figure(7, 4.6, 3, 1)
for axes, name in zip(panels, hopping, strict=True):
    document = looked[name][number]
    shown = document.words if axes is panels[0] else [""] * len(document.words)
    heat(axes, document.weights, [f"hop {n + 1}" for n in range(R)], shown, lean=True)
    axes.tick_params(labelsize=8.5)
    axes.set_xlabel(name.partition(", ")[2], loc="left")
    for n in find_decisive_words(document.words):
        axes.plot([n + 0.08, n + 0.92], [R + 0.25] * 2, color=COLOURS[1], lw=3, clip_on=False)
show(fig, "hops")

# %%
fig, panels = figure(7, 2.3, 1, 3)
rows, alike = [], {}
for axes, name in zip(panels, hopping, strict=True):
    every = [torch.tensor(document.weights) for document in looked[name]]
    mean = torch.stack([A @ A.T for A in every]).mean(0)
    heat(axes, mean, [str(n + 1) for n in range(R)], [""] * R, numbers=True)
    axes.set_xlabel(f"A Aᵀ, {name.partition(', ')[2]}")
    unit = [A / A.norm(dim=1, keepdim=True) for A in every]
    alike[name] = float(np.mean([((u @ u.T).sum() - R).item() / (R * (R - 1)) for u in unit]))
    needed = np.mean([torch.special.entr(A).sum(-1).exp().mean().item() for A in every])
    accuracy = np.mean([d.class_probabilities[0][0] == one.label for d, one in zip(looked[name], test, strict=True)])
    P = np.mean([penalty(A) for A in every])
    rows.append([name.partition("penalty ")[2], f"{accuracy:.3f}", f"{P:.2f}", f"{alike[name]:.2f}", f"{needed:.1f}"])  # fmt: skip
show(fig, "products")
table(["factor", "accuracy", "P", "two hops: cosine", "words a hop looks at (exp entropy)"], rows)
assert alike[hopping[0]] > 0.8 > alike[hopping[1]] > alike[hopping[2]]

# %% [markdown] lang="en"
# The orange lines mark the two words that decide.
#
# - **Without** the penalty the four hops are all but one: their cosine is close to 1. The model has paid for four looks and takes one, four times.
# - **With** it they part, the more the larger the factor. There are two ways to obey, as the extremes show: to spread over many words, or to be alone on one.
#   See in the last column which way each of our models took.
# - **All three are as good** at their task. One look is enough here, so nothing is gained by four. The paper reports gains on reviews, which say
#   more than one thing; our documents cannot show that.
# - **Apart is not the same as meaningful.** Under a large factor a hop that finds its word taken goes somewhere else, to be alone there. Look at the lowest map:
#   not every hop is at a word that says anything.
#
# ## Two levels: words make a sentence, sentences decide
#
# The hierarchical attention network (Yang et al. 2016) follows the shape of a text instead. One look at the words of each sentence makes a vector of it. Then
# the vectors of the sentences are read as words were, and one look at them makes the document. `jumok.watch` sees both looks:

# %% [markdown] lang="ko"
# 주황색 선은 분류를 결정하는 두 단어입니다.
#
# - 벌점이 **없으면** 홉 네 개는 사실상 하나입니다. 서로의 코사인이 1에 가깝습니다. 네 번 볼 값을 치르고는 같은 곳을 네 번 보는 셈입니다.
# - 벌점이 **있으면** 계수가 클수록 서로 떨어집니다. 극단적인 경우에서 보았듯이 벌점을 줄이는 길은 둘입니다. 여러 단어로 퍼지거나, 단어 하나를 혼자 차지하는 것입니다.
#   우리 모델들이 어느 길을 택했는지 마지막 열에서 보십시오.
# - **성능은 셋이 같습니다.** 여기서는 한 번 보는 것으로 충분하므로 네 번 보아도 얻는 것이 없습니다. 논문은 여러 가지를 함께 말하는 리뷰에서 점수가 올랐다고 하지만,
#   우리 문서로는 그것을 보일 수 없습니다.
# - **서로 다르다고 해서 의미가 있는 것은 아닙니다.** 계수가 크면, 보려던 단어를 다른 홉이 이미 차지했을 때 그저 혼자 있을 수 있는 곳으로 갑니다. 맨 아래 지도를 보십시오.
#   모든 홉이 의미 있는 단어를 보고 있지는 않습니다.
#
# ## 두 층위: 단어가 문장이 되고, 문장이 결정한다
#
# 계층적 어텐션 신경망(hierarchical attention network, Yang 외 2016)은 글의 생김새를 따릅니다. 문장마다 그 안의 단어들을 한 번 보아 문장 벡터를 만들고,
# 그 문장 벡터들을 단어처럼 다시 읽은 다음 한 번 보아 문서 벡터를 만듭니다. `jumok.watch`로 이 두 번의 시선을 모두 볼 수 있습니다.

# %%
text = (
    "The soup was awful. We walked to the castle in the rain. "
    "Overall the museum was splendid. The hotel was dreary once."
)
with jumok.watch(han.model) as captures:
    prediction = han.classify(text)
print(captures)
of_words, of_sentences = captures["word_level"].weights()[:, 0, 0], captures["sentence_level"].weights()[0, 0, 0]
torch.testing.assert_close(of_words.sum(-1), torch.ones(4))  # over the words of each sentence
torch.testing.assert_close(of_sentences.sum(), torch.tensor(1.0))  # over the sentences of the document
print("words: (sentences, words)", tuple(of_words.shape), "· sentences:", tuple(of_sentences.shape))
print("said:", prediction.label)

# %% [markdown] lang="en"
# How much a word counts is what it counts in its sentence, times what its sentence counts. `reader.highlight_texts` gives both, and the product:

# %% [markdown] lang="ko"
# 단어의 몫은 문장 안에서 차지하는 몫에 그 문장의 몫을 곱한 것입니다. `reader.highlight_texts`가 두 가지와 그 곱을 모두 줍니다.

# %%
[document] = han.highlight_texts([text])
fig, (left, middle, right) = figure(7, 4.4, 1, 3)
places = range(len(document.words))
columns = {
    left: ("in its sentence", document.normalize_within_sentences()),
    middle: ("of its sentence", np.repeat(document.get_sentence_weights(), np.diff(document.sentence_offsets))),
    right: ("in the document", document.get_word_weights()),
}
for axes, (title, numbers) in columns.items():
    axes.barh(places, numbers, color=COLOURS[0], height=0.75)
    axes.set(xlim=(0, 1.02), ylim=(len(places) - 0.4, -0.6), title=title)
    axes.set_yticks(places, document.words if axes is left else [], size=8.5)
    axes.tick_params(axis="y", length=0)
    for edge in document.sentence_offsets[1:-1]:
        axes.axhline(edge - 0.5, color=GREY, lw=0.6)
show(fig, "two_levels")
np.testing.assert_allclose(columns[left][1] * columns[middle][1], document.get_word_weights(), atol=1e-6)

# %% [markdown] lang="en"
# On the left every sentence has a word that stands out, the awful soup included: within its sentence a word knows nothing of the others. The middle column
# takes that back: the sentence does not count. Each level does one half of the task. The same in the viewer; choose how words are shaded, point at a word:

# %% [markdown] lang="ko"
# 왼쪽을 보면 끔찍한 수프(awful)를 포함해서 문장마다 두드러지는 단어가 있습니다. 문장 안의 단어는 다른 문장을 알지 못하기 때문입니다. 가운데 열이 그것을 바로잡습니다.
# 그 문장은 셈에 들어가지 않습니다. 두 층위가 일을 반씩 나누어 맡은 것입니다. 같은 문서를 뷰어로도 봅시다. 단어를 칠하는 방법을 바꾸고, 단어를 가리켜 보십시오.

# %%
viewer(han.build_viewer_data(text), "two_levels")

# %% [markdown] lang="en"
# ## Does attention hit the planted words?
#
# Of each test document, the two words with most weight (the mean of the hops): is one of them a word that decides (*hits*)? Which share of them
# are (*precision*)? Is the sentence with most weight the one with the marker? And what would blind choice give?

# %% [markdown] lang="ko"
# ## 어텐션은 심어 둔 단어를 맞히는가
#
# 시험 문서마다 가중치가 가장 큰 단어 둘을 봅니다(홉이 여럿이면 평균). 그 가운데 결정하는 단어가 하나라도 있는지(*hits*), 둘 중 얼마가 결정하는 단어인지(*precision*),
# 가중치가 가장 큰 문장이 표지가 있는 문장인지, 그리고 아무렇게나 고르면 얼마나 맞힐지를 잽니다.

# %%
figures = {name: reader.score_examples(test).metrics for name, reader in readers.items()}
asked = {"attention_hits": "hits", "attention_precision": "precision", "sentence_hits": "sentence"}
rows = [[name, f"{metrics['accuracy']:.3f}", *(f"{metrics[metric]:.2f}" for metric in asked)] for name, metrics in figures.items()]  # fmt: skip
rows.append(["by chance", "", *(f"{figures['two levels'][f'{metric}_by_chance']:.2f}" for metric in asked)])
table(["", "accuracy", *asked.values()], rows)
for metrics in figures.values():
    assert metrics["accuracy"] > 0.97
    assert metrics["sentence_hits"] > 0.9
    assert metrics["attention_precision"] > 3 * metrics["attention_precision_by_chance"]

# %% [markdown] lang="en"
# All of them find the *sentence*. But of the two *words*, about half are found, and by some models fewer. Is that an error of the models? They are right about nearly every document.
# The reason lies below attention. What is weighed is not a word but a *state* of a recurrent network, which has read the whole sentence from both sides.
# The state at "was" can know of "splendid" and of "overall". One look at one place of the right sentence is enough, and any place will do.
# Keep that in mind: it returns at the end.
#
# ## Debugging a wrong prediction by its weights
#
# The finished models leave little to debug. So we take one that was stopped early: the same two levels, after one pass over the training data. It is wrong
# often. First see how it looks at sentences: the one that decides, others that judge something, and those that judge nothing.

# %% [markdown] lang="ko"
# *문장*은 모두 찾아냅니다. 하지만 두 *단어* 가운데서는 절반쯤, 모델에 따라서는 그보다 덜 찾습니다. 모델이 잘못한 것일까요? 분류는 거의 다 맞힙니다.
# 까닭은 어텐션 아래에 있습니다. 가중치를 받는 것은 단어가 아니라 순환 신경망의 *상태*이고, 그 상태는 문장 전체를 양쪽에서 읽은 것입니다.
# "was" 자리의 상태도 "splendid"와 "overall"을 알 수 있습니다. 맞는 문장의 어느 한 곳만 보면 되고, 그곳이 어디든 상관없습니다.
# 이 점을 기억해 두십시오. 마지막에 다시 나옵니다.
#
# ## 틀린 예측을 가중치로 디버깅하기
#
# 학습을 마친 모델에는 고칠 것이 별로 없습니다. 그래서 덜 학습한 모델을 가져옵니다. 똑같이 두 층위인데 학습 데이터를 한 번만 훑었습니다. 이 모델은 자주 틀립니다.
# 먼저 문장들을 어떻게 보는지 봅시다. 결정하는 문장, 다른 것을 평가하는 문장, 아무것도 평가하지 않는 문장으로 나누어 봅니다.

# %%
JUDGING = {word: label for label, words in ENGLISH.judgements.items() for word in words}


def judged(document) -> list[str | None]:
    """What each sentence of a document says: praise, blame, neither, or nothing."""
    return [
        next((JUDGING[word.lower()] for word in sentence if word.lower() in JUDGING), None)
        for sentence in sentences_of(document)
    ]


def sentences_of(document, without: frozenset[int] = frozenset()) -> list[list[str]]:
    """A document as sentences of words, some of them taken away."""
    cut = [
        [document.words[n] for n in range(begin, end) if n not in without]
        for begin, end in pairwise(document.sentence_offsets)
    ]
    return [one for one in cut if one]


def deciding(document) -> int:
    """The number of the sentence with the marker."""
    return int(np.searchsorted(document.sentence_offsets, find_decisive_words(document.words)[0], side="right") - 1)


# %%
looked["two levels, early"] = early.highlight_texts(texts)
fig, panels = figure(7, 2.5, 1, 2, sharey=True)
kinds = ["decides", "judges, does not count", "judges nothing"]
for axes, name in zip(panels, ("two levels, early", "two levels"), strict=True):
    shares: list[list[float]] = [[], [], []]
    for document in looked[name]:
        for n, (weight, label) in enumerate(zip(document.get_sentence_weights(), judged(document), strict=True)):
            shares[0 if n == deciding(document) else 1 if label else 2].append(float(weight))
    axes.barh(kinds, [np.mean(share) for share in shares], color=[COLOURS[1], COLOURS[0], COLOURS[0]])
    right = np.mean([d.class_probabilities[0][0] == one.label for d, one in zip(looked[name], test, strict=True)])
    axes.set(xlim=(0, 1), title=f"{name}: {right:.0%} right", xlabel="mean weight of a sentence")
    axes.invert_yaxis() if axes is panels[0] else None
    axes.tick_params(axis="y", length=0)
show(fig, "early")

# %% [markdown] lang="en"
# The early model leaves out what judges nothing, and looks at all judgements nearly alike. It has learned which words judge, and not yet what a marker is. That is a
# diagnosis, read from weights: *it counts votes*. A diagnosis can be tested. In some documents most judgements say one thing and the one that counts another:

# %% [markdown] lang="ko"
# 덜 학습한 모델은 아무것도 평가하지 않는 문장을 덜 보고, 평가하는 문장은 거의 똑같이 봅니다. 어떤 단어가 평가인지는 배웠지만 표지가 무엇인지는 아직 배우지 못했습니다.
# 가중치에서 읽어 낸 진단은 이렇습니다. *이 모델은 표를 센다.* 진단은 시험해 볼 수 있습니다. 어떤 문서에서는 다수의 평가와 유효한 평가가 서로 다릅니다.

# %%
misleading = []
for n, one in enumerate(test):
    votes = Counter(filter(None, judged(looked["two levels"][n]))).most_common()
    if votes[0][0] != one.label and (len(votes) == 1 or votes[0][1] > votes[1][1]):
        misleading.append((n, votes[0][0]))
follow = {}
for name in ("two levels, early", "two levels"):
    answers = [(looked[name][n].class_probabilities[0][0], majority, test[n].label) for n, majority in misleading]
    follow[name] = np.mean([said == majority for said, majority, _ in answers])
    print(f"{name}: of {len(answers)} such documents, {follow[name]:.0%} get what most judgements say,",
          f"{np.mean([said == wanted for said, _, wanted in answers]):.0%} what counts")  # fmt: skip
assert follow["two levels, early"] > 0.5
assert follow["two levels"] < 0.1

# %%
first_answers = {n: (looked["two levels, early"][n].class_probabilities[0], majority) for n, majority in misleading}
sure = {n: chance for n, ((label, chance), majority) in first_answers.items() if label == majority}
worst = max(sure, key=sure.__getitem__)
document = replace(looked["two levels, early"][worst], label=test[worst].label)
show(draw_document(document, at("worst"), is_per_sentence=True))

# %% [markdown] lang="en"
# The diagnosis holds: it mostly follows the majority. The picture is the error of that kind that it was surest of; bars are the weights of the sentences, and words are shaded within their
# sentences. So what was missing was not a better classifier but more training at the level of sentences, and the finished model had it.
# (`jumok eval` writes such pictures for any run, `figures/errors.html`, the surest errors first.)
#
# The finished model can be misled too, by texts of our own. Two kinds of text that its training data did not have, and at the end a harmless one:

# %% [markdown] lang="ko"
# 진단이 맞습니다. 대체로 다수를 따라갑니다. 그림은 그런 오류 가운데 모델이 가장 자신 있게 틀린 문서입니다. 막대는 문장의 가중치이고, 단어는 자기 문장 안에서의 가중치로 칠했습니다.
# 모자란 것은 더 좋은 분류기가 아니라 문장 층위의 학습이었고, 학습을 마친 모델은 그것을 했습니다.
# (`jumok eval`은 어떤 모델에 대해서든 이런 그림을 가장 자신 있게 틀린 것부터 `figures/errors.html`에 모아 줍니다.)
#
# 학습을 마친 모델도 우리가 쓴 글로 속일 수 있습니다. 학습 데이터에 없던 두 종류의 글이고, 마지막 하나는 평범한 글입니다.

# %%
ours = {
    # a word that turns another around
    "Overall the museum was not splendid. The tram was passable.": "blame",
    "Overall the soup was far from awful. The film was usual.": "praise",
    # a marker that marks no judgement
    "Finally the rain stopped. My uncle thought the soup awful. The castle was superb overall.": "praise",
    "Finally a bus came. The film was charming. The bakery was dismal overall.": "blame",
    # nothing of the kind
    "We sold the car. The market was average. They called the beach average overall.": "neither",
}  # fmt: skip
rows = []
for text, wanted in ours.items():
    [document] = han.highlight_texts([text])
    (label, chance), top = document.class_probabilities[0], int(document.get_word_weights().argmax())
    unknown = [word for word in document.words if han.tokenizer.encode([[[word]]]) == [[[UNK]]]]
    rows.append([text, wanted, f"{label} {chance:.2f}", f"{document.words[top]} {document.get_word_weights()[top]:.2f}",
                 f"{document.get_sentence_weights().argmax() + 1}", ", ".join(unknown)])  # fmt: skip
table(["text", "we mean", "it says", "most weight", "in sentence", "never seen"], rows)
assert [row[2].split()[0] for row in rows[:2]] == ["praise", "blame"]

# %% [markdown] lang="en"
# The weights tell two kinds of error apart:
#
# - In the texts with "not" and "far from" it looks at the *right* place and reads it wrong. The last column says why: it has never seen these words. No look could help.
# - In the texts with "Finally" in a sentence that judges nothing, see where the weight goes: all its life a marker meant "here it is", and now nothing is there. Whether
#   the answer comes out right then is luck. Here the look itself is the error.
#
# That diagnosis, too, can be tested: if "Finally" is to blame, another word in its place should cure it. Three such sentences before all pairs of unlike judgements:

# %% [markdown] lang="ko"
# 가중치를 보면 두 종류의 오류를 구별할 수 있습니다.
#
# - "not"과 "far from"이 있는 글에서는 *맞는* 곳을 보고 잘못 읽습니다. 까닭은 마지막 열에 있습니다. 한 번도 본 적이 없는 단어입니다. 아무리 잘 보아도 소용이 없습니다.
# - 아무것도 평가하지 않는 문장에 "Finally"가 있는 글에서는 가중치가 어디로 가는지 보십시오. 이 모델에게 표지는 언제나 "여기에 있다"는 뜻이었는데, 이번에는 거기에 아무것도 없습니다.
#   그래도 답이 맞았다면 운입니다. 여기서는 시선 자체가 오류입니다.
#
# 이 진단도 시험해 볼 수 있습니다. "Finally"가 문제라면, 그 자리에 다른 단어를 넣으면 나아야 합니다. 그런 문장 셋을 서로 다른 평가의 모든 조합 앞에 붙여 봅시다.

# %%
begins = ["{} the rain stopped.", "{} a bus came.", "{} we reached the hotel."]
examples = {"praise": "superb", "blame": "dismal", "neither": "average"}
rows, cured = [], {}
for word in ("Finally", "Yesterday"):
    labels_by_text = {}
    for begin, (_, other), (label, judgement) in product(begins, examples.items(), examples.items()):
        if other != judgement:
            labels_by_text[f"{begin.format(word)} The film was {other}. The bakery was {judgement} overall."] = label
    read = list(zip(han.highlight_texts(list(labels_by_text)), labels_by_text.values(), strict=True))
    right = np.mean([document.class_probabilities[0][0] == label for document, label in read])
    cured[word] = np.mean([dict(document.class_probabilities)[label] for document, label in read])
    first, _, last = np.mean([document.get_sentence_weights() for document, _ in read], axis=0)
    rows.append([word, len(labels_by_text), f"{right:.0%}", f"{cured[word]:.2f}", f"{first:.2f}", f"{last:.2f}"])
table(["", "texts", "right", "probability of what we mean", "weight of the first sentence", "of the last"], rows)
assert cured["Yesterday"] > 0.95 > cured["Finally"] + 0.05

# %% [markdown] lang="en"
# ## Can the weights be trusted?
#
# "It looked here" is a fact. "It decided because of this" is a claim, and needs an experiment: take the words away that were looked at most, and read the
# text again (*comprehensiveness*: how far does the probability of the class fall?). Or leave only these (*sufficiency*: how far does it fall now?). A text with words missing is worse anyway,
# so the same is done with as many random words:

# %% [markdown] lang="ko"
# ## 가중치를 믿어도 되는가
#
# "여기를 보았다"는 사실입니다. "이것 때문에 그렇게 판단했다"는 주장이고, 주장에는 실험이 필요합니다. 가장 많이 본 단어들을 빼고 글을 다시 읽히거나(*포괄성*, comprehensiveness: 분류의 확률이 얼마나 떨어지는가?),
# 그 단어들만 남기고 읽혀 봅니다(*충분성*, sufficiency: 이번에는 얼마나 떨어지는가?). 단어가 빠지면 어차피 나빠지므로, 같은 수의 단어를 무작위로 골라서도 똑같이 해 봅니다.

# %%
SOME = 120
faithfulness = {}
for name in ("4 hops, penalty 0", "4 hops, penalty 0.03", "two levels"):
    some = looked[name][:SOME]
    faithfulness[name] = measure_faithfulness(
        [sentences_of(d) for d in some], [d.weights for d in some], readers[name].predict_probabilities
    )
    print(*wrap(f"{name}: {faithfulness[name].verdict}", 90), sep="\n", end="\n\n")

# %%
fig, panels = figure(7, 4.6, 2, 3, sharex=True, sharey=True)
for column, (name, one) in enumerate(faithfulness.items()):
    shares = [100 * at_share.share for at_share in one.shares]
    for row, kind in enumerate(("comprehensiveness", "sufficiency")):
        falls = [getattr(at_share, kind).probability for at_share in one.shares]
        axes = panels[row, column]
        axes.plot(shares, [f.attended for f in falls], marker="o", color=COLOURS[0], label="most attended")
        axes.plot(shares, [f.random for f in falls], marker="s", color=COLOURS[1], ls="--", label="random")
        axes.set(ylim=(-0.05, 1))
    panels[0, column].set_title(name)
    panels[1, column].set_xlabel("% of the words")
panels[0, 0].set_ylabel("fall without them\n(comprehensiveness)")
panels[1, 0].set_ylabel("fall with only them\n(sufficiency)")
panels[0, 0].legend(fontsize=8.5)
show(fig, "faithfulness")
falls = {name: one.comprehensiveness.probability for name, one in faithfulness.items()}
for contrast in falls.values():
    assert contrast.low > 0
assert falls["two levels"].difference > falls["4 hops, penalty 0"].difference

# %% [markdown] lang="en"
# In the upper row the highlight means something where the blue line lies above the orange one; in the lower row, where it lies below. By this
# test the weights of the two levels can be trusted most, those of the four hops that look as one least, though *both are right about nearly every text*. These are means over documents. A single picture is another matter.
#
# ## Where attention points, and nothing happens
#
# Take *one* word away, each word in turn, and compare what that costs with the weight that the word had:

# %% [markdown] lang="ko"
# 윗줄에서는 파란 선이 주황 선보다 위에 있을 때, 아랫줄에서는 아래에 있을 때 강조된 단어에 의미가 있습니다. 이 시험에 따르면 두 층위 모델의 가중치가 가장 믿을 만하고,
# 네 홉이 하나처럼 움직이는 모델의 가중치가 가장 못 미덥습니다. *둘 다 거의 모든 글을 맞히는데도* 그렇습니다. 그리고 이것은 여러 문서의 평균입니다. 그림 한 장은 또 다른 이야기입니다.
#
# ## 어텐션이 가리키지만 아무 일도 일어나지 않는 곳
#
# 단어를 차례로 *하나씩* 빼 보고, 그때 잃는 것과 그 단어가 받던 가중치를 견주어 봅시다.


# %%
def costs(reader, document) -> np.ndarray:
    """What taking each word away costs of the probability of what was said."""
    label = reader.labels.index(document.class_probabilities[0][0])
    versions = [sentences_of(document), *(sentences_of(document, frozenset([n])) for n in range(len(document.words)))]  # fmt: skip
    whole, *rest = reader.predict_probabilities(versions)[:, label]
    return whole - np.array(rest)


fig, panels = figure(7, 2.9, 1, 3, sharex=True, sharey=True)
idle = {}
for axes, name in zip(panels, faithfulness, strict=True):
    some = looked[name][:60]
    cost = [costs(readers[name], document) for document in some]
    axes.scatter(
        np.concatenate([d.get_word_weights() for d in some]),
        np.concatenate(cost),
        s=9,
        alpha=0.4,
        lw=0,
        color=COLOURS[0],
    )
    axes.set(title=name, xlabel="weight of a word", xlim=(-0.03, 1.03))
    idle[name] = np.mean([c[d.get_word_weights().argmax()] < 0.05 for c, d in zip(cost, some, strict=True)])
panels[0].set_ylabel("cost of taking it away")
show(fig, "cost")
print("the most attended word can go at a cost below 0.05, in so many of the documents:")
print({name: f"{share:.0%}" for name, share in idle.items()})
unseen = [
    d.words[n].lower()
    for d, c in zip(some, cost, strict=True)
    for n in np.flatnonzero((d.get_word_weights() < 0.05) & (c > 0.5))
]
print(f"two levels: {len(unseen)} words with a weight below 0.05 cost more than 0.5;",
      f"{np.mean([word in ENGLISH.markers for word in unseen]):.0%} of them are markers")  # fmt: skip
assert idle["4 hops, penalty 0"] > 0.3 > idle["two levels"]

# %% [markdown] lang="en"
# Were weights reasons, the dots would lie along the diagonal. With two levels, at least no word that is looked at much can go for nothing. With hops, many dots lie on the floor: *looked at much, not
# needed*. And all three have dots up on the left edge: *hardly looked at, indispensable*. With two levels, these are mostly the markers (see the last line): the judgement gets the weight, and the marker only tells
# the level above where to look. So even where the highlight is right it is not the whole reason. A document of the first kind:

# %% [markdown] lang="ko"
# 가중치가 곧 이유라면 점들은 대각선을 따라 놓여야 합니다. 두 층위 모델에서는 적어도 많이 본 단어를 빼고도 아무 일이 없는 경우는 없습니다. 홉 모델에서는 많은 점이 바닥에 깔려 있습니다. *많이 보지만 없어도 되는
# 단어*입니다. 그리고 셋 모두 왼쪽 가장자리 높은 곳에 점이 있습니다. *거의 보지 않지만 없어서는 안 되는 단어*입니다. 두 층위 모델에서는 대부분 표지입니다(마지막 줄을 보십시오). 가중치는 평가하는 단어가 받고, 표지는
# 위 층위에 어디를 볼지 알려 줄 뿐입니다. 그러니 강조가 맞을 때에도 그것이 이유의 전부는 아닙니다. 첫째 종류의 문서를 하나 봅시다.

# %%
name = "4 hops, penalty 0"
every = [costs(same, document) for document in looked[name][:60]]
gap = [c.max() - c[d.get_word_weights().argmax()] for c, d in zip(every, looked[name], strict=False)]
clearest = int(np.argmax(gap))
document, cost = looked[name][clearest], every[clearest]
begin = max(0, find_decisive_words(document.words)[0] - 9)
shown = range(begin, min(len(document.words), begin + 20))
fig, axes = figure(7, 3)
for shift, numbers, colour, label in (
    (-0.2, document.get_word_weights(), COLOURS[0], "weight"), (0.2, cost, COLOURS[1], "cost of taking it away")
):  # fmt: skip
    axes.bar([n + shift for n in shown], numbers[list(shown)], width=0.38, color=colour, label=label)
axes.axhline(0, color=INK, lw=0.8)
turned = {"rotation": 50, "ha": "right", "rotation_mode": "anchor", "size": 9}
axes.set_xticks(list(shown), [document.words[n] for n in shown], **turned)
axes.tick_params(length=0)
axes.legend()
show(fig, "idle")
top, needed = int(document.get_word_weights().argmax()), int(cost.argmax())
weight = document.get_word_weights()
print(
    f"said {document.class_probabilities[0][0]}: most weight on “{document.words[top]}”, {weight[top]:.2f}, which costs {cost[top]:.2f};"
)
print(f"“{document.words[needed]}” has {weight[needed]:.2f} of the weight, and costs {cost[needed]:.2f}")

# %% [markdown] lang="en"
# The state explains it, as promised. Attention weighs states, and the state at an empty word like "was" has read its neighbours. Take the empty word away, and the state
# next to it says the same: nothing happens. Take away the judgement, and *every* state of the sentence says something else. (A full stop can be indispensable too: without it two sentences run into one.)
#
# What to keep:
#
# - A weight says where a vector was taken from. Over a recurrent network, or over many layers of a Transformer, that vector is not the word that stands there.
# - Two models can be equally right, one with weights that point at the reason and one without. One cannot see it in the picture; one can measure it (`jumok eval RUN --faithfulness`).
# - For debugging, weights are a *hint* where to look. Then change the text, as we did with "Finally", and see.
#
# All of this was measured on made-up documents with two deciding words; real texts have no such list, and there the experiment is all one has.
#
# [Lesson 10](10_any_model.py) takes these questions to models that are not ours.

# %% [markdown] lang="ko"
# 앞에서 말한 상태가 그 까닭입니다. 어텐션이 무게를 재는 것은 상태이고, "was"처럼 내용이 없는 단어 자리의 상태도 이웃 단어들을 이미 읽었습니다. 그 단어를 빼면 바로 옆의 상태가
# 같은 말을 해 주므로 아무 일도 일어나지 않습니다. 하지만 평가하는 단어를 빼면 그 문장의 *모든* 상태가 다른 말을 합니다. (마침표도 없어서는 안 될 수 있습니다. 마침표가 없으면 두 문장이 하나로 이어집니다.)
#
# 기억해 둘 것은 이렇습니다.
#
# - 가중치는 벡터를 어디에서 가져왔는지를 말합니다. 순환 신경망 위에서든 여러 층의 트랜스포머 안에서든, 그 벡터는 그 자리에 적힌 단어와 같은 것이 아닙니다.
# - 똑같이 잘 맞히는 두 모델이라도 한쪽 가중치는 이유를 가리키고 다른 쪽은 그렇지 않을 수 있습니다. 그림만 보아서는 알 수 없지만 잴 수는 있습니다(`jumok eval RUN --faithfulness`).
# - 디버깅할 때 가중치는 어디를 보아야 하는지 알려 주는 *실마리*입니다. 그다음에는 "Finally"로 해 보았듯이 글을 바꾸어 확인해야 합니다.
#
# 이 모든 것은 결정하는 단어가 둘뿐인, 지어낸 문서에서 잰 것입니다. 실제 글에는 그런 목록이 없으므로 실험만이 유일한 길입니다.
#
# [10강](10_any_model.py)에서는 이 질문을 우리 것이 아닌 모델로 가져갑니다.
