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
# # Style tokens: when the query is a sound
#
# A model that speaks has two questions: *what* comes next, and *how* is it to be said? Tacotron answers the first by looking at the letters.
# Global style tokens answer the second with the same mechanism turned around: the query is a whole recording, and the keys are
# a handful of vectors that stand for nothing at first. This lesson trains such a voice, watches its attention find the diagonal, takes one
# step apart, and measures what turning a token does to pitch and duration.
#
# The voices are built in: a small synthesiser says numbers in five styles. Two voices are trained, and four more for a few steps only: about four minutes
# on two quiet cores the first time; they are kept in `runs/lessons`. (`pip install "jumok[speech]"` brings what sound needs.)

# %% [markdown] lang="ko"
# # 스타일 토큰: 소리가 쿼리일 때
#
# 말하는 모델은 두 가지를 알아야 합니다. 다음에 *무엇을* 말할 것인가, 그리고 *어떻게* 말할 것인가입니다. 타코트론(Tacotron)은 첫 번째 물음에 글자를 보면서 답합니다.
# 전역 스타일 토큰(global style tokens)은 같은 메커니즘을 뒤집어 두 번째 물음에 답합니다. 쿼리는 녹음 하나 전체이고, 키는 처음에는 아무 뜻도 없는 벡터 몇 개입니다.
# 이번 강의에서는 이런 목소리를 학습하면서 어텐션이 대각선을 찾아가는 모습을 지켜보고, 한 단계를 뜯어보고, 토큰 하나를 돌리면 음높이와 길이가 어떻게 되는지 재어 봅니다.
#
# 목소리는 내장되어 있습니다. 작은 합성기가 숫자를 다섯 가지 스타일로 읽습니다. 목소리 두 개를 학습하고, 견주어 볼 네 개를 몇 단계씩만 더 학습합니다. 처음에는 한가한 코어 두 개로 4분쯤 걸리고,
# 그다음부터는 `runs/lessons`에 보관된 것을 씁니다. (소리를 다루는 데 필요한 것은 `pip install "jumok[speech]"`로 설치합니다.)

# %%
import json
import sys

import numpy as np
import torch
from _shown import BLUES, COLOURS, GREY, INK, at, figure, heat, show, table, trained

import jumok
from jumok.batches.speech import SpeechBatch
from jumok.batches.tokens import Tokens
from jumok.data.audio import save_audio
from jumok.data.builtin.spoken_numbers import STYLES, synthesize_text
from jumok.metrics.alignment_health import measure_alignment_health
from jumok.metrics.prosody import measure_prosody
from jumok.models.tacotron_decoder import forward_attention

torch.manual_seed(0)

# %%
SMALL = ["tacotron", "data.builtin_size=1000", "model.postnet_layers=3", "model.postnet_width=96", "model.style.num_tokens=6",
         "model.style.num_heads=1", "model.style.conv_channels=[8,16,32]", "train.learning_rate=3.5e-3", "train.batch_tokens=1400"]  # fmt: skip
FREE = ["model.forward_attention=false", "model.guided_attention_loss=0", "train.seed=2"]
BRIEF, LONGER = (["train.max_steps=50", "train.warmup_steps=25"], ["train.max_steps=150", "train.warmup_steps=75"])
voice, free, voice_50, voice_150, free_50, free_150 = trained(
    voice=[*SMALL, "train.max_steps=1300", "train.validate_every=130"],
    voice_free=[*SMALL, *FREE, "train.max_steps=600", "train.validate_every=100"],
    voice_50=[*SMALL, *BRIEF],
    voice_150=[*SMALL, *LONGER],
    voice_free_50=[*SMALL, *FREE, *BRIEF],
    voice_free_150=[*SMALL, *FREE, *LONGER],
)

# %% [markdown] lang="en"
# ## One text, five styles
#
# This is what is to be learned: the same number, said by five voices that differ in pitch, in speed, and in how breathy they are. Nobody tells the model
# which recording is in which style. Since the synthesiser made them, pitch and duration are known, and so is the moment at which each letter sounds.

# %% [markdown] lang="ko"
# ## 글 하나, 스타일 다섯
#
# 배워야 할 것은 이것입니다. 같은 숫자를 다섯 목소리가 말합니다. 음높이와 빠르기, 숨소리가 서로 다릅니다. 어느 녹음이 어느 스타일인지는 아무도 모델에 알려 주지 않습니다.
# 합성기가 만든 소리이므로 음높이와 길이, 그리고 글자마다 언제 소리 나는지를 우리는 알고 있습니다.

# %%
text, rate = "forty two", voice.audio.config.sample_rate
fig, panels = figure(7, 1.9, 1, 5, sharey=True)
rows = []
for axes, (name, style) in zip(panels, STYLES.items(), strict=True):
    utterance = synthesize_text(text, name)
    axes.imshow(
        voice.audio.mel_spectrogram(utterance.waveform).T, origin="lower", aspect="auto", cmap=BLUES, vmin=0.2, vmax=0.9
    )
    axes.set(title=name, xticks=[], yticks=[], xlim=(0, 110))
    axes.spines[:].set_visible(False)
    heard = measure_prosody(utterance.waveform, utterance.sample_rate)
    rows.append([name, f"{style.pitch:.0f}", f"{heard.pitch:.0f}", f"{style.speed:.2f}", f"{heard.seconds:.2f}"])
panels[0].set_ylabel("mel bands")
show(fig, "five_styles")
table(["style", "pitch it was made with, Hz", "pitch measured, Hz", "speed", "seconds"], rows)

# %% [markdown] lang="en"
# ## The first attention: from frames to letters
#
# The voice says four frames of sound at a step (a frame is 12.5 ms), until it says that this was the end. Before each step it looks at the letters. One step with all its shapes, somewhere in the
# middle of "forty two":

# %% [markdown] lang="ko"
# ## 첫 번째 어텐션: 프레임에서 글자로
#
# 목소리는 한 단계에 소리 네 프레임(한 프레임은 12.5 ms)을 말하고, 이것이 끝이라고 스스로 말할 때까지 계속합니다. 단계마다 먼저 글자를 봅니다.
# "forty two"의 중간쯤에서 한 단계를 모든 모양과 함께 봅시다.

# %%
tacotron = voice.model
decoder = tacotron.decoder
letters = Tokens.pad([voice.tokenizer.encode(text)])
with torch.no_grad():
    style = tacotron.mix_style(tacotron.style_tokens.default_weights)  # more about it below
    states = tacotron.encoder(tacotron.prenet(tacotron.embedding(letters.ids)), letters)
    states = states + tacotron.style_projection(style)[:, None]  # the style is added to every letter
    state = decoder.initial_state(decoder.attention.prepare(states, letters.mask))
    frame = torch.zeros(1, 1, tacotron.config.n_mels)  # silence before the first
    for _ in range(10):
        previous, last_frame = state, frame
        output, state = decoder(last_frame, previous)
        frame = output.mels[:, -1:]  # a step is given the last frame of the one before

# %%
with torch.no_grad():
    heard = decoder.prenet(last_frame)  # what was said last
    rnn_input = torch.cat([heard, previous.context[:, None]], -1)
    query, _ = decoder.attention_rnn(rnn_input, previous.attention_hidden[0][None])
    alignment, memory = previous.alignment, previous.memory
    looked = torch.stack([alignment.last_weights, alignment.cumulative_weights], 1)  # where it has looked so far
    weights = jumok.weights(query, memory.keys, score=decoder.attention.score.with_previous(looked))
    moved = forward_attention(weights[:, 0], alignment.last_weights)[:, None]  # may stay, or go on by one
    context = jumok.mix(moved, memory.states)
    joined = decoder.rnn_projection(torch.cat([query, context], -1))
    spoken, _ = decoder.decoder_rnns[0](joined, previous.decoder_hidden[0][0])
    out = torch.cat([joined + spoken, context], -1)
    mels = decoder.mel_projection(out).unflatten(-1, (tacotron.config.reduction_factor, -1))
    stops = decoder.stop_projection(out)
torch.testing.assert_close(mels[:, 0], output.mels)

# %%
steps = [
    ("the last frame", "mels", last_frame), ("heard", "pre-net", heard), ("query", "GRU [heard; context before]", query),
    ("keys and values", "a state of each letter", states), ("so far", "weights before, and their sum", looked),
    ("weights", "softmax of the scores", weights), ("moved on", "of those within reach", moved),
    ("context", "Σ weight · state", context), ("into the output", "GRU, and the context once more", out),
    ("four frames", "mels", mels), ("was it the last?", "of each frame", stops),
]  # fmt: skip
table(["step", "what", "shape (batch, steps, …)"], [[name, what, str(tuple(x.shape))] for name, what, x in steps])

# %%
shown = {"where it was": alignment.last_weights[0], "weights": weights[0, 0], "moved on": moved[0, 0]}
fig, panels = figure(7, 2.1, 1, 3, sharey=True)
for axes, (title, values) in zip(panels, shown.items(), strict=True):
    axes.bar(range(len(values)), values.tolist(), color=COLOURS[0])
    axes.set(title=title, ylim=(0, 1))
    axes.set_xticks(range(len(values)), [*text.replace(" ", "␣"), "\nend"])
    axes.tick_params(length=0)
show(fig, "one_step")

# %% [markdown] lang="en"
# The score knows more than query and key: also where the voice has looked so far (*location-sensitive* attention). And of the weights only those count that
# are on the letter of the step before, or one further on (*forward* attention). Both say the same: one reads from left to right.
#
# ## How the alignment becomes diagonal
#
# A map of such a voice, steps by letters, must become a diagonal, or the voice does not read. Above, a voice that is helped: forward attention, and in training a price for looking
# far from the diagonal (*guided* attention). Below, one with neither. Each map is of a training of its own that ended after so many steps; all are told the same recording, and the line
# is the truth that the synthesiser knows.

# %% [markdown] lang="ko"
# 점수는 쿼리와 키만 보지 않습니다. 목소리가 지금까지 어디를 보았는지도 봅니다(*위치에 민감한*(location-sensitive) 어텐션). 그리고 가중치 가운데 앞 단계의 글자에 머물거나
# 한 칸 나아간 것만 남깁니다(*전진*(forward) 어텐션). 둘 다 같은 말을 합니다. 글은 왼쪽에서 오른쪽으로 읽는다는 것입니다.
#
# ## 정렬은 어떻게 대각선이 되는가
#
# 이런 목소리의 지도, 곧 단계와 글자 사이의 지도는 대각선이 되어야 합니다. 그렇지 않으면 글을 읽는 것이 아닙니다. 위는 도움을 받은 목소리입니다. 전진 어텐션을 쓰고, 학습할 때 대각선에서 먼 곳을 보면
# 대가를 치릅니다(*유도*(guided) 어텐션). 아래는 둘 다 없는 목소리입니다. 지도마다 따로 그만큼의 단계만 학습한 목소리이고, 모두 같은 녹음을 들려주며 그렸습니다. 선은 합성기가 알고 있는 정답입니다.


# %%
def compute_map(speaker, utterance) -> torch.Tensor:
    """Where each step looks (steps, letters) if the voice is told this recording, frame by frame."""
    mel = torch.from_numpy(speaker.audio.mel_spectrogram(utterance.waveform))
    batch = SpeechBatch.from_sequences([speaker.tokenizer.encode(utterance.text)], [mel])
    return speaker.model.compute_attention_maps(batch)[0].weights[0, 0]


# %%
utterance = synthesize_text("seventy eight", "calm")
names = [*("␣" if one == " " else one for one in utterance.text), "end"]
trainings = {
    "helped": {"50 steps": voice_50, "150 steps": voice_150, "1,300 steps": voice},
    "neither": {"50 steps": free_50, "150 steps": free_150, "600 steps": free},
}
fig, panels = figure(7, 5.4, 2, 3, sharex=True, sharey=True)
for line, (kind, stages) in zip(panels, trainings.items(), strict=True):
    for axes, (stage, speaker) in zip(line, stages.items(), strict=True):
        weights = compute_map(speaker, utterance)
        axes.pcolormesh(weights.T, cmap=BLUES, vmin=0, vmax=1)
        times = (np.arange(len(weights)) + 0.5) * 4 * speaker.audio.config.frame_seconds
        axes.plot(np.arange(len(weights)) + 0.5, utterance.character_indices(times) + 0.5, color=COLOURS[1], lw=1.2)
        axes.set_title(f"{kind}, {stage}: {measure_alignment_health(weights).diagonality:.2f}", size=10)
        axes.set_yticks(np.arange(len(names)) + 0.5, names, size=8)
        axes.tick_params(length=0)
for axes in panels[1]:
    axes.set_xlabel("steps")
show(fig, "diagonal")

# %% [markdown] lang="en"
# The number beside each title is the *diagonality*: 1 if all weight is near the diagonal, 0 if no more than by chance. In training it is measured on
# texts that the voice says by itself, with no recording to hold on to, and written to `metrics.jsonl` with other figures of health:

# %% [markdown] lang="ko"
# 제목 옆의 수는 *대각선 정도*(diagonality)입니다. 가중치가 모두 대각선 가까이에 있으면 1, 우연한 만큼밖에 없으면 0입니다. 학습하는 동안에는 들려주는 녹음 없이
# 목소리가 혼자 말한 글에서 재고, 다른 건강 지표와 함께 `metrics.jsonl`에 적어 둡니다.


# %%
def journal(speaker) -> list[dict]:
    """What each validation of a training found."""
    lines = (speaker.run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == "validation"]


# %%
fig, panels = figure(7, 2.5, 1, 3)
shown = {"alignment/diagonality": "diagonality", "alignment/entropy": "how widely a step looks", "loss": "loss"}
for axes, (name, title) in zip(panels, shown.items(), strict=True):
    for (kind, speaker), colour in zip((("helped", voice), ("neither", free)), COLOURS, strict=False):
        records = journal(speaker)
        steps, values = [record["step"] for record in records], [record[name] for record in records]
        axes.plot(steps, values, color=colour, label=kind, marker="o", ms=3)
    axes.set(title=title, xlabel="steps of training", ylim=(0, None if name == "loss" else 1.05))
panels[0].legend(loc="center right")
show(fig, "health")
last = {kind: journal(speaker)[-1] for kind, speaker in (("helped", voice), ("neither", free))}
for kind, record in last.items():
    print(
        f"{kind}: diagonality {record['alignment/diagonality']:.2f}, read as a whole {record['alignment/complete']:.0%}"
    )
assert last["helped"]["alignment/diagonality"] > 0.9 > 0.5 > last["neither"]["alignment/diagonality"]

# %%
ahead = {}  # how many letters the helped voice looks ahead of what sounds, in the mean of all steps
for name in STYLES:
    gaps = []
    for words in ("seventy eight", "thirty one", "nineteen"):
        recording = synthesize_text(words, name)
        weights = compute_map(voice, recording)
        times = (np.arange(len(weights)) + 0.5) * 4 * voice.audio.config.frame_seconds
        place = (weights * torch.arange(weights.shape[1])).sum(-1).numpy()
        gaps.extend(place - recording.character_indices(times))
    ahead[name] = np.mean(gaps)
print("letters ahead of what sounds:", ", ".join(f"{name} {gap:+.1f}" for name, gap in ahead.items()))

# %% [markdown] lang="en"
# The helped voice reads after a few hundred steps. The other has to find out for itself that speech goes through its text from left to right, from nothing but how well the sound
# fits, and in this short training it does not: its steps look at everything at once. Its *loss* hardly tells. While it is told the true frame
# before each step, it seems to say the next ones well enough without reading. That is why the figures of health are taken while a voice speaks alone. (Longer training may bring it there.)
#
# The help does not tell the model *which* letter a frame comes from, only that one goes on, about evenly. How long each letter takes, it still has to find. It found it
# roughly: the line and the map do not lie on each other, and the figures above say how far apart they are. That costs it nothing, since the states of letters know their neighbours. A diagonal is a sign that a voice reads, not a clock.
#
# ## The second attention: tokens as keys, a sound as the query
#
# Now to the style. In training, the recording that is to be said is also listened to: a small net makes one vector of all of it, the **reference**. That is the query. Keys and values are six learned vectors, the
# **tokens**, the same for all recordings. What is found is added to the state of every letter.

# %% [markdown] lang="ko"
# 도움을 받은 목소리는 몇백 단계 만에 글을 읽습니다. 다른 목소리는 말이 글을 왼쪽에서 오른쪽으로 지나간다는 것을, 소리가 얼마나 맞는지만 보고 스스로 알아내야 합니다. 이렇게 짧은 학습으로는 알아내지 못해서,
# 단계마다 모든 글자를 한꺼번에 봅니다. *손실*만 보아서는 거의 알 수 없습니다. 단계마다 바로 앞의 정답 프레임을 들려주면 글을 읽지 않아도 다음 프레임을 그럭저럭 말할 수 있는 듯합니다.
# 그래서 건강 지표는 목소리가 혼자 말할 때 잽니다. (더 오래 학습하면 다다를지도 모릅니다.)
#
# 도움은 어느 프레임이 *어느* 글자에서 오는지를 가르쳐 주지 않습니다. 대체로 고르게 앞으로 나아간다는 것만 알려 줍니다. 글자마다 얼마나 걸리는지는 여전히 스스로 찾아야 합니다. 목소리는 그것을 대강 찾았습니다.
# 선과 지도는 꼭 겹치지 않으며, 얼마나 떨어져 있는지는 위의 수가 말해 줍니다. 글자의 상태는 이웃 글자도 알고 있으므로 그래도 손해가 없습니다. 대각선은 목소리가 글을 읽는다는 표시이지 시계는 아닙니다.
#
# ## 두 번째 어텐션: 키는 토큰, 쿼리는 소리
#
# 이제 스타일입니다. 학습할 때는 말해야 할 녹음을 듣기도 합니다. 작은 신경망이 녹음 전체를 벡터 하나로 만드는데, 이것을 **참조**(reference)라고 합니다. 이것이 쿼리입니다.
# 키와 밸류는 학습된 벡터 여섯 개, 곧 **토큰**이고 모든 녹음에 대해 같습니다. 찾아낸 것은 모든 글자의 상태에 더해집니다.

# %%
tokens = tacotron.style_tokens
mel = torch.from_numpy(voice.audio.mel_spectrogram(utterance.waveform))
recording = SpeechBatch.from_sequences([[0]], [mel])  # the text does not matter here
with torch.no_grad():
    reference = tokens.reference_encoder(recording.mels, recording.mel_tokens)[:, None]
    bank = tokens.tokens.tanh()[None]
    shares = tokens.attention.weights(reference, bank)
    mixed = tokens.attention(reference, bank)
    torch.testing.assert_close(mixed[:, 0], tacotron.mix_style(shares[:, :, 0]))
steps = [
    ("the sound", "mels, all frames", recording.mels), ("query", "the reference", reference), ("keys and values", "the tokens", bank),
    ("weights", "one head, six tokens", shares), ("style", "Σ weight · value, projected", mixed),
]  # fmt: skip
table(["step", "what", "shape (batch, …)"], [[name, what, str(tuple(x.shape))] for name, what, x in steps])

# %% [markdown] lang="en"
# Since the query is one vector for a whole recording, and goes through six numbers that add up to 1, little of the text can get through: the way is narrow. What pays is what helps with all letters at once. The weights of
# recordings that the voice never heard, by the style they are in; which style that is, only we know:

# %% [markdown] lang="ko"
# 쿼리는 녹음 전체를 나타내는 벡터 하나이고, 합이 1인 수 여섯 개를 지나야 합니다. 길이 좁아서 글의 내용은 거의 지나갈 수 없습니다. 모든 글자에 두루 도움이 되는 것을 보내는 편이 이롭습니다.
# 목소리가 들어 본 적 없는 녹음들의 가중치를 스타일별로 보겠습니다. 어느 스타일인지는 우리만 알고 있습니다.


# %%
def heard_by(speaker, split: str) -> tuple[list[str], torch.Tensor]:
    """The styles of recordings it did not learn from, and their weights (recordings, heads, tokens)."""
    examples = speaker.load_split(split).examples
    mels = [speaker.audio.mel_spectrogram(example.audio.decode(speaker.audio)) for example in examples]
    return [example.emotion for example in examples], speaker.extract_style_weights(*mels)


named, weighed = heard_by(voice, "test")
of_style = {name: weighed[[n for n, style in enumerate(named) if style == name]] for name in STYLES}
count = tokens.config.num_tokens

# %%
fig, panels = figure(7, 2.3, 1, 5, sharey=True)
for axes, (name, each) in zip(panels, of_style.items(), strict=True):
    spread = {"lw": 0.9, "ecolor": INK}
    axes.bar(range(count), each.mean((0, 1)), yerr=each.mean(1).std(0), error_kw=spread, color=COLOURS[0])
    axes.set(title=name, ylim=(0, 0.8))
    axes.set_xticks(range(count), [str(n + 1) for n in range(count)])
    axes.tick_params(length=0)
panels[0].set_ylabel("weight")
panels[2].set_xlabel("style tokens")
show(fig, "weights_by_style")

# %% [markdown] lang="en"
# The thin lines are how far recordings of one style differ. No token *is* a style. A style is a mix, and several tokens share the work. But can the styles be told apart by
# these weights alone? We take the mean weights of each style in one set of recordings (validation) and ask for another set (test) which mean is nearest:

# %% [markdown] lang="ko"
# 가는 선은 같은 스타일의 녹음들이 서로 얼마나 다른지를 나타냅니다. 어떤 토큰도 그 자체로 하나의 스타일은 *아닙니다*. 스타일은 섞인 것이고, 여러 토큰이 일을 나누어 맡습니다.
# 그렇다면 이 가중치만으로 스타일을 구별할 수 있을까요? 한 묶음의 녹음(검증)에서 스타일마다 가중치의 평균을 구하고, 다른 묶음(시험)의 녹음이 어느 평균에 가장 가까운지 물어봅니다.


# %%
def told_apart(speaker) -> torch.Tensor:
    """How often recordings of a style (rows) are nearest to the mean weights of a style (columns)."""
    names, known = heard_by(speaker, "valid")
    means = torch.stack([known[[n for n, style in enumerate(names) if style == name]].mean(0) for name in STYLES])
    names, asked = heard_by(speaker, "test")
    nearest = (asked[:, None] - means).flatten(2).norm(dim=-1).argmin(1)
    counts = torch.zeros(len(STYLES), len(STYLES))
    for name, column in zip(names, nearest.tolist(), strict=True):
        counts[list(STYLES).index(name), column] += 1
    return counts


confusion = told_apart(voice)
fig, axes = figure(4.2, 3.4)
heat(axes, confusion / confusion.sum(1, keepdim=True), list(STYLES), list(STYLES), numbers=True)
axes.set_xlabel("nearest mean")
show(fig, "told_apart")
right = (confusion.diagonal().sum() / confusion.sum()).item()
print(f"{right:.0%} of the recordings are nearest to their own style; by chance it would be about 20%")
assert right > 0.4

# %% [markdown] lang="en"
# Where two styles are mixed up in this table, the voice has not learned to tell them apart, not yet at least, and will say both alike.
#
# ## Choosing a style
#
# When the voice speaks there is no recording of what it is going to say. So the style is chosen, in one of three ways: it is taken from **another recording**, of any text; from **one token**, by some
# amount; or from a **mix**. All three are weights of tokens, and the style is linear in them. First, five recordings of "nineteen", one in each style; in their styles, the voice
# says "forty two" and five other numbers, and pitch and duration are measured as they were for the synthesiser.

# %% [markdown] lang="ko"
# 이 표에서 두 스타일이 뒤섞여 있다면 목소리가 그 둘을 아직 구별하지 못하는 것이고, 둘을 똑같이 말하게 됩니다.
#
# ## 스타일 고르기
#
# 목소리가 말할 때는 앞으로 할 말의 녹음이 없습니다. 그래서 스타일을 골라야 하는데, 세 가지 방법이 있습니다. **다른 녹음**에서(어떤 글이든 상관없습니다), **토큰 하나**에서 얼마만큼,
# 또는 여러 토큰을 **섞어서** 얻습니다. 셋 다 토큰의 가중치이고, 스타일은 가중치에 선형입니다. 먼저 "nineteen"을 다섯 스타일로 녹음한 것에서 스타일을 얻어
# "forty two"와 다른 숫자 다섯 개를 말하게 하고, 합성기의 소리를 잰 것과 같은 방법으로 음높이와 길이를 잽니다.

# %%
TEXTS = [text, "seven", "sixteen", "thirty one", "eighty five", "ninety"]


def measured(weights: torch.Tensor) -> np.ndarray:
    """Duration and pitch of each of the texts in a style: (texts, 2)."""
    measures = [measure_prosody(piece.waveform, rate) for piece in voice.synthesize_segments(TEXTS, weights)]
    return np.array([(prosody.seconds, prosody.pitch) for prosody in measures])


def typical(measures: np.ndarray) -> tuple[float, float]:
    """The mean duration, and the median pitch: an octave off is an error, and one does not spoil it."""
    return float(measures[:, 0].mean()), float(np.nanmedian(measures[:, 1]))


def hear(speech, name: str) -> None:
    """A sound in a notebook; a file from a script."""
    path = at(name).with_suffix(".wav")
    save_audio(path, speech.waveform, speech.sample_rate)
    if "ipykernel" in sys.modules:
        from IPython.display import Audio, display

        display(Audio(str(path)))
    else:
        print("sound:", path.name)


# %%
rows = []
for name in STYLES:
    recording = at(f"nineteen_{name}").with_suffix(".wav")
    save_audio(recording, synthesize_text("nineteen", name).waveform, rate)
    speech = voice.speak(text, style_audio=recording)
    heard = [measure_prosody(synthesize_text(sentence, name).waveform, rate) for sentence in TEXTS]
    seconds, pitch = typical(np.array([(prosody.seconds, prosody.pitch) for prosody in heard]))
    own_seconds, own_pitch = typical(measured(speech.head_style_weights))
    rows.append([name, f"{seconds:.2f}", f"{own_seconds:.2f}", f"{pitch:.0f}", f"{own_pitch:.0f}"])
table(["style of", "seconds, synthesiser", "seconds, voice", "pitch, synthesiser", "pitch, voice"], rows)

# %% [markdown] lang="en"
# Compare the columns. How *fast* to speak it takes over well from a single word. Pitch is harder: it is a matter of fine lines in the spectrogram, the last thing that such a voice
# learns. In so short a training high voices may come out blurred, and where the two pitches are far apart, that is why. The full recipe (`jumok train tacotron`) has a wider net for that.
#
# To listen to: calm and hurried.

# %% [markdown] lang="ko"
# 열을 서로 견주어 보십시오. 얼마나 *빨리* 말하는지는 단어 하나만 듣고도 잘 이어받습니다. 음높이는 더 어렵습니다. 스펙트로그램의 가는 줄무늬에 담겨 있어 이런 목소리가 가장 늦게 배우는 것입니다.
# 이렇게 짧게 학습하면 높은 목소리는 흐릿하게 나올 수 있고, 두 음높이가 많이 다르다면 그 때문입니다. 정식 레시피(`jumok train tacotron`)는 그래서 더 넓은 신경망을 씁니다.
#
# 차분한 목소리와 서두르는 목소리를 들어 봅시다.

# %%
for name in ("calm", "hurried"):
    hear(voice.speak(text, style_audio=at(f"nineteen_{name}").with_suffix(".wav")), f"said_{name}")

# %% [markdown] lang="en"
# Now tokens by hand. We let the code pick two: the token that calm recordings have more of than hurried ones, and the one for which it is the other way round.

# %% [markdown] lang="ko"
# 이제 토큰을 직접 다루어 봅시다. 차분한 녹음에 서두르는 녹음보다 더 많이 들어 있는 토큰과 그 반대인 토큰을 하나씩 코드로 고릅니다.

# %%
differ = (of_style["calm"].mean(0) - of_style["hurried"].mean(0)).mean(0)  # over the heads
slow, fast = int(differ.argmax()) + 1, int(differ.argmin()) + 1
rows = []
wishes = {
    "the usual style": None, f"token {slow}, by 0.5": f"{slow}=0.5", f"token {fast}, by 0.5": f"{fast}=0.5",
    "half of each": f"{slow}=0.5,{fast}=0.5", f"token {slow}, by 1": f"{slow}=1", f"token {slow}, by 3": f"{slow}=3",
    f"token {slow}, by −1": f"{slow}=-1",
}  # fmt: skip
for name, wish in wishes.items():
    speech = voice.speak(text, style_weights=wish)
    health = speech.segments[0].health
    rows.append(
        [
            name,
            f"{speech.duration_seconds:.2f}",
            f"{health.diagonality:.2f}",
            str(len(health.skipped)),
            "yes" if speech.finished else "no",
        ]
    )
table(["style", "seconds", "diagonality", "letters skipped", "came to an end"], rows)

alone = [voice.expand_style_weights(torch.eye(count)[n].tolist()) for n in range(count)]
a, b = tacotron.mix_style(alone[slow - 1]), tacotron.mix_style(alone[fast - 1])
torch.testing.assert_close(tacotron.mix_style((alone[slow - 1] + alone[fast - 1]) / 2), (a + b) / 2)

# %% [markdown] lang="en"
# The last line checks that a mix of tokens is the mix of what each stands for. What the *voice* makes of it is not linear at all: compare the durations for 0.5, 1 and 3 of
# the same token. In training all weights lay between 0 and 1 and added up to 1; whatever else one asks for, it was never taught. That it still reads then is due to forward attention, which lets it do nothing else.
#
# ## What turning a token does
#
# So we turn carefully: from the usual style a little towards each token, or away from it, and measure six texts each time.

# %% [markdown] lang="ko"
# 마지막 줄에서는 토큰을 섞은 것이 저마다 나타내는 것을 섞은 것과 같은지 확인했습니다. 하지만 *목소리*가 그것으로 만들어 내는 소리는 전혀 선형이 아닙니다. 같은 토큰을 0.5, 1, 3만큼
# 주었을 때의 길이를 견주어 보십시오. 학습할 때 가중치는 모두 0과 1 사이에 있었고 합이 1이었습니다. 그 밖의 것은 배운 적이 없습니다. 그래도 글은 읽는다면, 다른 것을 할 수 없게 하는 전진 어텐션 덕분입니다.
#
# ## 토큰을 돌리면 무엇이 달라지는가
#
# 그래서 조심스럽게 돌려 봅니다. 보통의 스타일에서 출발해 토큰 하나 쪽으로, 또는 그 반대쪽으로 조금씩 움직이면서 그때마다 여섯 글을 말하게 하고 잽니다.

# %%
amounts = [-0.3, -0.15, 0.0, 0.15, 0.3]
usual = tokens.default_weights
straight = measured(usual)
turned = [[straight if not by else measured(torch.lerp(usual, weights, by)) for by in amounts] for weights in alone]
fig, panels = figure(7, 3.6, 2, count, sharex=True, sharey="row")
for n, line in enumerate(turned):
    for part, axes in enumerate(panels[:, n]):
        for by, measures in zip(amounts, line, strict=True):
            axes.scatter([by] * len(measures), measures[:, part], color=GREY, s=7, alpha=0.5, lw=0)
        axes.plot(amounts, [typical(measures)[part] for measures in line], color=COLOURS[part], marker="o", ms=3)
        axes.set_xticks([-0.3, 0, 0.3], ["−0.3", "0", "0.3"], size=8)
    panels[0, n].set_title(f"token {n + 1}", size=10)
panels[0, 0].set_ylabel("duration, s")
panels[1, 0].set(ylabel="pitch, Hz", yscale="log")
panels[1, 0].set_yticks([75, 100, 150, 200, 300, 400], ["75", "100", "150", "200", "300", "400"])
panels[1, 0].minorticks_off()
show(fig, "turned")

# %%
change = np.array([typical(line[-1])[0] / typical(line[0])[0] - 1 for line in turned])
rows = [
    [str(n + 1), f"{by:+.0%}".replace("-", "−"), f"{differ[n]:+.2f}".replace("-", "−")] for n, by in enumerate(change)
]
table(["token", "duration, from −0.3 to 0.3", "more weight in calm than in hurried"], rows)
print(f"correlation of the two: {np.corrcoef(change, differ)[0, 1]:.2f}")
assert change.max() > 0.05
assert change.min() < -0.05

# %% [markdown] lang="en"
# A dot is a text, a line the mean (of durations) or the median (of pitches). Duration moves steadily, for all texts alike: a token that calm recordings have more of makes the voice slower, and the other way round. Nobody told the
# model that there is such a thing as speed. Pitch is another matter. Where the dots of one column lie close together, all texts are said at that pitch. Where they
# are scattered, an octave apart or more, the voice has no clear pitch there, and the line means nothing. Between two ways to speak that it knows there need not be a third.
#
# ## What tokens mean, and what they do not

# %% [markdown] lang="ko"
# 점은 글 하나, 선은 (길이의) 평균 또는 (음높이의) 중앙값입니다. 길이는 어느 글에서나 꾸준히 움직입니다. 차분한 녹음에 더 많이 들어 있는 토큰은 목소리를 느리게 하고, 그 반대도 마찬가지입니다.
# 빠르기라는 것이 있다고는 아무도 모델에 가르쳐 주지 않았습니다. 음높이는 다릅니다. 한 열의 점들이 모여 있으면 모든 글을 그 높이로 말한 것입니다. 점들이 한 옥타브 넘게 흩어져 있으면 목소리에 뚜렷한 음높이가 없는 것이고,
# 거기서는 선에 아무 뜻도 없습니다. 알고 있는 두 말투 사이에 세 번째 말투가 꼭 있는 것은 아닙니다.
#
# ## 토큰이 뜻하는 것과 뜻하지 않는 것

# %%
names, others = heard_by(free, "test")
table_of = {
    kind: torch.stack([each[[n for n, style in enumerate(who) if style == name]].mean((0, 1)) for name in STYLES])
    for kind, (who, each) in {"voice": (named, weighed), "the other": (names, others)}.items()
}
fig, panels = figure(7, 2.9, 1, 2)
for axes, (kind, means) in zip(panels, table_of.items(), strict=True):
    heat(axes, means, list(STYLES), [str(n + 1) for n in range(count)], top=0.5, numbers=True)
    axes.set_xlabel(f"tokens of {kind}")
show(fig, "two_trainings")

# %% [markdown] lang="en"
# Both voices learned from the same kind of recordings, from different random beginnings. (The second may not read, but it has styles.) Look for token 1 of the left in the right: there is no such
# thing. What a token is called, and how the work is divided among them, is chance; only what they can do *together* is learned.
#
# - A token is **not a property**. "Token 3 is speed" is never true. Tokens divide up how *these* recordings differ. In these, a calm voice is slow *and* rather low, and nothing in training
#   rewards taking the two apart.
# - A weight is **not an amount**. Half the weight is not half the speed, and beyond the weights of real recordings anything may happen.
# - A weight is **not an explanation**. It tells what the decoder was given, not what it did with it; that is what was measured here. Measure, before you name a token.
# - What gets through is **what helps to say the recording**. Loudness, noise or a bad microphone are styles, too.
#
# Next: [captions](07_captions.py), where the keys are the places of a picture. More on voices, and on recordings of your own: [speech](../speech.md).

# %% [markdown] lang="ko"
# 두 목소리는 같은 종류의 녹음에서, 서로 다른 무작위 출발점에서 배웠습니다. (두 번째 목소리는 글을 못 읽을 수도 있지만 스타일은 있습니다.) 왼쪽의 1번 토큰을 오른쪽에서 찾아보십시오. 그런 것은 없습니다.
# 토큰의 번호와 토큰들이 일을 나누는 방식은 우연이고, 토큰들이 *함께* 할 수 있는 일만이 학습된 것입니다.
#
# - 토큰은 **속성이 아닙니다**. "3번 토큰은 빠르기다" 같은 말은 결코 옳지 않습니다. 토큰은 *이* 녹음들이 서로 다른 점을 나누어 맡을 뿐입니다. 이 녹음들에서 차분한 목소리는 느리면서 *동시에* 낮은 편이고,
#   둘을 떼어 놓는다고 해서 학습에 이로울 것이 없습니다.
# - 가중치는 **양이 아닙니다**. 가중치가 절반이라고 빠르기가 절반인 것은 아니며, 실제 녹음들의 가중치를 벗어나면 무슨 일이든 일어날 수 있습니다.
# - 가중치는 **설명이 아닙니다**. 디코더가 무엇을 받았는지를 말할 뿐, 그것으로 무엇을 했는지는 말하지 않습니다. 그래서 여기서는 재어 보았습니다. 토큰에 이름을 붙이기 전에 재어 보십시오.
# - 지나가는 것은 **녹음을 되살리는 데 도움이 되는 것**입니다. 소리의 크기, 잡음, 나쁜 마이크도 스타일이 됩니다.
#
# 다음 강의는 그림 속의 자리가 키가 되는 [그림 설명](07_captions.py)입니다. 목소리에 대해 더 알고 싶거나 자기 녹음을 쓰고 싶다면 [음성](../speech.md) 문서를 보십시오.
