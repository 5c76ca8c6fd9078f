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

# %% [markdown]
# # Beyond one machine
#
# What does a training on billions of words need, and a service for millions of people? This page answers by arithmetic:
# every figure comes from a file of `bench/results` that one of our benchmarks wrote, or is named as an assumption, which you
# change to yours. The arithmetic is the code below; it is run when this page is built, so new measurements change the page.
# (`python docs/beyond.py` prints the same.)
#
# Nothing of what follows was *run* at that size by us. Our measurements are of one GPU; what several of them lose to each
# other is estimated here, and is to be measured where they stand.

# %%
import json
from math import ceil
from pathlib import Path

ROOT = next(one for one in (Path.cwd(), *Path.cwd().parents) if (one / "bench" / "results").is_dir())


def measured(file: str, case: str = "", implementation: str = "ours") -> dict:
    """A row of a file of results, the figures of one implementation, and the machine."""
    told = json.loads((ROOT / "bench" / "results" / file).read_text())
    row = next(one for one in told["rows"] if case in one["case"] and implementation in one["implementations"])
    return {**row, **row["implementations"][implementation], "machine": told["machine"]}


translation = measured("training-transformer-nvidia-h200.json", "6+6 layers of 512")
bert = measured("bert-pretraining-nvidia-h200.json", "12 layers of 768")
beam = measured("decoding-nvidia-h200.json", "beam 5, batch 128", implementation="graphed")
reading = measured("bert-inference-amd-epyc.json", "as sentences are")

print(f"Transformer base, training: {translation['tokens_s']:>9,.0f} target tokens a second, one H200")
print(f"BERT base, pretraining:     {bert['tokens_s']:>9,.0f} tokens a second, one H200")
print(f"tiny Transformer, beam 5:   {beam['sentences_s']:>9,.0f} sentences a second, one H200")
print(f"MiniLM, reading:            {reading['tokens_s']:>9,.0f} tokens a second, two CPU cores")

# %% [markdown]
# ## Assumptions
#
# Put your own here.

# %%
PRICE = 3.0  # dollars for an hour of one H200
PIECES = 1.3  # tokens for a word of English, with a vocabulary of 32,000
LINKS = {"NVLink": 400e9, "400 Gbit/s": 50e9, "10 Gbit/s": 1.25e9}  # bytes a second
WORDS_A_SENTENCE = 25

# %% [markdown]
# ## Time and cost of a training
#
# Tokens divided by tokens a second. Costs are those of the GPU alone, for the last training, not for those that you will
# throw away: count on several times as much.

# %%
WORK = (
    ("translation, 1 billion words, 3 epochs", 1e9 * 3, translation),
    ("translation, 10 billion words, 1 epoch", 10e9, translation),
    ("BERT as published, 3.3 billion words, 40 epochs", 3.3e9 * 40, bert),
)


def days(words: float, at: dict, gpus: int = 1, efficiency: float = 1.0) -> float:
    """How long it takes to see so many words."""
    return words * PIECES / (at["tokens_s"] * gpus * efficiency) / 86_400


for name, words, at in WORK:
    alone = days(words, at)
    print(f"{name:<48} {alone * 24:7,.1f} hours on one GPU, {alone * 24 * PRICE:8,.0f} dollars")

# %% [markdown]
# (BERT's rate is of texts of 32 to 128 tokens, as in the first nine tenths of its training; the rest has 512.)
# A base model on billions of words is a matter of hours or days of *one* GPU today. What makes it a cluster's work is a larger
# model. Work grows with its weights: about 6 operations for each weight and token. What we reach with BERT base
# tells what to expect of others, as long as they are built alike:

# %%
reached = 6 * bert["weights"]["ours"] * bert["tokens_s"]  # operations a second, embeddings counted as weights
print(f"reached: {reached / 1e12:,.0f} trillion operations a second")
for weights in (0.11e9, 0.34e9, 1e9, 7e9):
    rate = reached / (6 * weights)
    hours = 10e9 * PIECES / rate / 3600
    print(f"{weights / 1e9:5.2f} billion weights: {rate:9,.0f} tokens/s, 10 billion words in {hours:7,.0f} GPU hours")

# %% [markdown]
# ## Data
#
# Text is read line by line, and kept tokenised: 2 bytes a token (up to 65,536 pieces), 8 bytes a sentence, memory-mapped. So a
# corpus may be far larger than memory. What it needs is a disk that gives the tokens as fast as the GPU takes them, which is
# little:

# %%
for words in (1e9, 10e9, 100e9):
    tokens, sentences = words * PIECES, words / WORDS_A_SENTENCE
    print(f"{words / 1e9:4.0f} billion words a side: {(tokens * 2 + sentences * 8) * 2 / 1e9:6,.0f} GB for both sides")
eaten = translation["tokens_s"] * 2 * 2
print(f"one GPU reads {eaten / 1e6:.1f} MB a second, 64 of them {eaten * 64 / 1e6:,.0f} MB")

# %% [markdown]
# Learning the vocabulary counts words of the first `text.pairs` pairs (a million, unless said): more add nothing. Tokenising is
# done once, by one process before training begins; with hundreds of billions of words, cut the corpus into files and do it for each
# in turn. Shuffling is by index, over the memory map: an epoch costs a permutation, not a copy.
#
# ## Many GPUs
#
# With `torchrun`, each GPU takes a part of every batch and gradients are added up (DDP). In a step of $N$ weights in 4 bytes
# over $n$ GPUs, each sends and receives $2 \cdot \frac{n-1}{n} \cdot 4N$ bytes. Against the time of a step as measured, and if nothing is
# hidden behind the computation (PyTorch hides much of it), at least this share of the time is left for work:

# %%
step = translation["ms"] / 1000 / translation["steps"]
weights = translation["weights"]["ours"]
labels = translation["labels"] / translation["steps"]
print(f"a step of {labels:,.0f} target tokens takes {step * 1000:.1f} ms; {weights / 1e6:.0f} million weights")
for n in (2, 8, 64):
    sent = 2 * (n - 1) / n * 4 * weights
    for batch in (1, 16):
        shares = {name: batch * step / (batch * step + sent / rate) for name, rate in LINKS.items()}
        told = ", ".join(f"{name} {share:4.0%}" for name, share in shares.items())
        print(f"{n:3} GPUs, {batch:2} × the batch each: {told}")

# %% [markdown]
# So: within a machine, DDP is enough for models of this size. Over a network, give each GPU a larger batch (`train.batch_tokens` is
# that of all of them together; raise the learning rate with it), and do not train over 10 Gbit/s.
#
# Note that steps are recorded as CUDA graphs on a single GPU only, and that on several GPUs a small model may wait for its
# launches: the same benchmark without recording (`ours, launched`) says how much.

# %%
launched = measured("training-transformer-nvidia-h200.json", "6+6 layers of 512", implementation="ours, launched")
print(f"recorded {translation['tokens_s']:,.0f}, launched one by one {launched['tokens_s']:,.0f} tokens a second:")
print(
    f"several GPUs begin to pay at {ceil(translation['tokens_s'] / launched['tokens_s'])} of them or more, for a base model"
)

# %% [markdown]
# **Memory.** A weight takes 4 bytes, its gradient 4, Adam's two moments 8. What does not fit on a GPU (with room left for
# activations, half of it here) is sharded over several: `train.parallel=fsdp`.

# %%
memory = translation["machine"]["gpu_gib"] * 2**30
for n in (1, 8, 64):
    print(f"{n:3} GPUs of {memory / 2**30:.0f} GiB: up to {memory / 2 / 16 * n / 1e9:6.1f} billion weights")

# %% [markdown]
# Beyond that (a single layer that does not fit, thousands of GPUs), models are cut across layers and within them (tensor and pipeline
# parallelism). jumok does not do that.
#
# ## A service for millions
#
# Requests come in waves: the busiest second of a day has several times the mean. A GPU should not be planned full: at
# 100 % load, queues have no end.

# %%
USERS, A_DAY, PEAK, LOAD = 1_000_000, 20, 4.0, 0.6  # people, requests of each, busiest to mean, planned load
busiest = USERS * A_DAY / 86_400 * PEAK
print(f"{busiest:,.0f} requests in the busiest second")

gpus = busiest / (beam["sentences_s"] * LOAD)
print(f"translation, beam 5, the tiny model of our benchmark: {gpus:.2f} of a GPU, so {max(2, ceil(gpus))} for a spare")
shapes = {"tiny": (4, 4, 128, 256), "base": (6, 6, 512, 2048)}  # layers, width, feed-forward
sizes = {name: e * (4 * w * w + 2 * w * f) + d * (8 * w * w + 2 * w * f) for name, (e, d, w, f) in shapes.items()}
print(f"a base model has {sizes['base'] / sizes['tiny']:.0f} times its weights outside of the embeddings")
cores = busiest * WORDS_A_SENTENCE * PIECES / (reading["tokens_s"] * LOAD) * 2
print(f"reading a sentence with MiniLM: {ceil(cores)} CPU cores")
print(f"1,000,000 translated sentences: {1e6 / (beam['sentences_s'] * LOAD) / 3600 * PRICE:.2f} dollars of GPU")

for path in sorted((ROOT / "bench" / "results").glob("serving-*.json")):  # the whole service, where it was measured
    told = json.loads(path.read_text())
    for implementation, found in told["rows"][0]["implementations"].items():
        if "sentences_s" in found:
            print(
                f"{told['machine'].get('gpu') or told['machine']['cpu']}, {implementation}: {found['sentences_s']:,.0f} sentences a second"
            )

# %% [markdown]
# That is the model alone, in full batches, and a tiny one, of width 128. Until you have measured yours, count on a rate that is
# lower by as many times as it has weights. `jumok serve` adds HTTP and the queue; what these take is told in its metrics.
#
# What a service for millions needs besides:
#
# | | |
# | --- | --- |
# | several copies | `jumok serve RUN` on each machine, all alike, behind a load balancer that asks `/ready`; nothing is shared between them |
# | an honest “no” | each copy holds at most `--max-queue-tokens` tokens of work; beyond, 503 with `Retry-After`, at once. Retry elsewhere, or later |
# | batches that fill | requests wait `--max-batch-delay-ms` milliseconds for others; the busier, the fuller, the cheaper |
# | figures | `/metrics` for Prometheus: scale by `jumok_pending_tokens`, not by CPU load |
# | deploys without loss | SIGTERM: no new requests, those taken are finished within `--shutdown-timeout` seconds |
# | TLS, accounts, limits for each client | a proxy in front: jumok has one token, and no TLS |
# | smaller answers | a smaller model, greedy search, or an [export](export.md) to an engine made for serving |
#
# ## What we do not know
#
# How DDP and FSDP scale on real machines with many GPUs: our tests hold that they compute the same, with two processes on a CPU;
# their speed we have not measured. How fast one machine tokenises billions of words. What the service makes of a million real
# people. Measure, and put your files beside ours: the page will count with them.
