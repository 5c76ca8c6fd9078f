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
# # Captions: words and places
#
# So far the keys were words, letters, or tokens that stand for nothing. Here they are places of a picture. A model says what it sees, one word at a time, and
# looks at the picture before each word. The pictures are scenes of coloured shapes that are drawn on the spot, so it is known
# what every word is about, and one can count how often the model looks there, and what went wrong when it says the wrong thing.
#
# Two captioners are trained, one with soft and one with hard attention: about three minutes on two cores the first time; they are
# kept in `runs/lessons`.

# %% [markdown] lang="ko"
# # 그림 설명: 단어와 자리
#
# 지금까지의 강의에서 키는 단어이거나 글자이거나, 아무 뜻도 없이 출발한 토큰이었습니다. 이번에는 그림 속의 자리가 키입니다. 모델은 본 것을 한 단어씩 말하고, 단어마다 먼저 그림을 봅니다.
# 그림은 그 자리에서 그려 내는, 색색의 도형이 놓인 장면입니다. 그래서 단어마다 무엇에 관한 것인지 알 수 있고, 모델이 거기를 얼마나 자주 보는지,
# 틀린 말을 할 때 무엇이 잘못되었는지 셀 수 있습니다.
#
# 부드러운(soft) 어텐션과 딱딱한(hard) 어텐션을 쓰는 모델을 하나씩, 모두 둘을 학습합니다. 처음에는 코어 두 개로 3분쯤 걸리고, 그다음부터는 `runs/lessons`에 보관된 것을 씁니다.

# %%
from collections import Counter
from dataclasses import replace

import numpy as np
import torch
from _shown import BLUES, COLOURS, GREY, at, figure, show, table, trained
from matplotlib.patches import Rectangle

import jumok
from jumok.batches.images import CaptionBatch
from jumok.batches.tokens import BOS, EOS, IGNORE
from jumok.data.builtin.scenes import IMAGE_SIZE
from jumok.look.viewer.view_writer import save_view
from jumok.metrics.pointing_game import score_pointing

torch.manual_seed(0)

# %%
SMALL = ["captioner", "train.max_steps=700", "train.validate_every=700", "data.builtin_size=7000",
         "data.held_out_size=1000", "decode.length_penalty=0"]  # fmt: skip
soft, hard = trained(caption_soft=SMALL, caption_hard=[*SMALL, "model.attention=hard"])
test = soft.load_split("test").examples
print(len(test), "scenes that neither has seen, such as")
for example in test[:3]:
    print(" ", example.captions[0])

# %% [markdown] lang="en"
# ## A picture is a set of places
#
# A small convolutional net makes a vector of each patch of the picture. The patches form a grid of 12 × 12, and so a
# picture becomes what a sentence was before: a row of keys, which are the values too.

# %% [markdown] lang="ko"
# ## 그림은 자리들의 모임이다
#
# 작은 합성곱 신경망(convolutional net)이 그림의 조각마다 벡터를 하나씩 만듭니다. 조각은 12 × 12 격자를 이룹니다. 이렇게 그림은 앞에서 문장이 그랬듯이
# 한 줄로 늘어선 키가 되고, 그 키들이 밸류이기도 합니다.


# %%
def pixels_of(example) -> np.ndarray:
    return example.image.decode()


def places_of(reader, examples) -> torch.Tensor:
    """What the encoder makes of pictures: (pictures, places, features)."""
    return reader.extract_features([reader.preprocess_image(pixels_of(one)) for one in examples])


# %%
scene = next(  # the first with three shapes (and None) on a light ground
    one for one in test if len(set(one.boxes)) == 4 and np.median(pixels_of(one)) > 150
)
shapes = list(dict.fromkeys(box for box in scene.boxes if box))
places = places_of(soft, [scene])
grid = soft.grid_size
cell = IMAGE_SIZE // grid[0]
print("pixels", pixels_of(scene).shape, "→ places", tuple(places.shape), "on a grid of", grid)

# %%
fig, panels = figure(7, 2.1, 1, 4)
for axes in panels:
    axes.imshow(pixels_of(scene), extent=(0, IMAGE_SIZE, IMAGE_SIZE, 0))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
for line in range(0, IMAGE_SIZE + 1, cell):
    panels[0].plot([0, IMAGE_SIZE], [line, line], color="white", lw=0.6)
    panels[0].plot([line, line], [0, IMAGE_SIZE], color="white", lw=0.6)
panels[0].set_title("144 places", size=10)
centred = places[0] - places[0].mean(0)
for axes, (left, top, right, bottom) in zip(panels[1:], shapes, strict=True):
    row, column = (top + bottom) // 2 // cell, (left + right) // 2 // cell
    alike = torch.cosine_similarity(centred, centred[row * grid[1] + column], dim=-1).clamp(min=0)
    axes.imshow(alike.reshape(grid), extent=(0, IMAGE_SIZE, IMAGE_SIZE, 0), cmap=BLUES, vmin=0, vmax=1, alpha=0.85)
    axes.add_patch(Rectangle((column * cell, row * cell), cell, cell, fill=False, edgecolor=COLOURS[1], lw=2))
    axes.set_title("like the one marked", size=10)
show(fig, "places")

# %% [markdown] lang="en"
# Places on one shape are like each other and unlike the others: that is what a query will be able to ask for.
#
# One thing has to be said at once, for it decides what all the maps below are worth. A deep net mixes its places: each comes to know what
# is around it, and then a model may read a shape's colour from a place beside it. The net used here was built against that. Its wide view is
# blind to hue, so that a colour can only be had from a place that has it. With another encoder
# the same captions may come with maps that point much less well.
#
# ## One step, with all its shapes
#
# The captioner is an LSTM. Its state before a word is the query; what it finds, times a gate β, goes into the LSTM
# together with the word said last. Here is the step in which the name of the first shape is said, by hand:

# %% [markdown] lang="ko"
# 같은 도형 위의 자리들은 서로 비슷하고 다른 자리들과는 다릅니다. 쿼리는 바로 이 차이를 보고 물을 수 있습니다.
#
# 아래에 나올 지도들이 얼마나 믿을 만한지가 여기에 달렸으므로 먼저 밝혀 둡니다. 깊은 신경망은 자리들을 섞습니다. 자리마다 주변에 무엇이 있는지 알게 되고,
# 그러면 도형 옆의 자리에서도 도형의 색을 읽을 수 있습니다. 여기서 쓰는 신경망은 그렇게 되지 않도록 만들었습니다. 넓게 보는 쪽은 색조를 보지 못하므로,
# 색은 그 색이 있는 자리에서만 알 수 있습니다. 다른 인코더를 쓰면 똑같은 설명을 하면서도 지도는 훨씬 덜 정확하게 가리킬 수 있습니다.
#
# ## 한 단계, 모든 모양과 함께
#
# 설명을 말하는 쪽은 LSTM입니다. 단어를 말하기 전의 상태가 쿼리이고, 찾아낸 것에 게이트 β를 곱해 직전 단어와 함께 LSTM에 넣습니다.
# 첫 번째 도형의 이름을 말하는 단계를 손으로 따라가 봅시다.

# %%
captioner = soft.model.captioner
words = scene.captions[0].split()
(ids,) = soft.tokenizer.encode([scene.captions[0]])
step = max(n for n, box in enumerate(scene.boxes) if box == shapes[0])  # its kind comes last
print(" ".join(words[:step]), "→", words[step])

with torch.no_grad():
    state = captioner.start(places)
    for word in [BOS, *ids][:step]:
        _, state = captioner.step(state, torch.tensor([word]))
    before = state  # it has yet to read the last word
    logits, _ = captioner.step(before, torch.tensor([ids[step - 1]]))

# %%
with torch.no_grad():
    query = before.hidden[0][:, None]  # h_(t−1)
    weights = jumok.weights(query, before.memory.keys, score=captioner.attention.score)  # softmax(v·tanh(…))
    context = jumok.mix(weights, before.memory.features)  # Σ weight · place
    beta = torch.sigmoid(captioner.gate(query))  # how much that counts
    gated = beta * context  # z_t
    word = captioner.embedding(torch.tensor([[ids[step - 1]]]))  # E y_(t−1)
    both = torch.cat([word, gated], dim=-1)
    new, _ = captioner.cell(both, tuple(part[None] for part in before.hidden))  # h_t
    readout = word + captioner.hidden_projection(new) + captioner.context_projection(gated)
    by_hand = captioner.generator(readout)  # a score for every word
torch.testing.assert_close(by_hand[:, 0], logits)

# %%
steps = [
    ("query", "h_(t−1)", query), ("keys and values", "a_1 … a_144", before.memory.features),
    ("weights", "softmax(v · tanh(W h + U a_i))", weights), ("context", "Σ α_i a_i", context), ("gate", "β = σ(w · h)", beta),
    ("into the LSTM", "[E y_(t−1); β · context]", both), ("state", "h_t", new), ("readout", "E y + L_h h_t + L_z z_t", readout),
    ("generator", "a number for every word", by_hand),
]  # fmt: skip
table(["step", "what", "shape (batch, steps, …)"], [[name, what, str(tuple(x.shape))] for name, what, x in steps])


# %%
def on_picture(axes, pixels, weights, box=None) -> None:
    """A map of places over a picture; the box of what is meant."""
    axes.imshow(pixels, extent=(0, IMAGE_SIZE, IMAGE_SIZE, 0))
    shade = np.asarray(weights, float) / float(weights.max())
    axes.imshow(np.zeros((*shade.shape, 3)), extent=(0, IMAGE_SIZE, IMAGE_SIZE, 0), alpha=0.75 * (1 - shade))
    if box:
        left, top, right, bottom = box
        frame = {"fill": False, "edgecolor": "white", "lw": 1.6, "ls": "--"}
        axes.add_patch(Rectangle((left, top), right - left, bottom - top, **frame))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


# %%
fig, (left, middle, right) = figure(7, 2.3, 1, 3, width_ratios=[1, 1, 1.1])
on_picture(left, pixels_of(scene), torch.ones(1, 1))
left.set_title(" ".join(words[:step]) + " …", size=9.5)
on_picture(middle, pixels_of(scene), weights[0, 0].reshape(grid), shapes[0])
middle.set_title(f"where it looks; β = {beta.item():.2f}", size=9.5)
likely, which = by_hand[0, 0].softmax(-1).topk(5)
right.barh(range(5), likely.tolist(), color=COLOURS[1])
right.set(ylim=(4.6, -0.6), xlim=(0, 1))
right.set_title("next word", size=9.5)
right.set_yticks(range(5), [piece.strip("▁") for piece in soft.tokenizer.ids_to_tokens(which.tolist())])
right.tick_params(length=0)
show(fig, "one_step")

# %% [markdown] lang="en"
# ## The overlay, word by word
#
# The best known pictures of attention are of this kind: one picture for each word, lit where the model looked before it said it.
# In a terminal, `jumok look RUN picture.png` makes it.

# %% [markdown] lang="ko"
# ## 단어마다 겹쳐 보기
#
# 어텐션을 보여 주는 가장 유명한 그림이 바로 이런 것입니다. 단어마다 그림을 한 장씩 놓고, 그 단어를 말하기 전에 본 곳을 밝힙니다.
# 터미널에서는 `jumok look RUN picture.png`로 만들 수 있습니다.


# %%
def strip(reader, example, name: str, caption: str | None = None) -> None:
    """The picture once for each word of what is said of it, or of another caption."""
    [view] = reader.build_image_viewer_data(pixels_of(example), caption)
    show(save_view(view, at(name)))


strip(soft, scene, "overlay")

# %% [markdown] lang="en"
# Every small picture has a scale of its own, so that the brightest place is always there, even if the word was said
# from nowhere in particular; the note below the figure tells how far the scales are apart. A caption also has words that are about no place: *a*, *of*,
# *and*. For these, too, the weights have to add up to 1, and something will be lit. So much for what a single picture can tell.
# Now for counting.
#
# ## The pointing game
#
# For each word that is about a shape, take the place with the most weight. If its middle lies in the shape's box, that is a hit. The model is
# told the true caption meanwhile, so that every word counts.

# %% [markdown] lang="ko"
# 작은 그림마다 눈금이 따로라서, 특별히 본 곳이 없는 단어라도 가장 밝은 자리는 언제나 있습니다. 눈금이 서로 얼마나 다른지는 그림 아래에 적혀 있습니다.
# 설명에는 어느 자리와도 관계없는 단어 *a*, *of*, *and*도 있습니다. 이런 단어도 가중치의 합은 1이어야 하므로 어딘가는 밝아집니다.
# 그림 한 장이 말해 줄 수 있는 것은 여기까지입니다. 이제 세어 봅시다.
#
# ## 가리키기 놀이
#
# 도형에 관한 단어마다 가중치가 가장 큰 자리를 고릅니다. 그 자리의 한가운데가 도형의 상자 안에 있으면 맞힌 것입니다. 이것을 가리키기 놀이(pointing game)라고 합니다.
# 모든 단어를 셀 수 있도록, 모델에는 정답 설명을 알려 주면서 잽니다.

# %%
KINDS = {
    "article": "a an", "size": "small", "colour": "red orange yellow green blue purple",
    "shape": "circle square triangle star heart moon", "relation": "left right above below", "of": "of", "and": "and",
}  # fmt: skip
KIND = {word: kind for kind, some in KINDS.items() for word in some.split()}


def in_parts(examples, size: int = 100):
    return (examples[begin : begin + size] for begin in range(0, len(examples), size))


def looked(reader, examples) -> list[torch.Tensor]:
    """Where it looks for each word of the true captions, (words, rows, columns) of each."""
    maps = []
    for some in in_parts(examples):
        caption_ids = reader.tokenizer.encode([one.captions[0] for one in some])
        maps += reader.compute_attention(places_of(reader, some), caption_ids)
    return maps


def pointed(maps, kind: str | None = None):
    """How often the strongest place is in the box, of all words or of one kind."""
    boxes = [
        [box if kind in (None, KIND[word]) else None
         for word, box in zip(one.captions[0].split(), one.boxes, strict=True)]
        for one in test
    ]  # fmt: skip
    return score_pointing(maps, boxes, (IMAGE_SIZE, IMAGE_SIZE))


# %%
soft_maps = looked(soft, test)
rows = []
for kind in ("size", "colour", "shape", None):
    score = pointed(soft_maps, kind)
    rows.append([kind or "all", str(score.count), f"{score.accuracy:.3f}", f"{score.chance:.3f}"])
table(["words", "how many", "pointed at", "by chance"], rows)
assert pointed(soft_maps).accuracy > 4 * pointed(soft_maps).chance

# %% [markdown] lang="en"
# And the others? For every word, how much of the weight lies on the shape that is being told, on the one that
# comes next, on the others, and on the bare ground:

# %% [markdown] lang="ko"
# 나머지 단어는 어떨까요? 단어의 종류마다 지금 말하고 있는 도형, 다음에 말할 도형, 그 밖의 도형, 그리고 아무것도 없는 바탕에 가중치가 얼마나 놓이는지 보겠습니다.


# %%
def inside(box) -> torch.Tensor:
    """Which places have their middle in a box: (rows, columns)."""
    left, top, right, bottom = box
    y, x = ((torch.arange(n) + 0.5) * IMAGE_SIZE / n for n in grid)
    return ((top <= y) & (y < bottom))[:, None] & ((left <= x) & (x < right))


WHERE = ("this shape", "the next shape", "other shapes", "the ground")
shares: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
for one, maps in zip(test, soft_maps, strict=True):
    order = list(dict.fromkeys(box for box in one.boxes if box))
    now = -1  # the shape that is being told
    for word, box, weights in zip(one.captions[0].split(), one.boxes, maps, strict=True):
        now = order.index(box) if box else now
        on = [weights[inside(box)].sum().item() for box in order]
        this = on[now] if now >= 0 else 0.0
        after = on[now + 1] if now + 1 < len(order) else 0.0
        shares[KIND[word]].append([this, after, sum(on) - this - after, 1 - sum(on)])

# %%
fig, axes = figure(7, 2.9)
left = np.zeros(len(KINDS))
means = np.array([np.mean(shares[kind], axis=0) for kind in KINDS])
for name, part, colour in zip(WHERE, means.T, (COLOURS[0], COLOURS[5], COLOURS[4], "#dfe4ea"), strict=True):
    axes.barh(range(len(KINDS)), part, left=left, color=colour, label=name)
    left += part
axes.set_yticks(
    range(len(KINDS)), [kind if kind in KIND else f"{kind} ({KINDS[kind].split()[0]}, …)" for kind in KINDS]
)
axes.set(ylim=(len(KINDS) - 0.4, -0.6), xlim=(0, 1), xlabel="share of the weight")
axes.tick_params(length=0)
axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.45, 1.0), handlelength=1)
show(fig, "where_words_look")

# %% [markdown] lang="en"
# Words about a shape look at it. The article looks ahead, and it has to: whether it is *a* or *an* depends on whether *orange* comes next.
# Relations are spread over the shapes and the bare ground. A relation is not a
# place. To know that a star is left of a moon one has to have seen both, but the comparison is made in
# the state of the LSTM, and no map shows it.
#
# ## The gate
#
# β says how much of what was found goes on to the LSTM and to the words. If it falls, the model says the word from what it has in mind.
# And what if it may not look at all? `jumok.knock_out` takes attention away, and we count, for each kind, how many words of the true captions
# would still be said right, all words before being given.

# %% [markdown] lang="ko"
# 도형에 관한 단어는 그 도형을 봅니다. 관사는 앞을 내다보는데, 그럴 수밖에 없습니다. *a*인지 *an*인지는 다음에 *orange*가 오는지에 달렸기 때문입니다.
# 관계를 나타내는 단어는 도형들과 빈 바탕에 흩어져 있습니다. 관계는 자리가 아닙니다. 별이 달 왼쪽에 있다는 것을 알려면
# 둘 다 보아야 하지만, 비교는 LSTM의 상태 안에서 이루어지고 어느 지도에도 나타나지 않습니다.
#
# ## 게이트
#
# β는 찾아낸 것을 LSTM과 단어에 얼마나 넘길지 정합니다. β가 낮아지면 모델은 이미 알고 있는 것으로 단어를 말합니다.
# 아예 보지 못하게 하면 어떻게 될까요? `jumok.knock_out`으로 어텐션을 떼어 내고, 앞의 단어를 모두 알려 준 상태에서 정답의 단어를
# 얼마나 맞히는지 종류별로 세어 봅니다.


# %%
@torch.no_grad()
def followed(reader, examples) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Of all words of the true captions: their kinds, β before each, and whether it would be said."""
    captioner, kinds, betas, right = reader.model.captioner, [], [], []
    for some in in_parts(examples):
        texts = [one.captions[0] for one in some]
        batch = CaptionBatch.from_sequences(places_of(reader, some), reader.grid_size, reader.tokenizer.encode(texts))
        state, gates, hits = captioner.start(batch.features), [], []
        for inputs, wanted in zip(batch.target.ids.T, batch.labels.T, strict=True):
            gates.append(torch.sigmoid(captioner.gate(state.hidden[0])).squeeze(-1))
            logits, state = captioner.step(state, inputs)
            hits.append(logits.argmax(-1) == wanted)
        real = (batch.labels != IGNORE) & (batch.labels != EOS)
        betas.append(torch.stack(gates, 1)[real])
        right.append(torch.stack(hits, 1)[real].float())
        kinds += [KIND[word] for text in texts for word in text.split()]
    return kinds, torch.cat(betas), torch.cat(right)


# %%
kinds, betas, right = followed(soft, test)
with jumok.knock_out(captioner, {"attention": [0]}):
    _, _, blind = followed(soft, test)
rows = []
for kind in KINDS:
    those = torch.tensor([one == kind for one in kinds])
    rows.append([kind, f"{betas[those].mean():.2f}", f"{right[those].mean():.3f}", f"{blind[those].mean():.3f}"])
rows.append(["all", f"{betas.mean():.2f}", f"{right.mean():.3f}", f"{blind.mean():.3f}"])
table(["words", "mean β", "said right", "without looking"], rows)
assert blind.mean() < right.mean()

# %% [markdown] lang="en"
# Compare the last two columns. What needs the picture at that moment (a colour, the name of a shape) is lost without looking; what follows from
# the grammar (*of* after *left*) is not. The little that is still right for colours and shapes comes from luck and from the mean of all places,
# which the LSTM starts from.
#
# β is another matter. In the paper it is meant to say when to look. Does it, here? Only if it is clearly lower for *of* and *and* than for
# colours and shapes; read it off the table. A gate is free to stay open: if what is found does no harm, nothing teaches it to close. So a β near 1 does not say that a word
# was taken from the picture. The last column does.
#
# ## Soft and hard
#
# *Soft* attention takes the mean of all places, by their weights. That is smooth: a gradient tells each weight how
# to change. *Hard* attention draws one place, with the weights as probabilities, and takes that one alone. No gradient goes through a draw. So it is taught by its luck
# (REINFORCE): if the caption came out better than usual, the place that was drawn gets more probable. That is noisy, and the
# recipe here lets half of the pictures in each batch be looked at softly, to calm it. After training, hard attention takes the most probable place.

# %% [markdown] lang="ko"
# 마지막 두 열을 비교해 보십시오. 그 순간 그림이 꼭 있어야 하는 것(색, 도형의 이름)은 보지 않으면 잃어버립니다. 문법에서 저절로 따라 나오는 것(*left* 다음의 *of*)은 그렇지 않습니다.
# 색과 도형 가운데 그래도 조금 맞는 것은 우연이거나, LSTM이 처음에 받는 모든 자리의 평균에서 온 것입니다.
#
# β는 이야기가 다릅니다. 논문에서 β는 언제 보아야 하는지를 말해 주는 것으로 소개됩니다. 여기서도 그럴까요? *of*와 *and*에서 색이나 도형보다 뚜렷이 낮아야 그렇다고 할 수 있습니다.
# 표에서 직접 확인해 보십시오. 게이트는 열린 채로 있어도 됩니다. 찾아낸 것이 해롭지 않다면 닫으라고 가르치는 것이 아무것도 없기 때문입니다.
# 그러니 β가 1에 가깝다고 해서 그 단어가 그림에서 왔다고 할 수는 없습니다. 그것을 말해 주는 것은 마지막 열입니다.
#
# ## 부드러운 어텐션과 딱딱한 어텐션
#
# *부드러운* 어텐션은 모든 자리의 가중 평균을 씁니다. 매끄러워서, 기울기가 가중치마다 어떻게 바뀌어야 하는지 알려 줍니다. *딱딱한* 어텐션은 가중치를 확률로 삼아 자리 하나를 뽑고
# 그 자리만 씁니다. 뽑기를 거슬러 흐르는 기울기는 없습니다. 그래서 운에서 배웁니다(REINFORCE). 설명이 평소보다 잘 나왔으면 뽑은 자리의 확률을 높입니다.
# 잡음이 많은 방법이라, 여기서는 이를 누그러뜨리려고 배치마다 그림의 절반은 부드럽게 보게 합니다. 학습이 끝나면 딱딱한 어텐션은 확률이 가장 높은 자리를 봅니다.

# %%
hard_maps = looked(hard, test)
exact = {
    "soft": soft.score_examples(test).metrics["exact_match"],
    "hard": hard.score_examples(test).metrics["exact_match"],
}
at_rest = hard.model.captioner.config
hard.model.captioner.config = replace(at_rest, inference_attention="soft")  # its weights, used as soft ones are
exact["hard, looking softly"] = hard.score_examples(test).metrics["exact_match"]
hard.model.captioner.config = at_rest
rows = []
for name, maps in zip(exact, (soft_maps, hard_maps, hard_maps), strict=True):
    flat = torch.cat([one.flatten(1) for one in maps])
    effective = (-(flat * flat.clamp_min(1e-12).log()).sum(-1)).exp()
    rows.append([name, f"{exact[name]:.3f}", f"{pointed(maps).accuracy:.3f}", f"{effective.median():.1f}"])
table(["attention", "captions without a mistake", "pointed at", "places of weight (median)"], rows)
assert exact["hard"] < exact["soft"]

# %%
fig, panels = figure(7, 3.9, 2, 4)
caption_ids = soft.tokenizer.encode([scene.captions[0]])
about = [n for n, box in enumerate(scene.boxes) if box == shapes[0]][-2:]  # its colour and its kind
about += [n for n, box in enumerate(scene.boxes) if box == shapes[1]][-2:]
for row, reader in enumerate((soft, hard)):
    (maps,) = reader.compute_attention(places_of(reader, [scene]), caption_ids)
    for axes, n in zip(panels[row], about, strict=True):
        on_picture(axes, pixels_of(scene), maps[n], scene.boxes[n])
        axes.set_title(f"{words[n]}: at most {maps[n].max():.2f}", size=9)
    panels[row, 0].set_ylabel(("soft", "hard")[row])
show(fig, "soft_and_hard")

# %% [markdown] lang="en"
# "Places of weight" is exp(entropy), as in the lesson on seq2seq: 1 if all weight is on one place. After equally many steps hard attention is behind: it learns
# from luck, and that takes time. The last row lets the same trained model look at all places by their weights, to tell the two troubles of hard attention apart: not knowing where to look, and having to look at one place only.
# Each is one short training; what more of it would bring, and which is better on photos, this table does not say.
#
# ## Successes and failures
#
# A caption is right if every word is. For each test scene we take what the model says, with how probable it holds it. Then
# the right caption that it was least sure of, and the two wrong ones that it was most sure of, all chosen by code:

# %% [markdown] lang="ko"
# 마지막 열('places of weight')은 시퀀스 투 시퀀스 강의에서처럼 exp(엔트로피)입니다. 한 자리에 가중치가 모두 몰리면 1입니다. 같은 단계만큼 학습하면 딱딱한 어텐션이 뒤처집니다.
# 운에서 배우는 데는 시간이 걸리기 때문입니다. 마지막 줄은 똑같은 모델에 모든 자리를 가중치대로 보게 한 것입니다. 어디를 보아야 할지 모르는 것과 한 자리밖에 볼 수 없는 것,
# 딱딱한 어텐션의 두 가지 어려움을 구별해 줍니다. 모두 짧게 한 번씩 학습한 결과입니다. 더 학습하면 어떻게 되는지, 사진에서는 어느 쪽이 나은지는 이 표로 알 수 없습니다.
#
# ## 성공과 실패
#
# 모든 단어가 맞아야 맞은 설명입니다. 시험 장면마다 모델이 한 말과 그 말에 준 확률을 구합니다. 그런 다음 맞은 설명 가운데 가장 덜 확신한 것과, 틀렸는데도 가장 확신한 설명 두 개를
# 코드로 골라 봅니다.

# %%
described = []
for some in in_parts(test):
    described += soft.caption_images([pixels_of(one) for one in some])
sure = [float(np.exp(one.score)) for one in described]  # the score is the log-probability
wrong = [n for n, one in enumerate(test) if described[n].caption != one.captions[0]]
fine = [n for n in range(len(test)) if n not in wrong]
print(f"{len(wrong)} of {len(test)} captions are wrong")
print(
    f"how sure, in the middle: {np.median([sure[n] for n in fine]):.3f} if right, {np.median([sure[n] for n in wrong]):.3f} if wrong"
)
assert len(wrong) >= 2
hardest = sorted(fine, key=lambda n: sure[n])[0]
worst = sorted(wrong, key=lambda n: -sure[n])[:2]

# %%
print(f"right, and the surest: {described[max(fine, key=lambda n: sure[n])].caption!r}")
print(f"right, and the least sure ({sure[hardest]:.2f}): {described[hardest].caption!r}")
strip(soft, test[hardest], "right")

# %%
for number, n in enumerate(worst, 1):
    print(f"said   {described[n].caption}    ({sure[n]:.2f})")
    print(f"wanted {test[n].captions[0]}")
    strip(soft, test[n], f"wrong_{number}")

# %% [markdown] lang="en"
# ## Where it looked when it erred
#
# Up to the first wrong word, what was said and what was wanted are the same. So the map of that word tells where the model looked when it had the choice.
# There are four cases: the wanted word is about a shape, and the model looked at it and still said something else (it *saw* wrong); or it
# looked at another shape (it *looked* wrong); or at the ground; or the wanted word is about no shape at all (*a*, *an*, *left*, …).

# %% [markdown] lang="ko"
# ## 틀렸을 때 어디를 보았는가
#
# 처음 틀린 단어까지는 한 말과 정답이 같습니다. 그러므로 그 단어의 지도는 갈림길에서 모델이 어디를 보았는지 말해 줍니다. 네 가지 경우가 있습니다.
# 정답 단어가 어떤 도형에 관한 것이고 모델이 그 도형을 보고도 다른 말을 했거나(*잘못 알아본* 경우), 다른 도형을 보았거나(*잘못 찾은* 경우), 바탕을 보았거나,
# 정답 단어가 어느 도형과도 관계가 없는(*a*, *an*, *left* 등) 경우입니다.


# %%
def first_wrong(n: int) -> int:
    """The number of the first word that is not as wanted; the end counts as one."""
    pairs = zip([*described[n].words, "</s>"], [*test[n].captions[0].split(), "</s>"], strict=False)
    return next(number for number, (said, wanted) in enumerate(pairs) if said != wanted)


def looked_at(n: int, number: int) -> tuple[str, tuple | None]:
    """What the strongest place of a word was on, as seen from the word that was wanted, and its box."""
    if number >= len(test[n].boxes) or test[n].boxes[number] is None:
        return "(about no shape)", None
    row, column = divmod(int(soft_maps[n][number].argmax()), grid[1])
    on = [box for box in dict.fromkeys(test[n].boxes) if box and inside(box)[row, column]]
    if test[n].boxes[number] in on:
        return "the shape that was meant", test[n].boxes[number]
    return ("another shape", on[0]) if on else ("the ground", None)


# %%
erred = Counter(looked_at(n, first_wrong(n))[0] for n in wrong)
at_right = Counter(looked_at(n, m)[0] for n in fine for m, box in enumerate(test[n].boxes) if box)
nowhere = erred.pop("(about no shape)", 0)
rows = [
    [name, str(erred[name]), f"{erred[name] / max(erred.total(), 1):.0%}", f"{at_right[name] / at_right.total():.0%}"]
    for name in ("the shape that was meant", "another shape", "the ground")
]  # fmt: skip
table(["looked at", "first mistakes", "share", "all such words of right captions"], rows)
assert erred["another shape"] / erred.total() > 3 * at_right["another shape"] / at_right.total()
print(f"besides, {nowhere} first mistakes are at words about no shape")

# %%
true = Counter()
for n in wrong:
    number = first_wrong(n)
    where, box = looked_at(n, number)
    if where == "another shape":
        there = {word for word, one in zip(test[n].captions[0].split(), test[n].boxes, strict=True) if one == box}
        true[described[n].words[number] in there] += 1
print(f"of {true.total()} that looked at another shape, {true[True]} said what is true of that one")
pairs = Counter((([*test[n].captions[0].split(), "</s>"])[first_wrong(n)], [*described[n].words, "</s>"][first_wrong(n)]) for n in wrong)  # fmt: skip
print("wanted → said:", ", ".join(f"{a} → {b} ({count})" for (a, b), count in pairs.most_common(8)))

# %%
surest = [n for n in sorted(wrong, key=lambda n: -sure[n]) if first_wrong(n) < len(soft_maps[n])][:8]
fig, panels = figure(7, 4.7, 2, 4)
for axes, n in zip(panels.flat, surest, strict=False):
    number = first_wrong(n)
    on_picture(axes, pixels_of(test[n]), soft_maps[n][number], test[n].boxes[number])
    predicted_word = [*described[n].words, "</s>"][number]
    axes.set_title(f"wanted “{test[n].captions[0].split()[number]}”\nsaid “{predicted_word}”", size=9)
    axes.set_xlabel(looked_at(n, number)[0], size=8.5, color=GREY)
for axes in panels.flat[len(surest) :]:
    axes.set_axis_off()
show(fig, "first_mistakes")

# %% [markdown] lang="en"
# What the attention explains, and what it does not:
#
# - **Looked wrong.** In captions that are right, the strongest place is hardly ever on another shape. Among the first mistakes that is far more frequent, and then the word that is said is often
#   true of the shape that was looked at. Here the map explains the mistake: the model said well what it saw, and saw the wrong thing.
# - **Saw wrong.** Where it looked at the right shape and said another kind or colour, the map is innocent. Such a mistake is in what the encoder made of the
#   place, or in how that was read.
# - **Neither.** A wrong *left*, *above* or *a* leaves no trace in the map of that word. A caption may even say that a shape is above itself: the
#   state of the LSTM lost account of what had been told, and attention followed it. Attention shows where a state looked, not why it wanted to.
#
# These are the mistakes of one small model on drawings, trained for a short time. The kinds are of interest; their shares are of this model alone. For
# photos, and for captions in Korean, see [captions](../captions.md).
#
# Next: [sentences and documents](08_documents.py), where one can check whether weights explain what was decided.

# %% [markdown] lang="ko"
# 어텐션이 설명해 주는 것과 그렇지 않은 것을 정리해 봅시다.
#
# - **잘못 찾은 경우.** 맞은 설명에서는 가중치가 가장 큰 자리가 다른 도형 위에 있는 일이 거의 없습니다. 처음 틀린 단어에서는 훨씬 잦고, 이때 모델이 말한 단어는 실제로 본 도형에는 맞는 말일 때가 많습니다.
#   이런 실수는 지도가 설명해 줍니다. 모델은 본 것을 제대로 말했지만 엉뚱한 것을 보았습니다.
# - **잘못 알아본 경우.** 도형을 제대로 찾아 놓고 다른 모양이나 색을 말했다면 지도에는 잘못이 없습니다. 인코더가 그 자리에서 만든 것이 잘못되었거나, 그것을 잘못 읽은 것입니다.
# - **둘 다 아닌 경우.** *left*, *above*, *a*를 틀리는 실수는 그 단어의 지도에 흔적을 남기지 않습니다. 어떤 도형이 자기 자신보다 위에 있다고 말하기까지 합니다.
#   무엇을 이미 말했는지를 LSTM의 상태가 놓쳤고 어텐션은 그 상태를 따라갔을 뿐입니다. 어텐션은 상태가 어디를 보았는지를 보여 줄 뿐, 왜 거기를 보려 했는지는 보여 주지 않습니다.
#
# 잠깐 학습한 작은 모델 하나가 단순한 그림에서 저지른 실수들입니다. 어떤 종류가 있는지는 눈여겨볼 만하지만, 비율은 이 모델에만 해당합니다. 사진에 대한 설명과 한국어 설명은
# [설명 달기](../captions.md) 문서에 있습니다.
#
# 다음 강의는 가중치가 판단을 설명해 주는지 확인해 볼 수 있는 [문장과 문서](08_documents.py)입니다.
