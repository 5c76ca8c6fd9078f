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
# # Masks
#
# Sentences have unequal lengths, and a tensor is a rectangle. So short ones are filled up, and attention has to be told what is
# filling: that is a mask. A second kind of mask keeps a model that writes from looking at what it has not written yet.
# Both are one line. This lesson measures what happens without that line, and at the places where it goes wrong.
#
# Runs in a few seconds.

# %% [markdown] lang="ko"
# # 마스크
#
# 문장의 길이는 제각각인데 텐서는 네모반듯합니다. 그래서 짧은 문장은 뒤를 채우고, 어디가 채운 자리인지를 어텐션에 알려 주어야 합니다.
# 그것이 마스크(mask)입니다. 또 다른 마스크는 글을 쓰는 모델이 아직 쓰지 않은 단어를 미리 보지 못하게 막습니다.
# 둘 다 코드 한 줄이면 됩니다. 이번 강의에서는 그 한 줄이 없을 때 무슨 일이 벌어지는지, 그리고 어디에서 틀리기 쉬운지를 숫자로 재어 봅니다.
#
# 실행에는 몇 초면 충분합니다.

# %%
import torch
from _shown import COLOURS, GREY, figure, heat, show, table

import jumok
from jumok import masks

torch.manual_seed(0)
torch.set_printoptions(precision=3, sci_mode=False)

# %% [markdown] lang="en"
# ## A batch of sentences of unequal length

# %% [markdown] lang="ko"
# ## 길이가 다른 문장들의 배치

# %%
sentences = [
    "비가 온다",
    "나는 아침마다 공원을 걷는다",
    "어제 만난 친구가 도서관에서 빌린 책을 나에게 주었다",
    "동생은 아직 잔다",
]
split = [sentence.split() for sentence in sentences]
lengths = [len(words) for words in split]
longest = max(lengths)
vocabulary = ["<pad>", *sorted({word for words in split for word in words})]
ids = torch.tensor([[vocabulary.index(w) for w in words] + [0] * (longest - len(words)) for words in split])
print("lengths:", lengths)
print(ids)
share = (ids == 0).float().mean().item()
print(f"{share:.0%} of this batch is filling")
assert 0.4 < share < 0.6

# %%
fig, axes = figure(7, 1.9)
words = [[vocabulary[i] for i in row] for row in ids.tolist()]
heat(axes, (ids != 0).float() * 0.18, [f"{n} words" for n in lengths], [str(n) for n in range(longest)])
axes.set_aspect("auto")
for row, line in enumerate(words):
    for column, word in enumerate(line):
        colour = GREY if word == "<pad>" else "black"
        axes.text(column + 0.5, row + 0.5, word, ha="center", va="center", size=10, color=colour)
show(fig, "batch")

# %% [markdown] lang="en"
# About half of the rectangle is filling. The padding mask says so with four numbers. In this library (and in
# PyTorch's `scaled_dot_product_attention`) a mask says what is **allowed**: `True` means "may attend". Rows are queries,
# columns are keys. Padding bars *columns*; the rows of the filling itself are computed too, and nobody reads them.

# %% [markdown] lang="ko"
# 네모의 절반쯤이 채움입니다. 패딩 마스크(padding mask)는 숫자 네 개로 이 사실을 말해 줍니다. 이 라이브러리에서는
# (파이토치의 `scaled_dot_product_attention`도 마찬가지로) 마스크가 **허용되는 것**을 나타냅니다. `True`는 "보아도 된다"는 뜻입니다.
# 행은 쿼리, 열은 키입니다. 패딩이 막는 것은 *열*입니다. 채운 자리의 행도 계산은 하지만 아무도 읽지 않습니다.

# %%
padding = masks.padding(lengths)
allowed = padding.to_dense(longest, longest)
print(tuple(allowed.shape), allowed.dtype)

fig, grid = figure(7, 2.1, 1, 4)
for axes, one, line in zip(grid, allowed, split, strict=True):
    heat(axes, one.float() * 0.7, [""] * longest, [""] * longest)
    axes.set_xlabel(f"{len(line)} of {longest} keys", size=9)
grid[0].set_ylabel("queries")
show(fig, "padding_mask")

# %% [markdown] lang="en"
# ## What leaks without it
#
# Each word gets a vector, as in any model, `<pad>` too; then one layer of self-attention. The context vector of a word should
# be the same whether its sentence stands alone or in a batch. We compare both, with the mask and without.

# %% [markdown] lang="ko"
# ## 마스크가 없으면 무엇이 새어 들어오는가
#
# 여느 모델처럼 단어마다 벡터를 하나씩 주고(`<pad>`에도 줍니다) 셀프 어텐션(self-attention)을 한 층 통과시킵니다.
# 단어의 문맥 벡터(context vector)는 문장이 혼자 있을 때나 배치 안에 있을 때나 같아야 합니다.
# 마스크가 있을 때와 없을 때를 각각 비교해 봅시다.

# %%
width = 32
embed = torch.nn.Embedding(len(vocabulary), width)
attention = jumok.MultiHead(width, num_heads=2)


@torch.no_grad()
def contexts(rows: torch.Tensor, mask: masks.Mask | None = None) -> torch.Tensor:
    """The context vectors (B, L, width) of a batch of words."""
    return attention(embed(rows), mask=mask)


# %%
rows = []
for n, length in enumerate(lengths):
    alone = contexts(ids[n : n + 1, :length])[0]
    with_mask = (contexts(ids, padding)[n, :length] - alone).norm() / alone.norm()
    without = (contexts(ids)[n, :length] - alone).norm() / alone.norm()
    with torch.no_grad():
        leak = attention.weights(embed(ids))[n, :, :length, length:].sum(-1).mean()
    rows.append([sentences[n], length, f"{leak:.0%}", f"{without:.0%}", f"{with_mask:.0e}"])
assert rows[0][2] > "50%"
table(["sentence", "words", "weight on filling, no mask", "context changes by, no mask", "with mask"], rows)

# %% [markdown] lang="en"
# The two-word sentence gives most of its weight to words that do not exist, and its context vector is mostly something else.
# Worse, how wrong it is depends on *its neighbours in the batch*: a longer neighbour means more filling. Nothing crashes,
# training even goes on; the model is just a bit worse, and says different things for the same sentence.
#
# Some hope that zeros in the filling do no harm. They do: a key of zeros has the score 0, and softmax makes exp(0) = 1 of it,
# as much as an average key gets. Let us fill the same sentence up more and more, with three kinds of filling.

# %% [markdown] lang="ko"
# 두 단어짜리 문장은 있지도 않은 단어에 가중치를 대부분 주었고, 문맥 벡터는 거의 다른 것이 되어 버렸습니다.
# 더 나쁜 것은, 얼마나 틀리는지가 *배치 안의 이웃*에 달려 있다는 점입니다. 이웃이 길수록 채움도 길어지기 때문입니다.
# 오류가 나지도 않고 학습도 계속됩니다. 모델이 조금 나빠질 뿐이고, 같은 문장에 다른 답을 할 뿐입니다.
#
# 0으로 채우면 괜찮으리라고 생각하기 쉽습니다. 그렇지 않습니다. 0으로 된 키의 점수는 0이고, 소프트맥스는 이것을 exp(0) = 1로 만듭니다.
# 평범한 키가 받는 만큼 받는 셈입니다. 같은 문장을 세 가지 방법으로 점점 길게 채워 봅시다.

# %%
real = embed(ids[1:2, : lengths[1]]).detach()
fillings = {
    "<pad> vector": embed.weight[0].detach(),
    "zeros": torch.zeros(width),
    "NaN, masked": torch.full((width,), torch.nan),
}
counts = [0, 1, 2, 4, 8, 16, 32, 64]
wrong: dict[str, list[float]] = {name: [] for name in fillings}
with torch.no_grad():
    alone = attention(real)
    for name, vector in fillings.items():
        for count in counts:
            x = torch.cat([real, vector.expand(1, count, width)], dim=1)
            mask = masks.padding([lengths[1]]) if name == "NaN, masked" else None
            y = attention(x, mask=mask)[:, : lengths[1]]
            wrong[name].append(((y - alone).norm() / alone.norm()).item())

# %%
fig, axes = figure(5.2, 2.9)
for (name, curve), mark, colour in zip(wrong.items(), "osD", COLOURS, strict=False):
    axes.plot(counts, curve, marker=mark, color=colour, label=name, clip_on=False, zorder=3)
axes.set(
    xlabel=f"fillings behind a sentence of {lengths[1]} words",
    ylim=(0, None),
    title="relative error of the context vectors",
)
axes.set_xscale("symlog", linthresh=1)
axes.set_xlim(0, 64)
axes.set_xticks(counts, [str(n) for n in counts])
axes.legend()
show(fig, "leak")
assert max(wrong["NaN, masked"]) < 1e-5 < 0.3 < min(wrong["zeros"][-1], wrong["<pad> vector"][-1])
print("with the mask, at most", max(wrong["NaN, masked"]))

# %% [markdown] lang="en"
# With the mask the filling may hold anything. Here it holds NaN, which nothing that is merely multiplied by zero survives
# (0 · NaN is NaN): keys that no query may see are kept out of the sum altogether.
#
# ## Which value means padding?
#
# There are four conventions, and a mask in the wrong one raises no error. The converters have names, so that one has to say which is meant:

# %% [markdown] lang="ko"
# 마스크가 있으면 채운 자리에 무엇이 들어 있든 상관없습니다. 여기서는 NaN을 넣었습니다. 0을 곱하는 것만으로는 NaN을 막을 수 없습니다
# (0 · NaN은 NaN입니다). 어떤 쿼리도 볼 수 없는 키는 아예 합에서 빼야 합니다.
#
# ## 어느 값이 패딩인가?
#
# 관례가 네 가지나 되는데, 엉뚱한 관례로 준 마스크는 아무 오류도 일으키지 않습니다. 그래서 어떤 관례인지를 이름으로 밝히게 했습니다.

# %%
keep = ids != 0  # (B, K), True: a real word
conventions = {
    "lengths": masks.padding(lengths),
    "Hugging Face attention_mask, 1 = real": masks.from_zero_one(keep.long()),
    "nn.MultiheadAttention key_padding_mask, True = padding": masks.from_zero_one(~(ids == 0)),
    "additive, −inf = padding": masks.from_additive(
        torch.zeros(4, 1, 1, longest).masked_fill(~keep[:, None, None], -torch.inf)
    ),
}
wanted = contexts(ids, masks.padding(lengths))
for name, mask in conventions.items():
    torch.testing.assert_close(contexts(ids, mask)[keep], wanted[keep])
    print("the same:", name)
upside_down = contexts(ids, masks.from_zero_one((ids == 0).long()))
print(
    f"1 and 0 swapped: the context changes by {(upside_down - wanted)[keep].norm() / wanted[keep].norm():.0%}, and no error"
)

# %% [markdown] lang="en"
# ## The causal mask
#
# A model that writes is trained on whole sentences at once, and at each place it must say the next word. If it may look at that
# word, it learns to copy, and can do nothing when it has to write alone. So each word sees itself and what came before it:

# %% [markdown] lang="ko"
# ## 인과 마스크
#
# 글을 쓰는 모델은 문장 전체를 한꺼번에 놓고 학습하는데, 자리마다 다음 단어를 맞혀야 합니다. 그 단어를 볼 수 있다면 베끼는 법만 배우고,
# 혼자 써야 할 때는 아무것도 하지 못합니다. 그래서 단어마다 자기 자신과 앞의 단어만 볼 수 있게 합니다. 이것이 인과 마스크(causal mask)입니다.

# %%
line = split[1]
x = embed(ids[1:2, : len(line)]).detach().requires_grad_()


def reaches(mask: masks.Mask | None) -> torch.Tensor:
    """How much each word (column) moves what comes out at each place (row): norms of the gradients."""
    y = attention(x, mask=mask)[0]
    moved = [torch.autograd.grad(y[t].norm(), x, retain_graph=True)[0][0].norm(dim=-1) for t in range(len(line))]
    return torch.stack(moved)


# %%
free, barred = reaches(None), reaches(masks.causal())
top = free.max().item()
fig, (left, middle, right) = figure(7, 2.6, 1, 3)
heat(left, masks.causal().to_dense(len(line), len(line)).float() * 0.7, line, line, lean=True)
heat(middle, free, [""] * len(line), line, top=top, lean=True)
heat(right, barred, [""] * len(line), line, top=top, lean=True)
for axes, title in ((left, "causal(): allowed"), (middle, "who moves whom, no mask"), (right, "with causal()")):
    axes.set_xlabel(title)
show(fig, "causal")
assert barred.triu(1).abs().max() == 0

# %% [markdown] lang="en"
# On the right, what is above the diagonal is exactly zero: not small, zero. That is what one should test in a model of one's own.
#
# With a cache of past words there are fewer queries than keys: the *last* query is the last word. So the triangle has to be
# aligned at the bottom right. The flag `is_causal=True` of PyTorch's function aligns it at the top left, and then the newest word
# sees only the oldest one. Masks combine with `&`, `|` and `~`:

# %% [markdown] lang="ko"
# 오른쪽 그림에서 대각선 위는 정확히 0입니다. 작은 값이 아니라 0입니다. 자기 모델에서도 꼭 확인해 볼 일입니다.
#
# 지난 단어를 캐시(cache)에 담아 두면 쿼리가 키보다 적어집니다. *마지막* 쿼리가 마지막 단어입니다. 그래서 삼각형은 오른쪽 아래에 맞추어야 합니다.
# 파이토치 함수의 `is_causal=True`는 왼쪽 위에 맞추기 때문에, 가장 새로운 단어가 가장 오래된 단어만 보게 됩니다.
# 마스크는 `&`, `|`, `~`로 조합할 수 있습니다.

# %%
pictures = {
    "causal(), 3 new of 8": (masks.causal(), 3),
    "causal(0), the same": (masks.causal(0), 3),
    "causal() & padding(6)": (masks.causal() & masks.padding(6), 8),
    "window(2, 0)": (masks.window(2, 0), 8),
    "documents: 3 + 5 words": (masks.documents([0] * 3 + [1] * 5), 8),
    "documents & causal": (masks.documents([0] * 3 + [1] * 5) & masks.causal(), 8),
}
fig, grid = figure(7, 4.6, 2, 3)
for axes, (name, (mask, queries)) in zip(grid.flat, pictures.items(), strict=True):
    heat(axes, mask.to_dense(queries, 8).float() * 0.7, [""] * queries, [""] * 8)
    axes.set_xlabel(name)
show(fig, "masks")

# %% [markdown] lang="en"
# ## Empty rows
#
# What if a query may see nothing at all? It happens more often than one thinks: an empty text in a batch, filling on the left
# together with a causal mask, a window that lies within the filling. Written down plainly, softmax divides zero by zero there:

# %% [markdown] lang="ko"
# ## 빈 행
#
# 쿼리가 아무것도 볼 수 없다면 어떻게 될까요? 생각보다 자주 일어나는 일입니다. 배치 안의 빈 텍스트, 왼쪽을 채운 문장에 건 인과 마스크,
# 채운 자리 안에만 놓인 창(window)이 모두 그렇습니다. 곧이곧대로 쓰면 소프트맥스는 여기서 0을 0으로 나눕니다.

# %%
q, k, v = (torch.randn(2, 3, 8) for _ in range(3))
weight = torch.randn(8, 8, requires_grad=True)  # some parameter before the attention
empty = masks.padding([3, 0])  # the second text has no words
allowed = empty.to_dense(3, 3)


def by_hand(blocked: float) -> torch.Tensor:
    """What one finds in many a notebook: a number is added to the scores where one may not look."""
    scores = (q @ weight) @ k.mT / 8**0.5
    return (scores + torch.where(allowed, 0.0, blocked)).softmax(-1) @ v


# %%
ways = {
    "−inf by hand": lambda: by_hand(-torch.inf),
    "−1e9 by hand": lambda: by_hand(-1e9),
    "jumok.attend": lambda: jumok.attend(q @ weight, k, v, mask=empty),
}
rows = []
for name, way in ways.items():
    y = way()
    (gradient,) = torch.autograd.grad(y.square().sum(), weight)
    first = "as it should be" if torch.allclose(y[0], jumok.attend(q[:1] @ weight, k[:1], v[:1])[0]) else "wrong"
    numbers = ", ".join(f"{x:.2f}" for x in y[1, 0, :3].tolist())
    rows.append([name, first, numbers + ", …", f"{gradient.isnan().float().mean():.0%}"])
table(["way", "the text with words", "the empty one", "NaN in the gradient of a shared weight"], rows)
assert rows[0][3] == "100%"
assert rows[2][3] == "0%"

# %% [markdown] lang="en"
# One empty text turns *all* gradients of a shared weight to NaN, and with the next step the model is gone. The usual repair, a
# large negative number instead of −inf, hides it: the empty text then gets the plain mean of its filling. Here such a row
# gives zeros, and zero gradients, on every path.
#
# Next: [seq2seq](04_seq2seq.py), where all of this is put to work on two languages.

# %% [markdown] lang="ko"
# 빈 텍스트 하나가 공유 가중치의 기울기를 *전부* NaN으로 만들고, 다음 한 걸음에 모델은 사라집니다. 흔히 쓰는 처방은 −inf 대신 큰 음수를 쓰는 것인데,
# 이는 문제를 가릴 뿐입니다. 빈 텍스트가 채움의 평균을 받게 되기 때문입니다. 여기서는 이런 행이 어떤 경로에서든 0을 내고, 기울기도 0입니다.
#
# 다음 강의는 지금까지 배운 것을 두 언어 사이에서 써 보는 [시퀀스 투 시퀀스](04_seq2seq.py)입니다.
