"""Classification: a class, or a number, for a text or for a pair of texts.

::

    a film that makes you happy          →   positive  0.98         single text (SST-2, NSMC)
    He is old.   ⇥   He is young.        →   different  0.91        text pair (MRPC, RTE)
    A man eats.  ⇥   Somebody eats.      →   3.8                    text pair, ``regression`` (STS)

``model.type`` selects the model: BERT (:mod:`.bert`), or a model of words whose attention shows what decided
(:mod:`.word_attention`).
"""

from __future__ import annotations

from jumok.run import Run
from jumok.tasks.classify.bert import BertClassificationTask
from jumok.tasks.classify.config import BertClassificationRecipe
from jumok.tasks.classify.word_attention import WordAttentionTask


def build_task(run: Run) -> BertClassificationTask | WordAttentionTask:
    """Build the task of a run; the model of its recipe decides the class."""
    if isinstance(run.recipe, BertClassificationRecipe):
        return BertClassificationTask(run)
    return WordAttentionTask(run)
