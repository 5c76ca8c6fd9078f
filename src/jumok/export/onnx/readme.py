"""The README of an exported folder: what is in it, and the lines that use it, without jumok."""

from __future__ import annotations

from typing import Any

from jumok.data.tokenizers.segmentation import WORD_REGEX
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.models.bert import BertPretrainingModel, BertSpanExtractor, BertTagger
from jumok.models.convolutional import ConvolutionalSeq2Seq
from jumok.models.hierarchical import HierarchicalAttentionNetwork
from jumok.models.self_attentive import SelfAttentiveClassifier
from jumok.models.seq2seq import Seq2Seq
from jumok.run import Run

__all__ = ["format_readme"]

README_TEMPLATE = """# {name}, for ONNX Runtime

{what}, written by `jumok export`. In this folder, after `pip install onnxruntime tokenizers{packages}`:

```python
{code}
```

{told}{more}
"""

SETUP_CODE = """\
import numpy as np, onnxruntime, tokenizers

session = onnxruntime.InferenceSession("model.onnx")
tokenizer = tokenizers.Tokenizer.from_file("tokenizer.json")
"""

# ------------------------------------------------------------------------------------------------ BERT

BERT_INPUT_CODE = """\
tokenizer.enable_padding(pad_id={pad}, pad_token="{pad_token}")
texts = {texts}
some = tokenizer.encode_batch(texts{divided})
inputs = {{
    "input_ids": np.array([one.ids for one in some]),
    "token_type_ids": np.array([one.type_ids for one in some]),
    "attention_mask": np.array([one.attention_mask for one in some]),
}}
"""
BERT_CLASSIFICATION_CODE = """\
[logits] = session.run(["logits"], inputs)
labels = json.load(open("labels.json", encoding="utf-8"))
for text, row in zip(texts, logits):
    shares = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    print(text, labels[row.argmax()], shares.max())
"""
BERT_REGRESSION_CODE = """\
[numbers] = session.run(["logits"], inputs)
for text, [number] in zip(texts, numbers):
    print(text, number)
"""
TAGGING_CODE = """\
[logits] = session.run(["logits"], inputs)
labels = json.load(open("labels.json", encoding="utf-8"))
for words, one, rows in zip(texts, some, logits):
    places = [one.word_ids.index(number) for number in range(len(words))]  # of the first piece of each
    print([(word, labels[rows[place].argmax()]) for word, place in zip(words, places)])
"""
ANSWERING_CODE = """\
starts, ends = session.run(["starts", "ends"], inputs)
for (question, text), one, start, end in zip(texts, some, starts, ends):
    inside = [number == 1 for number in one.sequence_ids]
    together = np.where(np.outer(inside, inside), np.add.outer(start, end), -np.inf)
    together[np.tril_indices(len(start), -1)] = -np.inf  # no answer ends before it begins,
    together[np.triu_indices(len(start), {longest})] = -np.inf  # or is longer than {longest} pieces
    first, last = np.unravel_index(together.argmax(), together.shape)
    print(question, text[one.offsets[first][0] : one.offsets[last][1]])
"""
FILL_MASK_CODE = """\
mask = tokenizer.token_to_id("[MASK]")
inputs["places"] = np.flatnonzero(inputs["input_ids"] == mask)  # counted through all rows
[words] = session.run(["words"], inputs)
for row in words:
    print([tokenizer.id_to_token(number) for number in row.argsort()[::-1][:5]])
"""

# ---------------------------------------------------------------------------------------- models of words

WORD_TOKENIZER_CODE = """\
WORD = r"{pattern}"

def encode(text):
    words = regex.findall(WORD, unicodedata.normalize("NFC", text))
    return tokenizer.encode(" ".join(words), add_special_tokens=False).ids or [1]

def padded(rows):
    longest = max(map(len, rows))
    return np.array([row + [0] * (longest - len(row)) for row in rows]), np.array([*map(len, rows)])

"""
SELF_ATTENTIVE_CODE = """\
texts = ["a film that makes you happy", "dull"]
ids, lengths = padded([encode(text) for text in texts])
logits, attention = session.run(["logits", "attention"], {"ids": ids, "lengths": lengths})
"""
SELF_ATTENTIVE_PAIR_CODE = """\
texts = [("He is old.", "He is young."), ("A man eats.", "Somebody eats.")]
ids, lengths = padded([encode(first) for first, _ in texts])
second_ids, second_lengths = padded([encode(second) for _, second in texts])
inputs = {"ids": ids, "lengths": lengths, "second_ids": second_ids, "second_lengths": second_lengths}
logits, attention = session.run(["logits", "attention"], inputs)
"""
HIERARCHICAL_CODE = """\
texts = [["The plot is thin.", "I loved it."], ["Dull."]]  # each as its sentences
ids, lengths = padded([encode(sentence) for text in texts for sentence in text])
numbers = iter(range(len(ids)))
documents, document_lengths = padded([[next(numbers) for _ in text] for text in texts])
inputs = {"ids": ids, "lengths": lengths, "documents": documents, "document_lengths": document_lengths}
logits, attention, sentences = session.run(["logits", "attention", "document_attention"], inputs)
"""
WORD_CLASSIFICATION_CODE = """\
labels = json.load(open("labels.json", encoding="utf-8"))
for text, row in zip(texts, logits):
    shares = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    print(text, labels[row.argmax()], shares.max())
"""
WORD_REGRESSION_CODE = """\
for text, [number] in zip(texts, logits):
    print(text, number)
"""

# --------------------------------------------------------------------------------------------- translation

TRANSLATION_CODE = """\
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
ATTENTION_NOTE = " Where each step looked in the source is its output `attention`."


def format_readme(run: Run, model: Any, comparison: str) -> str:
    """The text of the file."""
    what, code, more = _select_code(run, model)
    standard = [name for name in ("json", "regex", "unicodedata") if f"{name}." in code]
    if standard:
        code = f"import {', '.join(standard)}\n{code}"
    return README_TEMPLATE.format(
        name=run.folder.resolve().name,
        what=what,
        packages=" regex" * ("regex" in standard),
        code=code.strip(),
        told=comparison,
        more=f" {more}".rstrip(),
    )


def _select_code(run: Run, model: Any) -> tuple[str, str, str]:
    recipe = run.recipe
    if isinstance(model, Seq2Seq | ConvolutionalSeq2Seq):
        joint = not (run.folder / "tokenizer.source.json").exists()
        code = TRANSLATION_CODE.format(
            source="tokenizer.json" if joint else "tokenizer.source.json",
            target="tokenizer.json" if joint else "tokenizer.target.json",
            example="this is an example sentence",
        )
        more = "The words are the most probable ones; a beam is yours to write."
        if getattr(model.config, "attention", "global") not in (None, "local-p"):
            more += ATTENTION_NOTE
        if recipe.data.prepare != "none":
            more += (
                f" Texts go in as `data.prepare: {recipe.data.prepare}` makes them, and come out so: the "
                "lines above leave that to you."
            )
        return f"A {recipe.model.kind} model that translates", code, more
    regression = getattr(recipe.data, "regression", False)
    if isinstance(model, SelfAttentiveClassifier | HierarchicalAttentionNetwork):
        pairs = isinstance(model, SelfAttentiveClassifier) and model.config.text_pairs
        inputs = (
            HIERARCHICAL_CODE
            if isinstance(model, HierarchicalAttentionNetwork)
            else SELF_ATTENTIVE_PAIR_CODE
            if pairs
            else SELF_ATTENTIVE_CODE
        )
        code = (
            SETUP_CODE
            + WORD_TOKENIZER_CODE.format(pattern=WORD_REGEX.pattern)
            + inputs
            + (WORD_REGRESSION_CODE if regression else WORD_CLASSIFICATION_CODE)
        )
        where = "in `attention`, for each hop of each text"
        if isinstance(model, HierarchicalAttentionNetwork):
            where = (
                "in `attention`, for the words of each sentence, and in `sentences`, for those of each text"
            )
        more = f"Where it looked is {where}."
        if recipe.text.markup:
            more += " Tags (<br />) it learned without: take them out of your texts, too."
        return f"A {recipe.model.kind} classifier", code, more
    return _select_bert_code(run, model, regression)


def _select_bert_code(run: Run, model: Any, regression: bool) -> tuple[str, str, str]:
    texts, what, code = (
        '["a film that makes you happy", "dull"]',
        "A BERT that labels texts",
        BERT_CLASSIFICATION_CODE,
    )
    more = f"It reads up to {model.bert.config.positions} tokens at once."
    if isinstance(model, BertPretrainingModel):
        texts, what, code = (
            '["the capital of france is [MASK] ."]',
            "A BERT that says hidden words",
            FILL_MASK_CODE,
        )
        if model.nsp_head is not None:
            more += " Whether a second text follows the first is in the output `next`: it does, it does not."
    elif isinstance(model, BertSpanExtractor):
        texts = '[("Where is Seoul?", "Seoul is the capital of Korea.")]'
        what, code = "A BERT that answers questions", ANSWERING_CODE.format(longest=run.recipe.decode.longest)
        if run.recipe.data.unanswerable:
            more += " Where there is no answer, `start[0] + end[0]` is more than that of all others."
    elif isinstance(model, BertTagger):
        texts, what, code = '["Ekeus heads for Baghdad .".split()]', "A BERT that tags words", TAGGING_CODE
    else:
        if regression:
            what, code = "A BERT that says a number of texts", BERT_REGRESSION_CODE
        if run.recipe.data.pair is not None:
            texts = '[("He is old.", "He is young."), ("A man eats.", "Somebody eats.")]'
    pieces = WordPieceTokenizer.load(run.folder)
    divided = ", is_pretokenized=True" if isinstance(model, BertTagger) else ""
    filled = BERT_INPUT_CODE.format(
        pad=pieces.pad_id, pad_token=pieces.special_tokens["pad"], texts=texts, divided=divided
    )
    return what, SETUP_CODE + filled + code.replace("[MASK]", pieces.special_tokens["mask"]), more
