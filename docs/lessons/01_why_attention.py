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
# # Why attention
#
# Whoever reads a page does not give every word the same time. A few words decide, and the eye goes back to them.
# This lesson shows what a model gains if it may do the same: first on a paragraph, then on a sentence whose last words depend
# on its first, then in numbers, by counting.
#
# Two small classifiers are trained on the spot. Runs in about a minute.

# %% [markdown] lang="ko"
# # 왜 어텐션인가
#
# 글을 읽을 때 우리는 모든 단어에 같은 시간을 쓰지 않습니다. 몇몇 단어가 뜻을 결정하고, 눈은 그 단어로 되돌아갑니다.
# 모델도 그렇게 할 수 있다면 무엇이 좋아질까요? 이번 강의에서는 먼저 한 문단에서, 다음으로 끝이 처음에 달려 있는 문장에서,
# 마지막으로 직접 세어 본 숫자로 답을 찾아봅니다.
#
# 작은 분류기 두 개를 그 자리에서 학습합니다. 실행에는 1분쯤 걸립니다.

# %%
import math
import random
import time

import torch
from _shown import BLUES, COLOURS, GREY, figure, heat, marked, show, table, trained
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import jumok

random.seed(0)
torch.manual_seed(0)

# %% [markdown] lang="en"
# ## A paragraph, plain
#
# Is this praise or blame? And how did you find out?

# %% [markdown] lang="ko"
# ## 그냥 문단
#
# 칭찬일까요, 불평일까요? 그리고 그것을 어떻게 알았습니까?

# %%
english = (
    "The tram has a blue roof. Once the soup was awful. My sister waited near the bakery. "
    "Overall the museum was splendid. The hotel was dreary yesterday. A bus goes to the beach every hour."
)
korean = (
    "전차는 지붕이 파랗다. 처음에 국물은 형편없었다. 빵집은 역에서 가깝다. "
    "결국 박물관은 훌륭했다. 호텔은 어제는 지루했다. 시장은 월요일에 쉰다."
)

fig, (top, bottom) = figure(7, 2.35, 2, 1)
marked(top, english.split())
marked(bottom, korean.split())
show(fig, "plain")

# %% [markdown] lang="en"
# ## The same paragraph, with what was attended to
#
# Most of it is about roofs and buses, and two of the three judgements are bad ones; still this is praise, because
# of the one sentence that sums up. A classifier with attention (a hierarchical attention network, trained for some
# seconds on made-up texts of this kind) reads the same two paragraphs. Each word is as dark as its weight:

# %% [markdown] lang="ko"
# ## 같은 문단, 모델이 주목한 곳
#
# 대부분은 지붕과 버스 이야기이고, 세 번의 평가 가운데 둘은 나쁜 평가입니다. 그런데도 이 글은 칭찬입니다. 전체를 정리하는 한 문장 때문입니다.
# 어텐션이 있는 분류기(계층적 어텐션 네트워크, hierarchical attention network)를 이런 글로 몇 초 동안 학습한 뒤 같은 두 문단을 읽혔습니다.
# 가중치가 클수록 단어의 바탕이 진합니다.

# %%
readers = trained(
    hierarchical_en=["hierarchical", "data.train=decisive-words-en"],
    hierarchical_ko=["hierarchical", "data.train=decisive-words-ko"],
)
fig, both = figure(7, 2.35, 2, 1)
for axes, reader, text in zip(both, readers, (english, korean), strict=True):
    (document,) = reader.highlight_texts([text])
    shown: list[tuple[str, float]] = []
    for separator, word, weight in zip(document.separators, document.words, document.get_word_weights(), strict=True):
        if separator or not shown:
            shown.append((word, float(weight)))
        else:  # a full stop goes with its word
            shown[-1] = (shown[-1][0] + word, shown[-1][1] + float(weight))
    marked(axes, *zip(*shown, strict=True))
    first, second, *_ = sorted(shown, key=lambda word_and_weight: -word_and_weight[1])
    label, probability = document.class_probabilities[0]
    print(f"{label} {probability:.0%}; most weight: {first[0]} {first[1]:.2f}, {second[0]} {second[1]:.2f}")
    assert label == "praise"
show(fig, "marked")

# %% [markdown] lang="en"
# It found the sentence by itself: in training it was told the class and nothing else. Note what it does *not* mark: "Overall" and 결국, which make
# this sentence the one that counts. The vector of "splendid" has read its neighbours before attention comes, and knows of them already:
# a weight belongs to a *place* in the text, and what is known there may come from elsewhere. (Whether such a picture may be trusted is a
# question of its own, and the lesson on sentences and documents measures it.)
#
# ## How a word gets to where it is needed
#
# In this sentence, the word that comes next hangs on the very first word:
#
# > **언어학을** 공부한 민수는 … 책상에 앉아 **자연어를** 연구했다
# >
# > Minsu, who studied **linguistics**, … sat down at his desk and worked on **natural language**
#
# Had he studied astronomy, it would be constellations. Whatever stands between the two must not make the model forget. Three kinds of
# layer bring "linguistics" there in three ways. We build a small model of each, train them on sentences of this form, and ask the gradients
# which inputs move the output, and through which places they come.

# %% [markdown] lang="ko"
# 모델은 그 문장을 스스로 찾아냈습니다. 학습할 때 알려 준 것은 칭찬인지 불평인지뿐이었습니다. 그런데 이 문장을 중요하게 만드는 "Overall"과 '결국'은
# 표시되지 *않았습니다*. '훌륭했다'의 벡터는 어텐션이 오기 전에 이미 이웃 단어들을 읽어서 그 사실을 알고 있기 때문입니다.
# 가중치는 글의 한 *자리*에 붙는 것이고, 그 자리가 아는 것은 다른 곳에서 왔을 수도 있습니다. (이런 그림을 믿어도 되는지는 또 다른 문제이며,
# 문장과 문서를 다루는 강의에서 숫자로 확인합니다.)
#
# ## 단어는 필요한 곳까지 어떻게 가는가
#
# 다음 문장에서 빈자리에 올 단어는 맨 처음 단어에 달려 있습니다.
#
# > **언어학을** 공부한 민수는 … 책상에 앉아 **자연어를** 연구했다
#
# 민수가 천문학을 공부했다면 '별자리를' 연구했을 것입니다. 둘 사이에 무엇이 끼어들든 모델은 첫 단어를 잊지 말아야 합니다.
# 세 종류의 층은 '언어학을'을 그 자리까지 서로 다른 방법으로 나릅니다. 종류마다 작은 모델을 하나씩 만들어 이런 문장으로 학습한 다음,
# 어떤 입력이 출력을 움직이는지, 그리고 어디를 거쳐 오는지를 기울기(gradient)에게 물어봅니다.

# %%
FIELDS = {"언어학을": "자연어를", "천문학을": "별자리를", "식물학을": "들꽃을", "지질학을": "암석을",
          "경제학을": "시장을", "역사학을": "사료를", "음악학을": "민요를", "의학을": "질병을"}  # fmt: skip
CHUNKS = [
    "어제",
    "FRIEND",
    "커피를 마시고",
    "공원을 걷다가",
    "비를 피해",
    "집에 돌아와",
    "저녁을 먹고",
    "책상에 앉아",
    "밤늦게까지",
]


def sentence() -> list[str]:
    """One that ends with what the first word's field works on; somewhere, a friend may have another field."""
    field, other = random.sample(list(FIELDS), 2)
    words = [field, "공부한", random.choice(["민수는", "지영은", "현우는", "은지는"])]
    for chunk in CHUNKS:
        if random.random() < 0.5:
            words += (f"{other} 공부한 친구와 함께" if chunk == "FRIEND" else chunk).split()
    return [*words, FIELDS[field], "연구했다"]


# %%
for _ in range(3):
    print(*sentence())
vocabulary = ["<pad>", *sorted({word for _ in range(2000) for word in sentence()})]
number = {word: n for n, word in enumerate(vocabulary)}
objects = list(FIELDS.values())

# %% [markdown] lang="en"
# The three kinds of layer. Each takes a vector for every word, and gives a vector for every word that may depend on the word itself and those
# before it.

# %% [markdown] lang="ko"
# 세 종류의 층입니다. 모두 단어마다 벡터를 하나씩 받아 단어마다 벡터를 하나씩 내는데, 그 벡터는 자기 자신과 앞의 단어들에만 의존합니다.

# %%
WIDTH = 48
Nodes = list[Tensor]  # a vector (B, WIDTH) for each place


class Recurrent(nn.Module):
    """A step after the other: each gets the word and what the step before has handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, nodes: Nodes) -> Nodes:
        states, state = [], torch.zeros_like(nodes[0])
        for node in nodes:
            state = self.cell(node, state)
            states.append(state)
        return states


# %%
class Convolution(nn.Module):
    """Each place gets itself and the two before it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(WIDTH, WIDTH, kernel_size=3)

    def forward(self, nodes: Nodes) -> Nodes:
        x = torch.stack(nodes, dim=-1)  # (B, WIDTH, n)
        return list((x + F.relu(self.convolve(F.pad(x, (2, 0))))).unbind(-1))


# %%
class Attention(nn.Module):
    """Each place gets what it asks for, from all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = jumok.MultiHead(WIDTH, num_heads=4)

    def forward(self, nodes: Nodes) -> Nodes:
        x = torch.stack(nodes, dim=1)  # (B, n, WIDTH)
        return list((x + self.attend(x, mask=jumok.masks.causal())).unbind(1))


# %%
class Reader(nn.Module):
    """Says at each place which of the eight objects would come next, and hands out all vectors on the way."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(vocabulary), WIDTH)
        self.position = jumok.positions.SinusoidalPositions(WIDTH)
        self.layers = nn.ModuleList(layers)
        self.say = nn.Linear(WIDTH, len(objects))

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Nodes]]:
        x = self.embed(ids)
        levels = [list((x + self.position(x)).unbind(1))]
        for layer in self.layers:
            levels.append(layer(levels[-1]))
        return self.say(torch.stack(levels[-1], dim=1)), levels


# %%
def batch(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sentences up to the object (B, n), the place of each last word (B,), and the object (B,)."""
    some = [sentence() for _ in range(count)]
    longest = max(map(len, some)) - 2
    ids = torch.tensor([[number[w] for w in words[:-2]] + [0] * (longest - len(words) + 2) for words in some])
    last = torch.tensor([len(words) - 3 for words in some])
    return ids, last, torch.tensor([objects.index(words[-2]) for words in some])


# %%
models = {
    "recurrent": Reader(Recurrent()),
    "convolutional": Reader(Convolution(), Convolution(), Convolution()),
    "attention": Reader(Attention()),
}
losses: dict[str, list[float]] = {}
for name, model in models.items():
    losses[name] = []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        ids, last, wanted = batch(64)
        logits, _ = model(ids)
        loss = F.cross_entropy(logits[torch.arange(64), last], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[name].append(loss.item())
    print(f"{name:>13}: loss {losses[name][0]:.2f} → {losses[name][-1]:.2f}")

# %% [markdown] lang="en"
# Now one sentence, and at its last place: how likely is 자연어를 among the eight objects?

# %% [markdown] lang="ko"
# 이제 문장 하나를 줍니다. 마지막 자리에서 여덟 가지 목적어 가운데 '자연어를'이 나올 확률은 얼마일까요?

# %%
line = "언어학을 공부한 민수는 어제 천문학을 공부한 친구와 함께 공원을 걷다가 집에 돌아와 책상에 앉아".split()
ids = torch.tensor([[number[word] for word in line]])
reach, shades = {}, {}
for name, model in models.items():
    logits, levels = model(ids)
    likely = logits[0, -1].softmax(-1)
    moved = logits[0, -1, 0] - logits[0, -1].mean()  # what speaks for 자연어를
    flat = [node for level in levels for node in level]
    gradients = torch.autograd.grad(moved, flat, allow_unused=True)
    norms = [0.0 if g is None else g.norm().item() for g in gradients]
    shades[name] = torch.tensor(norms).view(len(levels), len(line))
    reach[name] = shades[name][0] / shades[name][0].max()
    print(f"{name:>13}: 자연어를 {likely[0]:.0%}, 별자리를 {likely[1]:.0%}")

# %%
fig, axes = figure(7, 2.3)
heat(axes, torch.stack(list(reach.values())), list(reach), line, lean=True)
axes.set_xlabel("which words move what is said next (the largest of each row: 1)")
show(fig, "which_inputs")
assert (reach["convolutional"][:-7] == 0).all()
assert reach["recurrent"].argmax() == reach["attention"].argmax() == 0


# %% [markdown] lang="en"
# Three layers of convolution see seven words and not one more: what lies before them has a gradient of exactly zero, and
# the model can only guess. Attention and the recurrent layer are moved most by the first word, and less by 천문학을, the friend's field,
# which stands nearer. Both have found what counts; they differ in how it gets there.
#
# The next figure shows the way itself. A dot is a vector inside the model, at a place (across) and a level (upwards); the darker, the more
# the output depends on it. The orange line is the shortest way from 언어학을 to the output.

# %% [markdown] lang="ko"
# 합성곱(convolution) 세 층은 일곱 단어만 보고 그 너머로는 한 단어도 더 보지 못합니다. 그 앞에 있는 단어의 기울기는 정확히 0이고,
# 모델은 찍을 수밖에 없습니다. 어텐션과 순환(recurrent) 층을 가장 크게 움직이는 것은 첫 단어이고, 더 가까이 있는 친구의 전공 '천문학을'은 그보다 덜 움직입니다.
# 둘 다 중요한 단어를 찾아냈습니다. 다른 것은 그 단어가 오는 길입니다.
#
# 다음 그림은 그 길을 보여 줍니다. 점 하나는 모델 안의 벡터 하나입니다. 가로는 자리, 위로 갈수록 높은 층이고, 진할수록 출력이 그 벡터에 많이 의존합니다.
# 주황색 선은 '언어학을'에서 출력까지 가는 가장 짧은 길입니다.

# %%
n, end = len(line), len(line) - 1
edges = {
    "recurrent": [((0, s), (1, s)) for s in range(n)] + [((1, s), (1, s + 1)) for s in range(end)],
    "convolutional": [((v, s), (v + 1, t)) for v in range(3) for t in range(n) for s in range(max(0, t - 2), t + 1)],
    "attention": [((0, s), (1, t)) for t in range(n) for s in range(t + 1)],
}
ways = {  # the shortest from the first word; a convolution's ends where it can go no further
    "recurrent": [(0, 0)] + [(1, s) for s in range(n)],
    "convolutional": [(0, 0), (1, 2), (2, 4), (3, 6)],
    "attention": [(0, 0), (1, end)],
}

# %%
dots = {"s": 90, "cmap": BLUES, "vmin": 0, "vmax": 1, "edgecolor": GREY, "lw": 0.7, "zorder": 3}
fig, panels = figure(7, 6.2, 3, 1, height_ratios=[2, 3.6, 2.4], sharex=True)
for axes, (name, shade) in zip(panels, shades.items(), strict=True):
    for (v, s), (w, t) in edges[name]:
        axes.plot([s, t], [v, w], color="#d8dce2", lw=0.7, zorder=1)
    axes.plot([s for _, s in ways[name]], [v for v, _ in ways[name]], color=COLOURS[1], lw=2, zorder=2)
    for level, row in enumerate(shade / shade.amax(1, keepdim=True)):
        axes.scatter(range(n), [level] * n, c=row.tolist(), **dots)
    steps = {"convolutional": "3 steps, and does not arrive", "attention": "1 step"}.get(name, f"{n} steps")
    axes.set(title=f"{name}: {steps}", yticks=[], ylim=(-0.35, len(shade) - 0.65))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
panels[-1].set_xticks(range(n), line, rotation=40, ha="right", rotation_mode="anchor")
show(fig, "paths")

# %% [markdown] lang="en"
# The recurrent layer hands the word on from dot to dot, fourteen times, and every one of them has to hold it. Attention takes it in one step.
#
# ## Does it matter?
#
# Three measurements: the loss while they learned; of 2,000 new sentences, how often the right object is the likeliest of the eight, by how
# far back the field stands; and, before any training, how the influence of a word fades with distance (random weights, mean of 20 models).

# %% [markdown] lang="ko"
# 순환 층은 단어를 점에서 점으로 열네 번 건네주는데, 그때마다 빠짐없이 간직해야 합니다. 어텐션은 한 걸음에 가져옵니다.
#
# ## 그래서 차이가 있는가?
#
# 세 가지를 재어 봅니다. 첫째는 학습하는 동안의 손실(loss)입니다. 둘째는 새 문장 2,000개에서 여덟 가지 목적어 가운데 맞는 것을 고른 비율을,
# 전공이 얼마나 앞에 있었는지에 따라 나눈 것입니다. 셋째는 학습하기 전에 단어의 영향이 거리에 따라 얼마나 옅어지는지입니다(무작위 가중치, 모델 20개의 평균).

# %%
ids, last, wanted = batch(2000)
right: dict[str, Tensor] = {}
with torch.no_grad():
    for name, model in models.items():
        right[name] = model(ids)[0][torch.arange(2000), last].argmax(-1) == wanted
        print(f"{name:>13}: {right[name].float().mean():.1%} right")

# %%
fade: dict[str, Tensor] = {}
for name, make in (("recurrent", [Recurrent]), ("convolutional", [Convolution] * 3), ("attention", [Attention])):
    total = torch.zeros(24)
    for _ in range(20):
        nodes = [torch.randn(1, WIDTH, requires_grad=True) for _ in range(24)]
        out = nodes
        for one in make:
            out = one()(out)
        grads = torch.autograd.grad((out[-1] * torch.randn(WIDTH)).sum(), nodes, allow_unused=True)
        total += torch.tensor([0.0 if g is None else g.norm().item() for g in reversed(grads)])
    fade[name] = total / total[0]

# %%
fig, (left, middle, faded) = figure(7, 2.7, 1, 3)
for (name, hits), mark, size, colour in zip(right.items(), "osD", (8, 4, 3.5), COLOURS, strict=False):
    left.plot(losses[name], color=colour, lw=1.3, label=name)
    far = [d for d in range(30) if (last == d).sum() >= 15]
    middle.plot(far, [hits[last == d].float().mean() for d in far], marker=mark, ms=size, color=colour, lw=1.3)
    faded.plot(range(24), [x or math.nan for x in fade[name].tolist()], marker=mark, ms=3, color=colour, lw=1.3)
middle.axhline(1 / 8, color=GREY, lw=0.8, ls=":")
left.set(title="loss", xlabel="step", ylim=(0, None))
middle.set(title="right (dotted: chance)", xlabel="words back", ylim=(0, 1.05))
faded.set(title="influence, untrained", xlabel="words back", yscale="log")
left.legend(loc=(0.3, 0.3), fontsize=8.5)
show(fig, "by_distance")

# %%
learned = {name: next((n for n, x in enumerate(curve) if x < 0.1), None) for name, curve in losses.items()}
print("steps until the loss is below 0.1:", learned)
assert learned["attention"] < learned["recurrent"]
assert learned["convolutional"] is None
assert right["attention"].float().mean() > 0.95
assert right["convolutional"][last >= 7].float().mean() < 0.25

# %% [markdown] lang="en"
# The right side has the reason, on a logarithmic scale: through a recurrent layer, influence is multiplied by some factor below one at
# every step, so it fades exponentially; a convolution ends; attention has no notion of far. Training can repair the recurrent layer (gated
# cells were invented for that), and on sentences as short as these it does: in the middle it is as good as attention. But it has to
# learn to carry first, and attention has not, so it is ready sooner. (The convolution *could* know the nearest cases, up to six words back.
# They are too rare among these sentences for it to have learned them.)
#
# ## The price: counted
#
# Nothing is free. This is the usual table of what a layer costs for n words of width d, with what we count and measure beside the formulas:
#
# - *multiplications*: counted by PyTorch's own counter, at n = 256, d = 64; then how the count grows if n or d is doubled (×2 is linear, ×4 is
#   quadratic)
# - *steps one after the other*: the longest chain of matrix products in the graph that autograd has recorded
# - *longest path*: layers (for the recurrent one: steps) until the first word moves the output of the last, found by its gradient
#
# Restricted attention sees r = 16 words, the convolution k = 3.

# %% [markdown] lang="ko"
# 로그 눈금으로 그린 오른쪽 그림이 이유를 보여 줍니다. 순환 층에서는 한 단계를 지날 때마다 영향에 1보다 작은 수가 곱해지므로 지수적으로 옅어집니다.
# 합성곱은 어느 거리에서 끝납니다. 어텐션에는 멀다는 개념이 없습니다. 순환 층도 학습으로 나아질 수 있고(게이트가 있는 셀은 그러려고 만들어졌습니다),
# 이렇게 짧은 문장에서는 실제로 그렇습니다. 가운데 그림에서 순환 층은 어텐션만큼 잘합니다. 다만 순환 층은 나르는 법부터 배워야 하고 어텐션은 그럴 필요가 없어서 더 빨리 배웁니다.
# (합성곱도 여섯 단어 앞까지는 *알 수 있었습니다*. 그런 문장이 너무 드물어 배우지 못했을 뿐입니다.)
#
# ## 치러야 하는 값: 세어 보기
#
# 공짜는 없습니다. 폭이 d인 단어 n개를 처리할 때 층마다 드는 비용을 적은 익숙한 표를, 우리가 직접 세고 잰 값과 나란히 놓아 보겠습니다.
#
# - *곱셈 수*: n = 256, d = 64일 때 파이토치의 계수기로 셉니다. 이어서 n이나 d를 두 배로 늘리면 몇 배가 되는지 봅니다(×2면 일차, ×4면 이차).
# - *차례로 해야 하는 단계*: autograd가 기록한 그래프에서 가장 긴 행렬 곱의 사슬입니다.
# - *가장 긴 경로*: 첫 단어가 마지막 자리의 출력을 움직일 때까지 필요한 층 수(순환 층은 단계 수)이며, 기울기로 찾습니다.
#
# 제한된 어텐션(restricted attention)은 r = 16개의 단어를, 합성곱은 k = 3개를 봅니다.

# %%
R, KERNEL = 16, 3


def self_attention(x: Tensor) -> Tensor:
    return (x @ x.T / x.shape[1] ** 0.5).softmax(-1) @ x


def restricted(x: Tensor) -> Tensor:
    near = F.pad(x, (0, 0, R - 1, 0)).unfold(0, R, 1)  # (n, d, R): each word and the R − 1 before it
    weights = (x[:, None] @ near / x.shape[1] ** 0.5).softmax(-1)  # (n, 1, R)
    return (weights @ near.mT)[:, 0]


# %%
def convolution(x: Tensor) -> Tensor:
    kernel = torch.ones(x.shape[1], x.shape[1], KERNEL) / (KERNEL * x.shape[1])
    return F.conv1d(F.pad(x.T[None], (KERNEL - 1, 0)), kernel)[0].T


def recurrent(x: Tensor) -> Tensor:
    state, states, weight = torch.zeros(1, x.shape[1]), [], torch.eye(x.shape[1])
    for word in x.split(1):
        state = torch.tanh(word @ weight + state @ weight)
        states.append(state)
    return torch.cat(states)


# %%
def multiplications(layer, n: int, d: int) -> int:
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(n, d))
    return counter.get_total_flops() // 2  # it counts a multiplication and an addition


# %%
def chain(layer, n: int = 64, d: int = 8) -> int:
    """The most matrix products that wait for each other."""
    longest: dict[object, int] = {}
    todo = [layer(torch.randn(n, d, requires_grad=True)).grad_fn]
    while todo:
        node = todo[-1]
        before = [one for one, _ in node.next_functions if one is not None]
        if waiting := [one for one in before if one not in longest]:
            todo += waiting
            continue
        own = any(kind in node.name() for kind in ("MmBackward", "BmmBackward", "AddmmBackward", "Convolution"))
        longest[node] = own + max((longest[one] for one in before), default=0)
        todo.pop()
    return max(longest.values())


# %%
def path(layer, n: int = 64, d: int = 8) -> int:
    """Layers until the first word moves the last output; a recurrent layer's steps count as such."""
    if layer is recurrent:
        return chain(recurrent, n, d)
    x = torch.rand(n, d, requires_grad=True)
    y, layers = layer(x), 1
    while torch.autograd.grad(y[-1].square().sum(), x, retain_graph=True)[0][0].abs().sum() == 0:
        y, layers = layer(y), layers + 1
    return layers


# %%
def milliseconds(layer, n: int = 1024, d: int = 64) -> float:
    x, times = torch.randn(n, d), []
    with torch.no_grad():
        for _ in range(5):
            begin = time.perf_counter()
            layer(x)
            times.append(1000 * (time.perf_counter() - begin))
    return min(times)


# %%
formulas = {
    self_attention: ("self-attention", "n²·d", "1", "1"),
    recurrent: ("recurrent", "n·d²", "n", "n"),
    convolution: ("convolutional", "k·n·d²", "1", "n/k"),
    restricted: ("restricted self-attention", "r·n·d", "1", "n/r"),
}
rows = []
for layer, (name, cost, steps, longest) in formulas.items():
    count = multiplications(layer, 256, 64)
    by_n, by_d = multiplications(layer, 512, 64) / count, multiplications(layer, 256, 128) / count
    rows.append([name, cost, f"{count / 1e6:.1f} M, ×{by_n:.0f}, ×{by_d:.0f}", steps, str(chain(layer)),
                 longest, str(path(layer)), f"{milliseconds(layer):.1f}"])  # fmt: skip
table(["layer", "cost", "counted; 2n; 2d", "steps", "n = 64", "path", "n = 64", "ms, n = 1024"], rows)
assert [row[2].split(", ", 1)[1] for row in rows] == ["×4, ×2", "×2, ×4", "×2, ×4", "×2, ×2"]
assert [row[6] for row in rows] == ["1", "64", "32", "5"]
assert multiplications(convolution, 256, 64) == 1.5 * multiplications(recurrent, 256, 64)

# %% [markdown] lang="en"
# The formulas hold, up to constants that they leave out on purpose. A few things that the table says to whoever reads it twice:
#
# - Attention is *cheaper* than a recurrent layer as long as a text is shorter than its vectors are wide, and dearer from there on. (Its
#   projections to queries, keys, values and back are left out of the n²·d, here as in most tables: they cost 4·n·d² more.)
# - What makes recurrent layers slow is hardly the number of multiplications. The convolution has half as many again, and takes a fraction of the
#   time: its steps do not wait for each other. (Times are of this machine, on the CPU.)
# - The path of a convolution is told as n/k in the table; with k = 3 a layer moves k − 1 words on, so it is (n − 1)/(k − 1), rounded up. With
#   holes in the kernel (dilation) it becomes log n.
# - A short path is a possibility, not yet a use. Whether a model takes it, only a trained one can tell.
#
# Next: [the mechanism](02_mechanism.py) itself.

# %% [markdown] lang="ko"
# 일부러 빼 둔 상수를 제외하면 공식이 그대로 들어맞습니다. 표를 한 번 더 읽으면 몇 가지가 더 보입니다.
#
# - 글의 길이가 벡터의 폭보다 짧은 동안에는 어텐션이 순환 층보다 *싸고*, 그보다 길어지면 비싸집니다. (쿼리, 키, 값으로 바꾸고 되돌리는 선형 변환은
#   대부분의 표처럼 여기서도 n²·d에 넣지 않았습니다. 넣으면 4·n·d²이 더 듭니다.)
# - 순환 층이 느린 까닭은 곱셈이 많아서가 아닙니다. 합성곱은 곱셈이 절반이나 더 많은데도 훨씬 짧은 시간에 끝납니다. 단계가 서로를 기다리지 않기 때문입니다.
#   (시간은 이 컴퓨터의 CPU에서 잰 것입니다.)
# - 합성곱의 경로는 표에 n/k로 적지만, k = 3이면 한 층에 k − 1 단어씩 나아가므로 정확히는 (n − 1)/(k − 1)을 올림한 값입니다.
#   커널에 구멍을 두면(dilation) log n이 됩니다.
# - 경로가 짧다는 것은 가능성일 뿐 아직 쓰임은 아닙니다. 모델이 그 길을 실제로 쓰는지는 학습된 모델만이 말해 줄 수 있습니다.
#
# 다음 강의는 [메커니즘](02_mechanism.py) 그 자체입니다.
