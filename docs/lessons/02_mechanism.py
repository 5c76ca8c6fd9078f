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
# # The mechanism
#
# Attention is one line, `softmax(QKᵀ/√d) V`. This lesson takes the line apart:
# what the three letters are, what each operation does to real numbers, why there is a root in it,
# and where the query comes from. Every number and figure below is made by the code above it.
#
# Runs in a few seconds.

# %% [markdown] lang="ko"
# # 메커니즘
#
# 어텐션(attention)은 `softmax(QKᵀ/√d) V`, 이 한 줄이 전부입니다. 이번 강의에서는 이 한 줄을 하나씩 뜯어봅니다.
# 세 글자가 각각 무엇인지, 연산마다 실제 숫자가 어떻게 바뀌는지, 제곱근은 왜 들어 있는지,
# 그리고 쿼리는 어디에서 오는지 살펴봅니다. 아래의 숫자와 그림은 모두 바로 위의 코드가 만든 것입니다.
#
# 실행에는 몇 초면 충분합니다.

# %%
import torch
from _shown import BLUES, COLOURS, GREY, figure, heat, show, table

import jumok

torch.manual_seed(0)
torch.set_printoptions(precision=3, sci_mode=False)

# %% [markdown] lang="en"
# ## A dictionary that can be learned
#
# On your desk lie a note and four folders. Each folder has a *label* on its back and *something inside*.
# You compare the note with the labels, choose a folder, and take out what is in it. In Python that is a dictionary:
# the note is the **query**, the labels are the **keys**, what is inside are the **values**.

# %% [markdown] lang="ko"
# ## 학습할 수 있는 사전
#
# 책상 위에 쪽지 한 장과 폴더 네 개가 있다고 합시다. 폴더마다 등에는 *라벨*이 붙어 있고 안에는 *내용물*이 들어 있습니다.
# 쪽지를 라벨들과 견주어 보고, 맞는 폴더를 골라, 안에 든 것을 꺼냅니다. 파이썬으로 말하면 딕셔너리입니다.
# 쪽지가 **쿼리(query)**, 라벨이 **키(key)**, 내용물이 **값(value)** 입니다.

# %%
folders = {"travel": 10.0, "recipes": 20.0, "bills": 30.0, "sports": 40.0}

print(folders["bills"])
try:
    print(folders["train fare"])
except KeyError as error:
    print("KeyError:", error)

# %% [markdown] lang="en"
# The dictionary fails at the first note that is not a label, letter by letter. And there is nothing to learn from:
# whether a key is found is yes or no, so no small change of the note makes the answer a little better.
#
# Now let notes and labels be vectors. Here a label has three numbers that we make up ourselves: how much it is about
# moving, eating and paying. A note about a train fare is about moving and about paying.

# %% [markdown] lang="ko"
# 딕셔너리는 라벨과 글자 하나까지 똑같은 쪽지가 아니면 바로 실패합니다. 배울 것도 없습니다.
# 키가 있느냐 없느냐는 예 아니면 아니요이므로, 쪽지를 조금 바꾼다고 답이 조금 나아지는 일은 없기 때문입니다.
#
# 그래서 쪽지와 라벨을 벡터로 바꿉니다. 여기서는 라벨마다 숫자 세 개를 직접 정했습니다.
# 이동, 음식, 돈과 각각 얼마나 관련이 있는지를 나타냅니다. 기차 요금을 적은 쪽지는 이동과 돈 둘 다와 관련이 있습니다.

# %%
#                       moving eating paying
keys = torch.tensor([[   3.0,   0.5,   1.0],   # travel
                     [   0.0,   3.0,   0.5],   # recipes
                     [   0.5,   0.5,   3.0],   # bills
                     [   2.0,   0.0,   0.0]])  # sports  # fmt: skip
values = torch.tensor([[10.0], [20.0], [30.0], [40.0]])
note = torch.tensor([[1.0, 0.0, 1.0]], requires_grad=True)  # a train fare

weights = jumok.weights(note, keys, score=jumok.scores.Dot())
answer = jumok.mix(weights, values)
for label, weight in zip(folders, weights[0].tolist(), strict=True):
    print(f"{label:>8}  {weight:.3f}")
print("answer:", round(answer.item(), 2))
answer.sum().backward()
print("how the answer changes with the note:", note.grad)
assert note.grad.abs().min() > 0

# %% [markdown] lang="en"
# Every folder is opened a little, the fitting ones more: the answer is a mean of what is inside, weighted by how well
# the labels fit. And it has a gradient: the last line says how the answer would change if the note were a bit more about
# moving, eating or paying. That is all that "differentiable dictionary" means, and it is why labels and notes can be *learned*.

# %% [markdown] lang="ko"
# 모든 폴더를 조금씩 열되, 잘 맞는 폴더를 더 많이 엽니다. 답은 내용물의 평균인데, 라벨이 쪽지와 맞는 정도를 가중치로 둔 평균입니다.
# 게다가 이 답은 미분할 수 있습니다. 마지막 줄은 쪽지가 이동, 음식, 돈과 조금 더 관련이 있었다면 답이 어떻게 달라졌을지를 말해 줍니다.
# "미분 가능한 사전"이란 바로 이 뜻이고, 그래서 라벨과 쪽지를 *학습*할 수 있습니다.

# %%
fig, axes = figure(7, 2.7)
axes.set_axis_off()
axes.set(xlim=(0, 10), ylim=(0, 4.6))
box = {"boxstyle": "round,pad=0.45", "facecolor": "#fff6dc", "edgecolor": "#e6c76a"}
axes.text(0.9, 2, "train fare\n(1, 0, 1)", ha="center", va="center", bbox=box)
for x, title in ((0.9, "query"), (4.9, "keys"), (7.6, "values"), (9.5, "answer")):
    axes.text(x, 4.35, title, ha="center", color=GREY)
label_of = [f"{label}  ({', '.join(f'{x:g}' for x in key)})" for label, key in zip(folders, keys.tolist(), strict=True)]
line = {"color": COLOURS[0], "alpha": 0.6, "solid_capstyle": "butt"}
middle = {"ha": "center", "va": "center"}
for n, weight in enumerate(weights[0].tolist()):
    y = 3.5 - n
    box = {"boxstyle": "round,pad=0.4", "facecolor": BLUES(0.62 * weight), "edgecolor": GREY}
    axes.plot([1.75, 3.6], [2, y], lw=0.5 + 9 * weight, **line)
    axes.plot([8.0, 9.15], [y, 2], lw=0.5 + 9 * weight, **line)
    axes.text(3.25, 2 + 0.81 * (y - 2) + 0.22, f"{weight:.2f}", ha="right", size=9)
    axes.text(4.9, y, label_of[n], bbox=box, **middle)
    axes.text(7.6, y, f"{values[n].item():g}", bbox=box, **middle)
axes.text(9.5, 2, f"{answer.item():.1f}", ha="center", va="center", size=13)
show(fig, "dictionary")

# %% [markdown] lang="en"
# If the scores are multiplied by a growing number, the soft dictionary turns into the hard one: all weight goes to the best
# label. And if they are multiplied by 0, the note does not matter at all, and the answer is the plain mean.

# %% [markdown] lang="ko"
# 점수에 점점 큰 수를 곱하면 부드러운 사전은 딱딱한 사전이 됩니다. 가장 잘 맞는 라벨이 가중치를 모두 가져갑니다.
# 반대로 0을 곱하면 쪽지는 아무 의미가 없어지고, 답은 그냥 평균이 됩니다.

# %%
rows = []
for scale in (0.0, 0.3, 1.0, 3.0, 10.0):
    w = jumok.weights(note.detach(), keys, score=jumok.scores.Dot(), scale=scale)
    rows.append([f"{scale:g}", *(f"{x:.3f}" for x in w[0].tolist()), f"{jumok.mix(w, values).item():.2f}"])
table(["scores ×", *folders, "answer"], rows)

# %% [markdown] lang="en"
# ## softmax(QKᵀ/√d) V, step by step
#
# A sentence asks questions of itself: each of its words has a query, a key and a value, here made of the word's vector by
# three matrices. Three words, vectors of width 4, all numbers printed:

# %% [markdown] lang="ko"
# ## softmax(QKᵀ/√d) V, 한 단계씩
#
# 문장이 스스로에게 질문을 던집니다. 단어마다 쿼리와 키와 값이 하나씩 있는데, 여기서는 단어 벡터에 행렬 세 개를 곱해서 만듭니다.
# 단어는 셋, 벡터의 폭은 4이고, 숫자를 모두 출력합니다.

# %%
words = ["나는", "친구를", "만났다"]
d = 4
x = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.0, 2.0, 0.0, 2.0], [1.0, 1.0, 1.0, 1.0]])  # (3 words, 4)
generator = torch.Generator().manual_seed(140)
W_q, W_k, W_v = (torch.randint(-1, 2, (d, d), generator=generator).float() for _ in range(3))
Q, K, V = x @ W_q, x @ W_k, x @ W_v
print("Q =", Q, "K =", K, "V =", V, sep="\n")

# %% [markdown] lang="en"
# **1. Scores.** Each query times each key. Row *i*, column *j*: how well the question of word *i* fits the label of word *j*.
#
# **2. Scale.** Divided by √d; the next section shows why.

# %% [markdown] lang="ko"
# **1. 점수.** 쿼리마다 모든 키와 내적합니다. *i*행 *j*열은 단어 *i*의 질문이 단어 *j*의 라벨에 얼마나 맞는지를 나타냅니다.
#
# **2. 스케일.** √d로 나눕니다. 이유는 다음 절에서 봅니다.

# %%
S = Q @ K.T
scaled = S / d**0.5
print("Q Kᵀ =", S, "Q Kᵀ / √d =", scaled, sep="\n")
torch.testing.assert_close(scaled, jumok.scores.ScaledDot()(Q, K))

# %% [markdown] lang="en"
# **3. Softmax**, along each row: exponentials, divided by their sum. Now they are weights: none is negative, a row adds up to 1.
#
# **4. Mix.** Each row of the result is the mean of the rows of V, weighted by a row of weights.

# %% [markdown] lang="ko"
# **3. 소프트맥스(softmax)** 를 행마다 적용합니다. 지수를 취하고 그 합으로 나눕니다. 이제 가중치가 되었습니다. 음수가 없고, 한 행을 더하면 1입니다.
#
# **4. 섞기.** 결과의 각 행은 V의 행들을 가중치 한 행으로 평균한 것입니다.

# %%
exponentials = scaled.exp()
W = exponentials / exponentials.sum(-1, keepdim=True)
Y = W @ V
print("weights =", W, "result =", Y, sep="\n")
torch.testing.assert_close(W, jumok.weights(Q, K))
torch.testing.assert_close(Y, jumok.attend(Q, K, V))
print("the same as jumok.weights(Q, K) and jumok.attend(Q, K, V)")

# %%
fig, grid = figure(7, 4.3, 2, 3)
numbers = ["1", "2", "3", "4"]
top = max(m.abs().max().item() for m in (Q, K, V))
heat(grid[0, 0], Q, words, numbers, top=top, signed=True, numbers=True, title="Q")
heat(grid[0, 1], K, words, numbers, top=top, signed=True, numbers=True, title="K")
heat(grid[0, 2], V, words, numbers, top=top, signed=True, numbers=True, title="V")
heat(grid[1, 0], scaled, words, words, top=scaled.abs().max().item(), signed=True, numbers=True, title="Q Kᵀ / √d")
heat(grid[1, 1], W, words, words, numbers=True, title="weights")
heat(grid[1, 2], Y, words, numbers, top=top, signed=True, numbers=True, title="weights · V")
show(fig, "steps")

# %% [markdown] lang="en"
# A slip that one meets often: V is *not* the weights. The weights come of Q and K alone; V is what they are used on.
# So one may change every value and the map stays the same:

# %% [markdown] lang="ko"
# 자주 보이는 실수 하나: V는 가중치가 *아닙니다*. 가중치는 Q와 K만으로 정해지고, V는 그 가중치를 적용할 대상입니다.
# 그래서 값을 전부 바꾸어도 어텐션 지도는 그대로입니다.

# %%
other = torch.randn_like(V)
assert not torch.allclose(jumok.attend(Q, K, V), jumok.attend(Q, K, other))
torch.testing.assert_close(jumok.attend(Q, K, other), jumok.mix(jumok.weights(Q, K), other))

# %% [markdown] lang="en"
# ## What the √d does
#
# If the numbers in q and k are independent with variance 1, their dot product is a sum of d products, and has variance d:
# scores grow like √d. Softmax turns large differences into a hard choice. Let us measure: random queries, 32 random keys,
# widths from 1 to 4096. We look at the *entropy* of the weights (5 bits: all 32 keys alike; 0 bits: one key has everything)
# and at how much the weights still move when a score moves.

# %% [markdown] lang="ko"
# ## √d가 하는 일
#
# q와 k의 성분이 서로 독립이고 분산이 1이면, 내적은 곱 d개의 합이므로 분산이 d입니다. 즉 점수는 √d에 비례해서 커집니다.
# 소프트맥스는 큰 차이를 만나면 하나만 고르는 딱딱한 선택이 됩니다. 직접 재어 봅시다. 쿼리와 키 32개를 무작위로 만들고 폭을 1에서 4096까지 바꿉니다.
# 가중치의 *엔트로피(entropy)* (5비트면 키 32개가 똑같고, 0비트면 키 하나가 전부 가져감)와,
# 점수가 움직일 때 가중치가 얼마나 움직이는지를 봅니다.

# %%
widths = [4**n for n in range(7)]
entropy: dict[str, list[float]] = {"with √d": [], "without": []}
moves: dict[str, list[float]] = {"with √d": [], "without": []}
spread = []
for width in widths:
    q, k = torch.randn(512, 1, width), torch.randn(512, 32, width)
    spread.append((q @ k.mT).std().item())
    for name, score in (("with √d", jumok.scores.ScaledDot()), ("without", jumok.scores.Dot())):
        w = jumok.weights(q, k, score=score)
        entropy[name].append(-(w * w.clamp_min(1e-30).log2()).sum(-1).mean().item())
        # The softmax's derivative of weight i by its own score is w (1 − w); 0 means: nothing is learned.
        moves[name].append((w * (1 - w)).sum(-1).mean().item())

# %%
fig, (left, right) = figure(7, 2.9, 1, 2)
for name, colour, mark in (("with √d", COLOURS[0], "o"), ("without", COLOURS[1], "s")):
    left.plot(widths, entropy[name], color=colour, marker=mark, label=name)
    right.plot(widths, moves[name], color=colour, marker=mark, label=name)
left.set(xscale="log", ylim=(0, 5.2), xlabel="width d", title="entropy of the weights, bits (32 keys)")
right.set(xscale="log", ylim=(0, 1.05), xlabel="width d", title="Σ ∂weight / ∂its score")
left.axhline(5, color=GREY, lw=0.8, ls=":")
left.legend(loc="lower left")
for axes in (left, right):
    axes.set_xticks(widths, [f"{w:,}" for w in widths], size=8)
    axes.minorticks_off()
show(fig, "root_of_d")

# %%
columns = zip(widths, spread, entropy["without"], entropy["with √d"], strict=True)
table(
    ["d", "√d", "spread of q·k", "entropy without", "with √d"],
    [[f"{d:,}", f"{d**0.5:.1f}", f"{s:.1f}", f"{a:.2f}", f"{b:.2f}"] for d, s, a, b in columns],
)
assert entropy["without"][-1] < 0.5 < 4 < entropy["with √d"][-1]
assert moves["without"][-1] < 0.25 * moves["with √d"][-1]

# %% [markdown] lang="en"
# With the root, the curve is flat: how sharp attention is does not depend on how wide the vectors happen to be.
# Without it, wide vectors begin as a hard choice of a random key, the softmax hardly moves, and next to nothing gets back to
# the queries and keys. (A trained model can be as sharp as it likes: it makes its queries longer. The root only
# decides where it *begins*.)

# %% [markdown] lang="ko"
# 제곱근이 있으면 곡선이 평평합니다. 어텐션이 얼마나 날카로운지가 벡터의 폭에 좌우되지 않습니다.
# 제곱근이 없으면 폭이 넓은 벡터는 처음부터 아무 키나 하나를 딱 골라 버리고, 소프트맥스가 거의 움직이지 않아
# 쿼리와 키로 돌아가는 기울기(gradient)가 거의 없습니다. (학습된 모델은 쿼리를 길게 만들어 얼마든지 날카로워질 수 있습니다.
# 제곱근은 *출발점*을 정할 뿐입니다.)

# %% [markdown] lang="en"
# ## A query made by a linear transform, before and after training
#
# We made up the labels above. In a model nobody does: a query is `W x`, and W is learned. To watch that, take eight English
# words as notes and eight Korean words as folder labels, each a random vector: the two languages have nothing to do
# with each other. What is in the folders is random, too. The only thing we teach is *what should come out*;
# nobody says where to look.

# %% [markdown] lang="ko"
# ## 선형 변환으로 만든 쿼리, 학습 전과 후
#
# 위에서는 라벨을 우리가 직접 정했습니다. 실제 모델에서는 아무도 정해 주지 않습니다. 쿼리는 `W x`이고, W는 학습으로 얻습니다.
# 이 과정을 지켜보기 위해 영어 단어 여덟 개를 쪽지로, 한국어 단어 여덟 개를 폴더 라벨로 두고 모두 무작위 벡터로 만듭니다.
# 두 언어의 벡터는 서로 아무 관계가 없습니다. 폴더 안의 내용물도 무작위입니다. 우리가 가르치는 것은 *무엇이 나와야 하는가*뿐이고,
# 어디를 보라고는 말하지 않습니다.

# %%
notes = ["dog", "cat", "water", "book", "house", "friend", "train", "flower"]
labels = ["개", "고양이", "물", "책", "집", "친구", "기차", "꽃"]
width = 16
english, korean = torch.randn(8, width), torch.randn(8, width)
inside = torch.randn(8, 4)
ask = torch.nn.Linear(width, width, bias=False)  # the W of q = W x: all that is learned


def look(noise: float) -> torch.Tensor:
    """What comes out of the folders for each note, written a little differently every time."""
    query = ask(english + noise * torch.randn_like(english))
    return jumok.attend(query, korean, inside)


# %%
before = jumok.weights(ask(english), korean).detach()
optimizer = torch.optim.Adam(ask.parameters(), lr=0.02)
losses = []
for _ in range(400):
    loss = (look(noise=0.3) - inside).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
after = jumok.weights(ask(english), korean).detach()
print(f"loss {losses[0]:.3f} → {losses[-1]:.3f}")
print(f"weight on the right folder {before.diag().mean():.2f} → {after.diag().mean():.2f}")
assert after.diag().min() > 0.8

# %%
fig, (left, middle, right) = figure(7, 2.9, 1, 3, width_ratios=[5, 5, 4])
heat(left, before, notes, labels, lean=True)
heat(middle, after, ["" for _ in notes], labels, lean=True)
left.set_xlabel("before training")
middle.set_xlabel("after")
right.plot(losses, color=COLOURS[0], lw=1.2)
right.set(xlabel="step", title="loss", ylim=(0, None), box_aspect=1)
show(fig, "learned_query")

# %% [markdown] lang="en"
# The same notes, the same labels; only the matrix between them changed. The way from "the answer was wrong" to "look
# elsewhere" is the softmax's gradient, and that is why one needs a *soft* dictionary. Does the query look like its label now?

# %% [markdown] lang="ko"
# 쪽지도 라벨도 그대로이고, 그 사이의 행렬만 바뀌었습니다. "답이 틀렸다"에서 "다른 곳을 보라"로 이어지는 길이 바로 소프트맥스의 기울기이며,
# 그래서 *부드러운* 사전이 필요합니다. 그렇다면 이제 쿼리는 자기 라벨과 닮았을까요?

# %%
with torch.no_grad():
    alike = torch.cosine_similarity(ask(english)[:, None], korean[None], dim=-1)
print(f"cosine of a query with its own label: {alike.diag().mean():.2f}")
print(f"with the others: {alike[~torch.eye(8, dtype=torch.bool)].mean():.2f}")
assert 0.3 < alike.diag().mean() < 0.95

# %% [markdown] lang="en"
# Only in part. A query need not *be* its label; it need only fit this one better than the others, and training stops asking for
# more once the answers are right. So be careful with the phrase "the query finds what is similar to it": similar it is in the
# eyes of the learned matrices, and in no other sense.
#
# Next: [masks](03_masks.py), which say where attention may not look at all.

# %% [markdown] lang="ko"
# 일부만 닮았습니다. 쿼리가 라벨과 *같을* 필요는 없습니다. 다른 라벨보다 그 라벨에 더 잘 맞기만 하면 되고, 답이 맞기 시작하면 학습은 더 요구하지 않습니다.
# 그러니 "쿼리는 자신과 비슷한 것을 찾는다"는 말은 조심해서 써야 합니다. 학습된 행렬의 눈으로 볼 때 비슷한 것이지, 다른 뜻은 없습니다.
#
# 다음 강의는 아예 보아서는 안 되는 곳을 정하는 [마스크](03_masks.py)입니다.
