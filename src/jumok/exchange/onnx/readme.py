"""The README of an exported folder: what is in it, and the lines that use it, without jumok."""

from __future__ import annotations

from typing import Any

from jumok.data.segmentation import WORD
from jumok.data.wordpiece import WordPieces
from jumok.models.bert import Pretraining, Spans, Tagger
from jumok.models.convolutional import Convolutional
from jumok.models.hierarchical import Hierarchical
from jumok.models.selfattentive import SelfAttentive
from jumok.models.seq2seq import Seq2Seq
from jumok.run import Run

__all__ = ["of"]

README = """# {name}, for ONNX Runtime

{what}, written by `jumok export`. In this folder, after `pip install onnxruntime tokenizers{packages}`:

```python
{code}
```

{told}{more}
"""

READ = """\
import numpy as np, onnxruntime, tokenizers

session = onnxruntime.InferenceSession("model.onnx")
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
"""

# ------------------------------------------------------------------------------------------------ BERT

BERT = """\
tokenizer.enable_padding(pad_id={pad}, pad_token="{pad_token}")
texts = {texts}
some = tokenizer.encode_batch(texts{divided})
inputs = {{
    "input_ids": np.array([one.ids for one in some]),
    "token_type_ids": np.array([one.type_ids for one in some]),
    "attention_mask": np.array([one.attention_mask for one in some]),
}}
"""
CLASSES = """\
[logits] = session.run(["logits"], inputs)
labels = json.load(open("labels.json", encoding="utf-8"))
for text, row in zip(texts, logits):
    shares = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    print(text, labels[row.argmax()], shares.max())
"""
NUMBER = """\
[numbers] = session.run(["logits"], inputs)
for text, [number] in zip(texts, numbers):
    print(text, number)
"""
TAGS = """\
[logits] = session.run(["logits"], inputs)
labels = json.load(open("labels.json", encoding="utf-8"))
for words, one, rows in zip(texts, some, logits):
    places = [one.word_ids.index(number) for number in range(len(words))]  # of the first piece of each
    print([(word, labels[rows[place].argmax()]) for word, place in zip(words, places)])
"""
ANSWERS = """\
starts, ends = session.run(["starts", "ends"], inputs)
for (question, text), one, start, end in zip(texts, some, starts, ends):
    inside = [number == 1 for number in one.sequence_ids]
    together = np.where(np.outer(inside, inside), np.add.outer(start, end), -np.inf)
    together[np.tril_indices(len(start), -1)] = -np.inf  # no answer ends before it begins,
    together[np.triu_indices(len(start), {longest})] = -np.inf  # or is longer than {longest} pieces
    first, last = np.unravel_index(together.argmax(), together.shape)
    print(question, text[one.offsets[first][0] : one.offsets[last][1]])
"""
HIDDEN = """\
mask = tokenizer.token_to_id("[MASK]")
inputs["places"] = np.flatnonzero(inputs["input_ids"] == mask)  # counted through all rows
[words] = session.run(["words"], inputs)
for row in words:
    print([tokenizer.id_to_token(number) for number in row.argsort()[::-1][:5]])
"""

# ---------------------------------------------------------------------------------------- models of words

WORDS = """\
WORD = r"{pattern}"

def encode(text):
    words = regex.findall(WORD, unicodedata.normalize("NFC", text))
    return tokenizer.encode(" ".join(words), add_special_tokens=False).ids or [1]

def padded(rows):
    longest = max(map(len, rows))
    return np.array([row + [0] * (longest - len(row)) for row in rows]), np.array([*map(len, rows)])

"""
HOPS = """\
texts = ["a film that makes you happy", "dull"]
ids, lengths = padded([encode(text) for text in texts])
logits, attention = session.run(["logits", "attention"], {"ids": ids, "lengths": lengths})
"""
PAIRS = """\
texts = [("He is old.", "He is young."), ("A man eats.", "Somebody eats.")]
ids, lengths = padded([encode(first) for first, _ in texts])
second_ids, second_lengths = padded([encode(second) for _, second in texts])
inputs = {"ids": ids, "lengths": lengths, "second_ids": second_ids, "second_lengths": second_lengths}
logits, attention = session.run(["logits", "attention"], inputs)
"""
LEVELS = """\
texts = [["The plot is thin.", "I loved it."], ["Dull."]]  # each as its sentences
ids, lengths = padded([encode(sentence) for text in texts for sentence in text])
numbers = iter(range(len(ids)))
documents, document_lengths = padded([[next(numbers) for _ in text] for text in texts])
inputs = {"ids": ids, "lengths": lengths, "documents": documents, "document_lengths": document_lengths}
logits, attention, sentences = session.run(["logits", "attention", "document_attention"], inputs)
"""
LABELS = """\
labels = json.load(open("labels.json", encoding="utf-8"))
for text, row in zip(texts, logits):
    shares = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    print(text, labels[row.argmax()], shares.max())
"""
NUMBERS = """\
for text, [number] in zip(texts, logits):
    print(text, number)
"""

# --------------------------------------------------------------------------------------------- translation

WRITE = """\
import numpy as np, onnxruntime, tokenizers

source, target = map(tokenizers.Tokenizer.from_file, ("{source}", "{target}"))
encoder, step = map(onnxruntime.InferenceSession, ("encoder.onnx", "step.onnx"))

def run(session, inputs):
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, inputs)))

ids = source.encode("{example}", add_special_tokens=False).ids + [3]  # </s>
state = run(encoder, {{"source": np.array([ids]), "source_lengths": np.array([len(ids)])}})
words, said = np.array([2]), []  # <s>
while words[0] != 3 and len(said) < 2 * len(ids) + 20:
    found = run(step, {{"words": words, **state}})
    found["logits"][:, :3] = -np.inf  # <pad>, <unk> and <s> are not said
    words = found["logits"].argmax(-1)
    said.append(words[0])
    state |= {{name[5:]: x for name, x in found.items() if name.startswith("next_")}}
print(target.decode([word for word in said if word != 3]))
"""
LOOKED = " Where each step looked in the source is its output `attention`."


def of(run: Run, model: Any, told: str) -> str:
    """The text of the file."""
    what, code, more = _written(run, model)
    standard = [name for name in ("json", "regex", "unicodedata") if f"{name}." in code]
    if standard:
        code = f"import {', '.join(standard)}\n{code}"
    return README.format(
        name=run.folder.resolve().name,
        what=what,
        packages=" regex" * ("regex" in standard),
        code=code.strip(),
        told=told,
        more=f" {more}".rstrip(),
    )


def _written(run: Run, model: Any) -> tuple[str, str, str]:
    recipe = run.recipe
    if isinstance(model, Seq2Seq | Convolutional):
        joint = not (run.folder / "tokenizer.source.json").exists()
        code = WRITE.format(
            source="tokenizer.json" if joint else "tokenizer.source.json",
            target="tokenizer.json" if joint else "tokenizer.target.json",
            example="this is an example sentence",
        )
        more = "The words are the most probable ones; a beam is yours to write."
        if getattr(model.config, "attention", "global") not in (None, "local-p"):
            more += LOOKED
        if recipe.data.prepare != "none":
            more += (
                f" Texts go in as `data.prepare: {recipe.data.prepare}` makes them, and come out so: the "
                "lines above leave that to you."
            )
        return f"A {recipe.model.kind} model that translates", code, more
    regression = getattr(recipe.data, "regression", False)
    if isinstance(model, SelfAttentive | Hierarchical):
        pairs = isinstance(model, SelfAttentive) and model.config.pairs
        inputs = LEVELS if isinstance(model, Hierarchical) else PAIRS if pairs else HOPS
        code = READ + WORDS.format(pattern=WORD.pattern) + inputs + (NUMBERS if regression else LABELS)
        where = "in `attention`, for each hop of each text"
        if isinstance(model, Hierarchical):
            where = (
                "in `attention`, for the words of each sentence, and in `sentences`, for those of each text"
            )
        more = f"Where it looked is {where}."
        if recipe.text.markup:
            more += " Tags (<br />) it learned without: take them out of your texts, too."
        return f"A {recipe.model.kind} classifier", code, more
    return _of_bert(run, model, regression)


def _of_bert(run: Run, model: Any, regression: bool) -> tuple[str, str, str]:
    texts, what, code = '["a film that makes you happy", "dull"]', "A BERT that labels texts", CLASSES
    more = f"It reads up to {model.bert.config.positions} tokens at once."
    if isinstance(model, Pretraining):
        texts, what, code = '["the capital of france is [MASK] ."]', "A BERT that says hidden words", HIDDEN
        if model.next is not None:
            more += " Whether a second text follows the first is in the output `next`: it does, it does not."
    elif isinstance(model, Spans):
        texts = '[("Where is Seoul?", "Seoul is the capital of Korea.")]'
        what, code = "A BERT that answers questions", ANSWERS.format(longest=run.recipe.decode.longest)
        if run.recipe.data.unanswerable:
            more += " Where there is no answer, `start[0] + end[0]` is more than that of all others."
    elif isinstance(model, Tagger):
        texts, what, code = '["Ekeus heads for Baghdad .".split()]', "A BERT that tags words", TAGS
    else:
        if regression:
            what, code = "A BERT that says a number of texts", NUMBER
        if run.recipe.data.pair is not None:
            texts = '[("He is old.", "He is young."), ("A man eats.", "Somebody eats.")]'
    pieces = WordPieces.load(run.folder)
    divided = ", is_pretokenized=True" if isinstance(model, Tagger) else ""
    filled = BERT.format(pad=pieces.pad, pad_token=pieces.names["pad"], texts=texts, divided=divided)
    return what, READ + filled + code.replace("[MASK]", pieces.names["mask"]), more
