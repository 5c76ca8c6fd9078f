"""The README of an exported folder, with example code that does not need jumok."""

from __future__ import annotations

from typing import Any

from jumok.data.tokenizers.segmentation import WORD_REGEX
from jumok.data.tokenizers.wordpiece import WordPieceTokenizer
from jumok.export.export_folder import find_tokenizer_files
from jumok.models.bert import BertPretrainingModel, BertSpanExtractor, BertTagger
from jumok.models.convolutional import ConvolutionalSeq2Seq
from jumok.models.hierarchical import HierarchicalAttentionNetwork
from jumok.models.self_attentive import SelfAttentiveClassifier
from jumok.models.seq2seq import Seq2Seq
from jumok.run import Run

README_TEMPLATE = """# {name}, for ONNX Runtime

{description}, exported by `jumok export`. To use this folder, run
`pip install onnxruntime tokenizers{packages}`, then:

```python
{code}
```

{comparison}{notes}
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
encodings = tokenizer.encode_batch(texts{options})
inputs = {{
    "input_ids": np.array([encoding.ids for encoding in encodings]),
    "token_type_ids": np.array([encoding.type_ids for encoding in encodings]),
    "attention_mask": np.array([encoding.attention_mask for encoding in encodings]),
}}
"""
LOGITS_CODE = """\
[logits] = session.run(["logits"], inputs)
"""
TAGGING_CODE = """\
labels = json.load(open("labels.json", encoding="utf-8"))
for words, encoding, rows in zip(texts, encodings, logits):
    first_pieces = [encoding.word_ids.index(number) for number in range(len(words))]
    print([(word, labels[rows[piece].argmax()]) for word, piece in zip(words, first_pieces)])
"""
ANSWERING_CODE = """\
start_logits, end_logits = session.run(["start_logits", "end_logits"], inputs)
for (question, context), encoding, start, end in zip(texts, encodings, start_logits, end_logits):
    in_context = [number == 1 for number in encoding.sequence_ids]
    scores = np.where(np.outer(in_context, in_context), np.add.outer(start, end), -np.inf)
    scores[np.tril_indices(len(start), -1)] = -np.inf  # an answer does not end before it starts,
    scores[np.triu_indices(len(start), {max_tokens})] = -np.inf  # and has at most {max_tokens} tokens
    first, last = np.unravel_index(scores.argmax(), scores.shape)
    print(question, context[encoding.offsets[first][0] : encoding.offsets[last][1]])
"""
FILL_MASK_CODE = """\
mask_id = tokenizer.token_to_id("[MASK]")
inputs["masked_positions"] = np.flatnonzero(inputs["input_ids"] == mask_id)
[mlm_logits] = session.run(["mlm_logits"], inputs)
for row in mlm_logits:
    print([tokenizer.id_to_token(number) for number in row.argsort()[::-1][:5]])
"""

# ----------------------------------------------------------------------------------- classification

CLASSIFICATION_CODE = """\
labels = json.load(open("labels.json", encoding="utf-8"))
for text, row in zip(texts, logits):
    probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    print(text, labels[row.argmax()], probabilities.max())
"""
REGRESSION_CODE = """\
for text, [number] in zip(texts, logits):
    print(text, number)
"""

# --------------------------------------------------------------------------- word-attention classifiers

WORD_TOKENIZER_CODE = """\
WORD = r"{pattern}"

def encode(text):
    words = regex.findall(WORD, unicodedata.normalize("NFC", text))
    return tokenizer.encode(" ".join(words), add_special_tokens=False).ids or [1]

def pad(rows):
    length = max(map(len, rows))
    return np.array([row + [0] * (length - len(row)) for row in rows]), np.array([*map(len, rows)])

"""
SELF_ATTENTIVE_CODE = """\
texts = ["a film that makes you happy", "dull"]
ids, lengths = pad([encode(text) for text in texts])
logits, attention = session.run(["logits", "attention"], {"ids": ids, "lengths": lengths})
"""
SELF_ATTENTIVE_PAIR_CODE = """\
texts = [("He is old.", "He is young."), ("A man eats.", "Somebody eats.")]
ids, lengths = pad([encode(first) for first, _ in texts])
second_ids, second_lengths = pad([encode(second) for _, second in texts])
inputs = {"ids": ids, "lengths": lengths, "second_ids": second_ids, "second_lengths": second_lengths}
logits, attention = session.run(["logits", "attention"], inputs)
"""
HIERARCHICAL_CODE = """\
texts = [["The plot is thin.", "I loved it."], ["Dull."]]  # each is a list of sentences
ids, lengths = pad([encode(sentence) for text in texts for sentence in text])
numbers = iter(range(len(ids)))
document_sentences, document_lengths = pad([[next(numbers) for _ in text] for text in texts])
inputs = {
    "ids": ids,
    "lengths": lengths,
    "document_sentences": document_sentences,
    "document_lengths": document_lengths,
}
logits, attention, document_attention = session.run(["logits", "attention", "document_attention"], inputs)
"""

# --------------------------------------------------------------------------------------------- translation

TRANSLATION_CODE = """\
import numpy as np, onnxruntime, tokenizers

source, target = map(tokenizers.Tokenizer.from_file, ("{source}", "{target}"))
encoder, step = map(onnxruntime.InferenceSession, ("encoder.onnx", "step.onnx"))

def run(session, inputs):
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs)))

ids = source.encode("this is an example sentence", add_special_tokens=False).ids + [3]  # </s>
state = run(encoder, {{"source_ids": np.array([ids]), "source_lengths": np.array([len(ids)])}})
input_ids, translation = np.array([2]), []  # <s>
while input_ids[0] != 3 and len(translation) < 2 * len(ids) + 20:
    outputs = run(step, {{"input_ids": input_ids, **state}})
    outputs["logits"][:, :3] = -np.inf  # never generate <pad>, <unk> and <s>
    input_ids = outputs["logits"].argmax(-1)
    translation.append(input_ids[0])
    state |= {{name[5:]: x for name, x in outputs.items() if name.startswith("next_")}}
print(target.decode([token_id for token_id in translation if token_id != 3]))
"""


def format_readme(run: Run, model: Any, comparison: str) -> str:
    """Return the text of the README."""
    description, code, notes = _select_code(run, model)
    imports = [name for name in ("json", "regex", "unicodedata") if f"{name}." in code]
    if imports:
        code = f"import {', '.join(imports)}\n{code}"
    return README_TEMPLATE.format(
        name=run.folder.resolve().name,
        description=description,
        packages=" regex" * ("regex" in imports),
        code=code.strip(),
        comparison=comparison,
        notes=f" {notes}".rstrip(),
    )


def _select_code(run: Run, model: Any) -> tuple[str, str, str]:
    """Return a description of the model, the example code, and notes."""
    if isinstance(model, Seq2Seq | ConvolutionalSeq2Seq):
        return _select_translation_code(run, model)
    is_regression = getattr(run.recipe.data, "regression", False)
    result_code = REGRESSION_CODE if is_regression else CLASSIFICATION_CODE
    if isinstance(model, SelfAttentiveClassifier | HierarchicalAttentionNetwork):
        return _select_word_attention_code(run, model, result_code)
    return _select_bert_code(run, model, result_code)


def _select_translation_code(run: Run, model: Seq2Seq | ConvolutionalSeq2Seq) -> tuple[str, str, str]:
    source, target = find_tokenizer_files(run)
    notes = "The code above is greedy search."
    if getattr(model.config, "attention", "global") not in (None, "local-p"):
        notes += " The output `attention` of a step is its attention over the source."
    if (preprocessing := run.recipe.data.preprocessing) != "none":
        notes += f" The model was trained with `data.preprocessing: {preprocessing}`. The code above does not apply it."
    description = f"A {run.recipe.model.type} model for translation"
    return description, TRANSLATION_CODE.format(source=source, target=target), notes


def _select_word_attention_code(
    run: Run, model: SelfAttentiveClassifier | HierarchicalAttentionNetwork, result_code: str
) -> tuple[str, str, str]:
    if isinstance(model, HierarchicalAttentionNetwork):
        input_code = HIERARCHICAL_CODE
        notes = (
            "The output `attention` has the weights of the words of each sentence, and `document_attention` "
            "those of the sentences of each text."
        )
    else:
        input_code = SELF_ATTENTIVE_PAIR_CODE if model.config.text_pairs else SELF_ATTENTIVE_CODE
        notes = "The output `attention` has the weights of each hop over the words of each text."
    if run.recipe.tokenizer.strip_markup:
        notes += " The model was trained without markup (<br />); remove it from your texts."
    tokenizer_code = WORD_TOKENIZER_CODE.format(pattern=WORD_REGEX.pattern)
    description = f"A {run.recipe.model.type} classifier"
    return description, SETUP_CODE + tokenizer_code + input_code + result_code, notes


def _select_bert_code(run: Run, model: Any, result_code: str) -> tuple[str, str, str]:
    recipe, options = run.recipe, ""
    notes = f"A text can have up to {model.bert.config.max_positions} tokens."
    if isinstance(model, BertPretrainingModel):
        purpose, code = "masked words", FILL_MASK_CODE
        texts = '["the capital of france is [MASK] ."]'
        if model.nsp_head is not None:
            notes += " The output `nsp_logits` has two columns: the second text follows the first, or it does not."
    elif isinstance(model, BertSpanExtractor):
        purpose, code = "question answering", ANSWERING_CODE.format(max_tokens=recipe.decode.max_answer_tokens)
        texts = '[("Where is Seoul?", "Seoul is the capital of Korea.")]'
        if recipe.data.has_unanswerable:
            notes += " If `start[0] + end[0]` is larger than all scores, the question has no answer."
    elif isinstance(model, BertTagger):
        purpose, code, options = "tagging", LOGITS_CODE + TAGGING_CODE, ", is_pretokenized=True"
        texts = '["Ekeus heads for Baghdad .".split()]'
    else:
        purpose = "regression" if result_code == REGRESSION_CODE else "classification"
        code, texts = LOGITS_CODE + result_code, '["a film that makes you happy", "dull"]'
        if recipe.data.pair_column is not None:
            texts = '[("He is old.", "He is young."), ("A man eats.", "Somebody eats.")]'
    tokenizer = WordPieceTokenizer.load(run.folder)
    pad, mask = tokenizer.special_tokens["pad"], tokenizer.special_tokens["mask"]
    input_code = BERT_INPUT_CODE.format(pad=tokenizer.pad_id, pad_token=pad, texts=texts, options=options)
    return f"A BERT for {purpose}", SETUP_CODE + input_code + code.replace("[MASK]", mask), notes
