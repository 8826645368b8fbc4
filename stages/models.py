"""Models that a recipe trains for its stages: which documents they learn from, and what is written.

    models:
      prose:
        kenlm: {text: {sources: [docs, readmes], max_bytes: 20_000_000}, order: 3, prune: [0, 0, 1]}
      quality:
        fasttext: {positive: {sources: [readmes]}, negative: {sources: [docs, code]}, word_ngrams: 2}

`roles()` names the selections. Whoever runs the training evaluates them, and hands `train` the texts of each role as
an iterable of string arrays, or of record batches with `text` and `language`. `train` writes into a local folder:

    model.json                  what the model is, and the percentiles of its scores; stages read it
    lm.arpa, <language>.arpa    the language model for KenLM, and other programs
    lm.npy, <language>.npy      the same, as the stage maps it
    lm.sp.model, <language>.sp.model    SentencePiece, where the model has `tokenize: sentencepiece`
    model.bin                   fastText

and returns the card: JSON-able, with the data and its hash, settings, sizes, seconds, and how the model does on
documents held out by a hash of their text. The same texts in the same order give the same files, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping

from gristmill.stages.train_fasttext import FastText
from gristmill.stages.train_kenlm import KenLM
from gristmill.stages.training import Limits, Selection, Texts

TRAININGS: Mapping[str, type[KenLM] | type[FastText]] = {"kenlm": KenLM, "fasttext": FastText}

__all__ = ["TRAININGS", "FastText", "KenLM", "Limits", "Selection", "Texts"]
