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
# # Seq2seq: from one vector to looking back
#
# A recurrent model reads an English sentence and writes a Korean one. First everything it has read must fit into one vector.
# Then it may look back. This lesson trains both on the spot, on built-in sentences that a grammar generated, and takes apart
# what happens at one step, between which words it looks, and what that does to long sentences.
#
# Seven small models are trained: four to five minutes on two cores the first time; they are kept in `runs/lessons`.

# %% [markdown] lang="ko"
# # 시퀀스 투 시퀀스: 벡터 하나에서 되돌아보기까지
#
# 순환 모델이 영어 문장을 읽고 한국어 문장을 씁니다. 처음에는 읽은 것을 모두 벡터 하나에 담아야 합니다. 그다음에는 되돌아볼 수 있게 합니다.
# 이번 강의에서는 두 모델을 그 자리에서 학습해 봅니다. 문장은 문법으로 생성한 내장 데이터입니다. 한 단계에서 무슨 일이 일어나는지,
# 어느 단어와 어느 단어 사이를 보는지, 그것이 긴 문장을 어떻게 바꾸는지 하나씩 뜯어봅니다.
#
# 작은 모델 일곱 개를 학습합니다. 처음에는 코어 두 개로 4~5분 걸리고, 그다음부터는 `runs/lessons`에 보관된 것을 씁니다.

# %%
import torch
from _shown import COLOURS, GREY, at, figure, heat, show, table, trained

import jumok
from jumok.batches.tokens import BOS, EOS, Seq2SeqBatch, Tokens
from jumok.look.figures.plots import draw_heat_map, draw_scores_by_length
from jumok.metrics.translation import Bleu, score_by_length
from jumok.metrics.word_alignment import score_alignment
from jumok.tasks.translate.predictor import TranslationOptions
from jumok.tasks.translate.word_alignment import WordAligner

torch.manual_seed(0)

# %%
SMALL = ["bahdanau/demo", "data.held_out_size=300", "tokenizer.vocab_size=1500", "model.width=128", "model.embedding_width=96",
         "data.builtin_size=30000", "train.warmup_steps=60"]  # fmt: skip
LONG = [*SMALL, "train.max_steps=900", "train.validate_every=900"]
SHORT = [*SMALL, "train.max_steps=450", "train.validate_every=450"]
LUONG, ONE_WAY = (["model.attention_query=current"], ["model.attention_query=current", "model.bidirectional=false"])

bahdanau, fixed, luong, luong_tanh, dot, general, concat = trained(
    bahdanau=LONG,
    fixed=[*LONG, "model.attention=null"],
    luong=[*LONG, *LUONG, "model.attention_score=general"],
    luong_tanh=[*LONG, *ONE_WAY, "model.attention_score=general", "model.readout=tanh"],
    luong_dot=[*SHORT, *ONE_WAY, "model.attention_score=dot"],
    luong_general=[*SHORT, *ONE_WAY, "model.attention_score=general"],
    luong_concat=[*SHORT, *ONE_WAY, "model.attention_score=concat"],
)

# %% [markdown] lang="en"
# ## The fixed context vector
#
# Without attention, the decoder begins from what the encoder remembers after the last word. That is one vector, and it has
# the same size for three words and for forty:

# %% [markdown] lang="ko"
# ## 고정된 문맥 벡터
#
# 어텐션이 없으면 디코더(decoder)는 인코더(encoder)가 마지막 단어를 읽은 뒤에 기억하는 것에서 출발합니다. 그것은 벡터 하나이고,
# 문장이 세 단어든 마흔 단어든 크기가 같습니다.

# %%
test = bahdanau.data.test_split()
short = "this is an example sentence"
middle, long = (next(e for e in test.examples if len(e.source.split()) == n) for n in (12, 26))
wanted = {short: "이것은 예문이다", middle.source: middle.target, long.source: long.target}


@torch.no_grad()
def read(translator, text: str):
    """What the decoder starts from."""
    (ids,) = translator.tokenizer.encode([text])
    return translator.model.start(Tokens.pad([[*ids, EOS]]))


# %%
rows = []
for text in wanted:
    without, state = read(fixed, text), read(bahdanau, text)
    annotations = state.memory.annotations
    rows.append(
        [
            len(text.split()),
            without.hidden[0].numel() + without.input_feed.numel(),
            f"{tuple(annotations.shape[1:])} = {annotations.numel():,}",
        ]
    )
table(["words", "numbers, fixed context", "numbers to look at, attention"], rows)

# %%
for text, truth in wanted.items():
    print("source   ", text)
    print("wanted   ", truth)
    print("fixed    ", fixed.translate(text, with_attention=False).translation)
    print("attention", bahdanau.translate(text, with_attention=False).translation, end="\n\n")

# %% [markdown] lang="en"
# The short sentence goes through the bottleneck; the long ones come out of it as sentences of the right *kind* in which things have
# been swapped. With attention, the encoder's notes on every word stay on the table, and the decoder may look at them again.
# How large the difference is, we measure at the end.
#
# ## One step, with all its shapes
#
# Take "i studied korean with my friend in the library". The decoder, Luong's as in his paper, has just written 친구와, "with a friend".
# Its state after that word, h_t, is the **query**. Everything up to the next word is in the next cell:

# %% [markdown] lang="ko"
# 짧은 문장은 병목을 무사히 통과합니다. 긴 문장은 *꼴*은 그럴듯하지만 내용이 뒤바뀐 채로 나옵니다. 어텐션이 있으면 단어마다 남긴 인코더의 메모가
# 책상 위에 그대로 있고, 디코더는 그것을 다시 볼 수 있습니다. 차이가 얼마나 큰지는 마지막에 재어 봅니다.
#
# ## 한 단계, 모든 모양과 함께
#
# "i studied korean with my friend in the library"를 번역해 봅시다. 루옹(Luong)의 논문에 나오는 디코더가 방금 '친구와'를 썼습니다.
# 그 단어 뒤의 상태 h_t가 **쿼리**입니다. 다음 단어가 나올 때까지의 모든 과정이 아래 셀에 있습니다.

# %%
source = "i studied korean with my friend in the library"
target = "나는 도서관에서 나의 친구와 함께 한국어를 공부했다"
tokenizer = luong_tanh.tokenizers.target
pieces = tokenizer.encode([target])[0]
until = max(n for n, word in enumerate(tokenizer.word_ids_from_text(target)) if word == target.split().index("친구와"))
print("pieces:", tokenizer.ids_to_tokens(pieces), "· given up to", tokenizer.ids_to_tokens(pieces)[until])

state = read(luong_tanh, source)
with torch.no_grad():
    for piece in [BOS, *pieces[: until + 1]]:
        logits, state = luong_tanh.model.step(state, torch.tensor([piece]))

# %%
lookup, readout = luong_tanh.model.decoder.attention, luong_tanh.model.decoder.readout
with torch.no_grad():
    query = state.hidden[0][-1][:, None]  # h_t
    annotations = state.memory.annotations  # what the encoder noted of each word
    scores = lookup.score(query, state.memory.keys) * lookup.scale  # h_t · W h̄
    weights = jumok.weights(query, state.memory.keys, score=lookup.score, scale=lookup.scale)  # softmax
    context = jumok.mix(weights, annotations)  # Σ weight · annotation
    both = torch.cat([query, context], dim=-1)  # concat
    blend = torch.tanh(readout.state_projection(both))  # tanh(W_c [h_t; c_t])
    by_hand = luong_tanh.model.generator(blend)  # the generator: a score for every word piece
torch.testing.assert_close(by_hand[:, 0], logits)

# %%
steps = [
    ("query", "h_t, after 친구와", query), ("keys and values", "h̄_1 … h̄_S", annotations),
    ("scores", "h_t · W h̄_s", scores), ("weights", "softmax over the source", weights),
    ("context", "Σ a_s h̄_s", context), ("concat", "[h_t; c_t]", both), ("tanh", "tanh(W_c [h_t; c_t])", blend),
    ("generator", "W tanh(…) + b", by_hand),
]  # fmt: skip
table(["step", "what", "shape (batch, steps, …)"], [[name, what, str(tuple(x.shape))] for name, what, x in steps])

# %%
words = [
    *(piece.strip("▁") for piece in luong_tanh.tokenizer.ids_to_tokens(luong_tanh.tokenizer.encode([source])[0])),
    "</s>",
]
fig, (left, middle_axes, right) = figure(7, 2.9, 1, 3, width_ratios=[3, 3, 2.2])
for axes, numbers, title in ((left, scores, "scores"), (middle_axes, weights, "weights")):
    axes.barh(range(len(words)), numbers[0, 0].tolist(), color=COLOURS[0])
    axes.set(title=title, ylim=(len(words) - 0.4, -0.6))
    axes.set_yticks(range(len(words)), words if axes is left else [])
    axes.tick_params(length=0)
left.axvline(0, color=GREY, lw=0.8)
likely, which = by_hand[0, 0].softmax(-1).topk(5)
right.barh(range(5), likely.tolist(), color=COLOURS[1])
right.set(title="next", ylim=(4.6, -0.6), xlim=(0, 1))
right.set_yticks(range(5), [piece.strip("▁") for piece in tokenizer.ids_to_tokens(which.tolist())])
right.tick_params(length=0)
show(fig, "one_step")

# %% [markdown] lang="en"
# The last row of the table is a number for each of the vocabulary's pieces, and its softmax says what comes next. Nothing in this was
# done by a hidden hand: the cell ends by checking that the model itself gives the same numbers.
#
# Compare where it looks with what it says. The next word should be 함께, "together", which renders "with". The weight need not lie there: a
# state may be done with a word already and look ahead, at "korean", which will be said *after* 함께. Where a model looks and what it
# says are related, and they are not the same.
#
# ## Bahdanau's query and Luong's
#
# Both ask the same question, at different moments. Luong asks with h_t, the state that *has read* the word said last. Bahdanau asks with
# s_(t−1), the state from before that word was read; what it finds goes into the cell together with the word. Introductions often mix
# them up; a model cannot. If we change one word of what the decoder is told, whose weights change, and from which step on?

# %% [markdown] lang="ko"
# 표의 마지막 줄은 어휘의 조각마다 숫자가 하나씩 있는 벡터이고, 여기에 소프트맥스를 취하면 다음에 올 조각의 확률이 됩니다. 숨은 손은 없습니다.
# 모델이 직접 낸 숫자와 같은지 셀 끝에서 확인했습니다.
#
# 보는 곳과 말하는 것을 견주어 보십시오. 다음에 올 단어는 "with"를 옮긴 '함께'입니다. 그렇다고 가중치가 꼭 "with"에 있는 것은 아닙니다. 그 단어는 이미 처리하고
# '함께' *다음에* 말할 "korean"을 내다보고 있을 수도 있습니다. 모델이 보는 곳과 말하는 것은 관계가 있지만 같지는 않습니다.
#
# ## 바다나우의 쿼리와 루옹의 쿼리
#
# 둘은 같은 질문을 서로 다른 순간에 던집니다. 루옹은 방금 말한 단어를 *이미 읽은* 상태 h_t로 묻습니다. 바다나우(Bahdanau)는 그 단어를 읽기 전의 상태 s_(t−1)로 묻고,
# 찾아낸 것을 그 단어와 함께 셀에 넣습니다. 소개 글은 이 둘을 자주 헷갈리지만 모델은 헷갈리지 않습니다.
# 디코더에 알려 주는 단어 하나를 바꾸면 누구의 가중치가 어느 단계부터 달라질까요?


# %%
def looked(translator, target_ids: list[int]) -> torch.Tensor:
    """Where each step looks (steps, source pieces) if the decoder is given these pieces."""
    batch = Seq2SeqBatch.from_sequences(translator.tokenizer.encode([source]), [target_ids])
    return translator.model.compute_attention_maps(batch)[0].weights[0, 0]


# %%
other = list(pieces)
changed = 2  # 나의, "my", becomes another piece
other[changed] = tokenizer.encode(["그의"])[0][0]
fig, axes = figure(7, 2.4)
for n, (name, translator) in enumerate((("Bahdanau", bahdanau), ("Luong", luong))):
    moved = (looked(translator, pieces) - looked(translator, other)).abs().sum(-1)
    axes.bar([t + 0.4 * n - 0.2 for t in range(len(moved))], moved.tolist(), width=0.38, color=COLOURS[n], label=name)
    first = int((moved > 0).nonzero()[0])
    print(f"{name}: weights change from step {first} on; the changed piece is read at step {changed + 1}")
    assert first == changed + (2 if name == "Bahdanau" else 1)
names = [piece.strip("▁") for piece in tokenizer.ids_to_tokens([*pieces, EOS])]
axes.set_xticks(range(len(names)), names, size=9.5)
axes.set(title="change of the weights of the step that says …, if 나의 had been another word")
axes.legend()
show(fig, "moment")

# %% [markdown] lang="en"
# Exactly one step later in Bahdanau's. So its weights while it says a word cannot depend on the word before it, only on those before
# that. Side by side, on the same sentence and the same told words:

# %% [markdown] lang="ko"
# 바다나우 쪽이 정확히 한 단계 늦습니다. 그래서 어떤 단어를 말할 때의 가중치는 바로 앞 단어에 의존할 수 없고, 그보다 앞의 단어들에만 의존합니다.
# 같은 문장, 같은 단어를 놓고 나란히 보면 이렇습니다.

# %%
fig, (left, right) = figure(7, 3.8, 1, 2)
heat(left, looked(bahdanau, pieces), names, words, lean=True)
heat(right, looked(luong, pieces), [""] * len(names), words, lean=True)
left.set_xlabel("Bahdanau: asks with s_(t−1)")
right.set_xlabel("Luong: asks with h_t")
show(fig, "side_by_side")

# %% [markdown] lang="en"
# ## dot, general, concat
#
# Luong compared three ways to score a query with a key. Three models that differ in nothing else, with an encoder that reads in one direction
# (for *dot* the states of encoder and decoder have to be equally wide), trained for half as long as the others (500 steps):

# %% [markdown] lang="ko"
# ## dot, general, concat
#
# 루옹은 쿼리와 키를 견주는 방법 세 가지를 비교했습니다. 다른 것은 모두 같고 인코더가 한 방향으로만 읽는(*dot*을 쓰려면 인코더와 디코더의 상태가 같은 폭이어야 합니다)
# 모델 셋을, 앞의 모델들이 배운 시간의 절반(500단계)만 학습해서 비교합니다.


# %%
def bleu(translator, pairs) -> float:
    """Of greedy translations."""
    predictions = translator.predict([pair.source for pair in pairs], TranslationOptions(beam_size=1))
    translations = [prediction.translation for prediction in predictions]
    return Bleu().score(translations, [pair.target for pair in pairs]).value


def error_rate(translator, count: int) -> float:
    """Of the word links that the weights give, against those that the grammar knows."""
    pairs, aligner = test.examples[:count], WordAligner(translator)
    alignments = aligner.align(pairs, aligner.select_views(pairs))
    return score_alignment([alignment.links for alignment in alignments], test.gold_alignments[:count]).error_rate


# %%
formulas = {"dot": "s · h", "general": "s · W h", "concat": "v · tanh(W [s; h])"}
rows = []
for (name, formula), translator in zip(formulas.items(), (dot, general, concat), strict=True):
    size = sum(p.numel() for p in translator.model.decoder.attention.score.parameters())
    rows.append(
        [
            name,
            formula,
            f"{size:,}",
            f"{bleu(translator, test.examples[:200]):.1f}",
            f"{error_rate(translator, 200):.2f}",
        ]
    )
table(["score", "formula", "weights to learn", "BLEU (200 sentences)", "alignment error rate"], rows)

# %%
fig, panels = figure(7, 3.1, 1, 3)
for axes, name, translator in zip(panels, formulas, (dot, general, concat), strict=True):
    heat(axes, looked(translator, pieces), names if axes is panels[0] else [""] * len(names), words, lean=True)
    axes.tick_params(labelsize=8.5)
    axes.set_xlabel(name)
show(fig, "scores")

# %% [markdown] lang="en"
# All three can learn it, and they learn it at different speeds; one short training on one small data set settles nothing about which is
# best. (*dot* needs query and key of the same width, *general* costs one product a key, *concat* a tanh for every pair: the real
# choice is often made by that.)
#
# ## The alignment matrix
#
# Nobody told the model which words belong together. The grammar that made the sentences knows, and its links are outlined:

# %% [markdown] lang="ko"
# 셋 다 배울 수 있지만 배우는 속도가 다릅니다. 작은 데이터로 짧게 한 번 학습한 결과만으로 어느 것이 가장 좋다고 할 수는 없습니다.
# (*dot*은 쿼리와 키의 폭이 같아야 하고, *general*은 키마다 곱셈이 한 번 더 들고, *concat*은 쌍마다 tanh가 듭니다. 실제로는 이런 비용이 선택을 좌우할 때가 많습니다.)
#
# ## 정렬 행렬
#
# 어느 단어와 어느 단어가 짝인지는 아무도 가르쳐 주지 않았습니다. 하지만 문장을 만든 문법은 알고 있으므로, 그 짝을 테두리로 표시했습니다.

# %%
text = "the lawyer runs because her mother cannot choose the book"
(number,) = (n for n, pair in enumerate(test.examples) if pair.source == text)
prediction = bahdanau.translate(text)
print(text, "→", prediction.translation)
is_correct = prediction.translation == test.examples[number].target
gold = test.gold_alignments[number].sure if is_correct else []
labels = prediction.target_words, prediction.source_words
show(draw_heat_map(prediction.attention, *labels, at("alignment"), gold_links=gold))
print(
    f"alignment error rate on all {len(test.examples)} test sentences: {error_rate(bahdanau, len(test.examples)):.3f}"
)

# %% [markdown] lang="en"
# Korean puts the reason first and the verb last, so the matrix is anything but a diagonal, and still most of the weight lies in the
# outlines. Look also where it does not: articles have no counterpart, particles and verb endings take from several words, and
# now and then the weight lies one word beside. A weight says where a step looked, not what a word means.
#
# ## How few source words a target word needs
#
# The entropy of a row of weights, as a number of words: exp(entropy) is 1 if all weight is on one word, and n if n words share it
# equally. Over the whole test set, by the length of the source:

# %% [markdown] lang="ko"
# 한국어는 이유를 먼저, 동사를 마지막에 말하므로 행렬은 대각선과 거리가 멀지만, 그래도 가중치는 대부분 테두리 안에 있습니다. 그렇지 않은 곳도 보십시오.
# 관사는 짝이 없고, 조사와 어미는 여러 단어에서 가져오며, 가끔은 가중치가 한 칸 옆에 있습니다. 가중치는 그 단계가 어디를 보았는지를 말할 뿐, 단어의 뜻을 말해 주지는 않습니다.
#
# ## 목표 단어 하나에 원문 단어 몇 개가 필요한가
#
# 가중치 한 행의 엔트로피를 단어 수로 바꾸어 봅니다. exp(엔트로피)는 한 단어에 가중치가 모두 몰리면 1이고, n개 단어가 똑같이 나누면 n입니다.
# 시험 문장 전체에서 원문 길이에 따라 재어 보겠습니다.

# %%
lengths, needed = [], []
for begin in range(0, len(test.examples), 50):
    maps, batch = bahdanau.compute_attention_maps(test.examples[begin : begin + 50])
    for weights, pieces_in, pieces_out in zip(
        maps[0].weights[:, 0], batch.source.lengths, batch.target.lengths, strict=False
    ):
        w = weights[:pieces_out, :pieces_in]
        lengths.append(pieces_in)
        needed.append((-(w * w.clamp_min(1e-12).log()).sum(-1)).exp())
each = torch.cat(needed)
print(f"median {each.median():.2f} source pieces, nine of ten steps below {each.quantile(0.9):.2f}")
for low, high in ((4, 10), (10, 20), (20, 60)):
    some = torch.cat([numbers for length, numbers in zip(lengths, needed, strict=True) if low <= length < high])
    print(f"sources of {low} to {high - 1} pieces: {some.mean():.2f}")
assert each.median() < 4
assert some.mean() < 8

# %%
fig, (left, right) = figure(7, 2.8, 1, 2)
left.hist(each.tolist(), bins=[1 + 0.25 * n for n in range(21)], color=COLOURS[0], edgecolor="white")
left.set(title="steps", xlabel="effective number of source pieces", yticks=[])
left.spines["left"].set_visible(False)
right.scatter(lengths, [numbers.mean().item() for numbers in needed], s=10, color=COLOURS[0], alpha=0.5, lw=0)
right.plot([3, 12], [3, 12], color=GREY, lw=1, ls=":")
right.annotate("all of them", (12, 12), xytext=(4, -2), textcoords="offset points", color=GREY, size=9)
right.set(title="mean of a sentence", xlabel="pieces in the source", ylim=(0, 14))
show(fig, "effective_number")

# %% [markdown] lang="en"
# A step looks at a few pieces, and in sentences several times as long at not many more. That is why the bottleneck was the wrong
# idea: what a step needs is small, but *which* small part it is changes with every step.
#
# ## Score by length, with attention and without

# %% [markdown] lang="ko"
# 한 단계는 몇 조각만 보고, 문장이 몇 배로 길어져도 별로 더 보지 않습니다. 병목이 잘못된 생각이었던 까닭이 여기에 있습니다. 한 단계에 필요한 것은 적지만,
# 그 적은 것이 *무엇인지*가 단계마다 바뀝니다.
#
# ## 어텐션이 있을 때와 없을 때, 길이에 따른 점수

# %%
references = [pair.target for pair in test.examples]
source_lengths = [len(pair.source.split()) for pair in test.examples]
curves = {}
for name, translator in (("fixed context", fixed), ("Bahdanau", bahdanau), ("Luong", luong)):
    texts = [
        prediction.translation
        for prediction in translator.predict([pair.source for pair in test.examples], TranslationOptions(beam_size=1))
    ]
    curves[name] = score_by_length(source_lengths, texts, references, bin_width=5, last_bin_above=25)
    print(f"{name}: BLEU {Bleu().score(texts, references).value:.1f}")
print(f"the model of “one step”: BLEU {bleu(luong_tanh, test.examples):.1f}")
show(draw_scores_by_length(curves, at("by_length")))
left_over = {name: curve[-1].score / curve[0].score for name, curve in curves.items()}
print({name: f"{share:.0%} of the score is left for the longest" for name, share in left_over.items()})
assert left_over["fixed context"] < 0.1 < 0.4 < left_over["Bahdanau"]

# %% [markdown] lang="en"
# This is the picture that made attention famous, on sentences made on the spot. For the shortest sentences one vector
# does nearly as well. Then its curve falls, and beyond twenty words next to nothing is right any more, while the models with attention lose slowly.
#
# Three things to keep in mind. These models are small and were trained for a minute or two: more training lifts all curves, the lower one
# too. The model of "one step" has the tanh readout of Luong's paper and lags far behind; the other Luong has Bahdanau's readout, which also
# sees the word before, and in so short a training that matters more than the moment of the query. And the last bins hold
# few sentences, as the grey bars say.
#
# Next: [the Transformer](05_transformer.py), which throws the recurrent part away.

# %% [markdown] lang="ko"
# 어텐션을 유명하게 만든 바로 그 그림을, 그 자리에서 만든 문장으로 다시 그렸습니다. 가장 짧은 문장에서는 벡터 하나로도 크게 뒤지지 않습니다.
# 그러나 곧 곡선이 떨어지고, 스무 단어를 넘으면 맞는 것이 거의 없습니다. 어텐션이 있는 모델은 천천히 나빠질 뿐입니다.
#
# 세 가지를 기억하십시오. 이 모델들은 작고 겨우 1~2분 학습했습니다. 더 학습하면 아래 곡선까지 모두 올라갑니다. '한 단계'에서 쓴 모델은 루옹의 논문대로
# tanh 출력층을 쓰는데 한참 뒤처집니다. 다른 루옹 모델은 앞 단어도 함께 보는 바다나우의 출력층을 쓰며, 이렇게 짧은 학습에서는 이것이 묻는 순간보다 더 중요합니다.
# 그리고 회색 막대가 보여 주듯 마지막 구간에는 문장이 몇 개 없습니다.
#
# 다음 강의는 순환하는 부분을 아예 버린 [트랜스포머](05_transformer.py)입니다.
